"""The service over real channels to scripted sandboxes: what it holds on to, and what it counts."""

from __future__ import annotations

import asyncio
import gc
import weakref
from array import array
from collections.abc import Callable

import pytest

from appliance.errors import InvalidRequestError, ModelNotFoundError
from appliance.gateway.service import GatewayService
from appliance.gateway.tally import TenantTally
from appliance.gateway.text_link import TextLink
from appliance.request import CallContext, Delta, Finished, GenerateRequest, Operation, Principal, TextPrompt
from appliance.telemetry.tracer import TelemetrySettings, open_telemetry
from isolation.ipc.messages import Encode, Encoded, Finish, Sampling, Submit

from .conftest import TEXT_READY, Pair
from .test_session import Stage, hear, say, stage  # noqa: F401 - the fixture

ALPHA = Principal("alpha", "key:a")
CALL = CallContext("POST /v1/completions", "http")


class Text(str):
    """A text that can be watched."""

    __slots__ = ("__weakref__",)


@pytest.fixture
async def service(stage: Stage, text_pair: Pair, counter: Callable[[], int]) -> GatewayService:  # noqa: F811
    """A service with one model, an engine and a text sandbox."""
    link = TextLink(text_pair.host, TEXT_READY, 1, lambda *_: None)
    link.table = stage.rooms.table
    stage.rooms.set_text(link)
    return GatewayService({"m": stage.rooms}, stage.ledger, open_telemetry(TelemetrySettings(version="0")))


def request(prompt: str, **options: object) -> GenerateRequest:
    """A completion of this text."""
    return GenerateRequest(
        request_id="req_1", operation=Operation.TEXT_COMPLETION, model="m", prompt=TextPrompt(prompt),
        sampling=Sampling(temperature=0.0), **options,  # type: ignore[arg-type]
    )


async def test_the_prompt_s_text_goes_when_its_ids_are_there(
    service: GatewayService, stage: Stage, text_pair: Pair  # noqa: F811
) -> None:
    """While an answer streams nobody in the gateway holds the text any more; the answer is complete all the same."""
    engine = stage.boot()
    text = Text("a long prompt")
    seen = weakref.ref(text)
    events = service.generate(ALPHA, request(text, max_tokens=2), CALL)
    del text
    first = asyncio.ensure_future(anext(events))
    job = await hear(text_pair, Encode)
    assert seen() is not None and job.source == b"a long prompt"
    text_pair.guest.send(Encoded(job.request, array("I", [1, 2, 3])))
    submit = await hear(engine, Submit)
    say(engine, submit.request, 5, started=True)
    await first
    gc.collect()
    assert seen() is None
    say(engine, submit.request, 6, finish=Finish.LENGTH)
    rest = [event async for event in events]
    assert "".join(event.text for event in rest if isinstance(event, Delta)) == "5 6 "
    assert isinstance(rest[-1], Finished)
    assert service.tally.of("alpha") == TenantTally(requests=1, tokens=5, refused=0)


async def test_refusals_are_counted_with_their_tenant(service: GatewayService) -> None:
    """A request for no model of ours, and one that never became a session."""
    wrong = GenerateRequest(
        request_id="req_2", operation=Operation.TEXT_COMPLETION, model="none", prompt=TextPrompt("x"),
        sampling=Sampling(),
    )
    with pytest.raises(ModelNotFoundError):
        await anext(service.generate(ALPHA, wrong, CALL))
    service.record_refusal(CALL, InvalidRequestError("not JSON"), "alpha")
    service.record_refusal(CALL, InvalidRequestError("a stranger's"), None)
    assert service.tally.of("alpha") == TenantTally(requests=2, tokens=0, refused=2)
