"""Responses that go on without their client: read from any event on, within their bounds, by their tenant alone."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from appliance.common.errors import RateLimitedError, UnavailableError
from appliance.gateway.generate_request import Started
from appliance.gateway.http import event_window
from appliance.gateway.http.event_window import (
    ALONE_S,
    READERS_EACH,
    STREAMS,
    STREAMS_EACH,
    WINDOW_S,
    BackgroundRun,
    BackgroundRuns,
    EventWindow,
)
from tests.appliance.gateway.batches.stack import LIMITED, POLICY, Stack, stacked, until
from tests.appliance.gateway.batches.test_files import send
from tests.appliance.gateway.front.support import MODEL, text_script

ASKED = {"model": MODEL, "input": "?", "stream": True, "background": True}
TEXTS = ("One ", "two ", "\u00e9\n\n", "data: four")


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of its own."""
    async with stacked(tmp_path) as made:
        yield made


def script(gate: asyncio.Event) -> list[Any]:
    """An answer that pauses after its second token."""
    begun, first, second, *rest = text_script(*TEXTS)
    return [begun, first, second, gate, *rest]


@contextlib.asynccontextmanager
async def begun(stack: Stack, tenant: str = "acme") -> AsyncIterator[AsyncIterator[bytes]]:
    """The events of a new response, as they come; behind the block its client is gone."""
    headers = {"authorization": f"Bearer {stack.keys[tenant]}"}
    async with (
        httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=20) as client,
        client.stream("POST", "/v1/responses", json=ASKED) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        yield events_of(answer)


async def events_of(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The whole events of an answer."""
    waiting = b""
    async for data in answer.aiter_raw():
        *whole, waiting = (waiting + data).split(b"\n\n")
        for event in whole:
            if not event.startswith(b":"):
                yield event + b"\n\n"
    assert not waiting


def id_of(event: bytes) -> str:
    """The response that the first event names."""
    found = re.search(rb'"response":\{"id":"(resp_\w+)"', event)
    assert found
    return found[1].decode()


async def rest(stack: Stack, response: str, query: str = "", tenant: str = "acme", **headers: str) -> httpx.Response:
    """The answer to a client that reads the stream of a response."""
    return await send(stack, "GET", f"/v1/responses/{response}?stream=true{query}", tenant, headers=headers)


async def test_a_stream_is_cut_at_every_event_and_read_on(stack: Stack) -> None:
    """Whatever event was the last that a client has, what it reads then is the rest, each event once: both together are
    byte for byte the stream of a reader that was never cut. It holds while the answer is computed and after its end,
    with OpenAI's query and with Last-Event-ID; events are numbered as their ids and in their objects."""
    cut, total = 0, 99
    while cut < total:
        cut += 1
        gate = asyncio.Event()
        stack.service.script = script(gate)
        got = []
        async with begun(stack) as events:
            if cut > 6:
                gate.set()
            while len(got) < cut:
                got.append(await anext(events))
        response = id_of(got[0])
        uncut = asyncio.ensure_future(rest(stack, response))
        last = str(cut - 1)
        how = {"query": f"&starting_after={last}"} if cut % 2 else {"Last-Event-ID": last}
        reading = asyncio.ensure_future(rest(stack, response, **how))
        await asyncio.sleep(0)
        gate.set()
        whole = (await uncut).content
        assert b"".join(got) + (await reading).content == whole
        numbers = re.findall(rb"^id: (\d+)$", whole, re.M)
        total = len(numbers)
        assert numbers == re.findall(rb'"sequence_number":(\d+)', whole) == [b"%d" % n for n in range(total)]
        assert b'"background":true' in whole and b"response.completed" in whole
        stack.ends.background.drop("acme", response, UnavailableError("no more"))
    assert total > 8


async def test_the_official_client_reads_on(stack: Stack) -> None:
    """Its own way to a stream that was cut, and the whole response after it."""
    gate = asyncio.Event()
    stack.service.script = script(gate)
    client = stack.openai()
    stream = await client.responses.create(**ASKED)
    first = await anext(aiter(stream))
    await stream.close()
    gate.set()
    more = await client.responses.retrieve(first.response.id, stream=True, starting_after=first.sequence_number)
    events = [event async for event in more]
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1))
    assert events[-1].response.output_text == "".join(TEXTS)
    assert await client.responses.retrieve(first.response.id) == events[-1].response


