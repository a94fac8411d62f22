"""Dashboards of traces in Tempo and in Jaeger: one request, what is slow in which phase, tenants, errors by rule."""

from __future__ import annotations

from docs.monitoring.grafana import Dashboard, Panel, Row, Search
from docs.monitoring.queries import ANSWER, TENANT, TENANTS, TTFT, quantiles

TEMPO_UID, JAEGER_UID = "athanor-traces", "athanor-traces-jaeger"

PHASES = {
    "policy": "Waits for a limit of the tenant.",
    "text": "Template, tokens and grammar, in the text sandbox.",
    "queue": "Waits inside the engine for its turn.",
    "prefill": "Computes the prompt.",
    "decode": "Computes the answer, token after token.",
}
"""Phases of a request, and what happens in each."""

OURS = 'resource.service.name = "$service"'
SERVER = f"{OURS} && kind = server"
OF_TENANT = 'span.athanor.tenant.id =~ "$tenant"'
GENERATION = f"{OURS} && span.gen_ai.operation.name != nil && {OF_TENANT}"
REFUSED = f'{{ {SERVER} && span.athanor.outcome = "refused" && {OF_TENANT} }} > {{ span.athanor.policy.rule != nil }}'

TEXTS = (("trace", "Trace ID", ""), ("slow", "Slow from", "1s"), ("service", "Service", "athanor"))


def _found(title: str, why: str, query: str) -> Panel:
    """Spans as a table, the longest first."""
    return Panel(title, why, (("", query),), kind="table", source="tempo", trace_page=TEMPO_UID)


def _counted(title: str, why: str, query: str, unit: str = "reqps") -> Panel:
    """Lines over time."""
    return Panel(title, why, (("", query),), unit, source="tempo")


TEMPO = Dashboard(
    TEMPO_UID,
    "Athanor: traces (Tempo)",
    "One request, what is slow and where, tenants, errors by rule.",
    (
        Row(
            "One request",
            (
                Panel(
                    "Waterfall",
                    "Phases of the request whose trace id stands above; a click on an id below puts it there.",
                    (("", "$trace"),),
                    kind="traces",
                    source="tempo",
                ),
            ),
        ),
        Row(
            "From metrics to traces",
            (
                Panel(
                    "First token",
                    "Each point is a request: a click on it shows its trace.",
                    quantiles(TTFT, "athanor_tenant_id", "0.95", "0.99", where=TENANT),
                    "s",
                ),
                Panel(
                    "Whole answer",
                    "Each point is a request: a click on it shows its trace.",
                    quantiles(ANSWER, "athanor_tenant_id", "0.95", "0.99", where=TENANT),
                    "s",
                ),
            ),
        ),
        Row(
            "What is slow",
            (
                _found(
                    "Slow requests",
                    "From arrival to the last byte.",
                    f"{{ {SERVER} && {OF_TENANT} && duration > $slow }}"
                    " | select(span.athanor.tenant.id, span.athanor.outcome, span.athanor.request.id)",
                ),
                _counted(
                    "Time by phase, p95",
                    "The phase that grew is the one to look at below.",
                    f'{{ {OURS} && name =~ "athanor[.]({"|".join(PHASES)})" }}'
                    " | quantile_over_time(duration, 0.95) by (name)",
                    "s",
                ),
            ),
        ),
        Row(
            "Slow by phase",
            tuple(
                _found(
                    phase.capitalize(), why, f'{{ {GENERATION} }} > {{ name = "athanor.{phase}" && duration > $slow }}'
                )
                for phase, why in PHASES.items()
                if phase in ("queue", "prefill", "decode")
            ),
        ),
        Row(
            "Slow before the engine",
            tuple(
                _found(
                    phase.capitalize(), why, f'{{ {GENERATION} }} > {{ name = "athanor.{phase}" && duration > $slow }}'
                )
                for phase, why in PHASES.items()
                if phase in ("policy", "text")
            ),
        ),
        Row(
            "By tenant",
            (
                _counted(
                    "Requests a second",
                    "Those that were exported: with sampling a share of all.",
                    f"{{ {SERVER} && {OF_TENANT} }} | rate() by (span.athanor.tenant.id)",
                ),
                _counted(
                    "Time of requests, p95",
                    "From arrival to the last byte.",
                    f"{{ {SERVER} && {OF_TENANT} }} | quantile_over_time(duration, 0.95) by (span.athanor.tenant.id)",
                    "s",
                ),
                _found(
                    "Slow generations",
                    "With their tokens: much output takes long and is no fault.",
                    f"{{ {GENERATION} && duration > $slow }} | select(span.athanor.tenant.id,"
                    " span.gen_ai.request.model, span.gen_ai.usage.input_tokens, span.gen_ai.usage.output_tokens)",
                ),
            ),
        ),
        Row(
            "Errors by rule",
            (
                _counted(
                    "Refusals a second by rule",
                    "Each is a rule of the policy, by its path there.",
                    f"{REFUSED} | rate() by (span.athanor.policy.rule)",
                ),
                _found(
                    "Refused",
                    "By a limit or a rule of the policy.",
                    f"{REFUSED} | select(span.athanor.policy.rule, span.error.type, span.athanor.tenant.id)",
                ),
                _found(
                    "Refused without a tenant",
                    "Credentials that are unknown, expired or revoked.",
                    f'{{ {SERVER} && span.athanor.outcome = "refused" && span.athanor.tenant.id = nil }}'
                    " | select(span.error.type, span.client.address)",
                ),
            ),
        ),
        Row(
            "Errors by type",
            (
                _counted(
                    "Errors a second by type",
                    "Refusals, callers' mistakes and our faults.",
                    f"{{ {SERVER} && span.error.type != nil }} | rate() by (span.error.type)",
                ),
                _found(
                    "Failed",
                    "By our fault; exported whatever the sampling, unless its share is 0.",
                    f"{{ {SERVER} && status = error }}"
                    " | select(span.error.type, span.athanor.tenant.id, span.athanor.request.id)",
                ),
                _found(
                    "Interrupted by a lost engine",
                    "The request may have gone on in the next engine: its second queue links to the first.",
                    f'{{ {OURS} && status = error && span.error.type = "engine_lost" }}',
                ),
            ),
        ),
    ),
    (TENANTS,),
    sources=("prometheus", "tempo"),
    texts=TEXTS,
)


