"""Tokens of one output that have arrived and are not read yet, between the engine's link and the request."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from appliance.common.errors import (
    ApplianceError,
    ContextLengthError,
    DeadlineExceededError,
    ExternalModelBusyError,
    ExternalModelError,
    ExternalModelLateError,
    IntegrityError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from appliance.gateway.sandboxes.engine_loss import EngineLoss
from appliance.gateway.sandboxes.grammars import GrammarRun
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from isolation.ipc.engine import Started
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs
from isolation.ipc.messages import FailureCode, Finish

ENDED = "the engine ended while it answered; the same request may be sent again"


class EngineGoneError(Exception):
    """The engine ended under the request; handled by the request's lifecycle, never shown to a caller. ``loss``: what
    the supervisor said of it, if it did."""

    def __init__(self, reason: str, loss: EngineLoss | None = None) -> None:
        super().__init__(reason)
        self._loss = loss

    def told(self, *, shown: bool) -> ApplianceError | None:
        """What a request is told whose output has been shown in part, or not; None: it may be tried again."""
        if self._loss is not None and (shown or not self._loss.requests_may_be_at_fault):
            return self._loss.error()
        return UnavailableError(ENDED, retry_after_s=RETRY_AFTER_S) if shown else None


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of one prompt that have arrived."""

    length: int
    """Number of tokens of the prompt."""
    alternatives: int
    """Alternatives asked for beside each token."""
    position: int = 1
    """Next position; the first token has no log-probability."""
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    top_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("d"))

    @property
    def complete(self) -> bool:
        """Whether every token but the first has its log-probability."""
        return self.position >= self.length

    @property
    def width(self) -> int:
        """Alternatives at each position: those asked for, or fewer in a tiny vocabulary."""
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0

    def take(self, part: PromptLogprobs, vocab_size: int) -> bool:
        """Add a part; returns whether it is one that may come now."""
        fits = (
            part.start == self.position
            and self.position + len(part.logprobs) <= self.length
            and part.width <= self.alternatives
            and (not self.logprobs or part.width == self.width)
            and max(part.top_ids, default=0) < vocab_size
        )
        if fits:
            self.position += len(part.logprobs)
            self.logprobs.extend(part.logprobs)
            self.top_ids.extend(part.top_ids)
            self.top_logprobs.extend(part.top_logprobs)
        return fits


@dataclass(slots=True, eq=False)
class TokenStream:
    """Tokens of one output. The request waits on ``wake``, or sets ``deliver`` and is called."""

    request: int
    grant: int
    keeps_logprobs: bool = False
    """Whether the request asked for log-probabilities; otherwise they are dropped."""
    every_step: bool = False
    """Whether tokens are handed on at each step, however busy the machine is: a rhythm that others cannot influence."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """One entry for each of ``token_ids`` where they are kept, else empty."""
    scores: PromptScores | None = None
    """Collects the prompt's log-probabilities, if they were asked for."""
    started: Started | None = None
    finish: Finish = Finish.NONE
    failure: FailureCode | None = None
    engine_gone: str | None = None
    """Why the engine ended, once it has."""
    loss: EngineLoss | None = None
    """What the supervisor said of that, if it did."""
    grammar: GrammarRun | None = None
    """Grammar that the output follows, if any."""
    grammar_error: ApplianceError | None = None
    """Why the grammar cannot be followed further."""
    withdrawn: ApplianceError | None = None
    """Why the request may not go on, once a new policy forbids it."""
    overrun: bool = False
    """Whether the request was aborted because its tokens were not read."""
    received: int = 0
    """Tokens received since the start."""
    fingerprint: bytes = b""
    """Fingerprint of the request in ``suspects``."""
    namespace: bytes = b""
    """Namespace key of the request's tenant."""
    expired: bool = False
    """Whether the request's deadline passed; set by a timer of the request, which then wakes."""
    due: bool = False
    """Whether the stream is part of the delivery's next pass."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    embeds: bool = False
    """Whether the request is for a vector; its one token has no meaning."""
    vector: array[float] | None = None
    deliver: Callable[[], None] | None = None
    """Called instead of setting ``wake``; takes what it can use and never raises."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return (
            self.finish is not Finish.NONE
            or self.failure is not None
            or self.engine_gone is not None
            or self.grammar_error is not None
            or self.overrun
        )

    def take(self) -> tuple[list[int], Sequence[TokenLogprobs | None]]:
        """Return the unread tokens and their log-probabilities, which then count as read.

        Raises:
            ApplianceError: the request was withdrawn: nobody may read them.
        """
        if self.withdrawn is not None:
            raise self.withdrawn
        taken = self.token_ids, self.logprobs
        self.token_ids, self.logprobs = [], []
        return taken

    def notify(self) -> None:
        """Hand on what has arrived."""
        if self.deliver is not None:
            self.deliver()
        else:
            self.wake.set()

    def raise_if_lost(self) -> None:
        """Raise what ended the stream besides its last token; do nothing while it goes on.

        Raises:
            EngineGoneError: the engine ended.
            ApplianceError: the request itself has ended.
        """
        if self.withdrawn is not None:
            raise self.withdrawn
        if self.engine_gone is not None:
            raise EngineGoneError(self.engine_gone, self.loss)
        if self.grammar_error is not None:
            raise self.grammar_error
        if self.expired:
            raise _late()
        if self.overrun:
            raise UnavailableError("the answer was not read fast enough; the request was stopped")
        if self.failure is not None:
            raise _FAILURES[self.failure]()


def _late() -> DeadlineExceededError:
    return DeadlineExceededError("the request's deadline passed before its answer was complete")


_FAILURES: dict[FailureCode, Callable[[], ApplianceError]] = {
    FailureCode.ABORTED: lambda: UnavailableError("the engine stopped this request", retry_after_s=RETRY_AFTER_S),
    FailureCode.INVALID: lambda: InvalidRequestError("the engine cannot run this request as asked"),
    FailureCode.NO_ADAPTER: lambda: UnavailableError("the engine has no such adapter: its files could not be used"),
    FailureCode.TOO_LONG: lambda: ContextLengthError(
        "prompt and output do not fit the engine's KV cache", param="prompt"
    ),
    FailureCode.OVERLOADED: lambda: UnavailableError("the engine's queue is full", retry_after_s=RETRY_AFTER_S),
    FailureCode.DEADLINE: _late,
    FailureCode.INTEGRITY: lambda: IntegrityError(
        "the engine found memory in this request's tables that is not the request's own, and ended it unread; the same "
        "request may be sent again",
        retry_after_s=RETRY_AFTER_S,
    ),
    FailureCode.INTERNAL: lambda: InternalError("the engine met a defect while serving this request"),
    FailureCode.ENDPOINT_FAILED: lambda: ExternalModelError(
        "the cluster that computes this model did not answer, or broke off", retry_after_s=RETRY_AFTER_S
    ),
    FailureCode.ENDPOINT_BUSY: lambda: ExternalModelBusyError(
        "the cluster that computes this model takes no more requests now", retry_after_s=RETRY_AFTER_S
    ),
    FailureCode.ENDPOINT_LATE: lambda: ExternalModelLateError(
        "the cluster that computes this model gave no token for too long"
    ),
    FailureCode.ENDPOINT_WRONG: lambda: ExternalModelError(
        "the cluster that computes this model answered with what is no answer to this request"
    ),
}
"""Errors that callers see, by the engine's failure code."""
