"""The trace pipeline end to end: a real appliance, a real collector, and behind it the protocol's own service."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from appliance.gateway.request.lifecycle import REPLAY_S
from appliance.gateway.telemetry.scrape import OPENMETRICS
from docs.monitoring import build
from tests.appliance.gateway.telemetry.collector import attributes, running_grpc
from tests.observers import rotel
from tests.system.conftest import PLAIN, Appliance, running
from tests.traceql import TAG, CollectedSpan, TraceQLError, parse, search

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

PARENT = "00f067aa0ba902b7"
SHOWN, REPLAYED, INVALID, SLOW, BEYOND, STRANGER, FAILED, WITHIN = (
    "4bf92f3577b34da6a3ce929d0e0e473" + digit for digit in "6789abcd"
)
TENANTS = {WITHIN: "beta", BEYOND: "beta", STRANGER: None}
"""Traces that are not of alpha, with their tenant."""

SLOW_S = 1.5
"""How long an engine stands still; other requests of the embedded model take some hundredths."""


def ask(
    appliance: Appliance,
    trace_id: str,
    model: str = "athanor-mini",
    prompt: str | list[int] = "The sandbox",
    tenant: str = "alpha",
    **options: Any,
) -> None:
    """One request of a caller that says that it is not sampled."""
    appliance.openai(tenant).with_options(timeout=60, **options).completions.create(
        model=model,
        prompt=prompt,
        max_tokens=8,
        extra_body={"ignore_eos": True},
        extra_headers={"traceparent": f"00-{trace_id}-{PARENT}-00"},
    )


def wait_in_flight(appliance: Appliance) -> None:
    """Wait until the policy has admitted a request of alpha."""
    deadline = time.monotonic() + 20
    while next(one for one in appliance.status()["tenants"] if one["id"] == "alpha")["in_flight"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask_through_a_death(appliance: Appliance) -> None:
    """A request that its engine dies under before it has said anything: the engine is stopped while it comes."""
    pid = appliance.sandbox_pid("engine")
    os.kill(pid, signal.SIGSTOP)
    # Token ids: on its way to the engine the request passes no other sandbox.
    asking = threading.Thread(target=ask, args=(appliance, REPLAYED), kwargs={"prompt": [5, 6, 7]})
    asking.start()
    wait_in_flight(appliance)
    time.sleep(0.3)  # it is in the queue, or nothing is replayed
    os.kill(pid, signal.SIGKILL)
    asking.join()


def stored(appliance: Appliance, trace_id: str) -> dict[str, Any]:
    """A request in the embedded store."""
    return dict(httpx.get(f"{appliance.ready['admin']}/traces/{trace_id}", timeout=10, verify=PLAIN).json())


@dataclass
class Collected:
    """What the appliance shows of the requests of ``planted``, and what arrived behind the collector."""

    shown: dict[str, dict[str, Any]]
    """Trace to the request in the embedded store."""
    raw: list[Span]
    spans: list[CollectedSpan]
    replays: bool
    scrape: str
    """Metrics in OpenMetrics after the slow request."""

    def expects(self, title: str, wanted: set[str], found: set[str]) -> bool:
        """Whether a panel has found the planted requests that it is for, as far as they were planted, and no other; but
        one that a loaded machine made slow is rightly found as slow, and one that is replayed where all are counted."""
        loose = {FAILED} if "lost engine" in title else {REPLAYED} if len(wanted) > 2 else set()
        if title.startswith("Slow"):
            loose |= {span.trace for span in self.spans if span.duration > (SLOW_S - 0.1) * 1e9}
        return wanted & set(self.shown) <= found <= wanted | loose

    def of(self, trace_id: str) -> list[Span]:
        """The spans of a trace in the protocol's form."""
        return [span for span in self.raw if span.trace_id.hex() == trace_id]


