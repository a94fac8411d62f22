"""Requests whose output follows a grammar, as one text sandbox has them: opened, followed token by token, closed.

A run is one attempt at one request. The engine reports its token; all tokens of a step that belong to runs go to the
text sandbox in one frame; the masks come back, usually in one frame too, and go on to the engine. Neither waits: a run
whose mask is late sits out alone, and is ended when nothing comes for ``MASK_WAIT_S``.

The text sandbox is hostile. A mask must be for a run that is owed one, for the position it is at, and as wide as the
vocabulary; anything else breaks the protocol. Which bits are set can only harm the run's own answer.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from appliance.common.errors import (
    ApplianceError,
    GrammarTooComplexError,
    InternalError,
    InvalidGrammarError,
    RateLimitedError,
    UnavailableError,
)
from appliance.gateway.generate_request import Grammar
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from isolation.ipc.codec import Message
from isolation.ipc.grammar import MAX_MASK_ROWS, NO_GRAMMAR_USER, Advance, CloseGrammar, Masks, MaskState, OpenGrammar
from isolation.ipc.messages import Failed, FailureCode

MASK_WAIT_S = 10.0
"""Seconds without a mask after which a run is ended; the text sandbox ends a grammar's process after two."""

LOOK_S = 1.0
"""Seconds between looks for such runs."""

MAX_OPENING = 128
"""Most grammars of all tenants that may wait for their first mask: 32 MiB of sources at most."""

TENANT_OPENING = 32
"""Most grammars of one tenant that may wait for their first mask."""

PARAM = "grammar"
"""``param`` of an error about a grammar; the request's lifecycle replaces it by the caller's name of the field."""

WORD_BITS = 32
WORD_BYTES = 4


class MaskedStream(Protocol):
    """Part of the request's token stream that a run uses."""

    grammar_error: ApplianceError | None
    wake: asyncio.Event


class MaskTaker(Protocol):
    """Part of the engine's link that a run uses."""

    def send_masks(self, masks: Masks) -> None:
        """Send masks on, unless the engine is gone."""


MOST_LEFT = 4_096
"""Most runs that are remembered after they were given up unanswered: far more than a text sandbox's ring can hold."""


class GrammarLostError(Exception):
    """The text sandbox ended before it had opened the grammar."""


@dataclass(slots=True, eq=False)
class GrammarRun:
    """One attempt at one structured request. Its id is the wire id of the request in the engine as well."""

    request: int
    tenant: bytes
    home: Grammars
    first: asyncio.Future[Masks]
    """Mask of the first token, once it is there."""
    position: int = 0
    """Number of tokens that the text sandbox was told of."""
    asked: float | None = None
    """Since when a mask is awaited, in monotonic seconds; None while none is."""
    stream: MaskedStream | None = None
    engine: MaskTaker | None = None
    error: ApplianceError | None = None
    """Why the run cannot go on."""

    @property
    def unanswered(self) -> bool:
        """Whether the text sandbox has not sent the first mask or a refusal yet, even where no task waits for it any
        more."""
        return not self.first.done() or self.first.cancelled()

    def follow(self, stream: MaskedStream, engine: MaskTaker) -> None:
        """Send the masks to an engine from now on, the first at once."""
        self.stream, self.engine = stream, engine
        if self.error is not None:
            stream.grammar_error = self.error
            stream.wake.set()
        else:
            engine.send_masks(self.first.result())

    def fail(self, error: ApplianceError) -> None:
        """End the request."""
        if self.error is not None:
            return
        self.error = error
        if not self.first.done():
            self.first.set_exception(error)
        elif self.stream is not None:
            self.stream.grammar_error = error
            self.stream.wake.set()

    def close(self) -> None:
        """End the attempt; idempotent."""
        self.home.close(self)


