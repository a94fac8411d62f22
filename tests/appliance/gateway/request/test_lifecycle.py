"""The end of a request, whatever ends it: slot freed, counted, trace closed with the error that the caller sees."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from appliance.common.errors import ApplianceError, CancelledError, InternalError, RateLimitedError
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
            life.place(life.admit(5))
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
