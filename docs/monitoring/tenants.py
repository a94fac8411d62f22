"""Dashboard of tenants: use, cost, what holds each back, and what each gets."""

from __future__ import annotations

from docs.monitoring.grafana import Dashboard, Panel, Row
from docs.monitoring.queries import TENANT, TENANTS, TOKENS, TPOT, TTFT, quantiles, total

HOURLY = "3600 / 1e9"
"""Billionths a second to units of the currency an hour."""

TENANT_PAGE = Dashboard(
    "athanor-tenants",
    "Athanor: tenants",
    "Who uses it, who is held back by what, and what each gets.",
    (
        Row(
            "Use",
            (
                Panel(
                    "Requests a second",
                    "Of tenants with series of their own; all others count as other.",
                    (("{{athanor_tenant_id}}", total("athanor_requests_total", "athanor_tenant_id", TENANT)),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Output tokens a second",
                    "As they are delivered to each.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            total(
                                "athanor_tokens_total",
                                "athanor_tenant_id",
                                '{athanor_tenant_id=~"$tenant", athanor_token_type="output"}',
                            ),
                        ),
                    ),
                    TOKENS,
                    stacked=True,
                ),
                Panel(
                    "Input tokens a second",
                    "Prompts, cached parts included.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            total(
                                "athanor_tokens_total",
                                "athanor_tenant_id",
                                '{athanor_tenant_id=~"$tenant", athanor_token_type="input"}',
                            ),
                        ),
                    ),
                    TOKENS,
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Cost",
            (
                Panel(
                    "Cost an hour by tenant",
                    "At this rate, in the currency of the policy's prices; athanor usage is exact and durable.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            f"{total('athanor_cost_total', 'athanor_tenant_id', TENANT)} * {HOURLY}",
                        ),
                    ),
                    "short",
                    stacked=True,
                ),
                Panel(
                    "Cost an hour by model",
                    "The same by the model that served.",
                    (
                        (
                            "{{gen_ai_request_model}}",
                            f"{total('athanor_cost_total', 'gen_ai_request_model', TENANT)} * {HOURLY}",
                        ),
                    ),
                    "short",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Held back",
            (
                Panel(
                    "Refusals a second by reason",
                    "By a limit or a rule of the policy.",
                    (
                        (
                            "{{athanor_tenant_id}}: {{athanor_reason}}",
                            total("athanor_refusals_total", "athanor_tenant_id, athanor_reason", TENANT),
                        ),
                    ),
                    "reqps",
                ),
                Panel(
                    "Failures a second",
                    "By our fault; nothing here is the rule.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            total(
                                "athanor_requests_total",
                                "athanor_tenant_id",
                                '{athanor_tenant_id=~"$tenant", athanor_outcome="failed"}',
                            ),
                        ),
                    ),
                    "reqps",
                ),
                Panel(
                    "Share of requests that were refused",
                    "One tenant near 1 wants more than its policy gives.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            total("athanor_refusals_total", "athanor_tenant_id", TENANT)
                            + " / "
                            + total("athanor_requests_total", "athanor_tenant_id", TENANT),
                        ),
                    ),
                    "percentunit",
                    top=1,
                ),
            ),
        ),
        Row(
            "What they get",
            (
                Panel(
                    "First token, p95",
                    "One tenant apart from the others waits for its own limits, not for the machine.",
                    quantiles(TTFT, "athanor_tenant_id", "0.95", where=TENANT),
                    "s",
                ),
                Panel(
                    "Time per output token, p95",
                    "After the first.",
                    quantiles(TPOT, "athanor_tenant_id", "0.95", where=TENANT),
                    "s",
                ),
                Panel(
                    "Input found in KV",
                    "Share of prompt tokens that were not computed again.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            total(
                                "athanor_tokens_total",
                                "athanor_tenant_id",
                                '{athanor_tenant_id=~"$tenant", athanor_token_type="cached"}',
                            )
                            + " / "
                            + total(
                                "athanor_tokens_total",
                                "athanor_tenant_id",
                                '{athanor_tenant_id=~"$tenant", athanor_token_type="input"}',
                            ),
                        ),
                    ),
                    "percentunit",
                    top=1,
                ),
            ),
        ),
        Row(
            "The last hour",
            (
                Panel(
                    "Requests",
                    "By tenant, the busiest first.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            f"topk(10, sum by (athanor_tenant_id) (increase(athanor_requests_total{TENANT}[1h])))",
                        ),
                    ),
                    kind="bargauge",
                ),
                Panel(
                    "Tokens",
                    "Input and output.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            "topk(10, sum by (athanor_tenant_id) (increase(athanor_tokens_total"
                            '{athanor_tenant_id=~"$tenant", athanor_token_type=~"input|output"}[1h])))',
                        ),
                    ),
                    kind="bargauge",
                ),
            ),
        ),
    ),
    (TENANTS,),
)
