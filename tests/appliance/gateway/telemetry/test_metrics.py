"""Prometheus text: exact names, exact buckets, bounded labels."""

from __future__ import annotations

import re

import pytest
from opentelemetry.sdk.resources import Resource
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from appliance.common.errors import InternalError, InvalidRequestError, RateLimitedError
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level, MetricNameError, Metrics
from appliance.gateway.telemetry.tracer import OtelTelemetry, open_telemetry
from tests.appliance.gateway.telemetry.calls import HTTP, SETTINGS, request, serve

GENAI_BUCKETS = {
    "gen_ai_server_request_duration_seconds": [
        *("0.01", "0.02", "0.04", "0.08", "0.16", "0.32", "0.64", "1.28", "2.56"),
        *("5.12", "10.24", "20.48", "40.96", "81.92", "+Inf"),
    ],
    "gen_ai_server_time_to_first_token_seconds": [
        *("0.001", "0.005", "0.01", "0.02", "0.04", "0.06", "0.08", "0.1", "0.25", "0.5"),
        *("0.75", "1.0", "2.5", "5.0", "7.5", "10.0", "+Inf"),
    ],
    "gen_ai_server_time_per_output_token_seconds": [
        *("0.01", "0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.4", "0.5"),
        *("0.75", "1.0", "2.5", "+Inf"),
    ],
    "gen_ai_client_token_usage": [
        *("1.0", "4.0", "16.0", "64.0", "256.0", "1024.0", "4096.0", "16384.0", "65536.0"),
        *("262144.0", "1048576.0", "4194304.0", "16777216.0", "67108864.0", "+Inf"),
    ],
}
"""As the specification prints them, semantic conventions v1.41.1."""


def families(metrics: Metrics) -> dict[str, Metric]:
    """The scrape, parsed by Prometheus' own client."""
    content_type, body = metrics.render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def values(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """A counter's or gauge's samples by their label values, in the order of the labels' names; not those of counters
    that are still at their beginning."""
    samples = [one for one in families(metrics)[name].samples if one.value or not one.name.endswith("_total")]
    return {tuple(v for _, v in sorted(one.labels.items())): one.value for one in samples}


@pytest.fixture
def telemetry() -> OtelTelemetry:
    """Telemetry that knows one tenant and one model."""
    one = open_telemetry(SETTINGS)
    one.metrics.know(tenants=["alpha"], models=["mini"])
    return one


def test_genai_histograms_have_the_specified_names_and_buckets(telemetry: OtelTelemetry) -> None:
    """Each GenAI histogram appears under its Prometheus name with the specification's bounds."""
    serve(telemetry)
    found = families(telemetry.metrics)
    for name, bounds in GENAI_BUCKETS.items():
        assert found[name].type == "histogram"
        samples = [one for one in found[name].samples if one.name == f"{name}_bucket"]
        series = {tuple(sorted((k, v) for k, v in s.labels.items() if k != "le")) for s in samples}
        for labels in series:
            mine = [s.labels["le"] for s in samples if dict(labels).items() <= s.labels.items()]
            assert mine == bounds
    usage = found["gen_ai_client_token_usage"].samples
    totals = {s.labels["gen_ai_token_type"]: s.value for s in usage if s.name.endswith("_sum")}
    assert totals == {"input": 12.0, "output": 5.0}


def test_rare_counters_begin_at_nothing(telemetry: OtelTelemetry) -> None:
    """A tenant's first request begins the series of all outcomes, and a counter is begun on demand: the first failure
    is an increase."""
    serve(telemetry)
    telemetry.metrics.expect(names.SANDBOX_LOSSES, model=["mini"], role=["engine", "text"], reason=["oom"])
    text = telemetry.metrics.render()[1].decode()
    for outcome, count in (("ok", 1), ("refused", 0), ("invalid", 0), ("cancelled", 0), ("failed", 0)):
        assert re.search(rf'athanor_requests_total{{.*athanor_outcome="{outcome}".*}} {count}\.0', text)
    assert len(re.findall(r'athanor_sandbox_losses_total{.*athanor_reason="oom".*} 0\.0', text)) == 2


def test_genai_labels(telemetry: OtelTelemetry) -> None:
    """The request duration carries operation, provider, model, tenant and the error if any."""
    serve(telemetry)
    serve(telemetry, error=InternalError("x"))
    name = "gen_ai_server_request_duration_seconds"
    counts = [s for s in families(telemetry.metrics)[name].samples if s.name == f"{name}_count"]
    common = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "athanor",
        "gen_ai_request_model": "mini",
        "athanor_tenant_id": "alpha",
    }
    assert sorted([s.labels for s in counts], key=str) == sorted(
        [common | {"error_type": ""}, common | {"error_type": "internal"}], key=str
    )


