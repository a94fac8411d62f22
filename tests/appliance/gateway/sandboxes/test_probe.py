"""Idle sandboxes are probed: when, what an answer proves, and what becomes of one that gives none."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.gateway.sandboxes import link as link_module
from appliance.gateway.sandboxes import progress
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.grammars import GrammarRun
from appliance.gateway.sandboxes.link import SandboxLink
from appliance.gateway.sandboxes.probe import LATE_S, PERIOD_S, Probe
from appliance.gateway.sandboxes.text_link import TextLink, TextLostError
from isolation.ipc.engine import Abort, StepOutput, Submit
from isolation.ipc.kv import KvUsage
from isolation.ipc.messages import Finish, Role
from isolation.ipc.ping import Ping, Pong
from isolation.ipc.public import PublicPrefix, PublicPrefixes, PublicState, PublicUsage, PublicUse
from isolation.ipc.sampling import Sampling
from isolation.ipc.text import Decode, Encode, SourceKind
from tests.appliance.gateway.pairs import ENGINE_READY, TEXT_READY, Pair, make_pair

LIMIT_S = 30.0
"""The configured ``step_timeout_s``."""

NAMESPACE = b"k" * 32


class Clocked:
    """A link of either role, the guest at its other end, and a clock that only the test moves."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch, *, text: bool = False) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now, thread_time=lambda: 0.0)
        for module in (link_module, progress):
            monkeypatch.setattr(module, "time", clock)
        self.guest = pair.guest
        self.ends: list[tuple[str, bool]] = []
        self.engine: Any = None if text else EngineLink(pair.host, ENGINE_READY, 1, self._ended)
        self.text: Any = TextLink(pair.host, TEXT_READY, 1, self._ended) if text else None
        self.link: SandboxLink = self.engine or self.text

    def _ended(self, _link: SandboxLink, reason: str, at_fault: bool) -> None:
        self.ends.append((reason, at_fault))

    def pass_s(self, seconds: float) -> list[Any]:
        """Let time go by and look, as the watch over engines does; gives what the guest then finds."""
        self.now += seconds
        if self.engine is not None:
            self.engine.check_progress(LIMIT_S)
        else:
            self.text.check_alive(LIMIT_S)
        return [] if self.ends else self.guest.receive()

    def say(self, message: Any) -> None:
        """The guest sends this, and the link takes it."""
        self.guest.send(message)
        self.link._link.look()

    def submit(self, request: int) -> Any:
        """Send a request to the engine."""
        prompt = array("I", [1])
        return self.engine.submit(Submit(request, NAMESPACE, prompt, 4, Sampling()), b"mark")


