"""What ended a stream of tokens besides its last token, as the error that the caller sees."""

from __future__ import annotations

from collections.abc import Callable

from appliance.errors import (
    ApplianceError,
    ContextLengthError,
    DeadlineExceededError,
    IntegrityError,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from appliance.gateway.rooms import RETRY_AFTER_S
from appliance.gateway.stream import TokenStream
from isolation.ipc.messages import FailureCode


class EngineGoneError(Exception):
    """The engine ended under the request; never leaves the session."""


def raise_if_lost(stream: TokenStream) -> None:
    """Nothing when the stream goes on.

    Raises:
        EngineGoneError: its engine is gone.
        ApplianceError: the request itself has ended.
    """
    if stream.engine_gone is not None:
        raise EngineGoneError(stream.engine_gone)
    if stream.grammar_error is not None:
        raise stream.grammar_error
    if stream.expired:
        raise _late()
    if stream.overrun:
        raise UnavailableError("the answer was not read fast enough; the request was stopped")
    if stream.failure is not None:
        raise _FAILURES[stream.failure]()


def _late() -> DeadlineExceededError:
    return DeadlineExceededError("the request's deadline passed before its answer was complete")


_FAILURES: dict[FailureCode, Callable[[], ApplianceError]] = {
    FailureCode.ABORTED: lambda: UnavailableError("the engine stopped this request", retry_after_s=RETRY_AFTER_S),
    FailureCode.INVALID: lambda: InvalidRequestError("the engine cannot run this request as asked"),
    FailureCode.TOO_LONG: lambda: ContextLengthError("prompt and output do not fit the engine's KV cache"),
    FailureCode.OVERLOADED: lambda: UnavailableError("the engine's queue is full", retry_after_s=RETRY_AFTER_S),
    FailureCode.DEADLINE: _late,
    FailureCode.INTEGRITY: lambda: IntegrityError(
        "the engine found memory in this request's tables that is not the request's own, and ended it unread; the same "
        "request may be sent again",
        retry_after_s=RETRY_AFTER_S,
    ),
    FailureCode.INTERNAL: lambda: InternalError("the engine met a defect while serving this request"),
}