def slowly(appliance: Appliance) -> None:
    """A request whose engine stands still for ``SLOW_S`` while it is there."""
    pid = appliance.sandbox_pid("engine")
    os.kill(pid, signal.SIGSTOP)
    try:
        asking = threading.Thread(target=ask, args=(appliance, SLOW), kwargs={"prompt": [5, 6, 7]})
        asking.start()
        wait_in_flight(appliance)
        time.sleep(SLOW_S)  # what is measured
    finally:
        os.kill(pid, signal.SIGCONT)
    asking.join()


def refused(appliance: Appliance) -> None:
    """A request beyond its tenant's rate, and one without a known key."""
    policy = appliance.state / "policy.yaml"
    head, beta, tail = policy.read_text().partition("  beta:\n")
    policy.write_text(head + beta + tail.replace("requests_per_minute: 6000", "requests_per_minute: 1"))
    httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).raise_for_status()
    ask(appliance, WITHIN, tenant="beta")
    with pytest.raises(openai.RateLimitError):
        ask(appliance, BEYOND, tenant="beta")
    with pytest.raises(openai.AuthenticationError):
        ask(appliance, STRANGER, api_key="nobody")


def failed(appliance: Appliance) -> None:
    """A request whose engine ends after the first tokens."""
    stream = appliance.openai("alpha", timeout=60).completions.create(
        model="athanor-mini",
        prompt="The sandbox",
        max_tokens=2_000,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"traceparent": f"00-{FAILED}-{PARENT}-00"},
    )
    with pytest.raises(openai.APIError):
        for number, _ in enumerate(stream):
            if number == 0:
                os.kill(appliance.sandbox_pid("engine"), signal.SIGKILL)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Collected:
    """Give an answered, a slow, an invalid, a refused, a failed and a replayed request, and one of a stranger, of an
    appliance with a real collector."""
    with tempfile.TemporaryDirectory() as name, running_grpc() as backend, rotel(Path(name), backend.url) as collector:
        state = tmp_path_factory.mktemp("traced") / "state"
        with running(state, env=collector.environment("grpc")) as appliance:
            ask(appliance, SHOWN)
            with pytest.raises(openai.NotFoundError):
                ask(appliance, INVALID, model="none")
            slowly(appliance)
            accept = {"accept": f"{OPENMETRICS};version=1.0.0"}
            scrape = httpx.get(appliance.ready["admin"] + "/metrics", headers=accept, timeout=30, verify=PLAIN).text
            refused(appliance)
            # Two deaths of the engine and no more: behind the third one a supervisor drops the demos' checkpoint.
            appliance.wait_checkpoints()
            failed(appliance)
            began = time.monotonic()
            appliance.wait_generation("engine", 1, 60.0)
            replays = time.monotonic() - began <= REPLAY_S / 2  # a second death in a row is followed by a pause
            if replays:
                ask_through_a_death(appliance)
            asked = [SHOWN, INVALID, SLOW, WITHIN, BEYOND, STRANGER, FAILED, *([REPLAYED] if replays else [])]
            shown = {trace: stored(appliance, trace) for trace in asked}
            count = sum(len(one["spans"]) for one in shown.values())
        found = backend.with_resources(count)
    spans = [CollectedSpan.of(span, dict(resource)) for resource, span in found]
    return Collected(shown, [span for _, span in found], spans, replays, scrape)


