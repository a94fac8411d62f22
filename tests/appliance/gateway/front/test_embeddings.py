"""Embeddings over both front ends, with the official client, and every wrong way to ask for them."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from array import array
from collections.abc import AsyncIterator

import grpc
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.common.errors import InvalidRequestError, UnavailableError
from appliance.gateway.front import request_builder
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import Embeddings, TextPrompt, TokenPrompt
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.gateway.http import openai_embeddings
from isolation.ipc.messages import Priority
from tests.appliance.gateway.front.support import MODEL, Running, serving

STAMP = Stamp("req_1", None)
THIRD = struct.unpack("<f", struct.pack("<f", 1 / 3))[0]


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    """Both front ends before a scripted service."""
    async with serving() as found:
        yield found


def client_of(running: Running) -> openai.AsyncOpenAI:
    """The official client."""
    return openai.AsyncOpenAI(base_url=running.base_url + "/v1", api_key=running.key, max_retries=0)


async def test_the_official_client(running: Running) -> None:
    """A string, several, ids, and several lists of ids; as floats and, its default, in base64; usage counted."""
    async with client_of(running) as client:
        for given_input, lengths in (("hello", [5]), (["a", "bcd"], [1, 3]), ([7, 8, 9], [3]), ([[1], [2, 3]], [1, 2])):
            for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
                answer = await client.embeddings.create(model=MODEL, input=given_input, **options)
                assert answer.model == MODEL
                assert [one.index for one in answer.data] == list(range(len(lengths)))
                expected = [[float(place), float(length), THIRD] for place, length in enumerate(lengths)]
                found = [one.embedding for one in answer.data]
                if options.get("encoding_format") == "base64":
                    found = [list(struct.unpack("<3f", base64.b64decode(one))) for one in found]
                assert found == expected
                assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)
        await client.embeddings.create(model=MODEL, input="x", dimensions=2, user="someone")
    asked = running.service.embeds[-1]
    assert (asked.dimensions, asked.inputs, asked.model) == (2, (TextPrompt("x"),), MODEL)
    assert {principal.tenant for principal in running.service.principals} == {"acme"}


async def test_headers_and_errors_over_http(running: Running) -> None:
    """Request id, rates and what was ignored are in the headers; the service's error is the client's."""
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client:
        good = await client.post("/v1/embeddings", json={"model": MODEL, "input": "x", "metadata": {}})
        assert good.headers["x-request-id"] == running.service.embeds[-1].request_id
        assert good.headers["x-ratelimit-limit-requests"] == "60"
        assert "metadata" in good.headers["x-athanor-ignored"]
        running.service.script = [UnavailableError("later", retry_after_s=3)]
        bad = await client.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
        assert (bad.status_code, bad.headers["retry-after"]) == (503, "3")
        assert (await client.get("/v1/embeddings")).status_code == 405
        stranger = await httpx.AsyncClient().post(
            running.base_url + "/v1/embeddings", json={"model": MODEL, "input": "x"}
        )
        assert stranger.status_code == 401


async def test_a_client_that_leaves_ends_the_work(running: Running) -> None:
    """Over both front ends, the session's task is cancelled when nobody wants the vectors any more."""
    running.service.script = [asyncio.Event()]
    async with httpx.AsyncClient(base_url=running.base_url, headers=running.authorization) as client:
        asking = asyncio.ensure_future(client.post("/v1/embeddings", json={"model": MODEL, "input": "x"}))
        await asyncio.wait_for(running.service.asked.wait(), 5)
        asking.cancel()
        await asyncio.wait_for(running.service.closed.wait(), 5)
    running.service.asked.clear()
    running.service.closed.clear()
    async with grpc.aio.insecure_channel(running.target) as channel:
        call = InferenceServiceStub(channel).Embed(
            pb.EmbedRequest(model=MODEL, inputs=[pb.EmbedInput(text="x")]),
            metadata=(("authorization", f"Bearer {running.key}"),),
        )
        await asyncio.wait_for(running.service.asked.wait(), 5)
        call.cancel()
        await asyncio.wait_for(running.service.closed.wait(), 5)


