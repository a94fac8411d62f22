"""Runs of one text sandbox: what goes out, what comes in, and what a hostile or dying sandbox can do with it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

import pytest

from appliance.common.errors import (
    ApplianceError,
    GrammarTooComplexError,
    InvalidGrammarError,
    RateLimitedError,
    UnavailableError,
)
from appliance.gateway.generate_request import Grammar
from appliance.gateway.sandboxes import grammars as module
from appliance.gateway.sandboxes.grammars import PARAM, TENANT_OPENING, GrammarLostError, GrammarRun, Grammars
from isolation.ipc.codec import Message
from isolation.ipc.grammar import Advance, CloseGrammar, GrammarKind, Masks, MaskState, OpenGrammar, Whitespace
from isolation.ipc.messages import Failed, FailureCode

ALPHA, BETA = b"a" * 16, b"b" * 16
REGEX = Grammar(GrammarKind.REGEX, b"[ab]")


class Stream:
    """What a run needs of a request's stream."""

    def __init__(self) -> None:
        self.grammar_error: ApplianceError | None = None
        self.wake = asyncio.Event()


class Engine:
    """Keeps the masks that it is sent."""

    def __init__(self) -> None:
        self.masks: list[Masks] = []

    def send_masks(self, masks: Masks) -> None:
        self.masks.append(masks)


class Bench:
    """Grammars with an ear at both ends; the vocabulary has 40 ids, so a mask has two words."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.broken: list[str] = []
        self.grammars = Grammars(self.sent.append, 40, self.broken.append)

    def rows(self, *rows: tuple[int, int], state: MaskState = MaskState.OPEN, width: int = 8) -> Masks:
        requests, positions = zip(*rows, strict=True)
        words = b"".join(bytes([request] * width) for request in requests)
        return Masks(array("Q", requests), array("I", positions), bytes([state] * len(rows)), words)

    async def opened(self, request: int, tenant: bytes = ALPHA) -> GrammarRun:
        task = asyncio.ensure_future(self.grammars.open(request, tenant, REGEX))
        await asyncio.sleep(0)
        self.grammars.take(self.rows((request, 0)))
        return await task

    async def followed(self, request: int, engine: Engine) -> tuple[GrammarRun, Stream]:
        run, stream = await self.opened(request), Stream()
        run.follow(stream, engine)
        return run, stream


async def test_a_run_from_open_to_close() -> None:
    """Opened with its first mask, told of each token, masks passed on, closed once."""
    bench, engine = Bench(), Engine()
    run, _ = await bench.followed(5, engine)
    assert bench.sent == [OpenGrammar(5, ALPHA, GrammarKind.REGEX, b"[ab]")]
    assert engine.masks == [bench.rows((5, 0))]
    bench.grammars.advance([(run, 17)])
    assert bench.sent[-1] == Advance(array("Q", [5]), array("I", [17]))
    bench.grammars.take(bench.rows((5, 1), state=MaskState.ACCEPTING))
    assert engine.masks[-1] == bench.rows((5, 1), state=MaskState.ACCEPTING)
    run.close()
    run.close()
    assert bench.sent[2:] == [CloseGrammar(5)]
    assert not bench.broken


async def test_the_text_sandbox_is_told_of_the_whitespace() -> None:
    """It goes along with the source, as the request has it."""
    bench = Bench()
    for request, whitespace in enumerate(Whitespace, start=1):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, b"{}", whitespace)
        task = asyncio.ensure_future(bench.grammars.open(request, ALPHA, grammar))
        await asyncio.sleep(0)
        task.cancel()
    opened = [message for message in bench.sent if isinstance(message, OpenGrammar)]
    assert [message.whitespace for message in opened] == list(Whitespace)


async def test_one_frame_a_step_each_way() -> None:
    """Tokens of several runs go out in one frame; their masks go on in one frame, less those of runs that ended."""
    bench, engine = Bench(), Engine()
    runs = [(await bench.followed(request, engine))[0] for request in (5, 6, 7)]
    bench.grammars.advance([(run, 9) for run in runs])
    assert bench.sent[-1] == Advance(array("Q", [5, 6, 7]), array("I", [9, 9, 9]))
    bench.grammars.take(bench.rows((5, 1), (6, 1), (7, 1)))
    assert engine.masks[-1] == bench.rows((5, 1), (6, 1), (7, 1))
    bench.grammars.advance([(run, 9) for run in runs])
    runs[1].close()
    bench.grammars.take(bench.rows((7, 2), (6, 2), (5, 2)))
    assert engine.masks[-1] == bench.rows((7, 2), (5, 2))


@pytest.mark.parametrize(
    "hostile",
    [
        lambda bench: bench.rows((5, 1)),
        lambda bench: bench.rows((5, 3)),
        lambda bench: bench.rows((5, 2), (5, 2)),
        lambda bench: bench.rows((5, 2), width=4),
        lambda bench: bench.rows((5, 2), width=12),
    ],
    ids=["old position", "later position", "twice", "narrow", "wide"],
)
async def test_masks_that_nobody_waits_for_break_the_protocol(hostile: Callable[[Bench], Masks]) -> None:
    """Of another position, twice, or of another width: the sandbox is ended."""
    bench, engine = Bench(), Engine()
    run, _ = await bench.followed(5, engine)
    for position in (1, 2):
        bench.grammars.advance([(run, 9)])
        if position == 1:
            bench.grammars.take(bench.rows((5, 1)))
    bench.grammars.take(hostile(bench))
    assert len(bench.broken) == 1
    assert len(engine.masks) == 2


async def test_a_mask_before_any_token_breaks_the_protocol() -> None:
    """A sandbox cannot run ahead."""
    bench, engine = Bench(), Engine()
    await bench.followed(5, engine)
    bench.grammars.take(bench.rows((5, 1)))
    assert len(bench.broken) == 1


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "in one step"])
async def test_tokens_that_run_ahead_of_their_masks_are_told_from_those_that_do_not(together: bool) -> None:
    """Of a run that is owed a mask no token is passed on, so that its mask is still the one that is waited for;
    control: the first one is."""
    bench, engine = Bench(), Engine()
    run, _ = await bench.followed(5, engine)
    if together:
        assert not bench.grammars.advance([(run, 9), (run, 9)])
        assert bench.sent[1:] == []
    else:
        assert bench.grammars.advance([(run, 9)])
        assert not bench.grammars.advance([(run, 9)])
        bench.grammars.take(bench.rows((5, 1)))
        assert bench.sent[1:] == [Advance(array("Q", [5]), array("I", [9]))]
    assert not bench.broken


async def test_rows_of_unknown_requests_are_passed_over() -> None:
    """They ended a moment ago."""
    bench = Bench()
    bench.grammars.take(bench.rows((9, 4)))
    assert not bench.broken


async def test_a_broken_row_ends_its_own_request() -> None:
    """It has its typed error at once, and its neighbour's mask goes on."""
    bench, engine = Bench(), Engine()
    (bad, first), (good, second) = await bench.followed(5, engine), await bench.followed(6, engine)
    bench.grammars.advance([(bad, 1), (good, 1)])
    bench.grammars.take(bench.rows((5, 0), state=MaskState.BROKEN))
    bench.grammars.take(bench.rows((6, 1)))
    assert isinstance(first.grammar_error, GrammarTooComplexError)
    assert first.wake.is_set()
    assert second.grammar_error is None
    assert engine.masks[-1] == bench.rows((6, 1))


