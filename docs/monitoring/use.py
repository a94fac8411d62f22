"""Dashboards of use: overview, KV memory."""

from __future__ import annotations

from docs.monitoring.grafana import GOOD_LOW, GOOD_ZERO, GREEN, RED, YELLOW, Dashboard, Panel, Row
from docs.monitoring.queries import ANSWER, MODEL, MODELS, RATE, TOKENS, TPOT, TTFT, or_none, quantiles, total

OVERVIEW = Dashboard(
    "athanor",
    "Athanor",
    "Is it well, how much does it do, how fast, what is it short of.",
    (
        Row(
            "Now",
            (
                Panel(
                    "Sandboxes that answer",
                    "Engines and text sandboxes that are ready, of all that are served.",
                    (("ready", "sum(athanor_sandbox_ready)"), ("of", "count(athanor_sandbox_ready)")),
                    kind="stat",
                ),
                Panel(
                    "Output tokens a second",
                    "Of all tenants, as they are delivered.",
                    (("tokens/s", f'sum(rate(athanor_tokens_total{{athanor_token_type="output"}}{RATE}))'),),
                    TOKENS,
                    "stat",
                ),
                Panel(
                    "Requests running",
                    "In the engines' last steps, and waiting in front of them.",
                    (
                        ("running", "sum(athanor_engine_running_requests)"),
                        ("waiting", "sum(athanor_engine_waiting_requests)"),
                    ),
                    kind="stat",
                ),
                Panel(
                    "First token within 2.5 s",
                    "The promise that the SLO page keeps account of.",
                    (("share", f'sum(rate({TTFT}_bucket{{le="2.5"}}{RATE})) / sum(rate({TTFT}_count{RATE}))'),),
                    "percentunit",
                    "stat",
                    steps=((None, RED), (0.95, YELLOW), (0.99, GREEN)),
                    top=1,
                ),
            ),
        ),
        Row(
            "Requests",
            (
                Panel(
                    "Requests a second by outcome",
                    "Refused: by a limit or a rule. Failed: by our fault.",
                    (("{{athanor_outcome}}", total("athanor_requests_total", "athanor_outcome")),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Tokens a second by type",
                    "Cached is the part of the input that was found in KV.",
                    (("{{athanor_token_type}}", total("athanor_tokens_total", "athanor_token_type")),),
                    TOKENS,
                ),
            ),
        ),
        Row(
            "Latency",
            (
                Panel(
                    "Time to first token",
                    "From the arrival of a request to its first token.",
                    quantiles(TTFT, "gen_ai_request_model", "0.5", "0.95", "0.99"),
                    "s",
                ),
                Panel(
                    "Time per output token",
                    "After the first; of answers whose tokens came in more than one pass.",
                    quantiles(TPOT, "gen_ai_request_model", "0.5", "0.99"),
                    "s",
                ),
                Panel(
                    "Whole request",
                    "From its arrival to its last byte.",
                    quantiles(ANSWER, "gen_ai_request_model", "0.5", "0.95"),
                    "s",
                ),
            ),
        ),
        Row(
            "Where time goes",
            (
                Panel(
                    "Where requests spend their time, p95",
                    "Policy and text are the host's, the rest the engine's.",
                    (
                        (
                            "{{athanor_phase}}",
                            "histogram_quantile(0.95, sum by (le, athanor_phase) "
                            f"(rate(athanor_phase_duration_seconds_bucket{RATE})))",
                        ),
                    ),
                    "s",
                ),
                Panel(
                    "Running and waiting",
                    "Waiting that stays is a lack of rows or of KV memory.",
                    (
                        ("running {{gen_ai_request_model}}", f"athanor_engine_running_requests{MODEL}"),
                        ("waiting {{gen_ai_request_model}}", f"athanor_engine_waiting_requests{MODEL}"),
                    ),
                ),
            ),
        ),
        Row(
            "Gateway",
            (
                Panel(
                    "Processor",
                    "Of the gateway's process; one core is all that it can use.",
                    (("cores", f"rate(process_cpu_seconds_total{RATE})"),),
                    "none",
                    top=1,
                ),
                Panel(
                    "Memory",
                    "Resident memory of the gateway.",
                    (("resident", "process_resident_memory_bytes"),),
                    "bytes",
                ),
                Panel(
                    "Descriptors",
                    "Open ones, and how many there may be.",
                    (("open", "process_open_fds"), ("limit", "process_max_fds")),
                ),
                Panel(
                    "Spans",
                    "To the collector. Lost ones cost no request.",
                    (
                        ("sent", f"sum(rate(athanor_telemetry_sent_spans_total{RATE}))"),
                        ("lost", f"sum(rate(athanor_telemetry_dropped_spans_total{RATE}))"),
                    ),
                    "cps",
                ),
            ),
        ),
    ),
    (MODELS,),
)

KV = Dashboard(
    "athanor-kv",
    "Athanor: KV memory",
    "Who holds the KV memory, who is squeezed, whether stamps hold.",
    (
        Row(
            "Now",
            (
                Panel(
                    "In use",
                    "Blocks that requests hold. Cached blocks can be evicted, so they are free.",
                    (
                        (
                            "{{gen_ai_request_model}}",
                            f"1 - athanor_engine_kv_free_blocks{MODEL} / athanor_engine_kv_blocks{MODEL}",
                        ),
                    ),
                    "percentunit",
                    "stat",
                    steps=GOOD_LOW,
                    top=1,
                ),
                Panel(
                    "Requests that wait",
                    "For rows or KV memory, inside the engines.",
                    (("{{gen_ai_request_model}}", f"athanor_engine_waiting_requests{MODEL}"),),
                    kind="stat",
                ),
                Panel(
                    "Stamps that did not hold",
                    "Requests ended because a block in their tables was not theirs.",
                    (("requests", f"sum(athanor_engine_integrity_failures_total{MODEL})"),),
                    kind="stat",
                    steps=GOOD_ZERO,
                ),
                Panel(
                    "Broken promises",
                    "Of fairness between tenants, found by the engine itself.",
                    (("{{gen_ai_request_model}}", f"athanor_engine_defects{MODEL}"),),
                    kind="stat",
                    steps=GOOD_ZERO,
                ),
            ),
        ),
        Row(
            "Memory",
            (
                Panel(
                    "Blocks in use",
                    "And how many there are.",
                    (
                        (
                            "in use {{gen_ai_request_model}}",
                            f"athanor_engine_kv_blocks{MODEL} - athanor_engine_kv_free_blocks{MODEL}",
                        ),
                        ("pool {{gen_ai_request_model}}", f"athanor_engine_kv_blocks{MODEL}"),
                    ),
                ),
                Panel(
                    "Blocks by account",
                    "Tenants, and sharing groups as group/NAME.",
                    (("{{athanor_tenant_id}}", f"sum by (athanor_tenant_id) (athanor_kv_resident_blocks{MODEL})"),),
                    stacked=True,
                ),
                Panel(
                    "Input found in KV",
                    "Share of prompt tokens that were not computed again.",
                    (
                        (
                            "{{gen_ai_request_model}}",
                            "sum by (gen_ai_request_model) "
                            f'(rate(athanor_tokens_total{{athanor_token_type="cached"}}{RATE})) '
                            "/ sum by (gen_ai_request_model) "
                            f'(rate(athanor_tokens_total{{athanor_token_type="input"}}{RATE}))',
                        ),
                    ),
                    "percentunit",
                    top=1,
                ),
            ),
        ),
        Row(
            "Quotas",
            (
                Panel(
                    "Reserved blocks",
                    "What each account can always have.",
                    (("{{athanor_tenant_id}}", f"sum by (athanor_tenant_id) (athanor_kv_reserved_blocks{MODEL})"),),
                ),
                Panel(
                    "Borrowed blocks",
                    "Beyond the reservation; taken back when their owner wants them.",
                    (("{{athanor_tenant_id}}", f"sum by (athanor_tenant_id) (athanor_kv_borrowed_blocks{MODEL})"),),
                ),
                Panel(
                    "Waits for the own cap",
                    "Each second; a raised cap would end them.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            f"sum by (athanor_tenant_id) (rate(athanor_kv_cap_waits{MODEL}{RATE}))",
                        ),
                    ),
                    "cps",
                ),
            ),
        ),
        Row(
            "Outside of the engines",
            (
                Panel(
                    "Sealed KV",
                    "Where it lies while it waits to come back; none where KV does not spill.",
                    (("{{athanor_tier}}", or_none("sum by (athanor_tier) (athanor_spill_bytes)", "athanor_tier")),),
                    "bytes",
                    stacked=True,
                ),
                Panel(
                    "Blocks a second",
                    "Restored are hits, absent misses; rejected ones were changed on their way.",
                    (
                        (
                            "{{athanor_outcome}}",
                            or_none(
                                f"sum by (athanor_outcome) (rate(athanor_spill_blocks_total{RATE}))", "athanor_outcome"
                            ),
                        ),
                    ),
                    "cps",
                ),
            ),
        ),
        Row(
            "Prompts computed by other hosts",
            (
                Panel(
                    "Asked",
                    "Long prompts a second, by outcome; all but computed are computed here.",
                    (
                        (
                            "{{athanor_outcome}}",
                            or_none(
                                f"sum by (athanor_outcome) (rate(athanor_split_asked_total{RATE}))", "athanor_outcome"
                            ),
                        ),
                    ),
                    "cps",
                    stacked=True,
                ),
                Panel(
                    "Wait for other hosts",
                    "Of one prompt in the mean. Where it is long and the outcome not computed, it is lost.",
                    (
                        (
                            "{{athanor_outcome}}",
                            or_none(
                                f"sum by (athanor_outcome) (rate(athanor_split_waited_seconds_total{RATE})) "
                                f"/ sum by (athanor_outcome) (rate(athanor_split_asked_total{RATE}) > 0)",
                                "athanor_outcome",
                            ),
                        ),
                    ),
                    "s",
                ),
                Panel(
                    "Computed again",
                    "Blocks a second of prompts that another host had computed: more than one a prompt says that the "
                    "store lost some, or has them too late.",
                    (
                        ("blocks", f"sum(rate(athanor_split_recomputed_blocks_total{RATE})) or vector(0)"),
                        (
                            "prompts of which nothing came",
                            f'sum(rate(athanor_split_taken_total{{athanor_outcome="nothing"}}{RATE})) or vector(0)',
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Served to other hosts",
                    "Prompts a second that other hosts sent here, by outcome.",
                    (
                        (
                            "{{athanor_outcome}}",
                            or_none(
                                f"sum by (athanor_outcome) (rate(athanor_split_served_total{RATE}))", "athanor_outcome"
                            ),
                        ),
                    ),
                    "cps",
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Squeezed by others",
            (
                Panel(
                    "Cached blocks lost",
                    "Each second: evicted for others; prompts are computed again.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            f"sum by (athanor_tenant_id) (rate(athanor_kv_lost_blocks{MODEL}{RATE}))",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "Requests preempted",
                    "Each second: put back to waiting for others.",
                    (
                        (
                            "{{athanor_tenant_id}}",
                            f"sum by (athanor_tenant_id) (rate(athanor_kv_preempted_requests{MODEL}{RATE}))",
                        ),
                    ),
                    "cps",
                ),
            ),
        ),
    ),
    (MODELS,),
)
