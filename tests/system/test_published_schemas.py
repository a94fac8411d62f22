"""Requests of OpenAI's and Anthropic's published schemas against the real appliance: no 5xx, no hang, and no answer
that their own types refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.system.conftest import Appliance

if TYPE_CHECKING:
    from tests.system import published

pytestmark = pytest.mark.runsc

MODELS = ("hermes", "llama3", "thinking")
"""Those of the full count (``tooled``)."""
APIS = ("openai", "anthropic")


def routes(api: str) -> tuple[published.Route, ...]:
    """Routes of an API. Imported by those who need them: Anthropic's types take each worker two seconds."""
    from tests.system import published

    return published.OPENAI if api == "openai" else published.ANTHROPIC


async def held(appliance: Appliance, api: str, number: int, seed: int) -> published.Found:
    """What came of so many requests, once nothing was wrong and no sandbox died of them."""
    from tests.system import published

    before = [(one["engine"]["generation"], one["text"]["generation"]) for one in appliance.status()["models"]]
    keys = [appliance.key(tenant) for tenant in ("alpha", "beta")]
    models = tuple(name for name in MODELS if name in appliance.ready["models"])
    assert len(models) >= 2
    found = await published.send(appliance.ready["http"], keys, models, routes(api), number, seed)
    assert found.wrong == [], "\n".join(found.wrong[:8])
    after = [(one["engine"]["generation"], one["text"]["generation"]) for one in appliance.status()["models"]]
    assert after == before
    assert found.by_status["200"] > number // 8 and found.streams > number // 40, found
    return found


@pytest.mark.parametrize(("api", "number"), [("openai", 40), ("anthropic", 48)])
async def test_answers_are_those_of_the_published_schema(tooled: Appliance, api: str, number: int) -> None:
    """Drawn requests of every field and union that the official client's types have: answered as the types say, or
    refused by an error of the published form."""
    await held(tooled, api, number, 1)


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("api", APIS)
async def test_five_thousand_requests(tooled: Appliance, api: str, record_property: Any) -> None:
    """The bar: 5,000 requests of each API."""
    found = await held(tooled, api, 5_000, 2)
    record_property("by status", dict(found.by_status))


def test_what_is_drawn_has_every_field() -> None:
    """The seed decides every request, and a thousand of them have every field of the types."""
    from tests.system import published

    for api in APIS:
        for route in routes(api):
            first, second = (published.Drawer(1, MODELS) for _ in range(2))
            bodies = [first.request(route) for _ in range(1_000)]
            again = [second.request(route) for _ in range(1_000)]
            assert json.dumps(bodies) == json.dumps(again)
            assert {name for body in bodies for name in body} >= published.fields_of(route.request)


def test_a_wrong_answer_would_be_seen() -> None:
    """Control: a missing field, another type, an unknown field, a stream without an end, and an error of another form
    are found."""
    from tests.system import published

    chat = published.OPENAI[0]
    choice = {"index": 0, "message": {"role": "assistant", "content": "a", "refusal": None}, "finish_reason": "stop"}
    good = {
        "id": "a",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{**choice, "logprobs": None}],
    }
    assert published.against(chat.answer, good) == ""
    for wrong in ({"created": "1"}, {"object": "other"}, {"zz": 1}, {"choices": [{**choice, "finish_reason": "no"}]}):
        assert published.against(chat.answer, {**good, **wrong})
    head = {"content-type": "text/event-stream"}
    cut = httpx.Response(200, headers=head, text="data: {}\n\n")
    assert published.judge(chat, cut, published.Found()) == "a stream has no end"
    assert published.judge(chat, httpx.Response(400, json={"error": {"message": "a"}}), published.Found())
    assert published.judge(chat, httpx.Response(503, json={}), published.Found()) == "status 503"
    assert published.wrong_error(published.ANTHROPIC[0], {"error": {"message": "a", "type": "api_error"}})