async def test_without_background_a_disconnect_ends_the_request(stack: Stack) -> None:
    """The request of a client that leaves is cancelled, and its stream is not there. Control: with it both go on."""
    for background in (True, False):
        gate = asyncio.Event()
        stack.service.script = script(gate)
        stack.service.closed.clear()
        client = stack.openai()
        stream = await client.responses.create(**{**ASKED, "background": background})
        first = await anext(aiter(stream))
        await stream.close()
        await client.close()
        if not background:
            await asyncio.wait_for(stack.service.closed.wait(), 5)
        assert stack.service.closed.is_set() is not background
        gate.set()
        assert (await rest(stack, first.response.id)).status_code == (200 if background else 404)


async def test_what_others_have_is_not_there(stack: Stack) -> None:
    """Another tenant is answered, byte for byte, as for a response that does not exist, while it runs and afterwards;
    a key without the scope is refused. Control: another reader of the tenant gets it."""
    gate = asyncio.Event()
    stack.service.script = script(gate)
    async with begun(stack) as events:
        response = id_of(await anext(events))
        for _ in range(2):
            answers = [await rest(stack, one, tenant="globex") for one in (response, "resp_" + "0" * 32)]
            assert [(one.status_code, one.content) for one in answers] == [(404, answers[1].content)] * 2
            deleted = await send(stack, "DELETE", f"/v1/responses/{response}", "globex")
            assert deleted.status_code == 404
            assert (await rest(stack, response, tenant=LIMITED)).status_code == 403
            gate.set()
            assert (await rest(stack, response)).status_code == 200


async def test_a_destroyed_key_and_a_policy_take_it_away(stack: Stack) -> None:
    """A shred gives the tenant another namespace key: the stream is not read any more at once, and what runs is ended.
    So does a policy under which nothing of the tenant is kept."""
    for take in (
        lambda: stack.ledger.replace(stack.ledger.policy, {name: bytes([1] * 32) for name in stack.ledger.namespaces}),
        lambda: stack.use(POLICY.replace("stored_responses: true", "stored_responses: false")),
    ):
        stack.use(POLICY)
        stack.service.script = script(asyncio.Event())
        stack.service.closed.clear()
        async with begun(stack) as events:
            response = id_of(await anext(events))
            take()
            assert (await rest(stack, response)).status_code in (403, 404)
            await asyncio.wait_for(stack.service.closed.wait(), 5)
            assert not stack.ends.background.held
            with contextlib.suppress(httpx.RemoteProtocolError):
                assert not [event async for event in events if b"response.completed" in event]


async def test_a_destroyed_key_leaves_nothing_to_delete(stack: Stack) -> None:
    """At once after a shred, a response in the background that has ended is one that nobody has, to its owner too. So
    is an unknown one (control), byte for byte; before the shred it is deleted."""
    stack.service.script = text_script(*TEXTS)
    made = []
    for _ in range(2):
        async with begun(stack) as events:
            made += [id_of(event) async for event in events if b"response.created" in event]
    assert (await send(stack, "DELETE", f"/v1/responses/{made[0]}")).status_code == 200
    stack.store.shred("acme")
    stack.ledger.replace(stack.ledger.policy, {name: bytes([1] * 32) for name in stack.ledger.namespaces})
    answers = [await send(stack, "DELETE", f"/v1/responses/{one}") for one in (made[1], "resp_" + "0" * 24)]
    assert [(one.status_code, one.content) for one in answers] == [(404, answers[1].content)] * 2


