"""The gateway against an engine that lies: every false claim ends the link, every true one reaches its stream."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from appliance.gateway.generate_request import Grammar
from appliance.gateway.sandboxes import engine_link, flush_interval, progress
from appliance.gateway.sandboxes import link as link_module
from appliance.gateway.sandboxes.engine_link import EngineFullError, EngineLink
from appliance.gateway.sandboxes.grammars import GrammarRun, Grammars
from appliance.gateway.sandboxes.stream import TokenStream
from isolation.ipc.engine import Abort, RequestFailure, Started, StepOutput, Submit
from isolation.ipc.errors import LocalProtocolError
from isolation.ipc.grammar import GrammarKind, Masks, MaskState
from isolation.ipc.messages import FailureCode, Finish
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.sampling import Sampling
from tests.appliance.gateway.pairs import ENGINE_READY, Pair


class Watched:
    """A link with a record of how it ended."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.ends: list[tuple[str, bool]] = []
        self.link = EngineLink(pair.host, ENGINE_READY, 1, self._ended)

    def _ended(self, _link: EngineLink, reason: str, at_fault: bool) -> None:
        self.ends.append((reason, at_fault))

    def submit(
        self, request: int, grant: int = 4, *, every_step: bool = False, namespace: bytes = b"k" * 32
    ) -> TokenStream:
        """Send a request."""
        prompt = array("I", [1])
        message = Submit(request, namespace, prompt, grant, Sampling())
        return self.link.submit(message, b"mark", every_step=every_step)

    def say(self, *tokens: tuple[int, int, Finish], urgent: bool = True, **rest: object) -> None:
        """One step's output from the engine."""
        self.pair.guest.send(
            StepOutput(
                array("Q", [request for request, _, _ in tokens]),
                array("I", [token for _, token, _ in tokens]),
                bytes(finish for _, _, finish in tokens),
                **rest,  # type: ignore[arg-type]
            ),
            urgent=urgent,
        )


@pytest.fixture
async def watched(engine_pair: Pair) -> Watched:
    """A link to a scripted engine."""
    return Watched(engine_pair)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds; the test's timeout bounds it."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_tokens_reach_their_streams_and_nobody_elses(watched: Watched) -> None:
    """Two requests in one frame: each stream gets its own tokens, its start and its finish."""
    first, second = watched.submit(7), watched.submit(8)
    watched.say((7, 11, Finish.NONE), (8, 21, Finish.STOP), (7, 12, Finish.LENGTH), starts=(Started(7, 16, 250),))
    await until(lambda: first.ended and second.ended)
    assert first.take()[0] == [11, 12] and first.finish is Finish.LENGTH
    assert first.started == Started(7, 16, 250)
    assert second.take()[0] == [21] and second.finish is Finish.STOP
    assert watched.link.live == () and watched.ends == []


async def test_more_tokens_than_granted_end_the_engine(watched: Watched) -> None:
    """The grant is the host's word: one token more is a breach, and the stream ends with it."""
    stream = watched.submit(7, grant=1)
    watched.say((7, 1, Finish.NONE), (7, 2, Finish.NONE))
    await until(lambda: stream.engine_gone is not None)
    assert watched.ends == [("broke the protocol: sent more tokens than granted", True)]


async def test_tokens_for_a_request_never_sent_end_the_engine(watched: Watched) -> None:
    """An id that the host never gave is forged."""
    stream = watched.submit(7)
    watched.say((900, 1, Finish.NONE))
    await until(lambda: stream.ended)
    assert watched.ends[0][1] is True


async def test_late_tokens_of_an_ended_request_are_dropped(watched: Watched) -> None:
    """What was under way when a request was aborted does no harm; the engine is told to stop."""
    stream = watched.submit(7)
    watched.link.abort(stream)
    watched.link.abort(stream)
    watched.say((7, 1, Finish.NONE))
    kept = watched.submit(8)
    watched.say((8, 5, Finish.STOP))
    await until(lambda: kept.ended)
    sent = watched.pair.guest.receive()
    assert [type(message) for message in sent] == [Submit, Abort, Submit]
    assert stream.token_ids == [] and watched.ends == []


