"""The trace pipeline end to end: a real appliance, a real collector, and behind it the protocol's own service."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from appliance.gateway.request.lifecycle import REPLAY_S
from tests.appliance.gateway.telemetry.collector import Collector, attributes, running_grpc
from tests.observers import rotel
from tests.system.conftest import PLAIN, Appliance, running

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

PARENT = "00f067aa0ba902b7"
SHOWN, REPLAYED, REFUSED = ("4bf92f3577b34da6a3ce929d0e0e473" + digit for digit in "678")


def ask(
    appliance: Appliance, trace_id: str, model: str = "athanor-mini", prompt: str | list[int] = "The sandbox"
) -> None:
    """One request of a caller that says that it is not sampled."""
    appliance.openai("alpha", timeout=60).completions.create(
        model=model,
        prompt=prompt,
        max_tokens=8,
        extra_body={"ignore_eos": True},
        extra_headers={"traceparent": f"00-{trace_id}-{PARENT}-00"},
    )


def ask_through_a_death(appliance: Appliance) -> None:
    """A request that its engine dies under before it has said anything: the engine is stopped while it comes."""
    pid = appliance.sandbox_pid("engine")
    os.kill(pid, signal.SIGSTOP)
    # Token ids: on its way to the engine the request passes no other sandbox.
    asking = threading.Thread(target=ask, args=(appliance, REPLAYED), kwargs={"prompt": [5, 6, 7]})
    asking.start()
    deadline = time.monotonic() + 20
    while next(one for one in appliance.status()["tenants"] if one["id"] == "alpha")["in_flight"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)  # it is in the queue, or nothing is replayed
    os.kill(pid, signal.SIGKILL)
    asking.join()


def stored(appliance: Appliance, trace_id: str) -> dict[str, Any]:
    """A request in the embedded store."""
    return dict(httpx.get(f"{appliance.ready['admin']}/traces/{trace_id}", timeout=10, verify=PLAIN).json())


def arrived(backend: Collector, counts: dict[str, int]) -> dict[str, list[Span]]:
    """Spans by trace, once so many have come."""
    spans = backend.spans(sum(counts.values()))
    return {trace: [span for span in spans if span.trace_id.hex() == trace] for trace in counts}


def test_traces_reach_the_collector_complete(tmp_path: Path, runsc_path: Path) -> None:
    """Answered, refused and replayed requests: behind the collector stand the spans that the appliance itself shows,
    all of them, under the caller's span, which had said that it is not sampled; a replay is linked to what it repeats.
    """
    with running_grpc() as backend, rotel(tmp_path, backend.url) as collector:
        with running(tmp_path / "state", env=collector.environment("grpc")) as appliance:
            ask(appliance, SHOWN)
            with pytest.raises(openai.NotFoundError):
                ask(appliance, REFUSED, model="none")
            replays = appliance.started_s <= REPLAY_S
            if replays:
                ask_through_a_death(appliance)
            asked = (SHOWN, REFUSED, REPLAYED) if replays else (SHOWN, REFUSED)
            shown = {trace: stored(appliance, trace) for trace in asked}
        found = arrived(backend, {trace: len(one["spans"]) for trace, one in shown.items()})
    for trace, spans in found.items():
        ids = {one["span_id"]: one for one in shown[trace]["spans"]}
        assert {span.span_id.hex() for span in spans} == set(ids), "every span, once"
        for span in spans:
            assert span.parent_span_id.hex() == ids[span.span_id.hex()]["parent_id"]
        (server,) = (span for span in spans if span.kind == Span.SPAN_KIND_SERVER)
        assert server.parent_span_id.hex() == PARENT
        assert attributes(server)["athanor.tenant.id"] == "alpha"
    phases = [span.name for span in sorted(found[SHOWN], key=lambda one: one.start_time_unix_nano)][2:]
    assert phases == [f"athanor.{phase}" for phase in ("policy", "text", "queue", "prefill", "decode")]
    if not replays:
        pytest.skip(f"no replay: a boot took {appliance.started_s:.0f} s here, and a replay waits {REPLAY_S:.0f} s")
    queues = [one for one in found[REPLAYED] if one.name == "athanor.queue"]
    first, again = sorted(queues, key=lambda one: one.start_time_unix_nano)
    assert first.status.code == Status.STATUS_CODE_ERROR and attributes(first)["error.type"] == "engine_lost"
    assert [link.span_id for link in again.links] == [first.span_id]
    assert shown[REPLAYED]["summary"]["outcome"] == "ok"


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