async def test_over_grpc(running: Running) -> None:
    """Texts and ids in one call, vectors in their order, usage; wrong calls are INVALID_ARGUMENT with the field."""
    metadata = (("authorization", f"Bearer {running.key}"),)
    async with grpc.aio.insecure_channel(running.target) as channel:
        stub = InferenceServiceStub(channel)
        inputs = [pb.EmbedInput(text="abc"), pb.EmbedInput(token_ids=pb.TokenIds(ids=[5, 6]))]
        asked = pb.EmbedRequest(model=MODEL, inputs=inputs, dimensions=3, priority=pb.PRIORITY_LOW)
        answer = await stub.Embed(asked, metadata=metadata)
        assert [list(vector.values) for vector in answer.vectors] == [[0, 3, THIRD], [1, 2, THIRD]]
        assert answer.usage == pb.Usage(input_tokens=5)
        seen = running.service.embeds[-1]
        assert (seen.inputs, seen.priority) == ((TextPrompt("abc"), TokenPrompt(array("I", [5, 6]))), Priority.LOW)
        assert answer.request_id == seen.request_id
        for wrong in (
            pb.EmbedRequest(model=MODEL),
            pb.EmbedRequest(inputs=inputs),
            pb.EmbedRequest(model=MODEL, inputs=[pb.EmbedInput()]),
            pb.EmbedRequest(model=MODEL, inputs=[pb.EmbedInput(text="")]),
            pb.EmbedRequest(model=MODEL, inputs=[pb.EmbedInput(token_ids=pb.TokenIds())]),
            pb.EmbedRequest(model=MODEL, inputs=inputs, dimensions=0),
            pb.EmbedRequest(model=MODEL, inputs=inputs, priority=9),
            pb.EmbedRequest(model=MODEL, inputs=inputs * 1_025),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Embed(wrong, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, wrong
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(asked)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


WRONG = [
    ({}, "model"),
    ({"model": 5, "input": "x"}, "model"),
    ({"model": "m"}, "input"),
    ({"model": "m", "input": ""}, "input"),
    ({"model": "m", "input": []}, "input"),
    ({"model": "m", "input": {"a": 1}}, "input"),
    ({"model": "m", "input": ["a", ""]}, "input[1]"),
    ({"model": "m", "input": ["a", 5]}, "input[1]"),
    ({"model": "m", "input": [[1], []]}, "input[1]"),
    ({"model": "m", "input": [1, "a"]}, "input"),
    ({"model": "m", "input": [True]}, "input[0]"),
    ({"model": "m", "input": [-1]}, "input"),
    ({"model": "m", "input": [1 << 31]}, "input"),
    ({"model": "m", "input": ["a"] * 2_049}, "input"),
    ({"model": "m", "input": "\ud800"}, "input"),
    ({"model": "m", "input": "x", "dimensions": 0}, "dimensions"),
    ({"model": "m", "input": "x", "dimensions": 1 << 20}, "dimensions"),
    ({"model": "m", "input": "x", "dimensions": "3"}, "dimensions"),
    ({"model": "m", "input": "x", "dimensions": True}, "dimensions"),
    ({"model": "m", "input": "x", "encoding_format": "int8"}, "encoding_format"),
    ({"model": "m", "input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"model": "m" * 300, "input": "x"}, "model"),
]


@pytest.mark.parametrize(("document", "param"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_named(document: dict[str, object], param: str) -> None:
    """Each wrong field is a 400 that names it."""
    with pytest.raises(InvalidRequestError) as caught:
        openai_embeddings.parse(json.dumps(document).encode(), STAMP)
    assert caught.value.param == param


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(given_input=anything, dimensions=anything, encoding=anything, model=st.sampled_from(["m", MODEL]) | anything)
def test_arbitrary_json_gives_a_request_in_range_or_the_one_error(
    given_input: object, dimensions: object, encoding: object, model: object
) -> None:
    """Whatever JSON comes, the result is a request within the limits or the typed error."""
    body = json.dumps({"model": model, "input": given_input, "dimensions": dimensions, "encoding_format": encoding})
    try:
        request = openai_embeddings.parse(body.encode(), STAMP).request
    except InvalidRequestError:
        return
    assert 1 <= len(request.inputs) <= request_builder.MAX_INPUTS
    assert all(one.text if isinstance(one, TextPrompt) else one.token_ids for one in request.inputs)


def test_an_answer_is_one_document_in_small_pieces() -> None:
    """What is written piece by piece is the JSON that it should be; a piece holds one vector."""
    embeddings = Embeddings((array("f", [0.5, -1.0]), array("f", [0.25, 1e-20])), 7)
    pieces = list(openai_embeddings.answer(embeddings, 'a "name"', base64=False))
    assert len(pieces) == 4
    document = json.loads(b"".join(pieces))
    assert [one["embedding"] for one in document["data"]] == [vector.tolist() for vector in embeddings.vectors]
    assert (document["object"], document["model"]) == ("list", 'a "name"')