def _search(title: str, why: str, search: Search) -> Panel:
    """Traces as a table, the longest first."""
    return Panel(title, why, (("", search),), kind="table", source="jaeger", trace_page=JAEGER_UID)


JAEGER = Dashboard(
    JAEGER_UID,
    "Athanor: traces (Jaeger)",
    "One request, what is slow and where, one tenant, errors by rule. Jaeger counts nothing: rates are in metrics.",
    (
        Row(
            "One request",
            (
                Panel(
                    "Waterfall",
                    "Phases of the request whose trace id stands above; a click on an id below puts it there.",
                    (("", "$trace"),),
                    kind="traces",
                    source="jaeger",
                ),
            ),
        ),
        Row(
            "What is slow",
            (
                _search("Slow requests", "With any span that took so long.", Search(at_least="$slow")),
                *(
                    _search(phase.capitalize(), why, Search(f"athanor.{phase}", at_least="$slow"))
                    for phase, why in PHASES.items()
                    if phase in ("queue", "prefill", "decode")
                ),
            ),
        ),
        Row(
            "Slow before the engine, and one tenant",
            (
                *(
                    _search(phase.capitalize(), why, Search(f"athanor.{phase}", at_least="$slow"))
                    for phase, why in PHASES.items()
                    if phase in ("policy", "text")
                ),
                _search("Of the tenant", "The tenant above.", Search(tags="athanor.tenant.id=$tenant")),
                _search(
                    "Slow, of the tenant",
                    "The tenant above.",
                    Search(tags="athanor.tenant.id=$tenant", at_least="$slow"),
                ),
            ),
        ),
        Row(
            "Errors by rule",
            (
                _search("Refused", "By a limit or a rule of the policy.", Search(tags="athanor.outcome=refused")),
                _search("Refused by the rule", "The rule above.", Search(tags="athanor.policy.rule=$rule")),
                _search("Failed", "By our fault.", Search(tags="athanor.outcome=failed error=true")),
                _search("Interrupted by a lost engine", "Replayed, or failed.", Search(tags="error.type=engine_lost")),
            ),
        ),
    ),
    sources=("jaeger",),
    texts=(*TEXTS, ("tenant", "Tenant", "alpha"), ("rule", "Rule", "tenants.alpha.limits.requests_per_minute")),
)