@pytest.mark.parametrize(
    ("code", "error", "param"),
    [
        (FailureCode.INVALID, InvalidGrammarError, PARAM),
        (FailureCode.TOO_LONG, GrammarTooComplexError, PARAM),
        (FailureCode.DEADLINE, UnavailableError, None),
        (FailureCode.OVERLOADED, RateLimitedError, None),
    ],
)
async def test_refusals_are_typed_and_printable(
    code: FailureCode, error: type[ApplianceError], param: str | None
) -> None:
    """What the compiler said is shown without control characters, and blamed on the grammar's field where the caller
    can do something; nothing stays open."""
    bench = Bench()
    task = asyncio.ensure_future(bench.grammars.open(5, ALPHA, REGEX))
    await asyncio.sleep(0)
    assert bench.grammars.refused(Failed(5, code, "bad\x1b[31m\nthing"))
    with pytest.raises(error, match=r"bad \[31m thing") as refused:
        await task
    assert refused.value.param == param
    assert not bench.grammars.refused(Failed(5, code, "again"))
    assert not bench.grammars.waiting


async def test_a_lost_sandbox_ends_its_runs_with_what_may_be_sent_again() -> None:
    """Those that wait may be opened elsewhere, those that run get a retryable error, those not begun yet too."""
    bench, engine = Bench(), Engine()
    _, running = await bench.followed(5, engine)
    opened = await bench.opened(6)
    waiting = asyncio.ensure_future(bench.grammars.open(7, ALPHA, REGEX))
    await asyncio.sleep(0)
    bench.grammars.lost()
    with pytest.raises(GrammarLostError):
        await waiting
    assert isinstance(running.grammar_error, UnavailableError)
    assert running.grammar_error.retry_after_s
    late = Stream()
    opened.follow(late, engine)
    assert isinstance(late.grammar_error, UnavailableError)
    assert len(engine.masks) == 1


async def test_one_tenant_cannot_open_without_end() -> None:
    """Beyond its bound a tenant is told to come back; another one is served; who leaves makes room."""
    bench = Bench()
    tasks = [asyncio.ensure_future(bench.grammars.open(100 + n, ALPHA, REGEX)) for n in range(TENANT_OPENING)]
    await asyncio.sleep(0)
    with pytest.raises(RateLimitedError):
        await bench.grammars.open(1, ALPHA, REGEX)
    await bench.opened(2, BETA)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    assert CloseGrammar(100) in bench.sent
    await bench.opened(3)
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_mask_that_does_not_come_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that is late fails alone; one that has its mask goes on."""
    monkeypatch.setattr(module, "MASK_WAIT_S", -1.0)
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    bench, engine = Bench(), Engine()
    (late, first), (_, second) = await bench.followed(5, engine), await bench.followed(6, engine)
    bench.grammars.advance([(late, 1)])
    await asyncio.wait_for(first.wake.wait(), 5)
    assert isinstance(first.grammar_error, GrammarTooComplexError)
    assert second.grammar_error is None


async def test_a_refusal_that_crosses_a_cancellation_is_no_fault() -> None:
    """The client goes away while its grammar is refused: the refusal is taken once, before the run is closed or after;
    control: a second one, and one for a grammar that was answered, are faults of the text sandbox."""
    bench, code = Bench(), FailureCode.OVERLOADED
    before, after = (asyncio.ensure_future(bench.grammars.open(request, ALPHA, REGEX)) for request in (5, 6))
    await asyncio.sleep(0)
    before.cancel()
    assert bench.grammars.refused(Failed(5, code, "crossed"))
    after.cancel()
    await asyncio.gather(before, after, return_exceptions=True)
    assert bench.grammars.refused(Failed(6, code, "crossed"))
    assert not bench.grammars.refused(Failed(6, code, "again"))
    (await bench.opened(7)).close()
    assert not bench.grammars.refused(Failed(7, code, "answered before"))
