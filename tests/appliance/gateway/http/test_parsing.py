"""Large bodies beside the loop: the same requests and errors, and the loop goes on turning."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import pytest

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import Operation
from appliance.gateway.http import openai
from appliance.gateway.http.parsing import INLINE_BYTES, Parser

STAMP = Stamp("req_1", None)
LARGE = json.dumps({"model": "m", "prompt": "word " * 40_000}).encode()
SMALL = json.dumps({"model": "m", "prompt": "word"}).encode()


TEXT = partial(openai.parse, Operation.TEXT_COMPLETION)


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_the_size_changes_nothing(body: bytes) -> None:
    """Inline or in the thread, the request is what ``openai.parse`` gives."""
    parsed = await Parser().parse("alpha", TEXT, body, STAMP)
    plain = openai.parse(Operation.TEXT_COMPLETION, body, STAMP)
    assert parsed.request.prompt == plain.request.prompt
    assert (len(body) > INLINE_BYTES) == (body is LARGE)


async def test_errors_come_back_from_the_thread() -> None:
    """A large body that is wrong is its sender's error, and the parser goes on."""
    parser = Parser()
    with pytest.raises(InvalidRequestError, match="acceptable JSON"):
        await parser.parse("alpha", TEXT, LARGE[:-1], STAMP)
    assert (await parser.parse("alpha", TEXT, LARGE, STAMP)).request.model == "m"


async def test_tenants_take_turns() -> None:
    """Ten bodies of one tenant are in line before another's one comes: it waits for one of them, not for ten."""
    order: list[str] = []

    def slow(_body: bytes, stamp: Stamp) -> None:
        order.append(stamp.request_id)

    parser = Parser()
    many = [parser.parse("flood", slow, LARGE, Stamp(f"flood-{number}", None)) for number in range(10)]
    waiting = [asyncio.ensure_future(one) for one in many]
    await asyncio.sleep(0)
    await parser.parse("victim", slow, LARGE, Stamp("victim", None))
    await asyncio.gather(*waiting)
    assert order.index("victim") <= 2
    assert sorted(order) == sorted(["victim", *(f"flood-{number}" for number in range(10))])
    assert not parser._turns, "nobody stands in line, so nothing is kept"