@pytest.mark.full
def test_traces_reach_the_collector_complete(planted: Collected) -> None:
    """Answered, refused and replayed requests: behind the collector stand the spans that the appliance itself shows,
    all of them, under the caller's span, which had said that it is not sampled; a replay is linked to what it repeats.
    """
    for trace, one in planted.shown.items():
        ids, spans = {span["span_id"]: span for span in one["spans"]}, planted.of(trace)
        assert {span.span_id.hex() for span in spans} == set(ids), "every span, once"
        for span in spans:
            assert span.parent_span_id.hex() == ids[span.span_id.hex()]["parent_id"]
        (server,) = (span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
        assert server.parent_span_id.hex() == PARENT
        assert attributes(server).get("athanor.tenant.id") == TENANTS.get(trace, "alpha")
    phases = [span.name for span in sorted(planted.of(SHOWN), key=lambda one: one.start_time_unix_nano)][2:]
    assert phases == [f"athanor.{phase}" for phase in ("policy", "text", "queue", "prefill", "decode")]
    if not planted.replays:
        pytest.skip(f"no replay: a killed engine was away longer here than the {REPLAY_S:.0f} s that a replay waits")
    queues = [one for one in planted.of(REPLAYED) if one.name == "athanor.queue"]
    first, again = sorted(queues, key=lambda one: one.start_time_unix_nano)
    assert first.status.code == Status.STATUS_CODE_ERROR and attributes(first)["error.type"] == "engine_lost"
    assert [link.span_id for link in again.links] == [first.span_id]
    assert planted.shown[REPLAYED]["summary"]["outcome"] == "ok"


def targets(page: str, **values: str) -> dict[str, dict[str, Any]]:
    """Panel to what it asks of a trace store, with a page's variables filled in."""
    chosen = {"service": "athanor", "tenant": ".*", "slow": f"{SLOW_S - 0.1}s", "trace": SHOWN, **values}
    text = re.sub(r"\$(\w+)", lambda found: chosen.get(found[1], found[0]), build.text(build.PAGES[page]))
    panels = json.loads(text)["panels"]
    return {
        panel["title"]: target
        for panel in panels
        for target in panel.get("targets", ())
        if panel["datasource"]["type"] != "prometheus" and panel["type"] != "traces"
    }


TEMPO_FINDS = {
    "Slow requests": {SLOW},
    "Time by phase, p95": {SHOWN, WITHIN, BEYOND, STRANGER, SLOW, FAILED},
    "Requests a second": {SHOWN, WITHIN, INVALID, SLOW, FAILED, BEYOND},
    "Time of requests, p95": {SHOWN, WITHIN, INVALID, SLOW, FAILED, BEYOND},
    "Slow generations": {SLOW},
    "Refusals a second by rule": {BEYOND},
    "Refused": {BEYOND},
    "Refused without a tenant": {STRANGER},
    "Errors a second by type": {INVALID, BEYOND, STRANGER, FAILED},
    "Failed": {FAILED},
    "Interrupted by a lost engine": {REPLAYED},
}
"""Panel of the board for Tempo -> planted requests that it has to find; others of them it may not. Those by phase are
apart, since which phase an engine that stands still makes slow is its own affair."""

PHASES = {"Policy": "policy", "Text": "text", "Queue": "queue", "Prefill": "prefill", "Decode": "decode"}


@pytest.mark.full
def test_every_panel_for_tempo_finds_its_planted_request(planted: Collected) -> None:
    """Each query is TraceQL, names attributes that real spans have, and finds the slow, the refused and the failed
    request that it is for, and no other; series have the rule and the tenant as labels."""
    asked = {title: parse(target["query"]) for title, target in targets("traces.json").items()}
    known = {name for span in planted.spans for name in span.scoped}
    assert {name for query in asked.values() for name in query.fields} <= known
    assert set(asked) == set(TEMPO_FINDS) | set(PHASES)
    for title, wanted in TEMPO_FINDS.items():
        found = {span.trace for span in asked[title].spans(planted.spans)} & set(planted.shown)
        assert planted.expects(title, wanted, found), title
    assert "tenants.beta.limits.requests_per_minute" in asked["Refusals a second by rule"].series(planted.spans)
    assert set(asked["Requests a second"].series(planted.spans)) == {"alpha", "beta"}
    assert set(asked["Time by phase, p95"].series(planted.spans)) == {f"athanor.{one}" for one in PHASES.values()}
    slow = {title: {span.trace for span in asked[title].spans(planted.spans)} for title in PHASES}
    assert SLOW in slow["Queue"] | slow["Prefill"]
    for title, target in targets("traces.json", slow="1ns").items():
        if title in PHASES:
            names = {span.name for span in parse(target["query"]).spans(planted.spans) if span.trace == SHOWN}
            assert names == {f"athanor.{PHASES[title]}"}


@pytest.mark.full
def test_an_exemplar_leads_to_the_trace_of_the_slow_request(planted: Collected) -> None:
    """The bucket into which the slow request's first token falls names its trace, which is behind the collector."""
    buckets = re.findall(r'time_to_first_token_seconds_bucket\{.*\} \S+ # \{trace_id="(\w+)"\} (\S+)', planted.scrape)
    slowest = max(buckets, key=lambda found: float(found[1]))
    assert slowest[0] == SLOW and float(slowest[1]) >= SLOW_S
    assert SLOW in {span.trace for span in planted.spans}


JAEGER_FINDS = {
    "Slow requests": {SLOW},
    "Of the tenant": {WITHIN, BEYOND},
    "Slow, of the tenant": set[str](),
    "Refused": {BEYOND, STRANGER},
    "Refused by the rule": {BEYOND},
    "Failed": {FAILED},
    "Interrupted by a lost engine": {REPLAYED},
}
"""Panel of the board for Jaeger -> planted requests that it finds, for tenant beta."""


@pytest.mark.full
def test_every_panel_for_jaeger_finds_its_planted_request(planted: Collected) -> None:
    """Each search has tags that real spans have, and finds what it is for and no other request."""
    values = {"tenant": "beta", "rule": "tenants.beta.limits.requests_per_minute"}
    asked = targets("traces-jaeger.json", **values)
    assert set(asked) == set(JAEGER_FINDS) | set(PHASES)
    known = {name.removeprefix("span.") for span in planted.spans for name in span.scoped} | {"error"}
    for title, wanted in JAEGER_FINDS.items():
        assert set(dict(TAG.findall(asked[title]["tags"]))) <= known
        found = search(planted.spans, asked[title]) & set(planted.shown)
        assert planted.expects(title, wanted, found), title
    slow = {title: search(planted.spans, asked[title]) for title in PHASES}
    assert SLOW in slow["Queue"] | slow["Prefill"]
    for title, target in targets("traces-jaeger.json", **values, slow="1ns").items():
        if title in PHASES:
            assert target["operation"] == f"athanor.{PHASES[title]}" and SHOWN in search(planted.spans, target)


@pytest.mark.parametrize(
    "query",
    [
        "{ span.a = 1",
        "{ a = 1 }",
        "{ .a = 1 }",
        "{ kind = error }",
        "{ name > 1 }",
        "{ duration > 5 minutes }",
        '{ span.a ~= "x" }',
        "{ span.a = nil } | rate()",
        "{ span.a = nil } | avg(duration)",
        "{ } extra",
    ],
)
def test_what_is_no_query_is_refused(query: str) -> None:
    """The reading is strict: a slip is an error, not an empty answer."""
    with pytest.raises(TraceQLError):
        parse(query)
    assert parse("{ span.a = nil && (kind = server || duration > 5m) } >> { } | select(name, span.b)").fields == {
        "span.a",
        "span.b",
    }


@pytest.mark.full
def test_a_thousand_ids_are_those_that_clients_saw(tmp_path: Path, runsc_path: Path) -> None:
    """Behind the collector each request's generation has the id that its client was given, on every route."""
    headers = {"anthropic-version": "2023-06-01"}
    with running_grpc() as backend, rotel(tmp_path, backend.url) as collector:
        with running(tmp_path / "state", env=collector.environment("grpc")) as appliance:
            client = appliance.openai("alpha").with_options(default_headers=headers)
            said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            bodies: dict[str, dict[str, Any]] = {"/chat/completions": said, "/messages": said}
            bodies |= {"/completions": {"prompt": "hi", "max_tokens": 1}}
            bodies |= {"/responses": {"input": "hi", "max_output_tokens": 1}}
            seen = {
                str(client.post(path, body={"model": "athanor-mini", **body}, cast_to=httpx.Response).json()["id"])
                for _ in range(250)
                for path, body in bodies.items()
            }
        assert len(seen) == 1_000
        deadline, found = time.monotonic() + 60, set[object]()
        while not seen <= found and time.monotonic() < deadline:
            found |= {attributes(span).get("gen_ai.response.id") for span in backend.spans(1)}
    assert found - {None} == seen
