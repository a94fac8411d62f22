"""Words and queries that several dashboards share."""

from __future__ import annotations

TOKENS = "suffix: tok/s"
MODEL = '{gen_ai_request_model=~"$model"}'
TENANT = '{athanor_tenant_id=~"$tenant"}'
RATE = "[$__rate_interval]"
MODELS = ("model", "label_values(athanor_sandbox_ready, gen_ai_request_model)")
TENANTS = ("tenant", "label_values(athanor_requests_total, athanor_tenant_id)")
TTFT = "gen_ai_server_time_to_first_token_seconds"
ANSWER = "gen_ai_server_request_duration_seconds"
TPOT = "athanor_output_token_latency_seconds"


def quantiles(metric: str, by: str, *shares: str, where: str = MODEL) -> tuple[tuple[str, str], ...]:
    """A query for each quantile of a histogram."""
    return tuple(
        (
            f"p{round(float(share) * 100)} {{{{{by}}}}}",
            f"histogram_quantile({share}, sum by (le, {by}) (rate({metric}_bucket{where}{RATE})))",
        )
        for share in shares
    )


def total(metric: str, by: str, where: str = "") -> str:
    """The rate of a counter by a label, or several."""
    return f"sum by ({by}) (rate({metric}{where}{RATE}))"


def or_none(query: str, label: str) -> str:
    """The query, or one series "none" of 0 where there is nothing to count yet."""
    return f'{query} or label_replace(vector(0), "{label}", "none", "", "")'


FAILURES = or_none(f"sum by (athanor_reason) (rate(athanor_failures_total{RATE}))", "athanor_reason")
