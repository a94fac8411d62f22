"""Events to OpenAI's objects, checked against the official client's own types."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from appliance.common.errors import RateLimitedError
from appliance.gateway.generate_request import (
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    Operation,
    Started,
    TextPrompt,
)
from appliance.gateway.http import sse
from appliance.gateway.http.openai_objects import LEAST_LOGPROB, Writer, error_object, model_object, pieces_of
from appliance.gateway.model_card import ModelCard
from isolation.ipc.sampling import Sampling
from tests.appliance.gateway.front.support import logprob_script

FINISHED = Finished(FinishReason.STOP, 7, 3, 2)


def _writer(operation: Operation, *, stream: bool, logprobs: int = -1, include_usage: bool = False) -> Writer:
    request = GenerateRequest(
        request_id="req_abc",
        operation=operation,
        model="m",
        prompt=TextPrompt("x"),
        sampling=Sampling(),
        logprobs=logprobs,
        stream=stream,
    )
    return Writer(request, 1_700_000_000, include_usage)


def _data(chunk: bytes | None) -> dict:
    assert chunk
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    return json.loads(chunk[6:])


@pytest.mark.parametrize("operation", list(Operation))
@given(text=st.text())
def test_a_chunk_carries_any_text_in_one_line(operation, text):
    """Whatever the text, the event has one line, and the client's parser gives the text back."""
    writer = _writer(operation, stream=True)
    chunk = writer.delta(Delta(text, (1,)))
    if not text:
        assert chunk == b""
        return
    assert chunk
    assert len(chunk.decode("ascii").splitlines()) == 2  # the event and the empty line that ends it
    choice = _data(chunk)["choices"][0]
    assert (choice["delta"]["content"] if operation is Operation.CHAT else choice["text"]) == text


def test_streamed_chat_has_the_published_shape():
    """Role, content, reason, usage, end mark; every chunk is a strict ChatCompletionChunk."""
    writer = _writer(Operation.CHAT, stream=True, include_usage=True)
    chunks = [writer.opening(Started(7, 3)), writer.delta(Delta("hi", (1,))), *writer.closing(FINISHED)]
    assert chunks[-1] == sse.DONE
    objects = [ChatCompletionChunk.model_validate(_data(chunk), strict=True) for chunk in chunks[:-1]]
    assert {chunk.id for chunk in objects} == {"chatcmpl-abc"}
    assert objects[0].choices[0].delta.role == "assistant"
    assert objects[2].choices[0].finish_reason == "stop"
    assert [chunk.usage is None for chunk in objects] == [True, True, True, False]
    assert objects[3].choices == []
    assert all("usage" in _data(chunk) for chunk in chunks[:-1])


def test_without_include_usage_no_chunk_mentions_it():
    """The field is there only for those who asked."""
    writer = _writer(Operation.CHAT, stream=True)
    chunks = [writer.opening(Started(7, 3)), writer.delta(Delta("hi", (1,))), *writer.closing(FINISHED)]
    assert all(b"usage" not in chunk for chunk in chunks if chunk)


@pytest.mark.parametrize(
    ("operation", "kind"), [(Operation.CHAT, ChatCompletion), (Operation.TEXT_COMPLETION, Completion)]
)
def test_collected_answers_have_the_published_shape(operation, kind):
    """One object of the client's own type, usage with cached tokens included."""
    document = _collected(_writer(operation, stream=False), [Delta("a"), Delta("b")])
    parsed = kind.model_validate(document, strict=True)
    assert parsed.usage.total_tokens == 9
    assert parsed.usage.prompt_tokens_details.cached_tokens == 3
    choice = parsed.choices[0]
    assert (choice.message.content if operation is Operation.CHAT else choice.text) == "ab"


def _collected(writer: Writer, events: list[Delta]) -> dict:
    """The answer as a client reads it."""
    return json.loads(b"".join(pieces_of(writer.collected(events, FINISHED))))


def _deltas() -> list[Delta]:
    return [event for event in logprob_script() if isinstance(event, Delta)]


def test_chat_logprobs_hold_bytes_of_partial_characters():
    """Halves of a character are replacement marks with their bytes beside them; minus infinity has a figure."""
    document = _collected(_writer(Operation.CHAT, stream=False, logprobs=2), _deltas())
    content = ChatCompletion.model_validate(document, strict=True).choices[0].logprobs.content
    assert [entry.token for entry in content] == ["a", "\ufffd", "\ufffd"]
    assert [entry.bytes for entry in content] == [[97], [0xC3], [0xA9]]
    assert content[1].top_logprobs[1].logprob == LEAST_LOGPROB
    json.dumps(document, allow_nan=False)


def test_completion_logprobs_count_characters():
    """Offsets are in characters of the output; a partial token is spelled by its bytes."""
    document = _collected(_writer(Operation.TEXT_COMPLETION, stream=False, logprobs=2), _deltas())
    logprobs = Completion.model_validate(document, strict=True).choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.text_offset == [0, 1, 1]
    assert logprobs.token_logprobs == [-0.5, -0.25, -0.125]
    assert logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    assert document["choices"][0]["text"] == "a\u00e9"


@pytest.mark.parametrize("operation", list(Operation))
def test_streamed_logprobs_equal_collected_ones(operation):
    """The chunks put together say what the one object says; a chunk without text still carries its token."""
    writer = _writer(operation, stream=True, logprobs=2)
    parts = [_data(writer.delta(delta))["choices"][0]["logprobs"] for delta in _deltas()]
    assert len(parts) == 3
    whole = _collected(_writer(operation, stream=False, logprobs=2), _deltas())["choices"][0]["logprobs"]
    for field in ("content",) if operation is Operation.CHAT else ("tokens", "text_offset", "token_logprobs"):
        assert [item for part in parts for item in part[field]] == whole[field]


def test_chosen_only_logprobs_have_no_alternatives():
    """``logprobs: 0`` of completions gives the chosen token's and null for the rest."""
    document = _collected(_writer(Operation.TEXT_COMPLETION, stream=False, logprobs=0), _deltas())
    assert document["choices"][0]["logprobs"]["top_logprobs"] is None


def test_models_and_errors_have_the_published_shape():
    """A model is the client's Model, and says so when it is none; it has the digest of its files where that is known;
    an error has exactly four members."""
    card = Model.model_validate(model_object(ModelCard("m", 5, 4096)), strict=True)
    assert (card.id, card.created, card.object) == ("m", 5, "model")
    assert not {"runner", "digest"} & model_object(ModelCard("m", 5, 4096)).keys()
    assert model_object(ModelCard("m", 5, 4096, digest="ab" * 32))["digest"] == "ab" * 32
    assert model_object(ModelCard("m", 5, 4096, "null"))["runner"] == "null"
    error = error_object(RateLimitedError("slow down", param="x"))
    assert error == {
        "error": {"message": "slow down", "type": "rate_limit_error", "param": "x", "code": "rate_limit_exceeded"}
    }
