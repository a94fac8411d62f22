"""Dashboards of health: sandboxes, and how fast the promises are used up."""

from __future__ import annotations

from docs.monitoring.grafana import GOOD_LOW, GOOD_ZERO, GREEN, ORANGE, RED, YELLOW, Dashboard, Panel, Row
from docs.monitoring.queries import FAILURES, MODEL, MODELS, RATE, TTFT, or_none, quantiles

WINDOWS = ("5m", "30m", "1h", "6h", "3d")
"""Of the recording rules in alerts.yaml, from what happens now to what happens all the time."""

BURNING = ((None, GREEN), (1, YELLOW), (6, ORANGE), (14.4, RED))
"""A budget that burns 14.4 times too fast is gone in two days; the alerts' own limits."""

SANDBOXES = Dashboard(
    "athanor-sandboxes",
    "Athanor: sandboxes",
    "Which are up, how often they end and why, what they hold.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Ready",
                    "1 while a sandbox answers.",
                    (("{{gen_ai_request_model}} {{athanor_role}}", f"athanor_sandbox_ready{MODEL}"),),
                    kind="stat",
                    steps=((None, RED), (1, GREEN)),
                ),
                Panel(
                    "Tenants' own",
                    "Sandboxes of strict and dedicated tenants that answer.",
                    (("{{gen_ai_request_model}} {{athanor_role}}", f"athanor_sandbox_own{MODEL}"),),
                    kind="stat",
                ),
                Panel(
                    "Suspects",
                    "Requests that were in an engine when it ended, remembered for an hour.",
                    (
                        ("remembered", f"sum(athanor_suspects{MODEL})"),
                        ("in quarantine", f"sum(athanor_quarantined{MODEL})"),
                    ),
                    kind="stat",
                    steps=((None, GREEN), (1, ORANGE)),
                ),
                Panel(
                    "Audit log",
                    "1 while it cannot be written, or a witness does not cosign it.",
                    (("failing", "max(athanor_audit_failing)"), ("unwitnessed", "max(athanor_audit_unwitnessed)")),
                    kind="stat",
                    steps=GOOD_ZERO,
                ),
            ),
        ),
        Row(
            "Lives",
            (
                Panel(
                    "Ends by reason, in 15 minutes",
                    "Oom: memory limit. Fault: it broke the protocol, or hung. Gpu: card lost, or share exceeded.",
                    (
                        (
                            "{{athanor_reason}} {{gen_ai_request_model}} {{athanor_role}}",
                            "sum by (athanor_reason, gen_ai_request_model, athanor_role) "
                            f"(increase(athanor_sandbox_losses_total{MODEL}[15m]))",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Restarts, in 15 minutes",
                    "Counted when it is up again.",
                    (
                        (
                            "{{gen_ai_request_model}} {{athanor_role}}",
                            f"increase(athanor_sandbox_restarts_total{MODEL}[15m])",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Last absence",
                    "From its end, or the start of the service, until it was ready.",
                    (("{{gen_ai_request_model}} {{athanor_role}}", f"athanor_sandbox_last_away_seconds{MODEL}"),),
                    "s",
                ),
                Panel(
                    "Share of time ready",
                    "Over the last hour.",
                    (
                        (
                            "{{gen_ai_request_model}} {{athanor_role}}",
                            f"avg_over_time(athanor_sandbox_ready{MODEL}[1h])",
                        ),
                    ),
                    "percentunit",
                    top=1,
                ),
            ),
        ),
        Row(
            "Starts and memory",
            (
                Panel(
                    "Starts by kind, in 15 minutes",
                    "Cold, restored from a checkpoint, or fallen back to a cold one.",
                    (
                        (
                            "{{athanor_outcome}}",
                            or_none(
                                "sum by (athanor_outcome) (increase(athanor_sandbox_starts_total[15m]))",
                                "athanor_outcome",
                            ),
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Held",
                    "As the limit counts it; weights, KV and buffers are taken at the start.",
                    (("{{gen_ai_request_model}} {{athanor_role}}", f"athanor_sandbox_memory_bytes{MODEL}"),),
                    "bytes",
                ),
                Panel(
                    "Of the limit",
                    "At 1 the kernel ends the sandbox.",
                    (
                        (
                            "{{gen_ai_request_model}} {{athanor_role}}",
                            f"athanor_sandbox_memory_bytes{MODEL} / athanor_sandbox_memory_limit_bytes{MODEL}",
                        ),
                    ),
                    "percentunit",
                    "bargauge",
                    steps=GOOD_LOW,
                    top=1,
                ),
            ),
        ),
        Row(
            "GPUs",
            (
                Panel(
                    "Lost",
                    "1 while nothing can compute on a card, no engine gets it, or a model's engine has none.",
                    (
                        ("card {{athanor_gpu}}", or_none("athanor_gpu_lost", "athanor_gpu")),
                        ("no engine on {{athanor_gpu}}", or_none("athanor_gpu_out", "athanor_gpu")),
                        (
                            "{{gen_ai_request_model}} has none",
                            or_none(f"athanor_gpu_unplaced{MODEL}", "gen_ai_request_model"),
                        ),
                    ),
                    kind="stat",
                    steps=GOOD_ZERO,
                ),
                Panel(
                    "Memory",
                    "In use by whatever process, and what models' engines hold.",
                    (
                        ("card {{athanor_gpu}}", or_none("athanor_gpu_memory_used_bytes", "athanor_gpu")),
                        (
                            "{{gen_ai_request_model}} on {{athanor_gpu}}",
                            or_none(f"athanor_gpu_model_memory_bytes{MODEL}", "athanor_gpu"),
                        ),
                    ),
                    "bytes",
                ),
                Panel(
                    "Busy",
                    "Part of the time in which something computes.",
                    (("card {{athanor_gpu}}", or_none("athanor_gpu_busy_percent", "athanor_gpu")),),
                    "percent",
                    top=100,
                ),
                Panel(
                    "Temperature",
                    "Clocks fall where a card is too hot.",
                    (("card {{athanor_gpu}}", or_none("athanor_gpu_temperature_celsius", "athanor_gpu")),),
                    "celsius",
                ),
            ),
        ),
        Row(
            "What requests see of it",
            (
                Panel(
                    "Replays a second",
                    "Begun again in the next engine; their callers noticed a delay.",
                    (
                        (
                            "{{gen_ai_request_model}}",
                            f"sum by (gen_ai_request_model) (rate(athanor_replays_total{MODEL}{RATE}))",
                        ),
                    ),
                    "reqps",
                ),
                Panel(
                    "Failures a second by reason",
                    "unavailable: its engine ended after something was shown.",
                    (("{{athanor_reason}}", FAILURES),),
                    "reqps",
                ),
            ),
        ),
    ),
    (MODELS,),
)


def burn(promise: str) -> tuple[tuple[str, str], ...]:
    """How fast a promise's budget burns, over each window."""
    return tuple((window, f"athanor:{promise}_burn:{window}") for window in WINDOWS)


SLO = Dashboard(
    "athanor-slo",
    "Athanor: SLO",
    "Two promises, and how fast what they allow is used up: 1 lasts exactly 30 days.",
    (
        Row(
            "Promises, over three days",
            (
                Panel(
                    "Available",
                    "Requests that did not fail by our fault; 99.9 % is promised. Refusals do not count.",
                    (("share", "1 - athanor:failed_ratio:3d"),),
                    "percentunit",
                    "stat",
                    steps=((None, RED), (0.999, GREEN)),
                    top=1,
                ),
                Panel(
                    "First token within 2.5 s",
                    "95 % is promised.",
                    (("share", "1 - athanor:slow_ratio:3d"),),
                    "percentunit",
                    "stat",
                    steps=((None, RED), (0.95, GREEN)),
                    top=1,
                ),
                Panel(
                    "Failures burn",
                    "Over an hour. 1 is what the promise allows; 14.4 wakes somebody.",
                    (("times", "athanor:failed_burn:1h"),),
                    "none",
                    "stat",
                    steps=BURNING,
                ),
                Panel(
                    "Slow answers burn",
                    "Over an hour.",
                    (("times", "athanor:slow_burn:1h"),),
                    "none",
                    "stat",
                    steps=BURNING,
                ),
            ),
        ),
        Row(
            "Burn rates by window",
            (
                Panel(
                    "Failures", "A short window above a long one: it begins. Below: it is over.", burn("failed"), "none"
                ),
                Panel("Slow first tokens", "The same of first tokens later than 2.5 s.", burn("slow"), "none"),
            ),
        ),
        Row(
            "What is behind it",
            (
                Panel(
                    "Failed requests a second, by tenant",
                    "One tenant alone has met something that its requests bring about.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            "sum by (athanor_tenant_id) "
                            f'(rate(athanor_requests_total{{athanor_outcome="failed"}}{RATE}))',
                        ),
                    ),
                    "reqps",
                ),
                Panel(
                    "First token by model",
                    "With the promise.",
                    (*quantiles(TTFT, "gen_ai_request_model", "0.5", "0.95"), ("objective", "vector(2.5)")),
                    "s",
                ),
                Panel(
                    "Time from arrival to first token, p95 by phase",
                    "Where it goes.",
                    (
                        (
                            "{{athanor_phase}}",
                            "histogram_quantile(0.95, sum by (le, athanor_phase) "
                            "(rate(athanor_phase_duration_seconds_bucket"
                            f'{{athanor_phase!="decode"}}{RATE})))',
                        ),
                    ),
                    "s",
                ),
            ),
        ),
    ),
    (MODELS,),
    "now-6h",
)
