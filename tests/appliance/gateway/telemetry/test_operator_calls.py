"""Calls of the operator's API in metrics and spans, and what is told of them over the admin listener."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from appliance.common.operator_calls import OperatorCall
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.tracer import TelemetrySettings, open_telemetry

METHOD = "athanor.policy.v1.PolicyService/Apply"


def call(outcome: str) -> OperatorCall:
    """A call that took a quarter of a second."""
    fields = {"user": 0, "roles": "", "subject": "", "request": "req_1"}
    return OperatorCall(method=METHOD, outcome=outcome, milliseconds=250, **fields)  # type: ignore[arg-type]


def test_each_call_is_counted_and_has_a_span() -> None:
    """By method and status; the span has its length, and an error where it failed alone."""
    exporter = InMemorySpanExporter()
    telemetry = open_telemetry(TelemetrySettings(version="0", sample_ratio=1.0), exporter)
    for outcome in ("OK", "OK", "PERMISSION_DENIED"):
        telemetry.operator_call(call(outcome))
    text = telemetry.metrics.render()[1].decode()
    telemetry.close()
    counted = [line for line in text.splitlines() if line.startswith("athanor_operator_calls_total{")]
    assert sorted(line.rpartition(" ")[2] for line in counted) == ["1.0", "2.0"]
    spans = exporter.get_finished_spans()
    assert [one.name for one in spans] == [METHOD] * 3
    assert all((one.end_time or 0) - (one.start_time or 0) == 250_000_000 for one in spans)
    failed = [(one.attributes or {}).get(names.ERROR_TYPE) for one in spans]
    assert failed == [None, None, "PERMISSION_DENIED"]


def test_what_is_told_is_read_again() -> None:
    """A call's query gives the call, but for what only the audit log is told."""
    told = call("OK")
    query = dict(pair.split("=") for pair in told.query().replace("%2F", "/").split("&"))
    assert OperatorCall.of_query(query) == told


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "athanor.inference.v1.InferenceService/Generate"},
        {"method": "athanor.policy.v1.PolicyService/" + "A" * 40},
        {"outcome": "ok"},
        {"milliseconds": "-1"},
        {"milliseconds": "99999999"},
    ],
)
def test_other_queries_become_no_series(wrong: dict[str, str]) -> None:
    """Methods of others, words that are no status and times out of range are refused; so labels are bounded."""
    good = {"method": METHOD, "outcome": "OK", "milliseconds": "1"}
    assert OperatorCall.of_query(good).method == METHOD
    with pytest.raises(ValueError, match="must be"):
        OperatorCall.of_query(good | wrong)