def test_own_counters(telemetry: OtelTelemetry) -> None:
    """Requests by outcome, refusals and failures by reason; a caller's mistake is no refusal."""
    serve(telemetry)
    serve(telemetry, error=RateLimitedError("x"))
    serve(telemetry, error=InvalidRequestError("x"))
    serve(telemetry, error=InternalError("x"))
    metrics = telemetry.metrics
    assert values(metrics, "athanor_requests") == {
        ("http", "ok", "alpha", "mini"): 1,
        ("http", "refused", "alpha", "mini"): 1,
        ("http", "invalid", "alpha", "mini"): 1,
        ("http", "failed", "alpha", "mini"): 1,
    }
    assert values(metrics, "athanor_refusals") == {("rate_limited", "alpha"): 1}
    assert values(metrics, "athanor_failures") == {("internal", "alpha"): 1}
    phases = families(metrics)["athanor_phase_duration_seconds"].samples
    counted = {s.labels["athanor_phase"]: s.value for s in phases if s.name.endswith("_count")}
    assert counted == {"policy": 4, "text": 4, "queue": 4, "prefill": 4, "decode": 4}


def test_gauges_and_counters_by_name(telemetry: OtelTelemetry) -> None:
    """What the gateway counts itself appears under the name and labels of ``names``."""
    telemetry.levels([Level(names.KV_FREE_BLOCKS, 512, {"model": "mini"})])
    told = {names.KV_FREE_BLOCKS: 500, names.RUNNING: 3, names.WAITING: 0}
    telemetry.levels([Level(name, value, {"model": "mini"}) for name, value in told.items()])
    telemetry.count(names.SANDBOX_RESTARTS, model="mini", role="engine")
    telemetry.count(names.POLICY_RELOADS, outcome="ok")
    telemetry.count(names.POLICY_RELOADS, 2, outcome="failed")
    metrics = telemetry.metrics
    assert values(metrics, "athanor_engine_kv_free_blocks") == {("mini",): 500}
    assert values(metrics, "athanor_engine_running_requests") == {("mini",): 3}
    assert values(metrics, "athanor_engine_waiting_requests") == {("mini",): 0}
    assert values(metrics, "athanor_sandbox_restarts") == {("engine", "mini"): 1}
    assert values(metrics, "athanor_policy_reloads") == {("ok",): 1, ("failed",): 2}


def test_every_name_can_be_emitted(telemetry: OtelTelemetry) -> None:
    """Each counter and gauge takes all its labels at once and comes out in the scrape."""
    for name, instrument in names.COUNTERS.items():
        telemetry.count(name, **dict.fromkeys(instrument.labels, "x"))
    telemetry.levels([Level(name, 1, dict.fromkeys(one.labels, "x")) for name, one in names.GAUGES.items()])
    found = families(telemetry.metrics)
    for name in names.COUNTERS | names.GAUGES:
        assert any(one.startswith(name.replace(".", "_")) for one in found), name


@pytest.mark.parametrize(
    ("name", "labels"), [("athanor.nothing", {}), (names.REQUESTS, {"prompt": "x"}), (names.KV_FREE_BLOCKS, {})]
)
def test_unknown_names_are_a_callers_defect(telemetry: OtelTelemetry, name: str, labels: dict[str, str]) -> None:
    """A counter that does not exist, a label it lacks, and a gauge that is counted are refused."""
    with pytest.raises(MetricNameError):
        telemetry.count(name, **labels)


def test_strangers_share_one_label(telemetry: OtelTelemetry) -> None:
    """A model or tenant that the policy does not know adds no series of its own."""
    for number in range(50):
        serve(telemetry, asked=request(model=f"made-up-{number}"), tenant=f"nobody-{number}")
    assert values(telemetry.metrics, "athanor_requests") == {("http", "ok", "other", "other"): 50}
    body = telemetry.metrics.render()[1]
    assert b"made-up" not in body
    assert b"nobody" not in body


def test_levels_are_told_all_at_once() -> None:
    """A series that is not told any more is gone; what counts as "other" is added up, not overwritten."""
    metrics = Metrics(Resource.create({}))
    metrics.know(tenants=["a"], models=["m", "n"])

    def told(**blocks: int) -> None:
        metrics.levels(Level(names.KV_RESIDENT, count, {"tenant": who, "model": "m"}) for who, count in blocks.items())

    told(a=5, b=2, c=3)
    assert values(metrics, "athanor_kv_resident_blocks") == {("a", "m"): 5, ("other", "m"): 5}
    told(b=1)
    assert values(metrics, "athanor_kv_resident_blocks") == {("other", "m"): 1}
    with pytest.raises(MetricNameError):
        metrics.levels([Level(names.KV_RESIDENT, 1, {"prompt": "x"})])
    assert values(metrics, "athanor_kv_resident_blocks") == {("other", "m"): 1}


def test_calls_without_a_tenant(telemetry: OtelTelemetry) -> None:
    """A refusal before authentication counts under no tenant, not under "other"."""
    telemetry.start(HTTP, "req_000000000000000000000009", None).finish(error=RateLimitedError("x"))
    assert values(telemetry.metrics, "athanor_refusals") == {("rate_limited", ""): 1}


def test_process_figures_are_there(telemetry: OtelTelemetry) -> None:
    """The usual process metrics come from the same registry, and nothing from a global one."""
    found = families(telemetry.metrics)
    assert "process_resident_memory_bytes" in found
    assert "python_info" not in found
    assert not any(name.startswith("otel_") for name in found)
