"""The end of a request, whatever ends it: slot freed, counted, trace closed with the error that the caller sees."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from appliance.common.errors import (
    ApplianceError,
    CancelledError,
    ContextLengthError,
    DeterministicNotAllowedError,
    InternalError,
    InvalidGrammarError,
    RateLimitedError,
    UnavailableError,
)
from appliance.gateway.generate_request import GenerateRequest, Operation, Principal, TokenPrompt
from appliance.gateway.request.lifecycle import Lifecycle
from isolation.ipc.sampling import Sampling
from tests.appliance.gateway.request.test_session import Quiet, Stage

REQUEST = GenerateRequest(
    request_id="req",
    operation=Operation.TEXT_COMPLETION,
    model="m",
    prompt=TokenPrompt(array("I", [1])),
    sampling=Sampling(),
)


class Trace(Quiet):
    """A trace that keeps how it was finished."""

    def __init__(self) -> None:
        self.finished: list[ApplianceError | None] = []

    def finish(self, *, error: ApplianceError | None, **_counts: Any) -> None:
        """Keep the error."""
        self.finished.append(error)


@pytest.mark.parametrize(
    ("raised", "reported", "refused"),
    [
        (None, None, 0),
        (RateLimitedError("slow down"), RateLimitedError, 1),
        (asyncio.CancelledError(), CancelledError, 0),
        (GeneratorExit(), CancelledError, 0),
        (RuntimeError("a defect"), InternalError, 0),
    ],
)
async def test_each_end_is_reported_once(
    stage: Stage, raised: BaseException | None, reported: type[ApplianceError] | None, refused: int
) -> None:
    """The concurrency slot comes back, the tenant's count has the request, and trace and count agree on the error."""
    trace, raises = Trace(), None
    try:
        with Lifecycle(stage.dependencies, Principal("alpha", "key:a"), REQUEST, trace) as life:  # type: ignore[arg-type]
            await life.place(await life.admit(5))
            assert stage.ledger.concurrency("alpha") == 1
            if raised is not None:
                raise raised
    except BaseException as error:  # noqa: BLE001 - compared below
        raises = error
    assert raises is raised
    assert stage.ledger.concurrency("alpha") == 0
    (error,) = trace.finished
    assert error is None if reported is None else type(error) is reported
    count = stage.dependencies.tenant_counts.of("alpha")
    assert (count.requests, count.refused, count.tokens) == (1, refused, 0)


@pytest.mark.parametrize(
    ("raised", "started", "charged"),
    [
        (ContextLengthError("too long"), False, 70),
        (InvalidGrammarError("no grammar"), False, 70),
        (DeterministicNotAllowedError("not granted"), False, 70),
        (InvalidGrammarError("after the start"), True, 60),
        (RateLimitedError("slow down"), False, 0),
        (UnavailableError("no engine"), False, 0),
        (asyncio.CancelledError(), False, 0),
    ],
)
async def test_what_a_refused_prompt_cost_is_charged_to_who_sent_it(
    stage: Stage, raised: BaseException, started: bool, charged: int
) -> None:
    """A request that can never be served pays for the work on its prompt, once; one that may come again, or that the
    appliance failed, pays nothing. Counts of what engines served do not include it."""
    before = stage.ledger.rates("alpha").remaining_tokens

    async def refused() -> None:
        with Lifecycle(stage.dependencies, Principal("alpha", "key:a"), REQUEST, Quiet()) as life:  # type: ignore[arg-type]
            (await life.admit(5)).reserve(60, 5, 100)
            life.outcome.text_tokens, life.outcome.input_tokens, life.outcome.started = 70, 60, started
            raise raised

    with pytest.raises(type(raised)):
        await refused()
    assert before - stage.ledger.rates("alpha").remaining_tokens == pytest.approx(charged, abs=1)
    assert stage.dependencies.tenant_counts.of("alpha").tokens == (60 if started else 0)