async def test_a_failed_request_fails_alone(watched: Watched) -> None:
    """A failure names one request; its neighbour goes on."""
    bad, good = watched.submit(7), watched.submit(8)
    watched.say((8, 3, Finish.NONE), failures=(RequestFailure(7, FailureCode.INTERNAL),))
    await until(lambda: bad.ended)
    assert bad.failure is FailureCode.INTERNAL
    assert not good.ended and good.take()[0] == [3]


async def test_death_ends_every_stream_and_keeps_what_was_said(watched: Watched) -> None:
    """Tokens sent before the death count; the streams then end as lost through no fault of the protocol."""
    stream = watched.submit(7)
    watched.say((7, 3, Finish.NONE))
    watched.pair.guest.close()
    await until(lambda: stream.ended)
    assert stream.take()[0] == [3] and stream.engine_gone == "the sandbox is gone"
    assert watched.ends == [("the sandbox is gone", False)]
    later = watched.submit(9)
    assert later.engine_gone is not None


async def test_an_unread_stream_is_stopped_at_its_bound(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that reads nothing loses its own request only."""
    monkeypatch.setattr(engine_link, "MAX_UNREAD_TOKENS", 3)
    slow, other = watched.submit(7, grant=100), watched.submit(8)
    watched.say(*[(7, 1, Finish.NONE)] * 4, (8, 2, Finish.NONE))
    await until(lambda: slow.ended)
    assert slow.overrun and not other.ended
    assert any(isinstance(message, Abort) for message in watched.pair.guest.receive())


async def test_the_number_of_requests_is_bounded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a request is refused at once and never sent."""
    monkeypatch.setattr(engine_link, "MAX_LIVE_REQUESTS", 2)
    watched.submit(1), watched.submit(2)
    with pytest.raises(EngineFullError):
        watched.submit(3)
    assert len(watched.pair.guest.receive()) == 2


async def test_a_token_beyond_the_vocabulary_ends_the_engine(watched: Watched) -> None:
    """Ids are bounded by the width of the logits: what is beyond would reach the table and the text sandbox."""
    stream = watched.submit(7)
    watched.say((7, ENGINE_READY.vocab_size - 1, Finish.NONE))
    await until(lambda: bool(stream.token_ids))
    watched.say((7, ENGINE_READY.vocab_size, Finish.NONE))
    await until(lambda: stream.engine_gone is not None)
    assert watched.ends == [("broke the protocol: sent a token beyond its vocabulary", True)]


async def test_a_request_that_cannot_be_sent_leaves_nothing_behind(watched: Watched) -> None:
    """Outside the protocol's bounds: the caller hears it, no slot is lost, and the link goes on."""
    odd = Submit(7, b"k" * 32, array("I", [1]), 4, Sampling(), weight=0)
    with pytest.raises(LocalProtocolError):
        watched.link.submit(odd, b"mark")
    assert watched.link.live == () and watched.link.inside == ()
    stream = watched.submit(8)
    watched.say((8, 5, Finish.STOP))
    await until(lambda: stream.ended)
    assert watched.ends == []


async def test_who_leaves_before_the_death_has_not_got_away(watched: Watched) -> None:
    """An aborted request counts as inside until the engine answered the abort, by a failure or by a late finish."""
    failed, finished, killer = watched.submit(7), watched.submit(8), watched.submit(9)
    for stream in (failed, finished, killer):
        watched.link.abort(stream)
    assert watched.link.live == () and watched.link.inside == (failed, finished, killer)
    watched.say((8, 1, Finish.STOP), failures=(RequestFailure(7, FailureCode.ABORTED),))
    await until(lambda: len(watched.link.inside) == 1)
    assert watched.link.inside == (killer,)


async def test_who_leaves_before_being_sent_was_never_there(watched: Watched) -> None:
    """While the engine reads nothing, submitting and leaving piles up neither frames nor suspects."""
    huge = array("I", bytes(4 << 20))
    streams = [watched.link.submit(Submit(number, b"k" * 32, huge, 4, Sampling()), b"mark") for number in range(1, 5)]
    for stream in streams:
        watched.link.abort(stream)
    waiting = list(watched.link._link._pending)
    assert not any(isinstance(message, Submit) for message in waiting)
    assert {stream.request for stream in watched.link.inside} == {1}
    assert watched.ends == []


async def test_streams_at_a_cadence_are_fed_without_a_bell(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many streams, frames sent as not urgent arrive with the next pass though no bell rang for them; once a
    stream of a fixed cadence is among them, every frame rings."""
    monkeypatch.setattr(flush_interval, "CHUNK_S", 1.0)
    streams = [watched.submit(number, grant=100) for number in range(7, 10)]
    watched.say(*((number, 1, Finish.NONE) for number in range(7, 10)), starts=())
    await until(lambda: all(stream.received == 1 for stream in streams))
    rung: list[bool] = []
    take = watched.pair.guest._writer.take_sleeper
    monkeypatch.setattr(
        watched.pair.guest._writer, "take_sleeper", lambda *, urgent: rung.append(take(urgent=urgent)) or rung[-1]
    )
    for turn in range(2, 8):
        watched.say(*((number, turn, Finish.NONE) for number in range(7, 10)), urgent=False)
        await until(lambda turn=turn: all(stream.received == turn for stream in streams))
    assert rung[2:] == [False] * 4  # Before the first passes nobody looks.
    steady = watched.submit(11, grant=100, every_step=True)
    watched.say((11, 1, Finish.NONE), urgent=True)
    await until(lambda: steady.received == 1)
    rung.clear()
    for turn in range(2, 6):
        watched.say((11, turn, Finish.NONE), urgent=False)
        await until(lambda turn=turn: steady.received == turn)
    assert rung == [True] * 4


async def test_an_engine_that_finishes_no_step_is_ended(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence counts while a request is live, from the last frame on; an idle engine may be silent for ever."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        watched.link.check_progress(10.0)

    pass_time(3_600.0)
    pass_time(3_600.0)
    stream = watched.submit(1)
    pass_time(9.0)
    watched.say((1, 7, Finish.NONE))
    watched.link._link.look()
    assert stream.received == 1
    pass_time(9.0)
    assert watched.ends == []
    pass_time(2.0)
    assert watched.ends == [("finished no step for 10 s", True)]
    assert stream.engine_gone == "finished no step for 10 s"
    pass_time(60.0)
    assert len(watched.ends) == 1


async def test_an_engine_hangs_when_its_work_stands_still(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than five seconds, and than four times the longest wait before; an idle one never does, nor one whose
    requests wait for masks."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def hangs_after(seconds: float) -> bool:
        now[0] += seconds
        return watched.link.progress.hangs

    assert not hangs_after(3_600.0)
    stream = watched.submit(1)
    assert not hangs_after(4.9)
    assert hangs_after(0.2)
    watched.say((1, 7, Finish.NONE))
    watched.link._link.look()
    assert stream.received == 1
    assert not hangs_after(20.0)
    assert hangs_after(0.5)
    stream.grammar = GrammarRun(1, b"k" * 32, None, None, asked=100.0)  # type: ignore[arg-type]
    assert not watched.link.progress.hangs


async def test_an_engine_is_not_ended_for_a_pause_of_the_gateways_own(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that comes later than any silence may last says nothing of the engine; a silence between looks that come
    in time is one (control)."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        watched.link.check_progress(10.0)

    pass_time(1.0)
    watched.submit(1)
    pass_time(60.0)
    pass_time(9.0)
    assert watched.ends == []
    pass_time(9.0)
    assert watched.ends == [("finished no step for 10 s", True)]


async def test_an_engine_is_not_ended_for_masks_that_the_text_sandbox_owes(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence does not count while every live request waits for its mask, and counts again once one has come."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        watched.link.check_progress(10.0)

    stream = watched.submit(1)
    first: asyncio.Future[Masks] = asyncio.get_running_loop().create_future()
    stream.grammar = GrammarRun(1, b"k" * 32, None, first, asked=100.0)  # type: ignore[arg-type]
    pass_time(3_600.0)
    assert watched.ends == []
    stream.grammar.asked = None
    pass_time(9.0)
    assert watched.ends == []
    pass_time(2.0)
    assert watched.ends == [("finished no step for 10 s", True)]


async def test_nobody_alone_fills_an_engine_for_the_others(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that sends without end is refused before the engine is full; others have the last places, a few each."""
    for name, value in (("MAX_LIVE_REQUESTS", 10), ("LAST_PLACES", 4), ("FEW", 2)):
        monkeypatch.setattr(engine_link, name, value)
    for request in range(6):
        watched.submit(1 + request)
    for namespace, first in ((b"k" * 32, 10), (b"l" * 32, 20), (b"m" * 32, 30), (b"n" * 32, 40)):
        taken = 0
        with contextlib.suppress(EngineFullError):
            for request in range(9):
                watched.submit(first + request, namespace=namespace)
                taken += 1
        assert taken == (2 if namespace in (b"l" * 32, b"m" * 32) else 0)
    assert len(watched.link.live) == 10


async def test_an_engine_that_runs_ahead_of_its_masks_is_ended_and_the_text_sandbox_is_not(watched: Watched) -> None:
    """A second token of a structured request before the mask for it was sent is the engine's breach; control: the first
    one is told to the text sandbox."""
    told: list[object] = []
    blamed: list[str] = []
    grammars = Grammars(told.append, ENGINE_READY.vocab_size, blamed.append)
    opening = asyncio.ensure_future(grammars.open(7, b"t" * 16, Grammar(GrammarKind.REGEX, b"a*")))
    await asyncio.sleep(0)
    width = -(-ENGINE_READY.vocab_size // 32) * 4
    mask = Masks(array("Q", [7]), array("I", [0]), bytes([MaskState.OPEN]), bytes(width))
    grammars.take(mask)
    message = Submit(7, b"k" * 32, array("I", [1]), 4, Sampling(), structured=True)
    stream = watched.link.submit(message, b"mark", grammar=await opening)
    watched.say((7, 11, Finish.NONE))
    await until(lambda: len(told) == 2)
    assert watched.ends == []
    watched.say((7, 12, Finish.NONE))
    await until(lambda: stream.ended)
    ((reason, at_fault),) = watched.ends
    assert at_fault and "mask" in reason
    grammars.take(Masks(array("Q", [7]), array("I", [1]), bytes([MaskState.OPEN]), bytes(width)))
    assert blamed == []


async def test_a_prompt_for_which_the_ring_has_no_room_is_not_taken(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word that another host computes a prompt is a chance: an engine that reads nothing is not told, and not ended
    for that, nor for the word that a client has left meanwhile. Control: what finds room arrives, in order, with its
    end; of a request of its own such an engine must hear."""
    monkeypatch.setattr(link_module, "MAX_PENDING", 2)
    large = array("I", [1] * 500_000)
    for number in range(1, 11):
        watched.link.prefetch(Prefetch(number, b"k" * 32, large))
    watched.link.end_prefetch(10)
    assert len(watched.link._link._pending) == 2, "the queue is full"
    assert watched.ends == []
    await asyncio.sleep(0.05)
    heard = list[object]()
    until_s = asyncio.get_running_loop().time() + 10
    while not heard or asyncio.get_running_loop().time() < until_s:
        heard += watched.pair.guest.receive(20)
        await asyncio.sleep(0.01)
        if heard and len(heard) < 10 and not watched.link._link._pending:
            break
    numbers = [one.request for one in heard if isinstance(one, Prefetch)]
    assert numbers == list(range(1, len(numbers) + 1)) and 0 < len(numbers) < 10
    watched.link.end_prefetch(1)
    assert [type(one) for one in watched.pair.guest.receive(5)][-1:] == [Abort]
    assert watched.ends == []
