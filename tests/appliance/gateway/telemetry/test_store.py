"""The embedded trace store: bounds, order, and what an id may name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from appliance.common.json_codec import SnapshotError, decode, encode
from appliance.gateway.telemetry.store import MAX_SPANS, StoredTrace, TraceStore
from tests.appliance.gateway.telemetry import samples


def numbered(number: int, trace_id: str | None = None) -> StoredTrace:
    """A trace whose request id ends in ``number``."""
    summary = replace(samples.SUMMARY, request_id=f"req_{number:024x}", trace_id=trace_id or f"{number + 1:032x}"[::-1])
    return StoredTrace(summary, (samples.span(1, None, "request", 0, 1),))


def test_keeps_the_newest_and_counts_all() -> None:
    """A full store lets the oldest go, lists the newest first and still knows how many there were."""
    store = TraceStore(capacity=4)
    for number in range(10):
        store.record(numbered(number))
    listed = store.newest(3)
    assert [one.request_id for one in listed.traces] == [f"req_{n:024x}" for n in (9, 8, 7)]
    assert (listed.recorded, listed.capacity) == (10, 4)
    assert store.find(f"req_{5:024x}") == ()
    assert len(store.newest(100).traces) == 4
    assert store.newest(0).traces == ()


def test_bounds_the_spans_of_one_request() -> None:
    """Spans beyond the bound are dropped and counted, the first ones kept."""
    store = TraceStore()
    spans = tuple(samples.span(n + 1, n or None, "athanor.queue", n, n + 1) for n in range(40))
    store.record(StoredTrace(samples.SUMMARY, spans, dropped_spans=2))
    (found,) = store.find(samples.SUMMARY.request_id)
    assert found.spans == spans[:MAX_SPANS]
    assert found.dropped_spans == 2 + 40 - MAX_SPANS


@pytest.mark.parametrize(
    "wanted",
    [
        "req_7f3a9c01de5544aa90b1c2d3",
        "7f3a9c01de5544aa90b1c2d3",
        "7f3a9c",
        "REQ_7F3A9C01",
        "chatcmpl-7f3a9c01de5544aa90b1c2d3",
        "cmpl-7f3a9c",
        "4bf92f3577b34da6a3ce929d0e0e4736",
        "4bf92f3577",
    ],
)
def test_finds_by_request_or_trace_id(wanted: str) -> None:
    """A whole id or a prefix of six digits names a request, in either case of letters."""
    store = TraceStore()
    store.record(samples.answered())
    store.record(numbered(1))
    assert store.find(wanted) == (samples.answered(),)


@pytest.mark.parametrize("wanted", ["7f3a9", "req_7f3a9", "", "zzzzzz", "req_", "7f3a9d"])
def test_too_short_or_unknown_names_nothing(wanted: str) -> None:
    """Five digits, no digits and digits of nobody find nothing."""
    store = TraceStore()
    store.record(samples.answered())
    assert store.find(wanted) == ()


def test_requests_of_one_callers_trace_are_all_found() -> None:
    """A caller's trace id may cover many requests; none of them hides another."""
    shared = "4bf92f3577b34da6a3ce929d0e0e4736"
    store = TraceStore()
    for number in range(3):
        store.record(numbered(number, shared))
    assert len(store.find(shared)) == 3
    assert len(store.find(shared[:8])) == 3
    assert store.find(f"{1:024x}")[0].summary.request_id == f"req_{1:024x}"


@pytest.mark.parametrize("trace", [samples.answered(), samples.refused(), samples.failed()])
def test_survives_json(trace: StoredTrace) -> None:
    """What the admin listener writes, the command line reads back unchanged."""
    assert decode(StoredTrace, json.loads(json.dumps(encode(trace)))) == trace


def test_json_of_another_shape_is_refused_with_its_path() -> None:
    """A missing or mistyped value is named; an unknown key of a newer version is passed over."""
    data = json.loads(json.dumps(encode(samples.answered())))
    assert decode(StoredTrace, data | {"new": 1}) == samples.answered()
    data["spans"][2]["start_ns"] = "soon"
    with pytest.raises(SnapshotError, match=r"spans\[2\]\.start_ns: input should be a valid integer"):
        decode(StoredTrace, data)
    del data["summary"]["route"]
    with pytest.raises(SnapshotError, match=r"summary\.route: field required"):
        decode(StoredTrace, data)
    with pytest.raises(SnapshotError, match="document: input should be an object"):
        decode(StoredTrace, [])