class Grammars:
    """All runs of one text sandbox. ``send`` puts a message onto its ring; ``broken`` ends the sandbox with a
    reason."""

    def __init__(self, send: Callable[[Message], None], vocab_size: int, broken: Callable[[str], None]) -> None:
        self._send = send
        self._width = -(-vocab_size // WORD_BITS) * WORD_BYTES
        self._broken = broken
        self._runs: dict[int, GrammarRun] = {}
        self._left: dict[int, None] = {}
        """Runs that were given up unanswered: a refusal may be on its way."""
        self._opening: Counter[bytes] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def occupied(self) -> bool:
        """Whether a request follows a grammar."""
        return bool(self._runs)

    @property
    def waiting(self) -> bool:
        """Whether an answer is awaited."""
        return any(run.asked is not None for run in self._runs.values())

    async def open(
        self, request: int, tenant: bytes, grammar: Grammar, *, keep: bool = True, user: bytes = NO_GRAMMAR_USER
    ) -> GrammarRun:
        """Have the grammar compiled, or found compiled, and followed from its beginning. ``keep``: whether later
        requests of the tenant and user may find it.

        Raises:
            ApplianceError: it cannot be used, or too many are asked for.
            GrammarLostError: the text sandbox ended first.
        """
        if self._opening[tenant] >= TENANT_OPENING or self._opening.total() >= MAX_OPENING:
            raise RateLimitedError("too many grammars are asked for at once", retry_after_s=RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        run = GrammarRun(request, tenant, self, loop.create_future(), asked=time.monotonic())
        self._opening[tenant] += 1
        self._runs[request] = run
        try:
            form = grammar.whitespace, grammar.thinking
            self._send(OpenGrammar(request, tenant, grammar.kind, grammar.source, keep, *form, user))
            self._watch()
            await run.first
        except BaseException:
            run.close()
            raise
        finally:
            self._opening[tenant] -= 1
            if not self._opening[tenant]:
                del self._opening[tenant]
        return run

    def advance(self, runs: list[tuple[GrammarRun, int]]) -> bool:
        """Report one step's tokens. False when one is of a run whose mask has not come: the engine cannot have chosen
        it under that mask, and the text sandbox would be blamed for a mask of an earlier position."""
        now = time.monotonic()
        for start in range(0, len(runs), MAX_MASK_ROWS):
            requests, tokens = array("Q"), array("I")
            for run, token in runs[start : start + MAX_MASK_ROWS]:
                if self._runs.get(run.request) is run:
                    if run.asked is not None:
                        return False
                    run.position += 1
                    run.asked = now
                    requests.append(run.request)
                    tokens.append(token)
            if requests:
                self._send(Advance(requests, tokens))
        self._watch()
        return True

    def close(self, run: GrammarRun) -> None:
        """End a run."""
        if self._runs.pop(run.request, None) is not None:
            if run.unanswered:
                self._left[run.request] = None
                if len(self._left) > MOST_LEFT:
                    del self._left[next(iter(self._left))]
            self._send(CloseGrammar(run.request))

    def take(self, masks: Masks) -> None:
        """Send masks on to the engines that wait for them."""
        if masks.requests and masks.width != self._width:
            self._broken("sent masks of another width than its vocabulary's")
            return
        by_engine: dict[MaskTaker, list[int]] = {}
        for row, request in enumerate(masks.requests):
            run = self._runs.get(request)
            if run is None:
                continue
            state = masks.states[row]
            if run.asked is None or (state != MaskState.BROKEN and masks.positions[row] != run.position):
                self._broken("sent a mask that nobody waits for")
                return
            run.asked = None
            if state == MaskState.BROKEN:
                run.fail(
                    GrammarTooComplexError(
                        "the grammar takes more time or memory to follow than one may; simplify it", param=PARAM
                    )
                )
            elif run.engine is not None:
                by_engine.setdefault(run.engine, []).append(row)
            elif not run.first.done():
                run.first.set_result(_chosen(masks, [row]))
        for engine, rows in by_engine.items():
            engine.send_masks(masks if len(rows) == len(masks.requests) else _chosen(masks, rows))

    def refused(self, failure: Failed) -> bool:
        """Take a refusal; returns whether it answers a grammar that was to be opened, whose waiter then gets the
        error."""
        run = self._runs.get(failure.request)
        if run is None:
            return self._left.pop(failure.request, failure) is None
        if not run.unanswered:
            return False
        run.asked = None
        if not run.first.cancelled():
            run.fail(_refusal(failure))
        return True

    def lost(self) -> None:
        """End all runs, as the text sandbox has ended."""
        if self._timer is not None:
            self._timer.cancel()
        runs, self._runs = self._runs, {}
        for run in runs.values():
            if not run.first.done():
                run.first.set_exception(GrammarLostError())
                continue
            run.fail(
                UnavailableError(
                    "what checks the answer's structure was lost; the same request may be sent again",
                    retry_after_s=RETRY_AFTER_S,
                )
            )

    def _watch(self) -> None:
        if self._timer is None and self.waiting:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        late = time.monotonic() - MASK_WAIT_S
        for run in list(self._runs.values()):
            if run.asked is not None and run.asked < late:
                run.asked = None
                run.fail(GrammarTooComplexError("the grammar took too long; simplify it", param=PARAM))
        self._watch()


def _chosen(masks: Masks, rows: list[int]) -> Masks:
    """Return some rows of a frame."""
    width = masks.width
    return Masks(
        array("Q", [masks.requests[row] for row in rows]),
        array("I", [masks.positions[row] for row in rows]),
        bytes(masks.states[row] for row in rows),
        b"".join(masks.words[row * width : (row + 1) * width] for row in rows),
    )


def printable_reason(failure: Failed) -> str:
    """Return the reason that a sandbox gives for a refusal, which is shown to the caller as data."""
    return "".join(char if char.isprintable() else " " for char in failure.reason)


def _refusal(failure: Failed) -> ApplianceError:
    """Return the caller's error."""
    reason = printable_reason(failure)
    if failure.code is FailureCode.INVALID:
        return InvalidGrammarError(f"the grammar cannot be used: {reason}", param=PARAM)
    if failure.code is FailureCode.TOO_LONG:
        return GrammarTooComplexError(f"the grammar cannot be used: {reason}", param=PARAM)
    if failure.code is FailureCode.OVERLOADED:
        return RateLimitedError(f"too many grammars: {reason}", retry_after_s=RETRY_AFTER_S)
    if failure.code is FailureCode.DEADLINE:
        return UnavailableError(f"the grammar was not compiled: {reason}", retry_after_s=RETRY_AFTER_S)
    return InternalError("what compiles grammars met a defect")