async def test_a_deleted_response_ends(stack: Stack) -> None:
    """Deletion ends a response that runs, before it is kept, and there is none behind it."""
    stack.service.script = script(asyncio.Event())
    async with begun(stack) as events:
        response = id_of(await anext(events))
        assert (await send(stack, "DELETE", f"/v1/responses/{response}")).status_code == 200
        await asyncio.wait_for(stack.service.closed.wait(), 5)
    assert (await rest(stack, response)).status_code == 404
    assert (await send(stack, "DELETE", f"/v1/responses/{response}")).status_code == 404


async def test_errors_before_and_behind_the_first_event(stack: Stack) -> None:
    """What fails before it runs is answered with its status and leaves nothing; what fails later is the last event, for
    every reader."""
    stack.service.script = [UnavailableError("not now")]
    with pytest.raises(openai.InternalServerError):
        await stack.openai().responses.create(**ASKED)
    assert not stack.ends.background.held
    begin, first, *_ = text_script(*TEXTS)
    stack.service.script = [begin, first, UnavailableError("not now")]
    async with begun(stack) as events:
        found = [event async for event in events]
    assert b"event: error" in found[-1] and b"not now" in found[-1]
    assert (await rest(stack, id_of(found[0]))).content == b"".join(found)


@pytest.mark.parametrize(
    ("fields", "tenant", "status"),
    [
        ({"stream": False}, "acme", 400),
        ({"store": False}, "acme", 400),
        ({}, "without", 403),
        ({}, "forgets", 403),
        ({"background": "yes"}, "acme", 400),
    ],
)
async def test_what_cannot_go_on_is_refused(stack: Stack, fields: dict[str, Any], tenant: str, status: int) -> None:
    """With the field's name, before anything is asked of the session."""
    answer = await send(stack, "POST", "/v1/responses", tenant, json={**ASKED, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, "background")
    assert not stack.service.requests


async def test_padded_answers_do_not_go_on(stack: Stack) -> None:
    """A tenant whose answers show nothing by their moments has none that others could time."""
    stack.service.padded.add("acme")
    assert (await send(stack, "POST", "/v1/responses", json=ASKED)).status_code == 403


async def test_numbers_that_are_none(stack: Stack) -> None:
    """A number that no event has yet, text, and two numbers are a 400; the last number gives an empty rest."""
    stack.service.script = text_script(*TEXTS)
    async with begun(stack) as events:
        found = [event async for event in events]
    response, last = id_of(found[0]), len(found) - 1
    for query in ("99", "-1", "x", "9" * 11, ""):
        assert (await rest(stack, response, f"&starting_after={query}")).json()["error"]["param"] == "starting_after"
    assert (await rest(stack, response, "&starting_after=1", **{"Last-Event-ID": "2"})).status_code == 400
    assert (await rest(stack, response, f"&starting_after={last}")).content == b""


async def test_old_events_go_and_a_reader_that_lacks_them_is_told(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window keeps the newest events, by number and by bytes; a rest that is not whole is never given."""
    monkeypatch.setattr(event_window, "WINDOW_EVENTS", 4)
    gate = asyncio.Event()
    start, *more = text_script(*TEXTS)
    stack.service.script = [start, gate, *more]
    async with begun(stack) as events:
        response = id_of(await anext(events))
    gate.set()
    await until(lambda: stack.ends.background.find("acme", response).window.ended)
    assert (await rest(stack, response, "&starting_after=0")).status_code == 400
    window = stack.ends.background.find("acme", response).window
    assert len(window.read(window.first)[0].split(b"\n\n")) == 5
    assert (await rest(stack, response, f"&starting_after={window.first - 1}")).status_code == 200
    small = EventWindow()
    monkeypatch.setattr(event_window, "WINDOW_BYTES", 500)
    for _ in range(3):
        small.add(b"data: " + b"x" * 200 + b"\n\n")
    assert (small.first, small.next, small.size < 500) == (2, 3, True)


async def test_runs_are_bounded_and_forgotten() -> None:
    """By tenant and in all; what has ended makes room and goes after its time, what nobody reads is ended, and what
    somebody reads stays."""
    now = [0.0]
    runs = BackgroundRuns(lambda: now[0])
    made = [runs.begin("acme", str(number), b"") for number in range(STREAMS_EACH)]
    with pytest.raises(RateLimitedError):
        runs.begin("acme", "more", b"")
    made[3].window.end()
    runs.begin("acme", "more", b"")
    assert runs.find("acme", "3") is None and runs.find("acme", "2") is made[2]
    for number in range(STREAMS - STREAMS_EACH):
        runs.begin(f"tenant-{number}", "one", b"").window.end()
    runs.begin("late", "one", b"")
    assert runs.held == STREAMS and runs.find("tenant-0", "one") is None
    with made[0].read(runs.clock):
        now[0] = ALONE_S + 1
        runs.look(lambda _tenant: b"", lambda: UnavailableError("ended"))
        assert runs.find("acme", "0") is made[0] and runs.find("acme", "1") is None
        assert runs.held == 1 + STREAMS - STREAMS_EACH - 1 and runs.dropped == STREAMS_EACH
    now[0] = WINDOW_S + 1
    runs.look(lambda _tenant: b"", lambda: UnavailableError("ended"))
    assert runs.held == runs.size == 0


async def test_a_client_that_waits_for_its_first_event_reads(stack: Stack) -> None:
    """A response that waits in a queue or for its model for longer than one may be alone goes on while its client is
    there. Control: once that has left, it is ended after that time."""
    gate, now, runs = asyncio.Event(), [0.0], stack.ends.background
    runs.clock = lambda: now[0]
    stack.service.script = [gate, *text_script(*TEXTS)]
    for leaves in (False, True):
        waiting = asyncio.ensure_future(send(stack, "POST", "/v1/responses", json=ASKED))
        await until(lambda: runs.running() and runs.running()[0].readers)
        if leaves:
            waiting.cancel()
            await until(lambda: not runs.running()[0].readers)
        now[0] += ALONE_S + 1
        runs.look(lambda _tenant: bytes(32), lambda: UnavailableError("alone"))
        assert len(runs.running()) == (0 if leaves else 1)
        if not leaves:
            gate.set()
            answer = await waiting
            assert answer.status_code == 200 and b"response.completed" in answer.content
            gate.clear()
    assert runs.dropped == 1


async def test_readers_of_a_stream_are_bounded(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused with a retryable error before its stream begins, and counted as a refused call; the place of
    one that has left is free."""
    run = BackgroundRun(b"", 0.0)
    with contextlib.ExitStack() as readers:
        for _ in range(READERS_EACH):
            readers.enter_context(run.read(lambda: 0.0))
        with pytest.raises(RateLimitedError), run.read(lambda: 0.0):
            pass
        assert run.readers == READERS_EACH
    with run.read(lambda: 0.0):
        assert run.readers == 1
    monkeypatch.setattr(event_window, "READERS_EACH", 1)
    gate = asyncio.Event()
    stack.service.script = script(gate)
    async with begun(stack) as events:
        response = id_of(await anext(events))
        refused = await rest(stack, response)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
        assert isinstance(stack.service.refusals[-1][1], RateLimitedError)
        gate.set()
    await until(lambda: not stack.ends.background.find("acme", response).readers)
    assert (await rest(stack, response)).status_code == 200


def test_the_newest_event_costs_a_reader_what_the_oldest_does() -> None:
    """Each reader takes each token by itself, so that must not grow with the events that are kept."""
    window = EventWindow()
    for _ in range(event_window.WINDOW_EVENTS + 20):
        window.add(b"x\n\n")
    assert (window.first, window.next) == (20, event_window.WINDOW_EVENTS + 20)
    assert window.read(window.next - 1) == (b"id: %d\nx\n\n" % (window.next - 1), window.next)
    assert window.read(20)[0].startswith(b"id: 20\n")
    small = EventWindow()
    small.add(b"x\n\n")

    def took_s(read: EventWindow) -> float:
        before = time.process_time()
        for _ in range(2_000):
            read.read(read.next - 1)
        return time.process_time() - before

    assert took_s(window) < 10 * took_s(small)


def test_what_makes_room_keeps_no_events() -> None:
    """The events of a stream that makes room are gone, also for a reader of it; one that nobody reads makes room
    first."""
    runs = BackgroundRuns(lambda: 0.0)
    made = [runs.begin("acme", str(number), b"") for number in range(STREAMS_EACH)]
    for run in made[:2]:
        run.window.add(b"data: x\n\n")
        run.window.end()
    with made[0].read(runs.clock) as window:
        runs.begin("acme", "more", b"")
        assert runs.find("acme", "0") is made[0] and runs.find("acme", "1") is None and window.size
        runs.begin("acme", "again", b"")
        assert runs.find("acme", "0") is None and not window.size and window.first == window.next


async def test_a_reader_ends_with_its_credential(stack: Stack) -> None:
    """Once a key is withdrawn, what reads with it ends with an error. Control: the reader with another key of the
    tenant gets the rest."""
    gate = asyncio.Event()
    stack.service.script = script(gate)
    async with begun(stack, LIMITED) as events:
        response = id_of(await anext(events))
        reading = asyncio.ensure_future(rest(stack, response))
        await until(lambda: stack.ends.background.find("acme", response).readers == 2)
        del stack.service.tenants["key:acme-1"]
        content = (await asyncio.wait_for(reading, 5)).content
        assert b"event: error" in content and b"response.completed" not in content
        gate.set()
        assert b"response.completed" in [event async for event in events][-1]


@pytest.mark.parametrize("how", ["nothing", "region", "padded"])
async def test_an_ended_stream_is_read_by_the_rules_of_now(stack: Stack, how: str) -> None:
    """A tenant that may not be served in this region any more, or whose answers are padded by now, reads no stream that
    was kept before. Control: without a change it does."""
    stack.service.script = text_script(*TEXTS)
    async with begun(stack) as events:
        found = [event async for event in events]
    if how == "region":
        stack.use(POLICY.replace('["key:acme-1"]', '["key:acme-1"]\n    regions: [eu-1]'))
    elif how == "padded":
        stack.service.padded.add("acme")
    answer = await rest(stack, id_of(found[0]))
    assert answer.status_code == (200 if how == "nothing" else 400), answer.text
    assert (b"event:" in answer.content) is (how == "nothing")


async def test_a_drain_leaves_what_has_no_reader_its_time(stack: Stack) -> None:
    """A response whose client has left has the grace of the appliance's end as any other: it ends whole, and the end
    waits for it."""
    gate = asyncio.Event()
    stack.service.script = script(gate)
    async with begun(stack) as events:
        response = id_of(await anext(events))
    run = stack.ends.background.find("acme", response)
    await until(lambda: not run.readers)
    stopping = asyncio.ensure_future(stack.ends.stop(20.0))
    await asyncio.wait({stopping}, timeout=0.5)
    assert not stopping.done() and not run.window.ended
    gate.set()
    await asyncio.wait_for(stopping, 10)
    assert run.window.ended and b"response.completed" in run.window.read(run.window.next - 1)[0]


async def test_a_drain_tells_every_reader(stack: Stack) -> None:
    """What runs at the end of the appliance ends with a retryable error as its last event."""
    stack.service.script = [Started(1, 0), asyncio.Event()]
    async with begun(stack) as events:
        await anext(events)
        stopping = asyncio.ensure_future(stack.ends.stop(0.1))
        found = [event async for event in events]
        assert b"shutting down" in found[-1]
        await stopping