@pytest.fixture
async def clocked(engine_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    """An engine."""
    return Clocked(engine_pair, monkeypatch)


@pytest.fixture
async def worker(text_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Clocked:
    """A text sandbox."""
    return Clocked(text_pair, monkeypatch, text=True)


@pytest.fixture(params=[Role.ENGINE, Role.TEXT])
async def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clocked]:
    """One of each."""
    text = request.param is Role.TEXT
    pair = make_pair(request.param, TEXT_READY if text else ENGINE_READY)
    yield Clocked(pair, monkeypatch, text=text)
    pair.guest.close()
    pair.host.close()


def test_one_ping_at_a_time_with_a_number_of_its_own() -> None:
    """The pure part: due after the interval since the last answer, late after its bound, and only the answer that was
    asked for counts."""
    probe = Probe(0.0)
    assert not probe.due(PERIOD_S - 0.1) and probe.due(PERIOD_S)
    first = probe.ask(PERIOD_S)
    assert probe.outstanding and not probe.due(1_000.0)
    assert not probe.late(PERIOD_S + LATE_S) and probe.late(PERIOD_S + LATE_S + 0.1)
    assert not probe.answer(first + 1, 11.0) and probe.outstanding
    assert probe.answer(first, 11.0) and not probe.outstanding and probe.silence_s(99.0) == 0.0
    assert not probe.answer(first, 11.0), "a second answer to one ping"
    assert not probe.due(11.0 + PERIOD_S - 0.1)
    assert probe.ask(11.0 + PERIOD_S, 60.0) != first
    assert not probe.late(11.0 + PERIOD_S + 60.0)


async def test_an_idle_sandbox_is_asked_at_intervals(either: Clocked) -> None:
    """Both roles: nothing before the interval, then one ping, the next one an interval after its answer; the freezer's
    count does not move, so probes keep nothing from being frozen."""
    one = either
    before = one.link.frames
    assert one.pass_s(PERIOD_S - 1) == []
    assert one.pass_s(1) == [Ping(1)]
    assert one.pass_s(2) == []
    one.say(Pong(1))
    assert (one.link.hang, one.pass_s(PERIOD_S - 1), one.pass_s(1)) == ("", [], [Ping(2)])
    one.say(Pong(2))
    assert one.link.frames == before and not one.link.probe.outstanding and one.ends == []
    if one.engine is not None:
        one.say(KvUsage())
        assert one.link.frames == before + 1, "control: another frame moves it"


async def test_an_idle_link_has_no_timer(either: Clocked) -> None:
    """The look for a missed bell ends with the answer to a probe: nothing wakes the loop between two of them. It stays
    while an answer is awaited (control)."""
    one = either
    one.pass_s(PERIOD_S)
    assert one.link._link._timer is not None
    one.say(Pong(1))
    assert one.link._link._timer is None
    if one.engine is not None:
        one.pass_s(PERIOD_S)
        one.submit(1)
        one.say(Pong(2))
        assert one.link._link._timer is not None


async def test_one_without_an_answer_hangs_and_is_ended(either: Clocked) -> None:
    """It counts as hung from the bound on, is well again with a late answer, and is ended at the configured limit as
    one that is at fault."""
    one = either
    one.pass_s(PERIOD_S)
    one.pass_s(LATE_S)
    assert one.link.hang == ""
    one.now += 0.1
    assert one.link.hang == "answers no probe"
    one.say(Pong(1))
    assert one.link.hang == ""
    assert one.pass_s(PERIOD_S) == [Ping(2)]
    for _ in range(2):
        one.pass_s(LIMIT_S / 2)
        assert one.ends == []
    one.pass_s(0.1)
    assert one.ends == [("answered no probe for 30 s", True)] and one.link.closed
    one.pass_s(LIMIT_S)
    assert len(one.ends) == 1


async def test_a_frozen_sandbox_is_not_asked(clocked: Clocked) -> None:
    """It could not answer, and the word to thaw must not be sent for a probe; once thawed it is asked again, which is
    the control."""
    woken: list[int] = []
    clocked.link.wake = lambda: woken.append(1)
    assert clocked.pass_s(3_600.0) == clocked.pass_s(3_600.0) == []
    assert (woken, clocked.link.hang, clocked.ends) == ([], "", [])
    clocked.link.wake = None
    assert clocked.pass_s(0.1) == [Ping(1)]


async def test_an_engine_with_requests_is_not_asked(clocked: Clocked) -> None:
    """Its frames say enough; a request that comes behind an unanswered ping does not make the engine well."""
    clocked.submit(7)
    assert [type(one) for one in clocked.pass_s(PERIOD_S)] == [Submit]
    assert clocked.pass_s(PERIOD_S) == []
    clocked.say(StepOutput(array("Q", [7]), array("I", [1]), bytes([Finish.STOP])))
    assert clocked.pass_s(1) == [Ping(1)]
    clocked.now += LATE_S - 1
    clocked.submit(8)
    clocked.now += 1.1
    assert clocked.link.hang == "answers no probe"


async def test_one_whose_requests_all_wait_for_masks_is_asked(clocked: Clocked) -> None:
    """The text sandbox owes masks, so no step is due; that the engine would take them is shown by a probe."""
    stream = clocked.submit(7)
    stream.grammar = GrammarRun(1, NAMESPACE, None, None, asked=100.0)  # type: ignore[arg-type]
    assert [type(one) for one in clocked.pass_s(PERIOD_S)] == [Submit, Ping]
    clocked.now += LATE_S + 0.1
    assert clocked.link.hang == "answers no probe"


async def test_one_that_may_be_in_a_step_has_the_time_of_steps(clocked: Clocked) -> None:
    """An engine whose last request was aborted, or that computes a public prefix, may be in a step as long as earlier
    ones: four times the longest silence. One that hung with requests, which all gave up, is found out all the same."""
    stream = clocked.submit(7)
    clocked.now += 10.0
    clocked.say(StepOutput(array("Q", [7]), array("I", [1]), bytes([Finish.NONE])))
    clocked.engine.abort(stream)
    assert [type(one) for one in clocked.pass_s(0.1)] == [Submit, Abort, Ping]
    clocked.now += 40.0
    assert clocked.link.hang == ""
    clocked.now += 0.1
    assert clocked.link.hang == "answers no probe"
    clocked.say(Pong(1))
    clocked.engine.set_public(PublicPrefixes((PublicPrefix(NAMESPACE, array("I", [1])),)))
    clocked.say(PublicUsage((PublicUse(NAMESPACE, PublicState.PENDING, 0, 0),)))
    assert Ping(2) in clocked.pass_s(PERIOD_S)
    clocked.now += 40.0
    assert clocked.link.hang == ""


async def test_a_text_sandbox_with_a_job_is_not_asked(worker: Clocked) -> None:
    """The job has a clock of its own. One that was sent behind an unanswered ping was never begun: its caller may send
    it again, while one that is worked on is the culprit (control)."""
    job = asyncio.create_task(worker.text.ask(Decode(1, array("I", [1]))))
    await asyncio.sleep(0)
    assert [type(one) for one in worker.pass_s(PERIOD_S)] == [Decode]
    worker.text._too_long()
    with pytest.raises(TextLostError) as found:
        await job
    assert found.value.culprit


async def test_a_job_behind_an_unanswered_ping_is_no_culprit(worker: Clocked) -> None:
    """The worker answers in order, so it hung before the job came."""
    assert worker.pass_s(PERIOD_S) == [Ping(1)]
    job = asyncio.create_task(worker.text.ask(Encode(1, SourceKind.TEXT, b"a", 8)))
    await asyncio.sleep(0)
    worker.text._too_long()
    with pytest.raises(TextLostError) as found:
        await job
    assert not found.value.culprit


@pytest.mark.parametrize("number", [2, None])
async def test_an_answer_that_was_not_asked_for_breaks_the_protocol(clocked: Clocked, number: int | None) -> None:
    """Another number than the ping's, or an answer without a ping: a sandbox that vouches for itself is ended."""
    if number is not None:
        clocked.pass_s(PERIOD_S)
    clocked.say(Pong(number or 1))
    assert clocked.ends == [("broke the protocol: answered a probe that was not sent", True)]


async def test_no_sandbox_is_ended_for_a_pause_of_the_gateways_own(clocked: Clocked) -> None:
    """An answer that lies in the ring is taken before anything is judged, and a look that comes later than the limit
    judges nothing; looks that come in time do (control)."""
    clocked.pass_s(PERIOD_S)
    clocked.guest.send(Pong(1))
    clocked.pass_s(10 * LIMIT_S)
    assert clocked.ends == [] and clocked.link.hang == ""
    clocked.pass_s(PERIOD_S)
    assert clocked.link.probe.outstanding
    clocked.pass_s(10 * LIMIT_S)
    assert clocked.ends == []
    clocked.pass_s(LIMIT_S)
    clocked.pass_s(1.0)
    assert clocked.ends == [("answered no probe for 30 s", True)]


async def test_a_ring_that_is_full_for_good_counts_as_no_answer(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ping that finds no room is one that is not answered, not an exception in the watch over engines."""
    monkeypatch.setattr(link_module, "MAX_PENDING", 0)
    clocked.link._link._pending.append(Abort(1))
    clocked.pass_s(PERIOD_S)
    assert clocked.link.probe.outstanding
    clocked.now += LATE_S + 0.1
    assert clocked.link.hang == "answers no probe"
