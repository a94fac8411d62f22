"""Events -> OpenAI's objects: chat and text completions, whole and in chunks, models, errors; pure.

A ``Writer`` serves one request. Streamed, it gives the bytes of server-sent events; collected, the one object of the
answer. Source of the shapes: OpenAI's API specification of 2026-08.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.common.errors import ApplianceError
from appliance.gateway.front.padding import Padding
from appliance.gateway.generate_request import (
    CallDelta,
    ChoiceFinished,
    Delta,
    Event,
    Finished,
    GenerateRequest,
    Operation,
    PromptToken,
    PromptTokens,
    Started,
    TokenLogprob,
)
from appliance.gateway.http import sse
from appliance.gateway.http.dialect import ErrorForm
from appliance.gateway.model_card import ModelCard

LEAST_LOGPROB = -9999.0
"""OpenAI's figure for "very unlikely"; stands for minus infinity, which JSON cannot write."""

OWNER = "athanor"

REASONING = "reasoning_content"
"""Name of what the model wrote to itself, in messages and deltas, as in vLLM."""

REFUSED = "tool_call_error"
"""Our own field of a choice: why text in it that begins like a call is none."""

_OBJECTS = {
    (Operation.CHAT, False): "chat.completion",
    (Operation.CHAT, True): "chat.completion.chunk",
    (Operation.TEXT_COMPLETION, False): "text_completion",
    (Operation.TEXT_COMPLETION, True): "text_completion",
}
"""``object`` of an answer by operation and whether it is streamed."""


def _at_once(make: Callable[[Any], Any], entries: Sequence[Any]) -> list[Any]:
    return [make(entry) for entry in entries]


class Writer:
    """Writes the answer to one request in the shape of its endpoint."""

    def __init__(self, request: GenerateRequest, created: int, include_usage: bool, *, number: int = 0) -> None:
        """``number``: of the request's prompt, where there are several: its choices stand behind those of the prompts
        before it."""
        self._first = number * request.choices
        self._chat = request.operation is Operation.CHAT
        self._choices = request.choices
        self._echo = request.echo
        self._scored = request.prompt_logprobs >= 0
        self._logprobs = request.logprobs >= 0
        self._alternatives = request.logprobs > 0
        self._include_usage = include_usage
        self._head: dict[str, Any] = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + request.request_id.removeprefix("req_"),
            "object": _OBJECTS[request.operation, request.stream],
            "created": created,
            "model": request.model,
        }
        self._offsets = [_Offsets() for _ in range(request.choices)]
        self._templates = [self._template(choice) for choice in range(request.choices)]

    def record_bytes(self, padding: Padding) -> int:
        """Bytes of each record of this answer, where it is streamed and padded: by its shape, not by its content."""
        return padding.size(choices=self._choices, scored=self._logprobs or self._echo)

    def event(self, event: Event) -> bytes:
        """Return the events for an event of the session, but for its end; empty where there is nothing to tell."""
        if isinstance(event, Delta):
            return self.delta(event)
        if isinstance(event, PromptTokens):
            return self.prompt(event)
        return self.ended(event) if isinstance(event, ChoiceFinished) else b""

    def opening(self, _started: Started) -> bytes:
        """Return the events before any text: in chat the role of each choice, else nothing."""
        if not self._chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            sse.event(self._with_choice({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}))
            for index in range(self._choices)
        )

    def prompt(self, prompt: PromptTokens) -> bytes:
        """Return the events that repeat the prompt at the beginning of each choice, where an echo was asked for."""
        if not self._echo:
            return b""
        events = []
        for index in range(self._choices):
            logprobs = self._rendered(prompt.tokens, index) if self._logprobs else None
            events.append(sse.event(self._chunk(index, prompt.text, logprobs, None)))
        return b"".join(events)

    def delta(self, delta: Delta) -> bytes:
        """Return the event for new text; empty when there is none yet (part of a character)."""
        if delta.reasoning or delta.calls:
            return self._parts(delta)
        return self._text(delta)

    def _text(self, delta: Delta) -> bytes:
        if self._logprobs:
            if not delta.text and not delta.logprobs:
                return b""
            rendered = self._rendered(delta.logprobs, delta.choice)
            return sse.event(self._chunk(delta.choice, delta.text, rendered, None))
        return self._templates[delta.choice].fill(delta.text) if delta.text else b""

    def _parts(self, delta: Delta) -> bytes:
        """Return the events of a delta with reasoning or calls: reasoning, text, calls."""
        events = []
        if delta.reasoning:
            events.append(sse.event(self._own_chunk(delta.choice, {REASONING: delta.reasoning})))
        events.append(self._text(delta))
        if calls := [_call_chunk(call) for call in delta.calls if not call.refused]:
            events.append(sse.event(self._own_chunk(delta.choice, {"tool_calls": calls})))
        return b"".join(events)

    def ended(self, event: ChoiceFinished | Finished) -> bytes:
        """The event for the end of one choice."""
        chunk = self._chunk(event.choice, "", None, event.reason.value)
        if event.refused is not None:
            chunk["choices"][0][REFUSED] = event.refused
        return sse.event(chunk)

    def closing(self, finished: Finished) -> list[bytes]:
        """Return the last events: reason, usage where asked for, end mark."""
        events = [self.ended(finished)]
        if self._include_usage:
            events.append(sse.event({**self._head, "choices": [], "usage": usage(finished)}))
        return [*events, sse.DONE]

    def collected(self, events: Sequence[PromptTokens | Delta | ChoiceFinished], finished: Finished) -> dict[str, Any]:
        """The whole answer as one object, in which ``Rows`` may stand for lists."""
        prompt = next((event for event in events if isinstance(event, PromptTokens)), PromptTokens("", ()))
        ends: dict[int, ChoiceFinished | Finished] = {
            event.choice: event for event in events if isinstance(event, ChoiceFinished)
        }
        ends[finished.choice] = finished
        choices = []
        for index in range(self._choices):
            deltas = [event for event in events if isinstance(event, Delta) and event.choice == index]
            choices.append(self._collected(index, prompt, deltas, ends[index]))
        answer = {**self._head, "choices": choices, "usage": usage(finished)}
        if self._scored:
            # Where vLLM has it: chat beside the choices, completions in the choice.
            (answer if self._chat else choices[0])["prompt_logprobs"] = Rows(_scored, prompt.tokens)
        return answer

    def _collected(
        self, index: int, prompt: PromptTokens, deltas: Sequence[Delta], end: ChoiceFinished | Finished
    ) -> dict[str, Any]:
        text = prompt.text + "".join(delta.text for delta in deltas)
        logprobs = None
        if self._logprobs:
            echoed = prompt.tokens if self._echo else ()
            logprobs = self._rendered([*echoed, *(entry for delta in deltas for entry in delta.logprobs)], index, Rows)
        choice: dict[str, Any] = {"index": self._first + index}
        if self._chat:
            choice["message"] = _message(text, deltas)
        else:
            choice["text"] = text
        choice |= {"logprobs": logprobs, "finish_reason": end.reason.value}
        return choice if end.refused is None else choice | {REFUSED: end.refused}

    def _template(self, index: int) -> sse.ChunkTemplate:
        return sse.ChunkTemplate.around(lambda text: self._chunk(index, text, None, None))

    def _chunk(self, index: int, text: str, logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            choice["delta"] = {} if reason is not None else {"content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        return self._with_choice(choice)

    def _own_chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return self._with_choice({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def _with_choice(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._with_usage({**self._head, "choices": [choice]})

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _rendered(
        self, entries: Sequence[TokenLogprob | PromptToken], index: int, rows: Callable[..., Any] = _at_once
    ) -> dict[str, Any]:
        """``rows``: makes a list of what is made of each entry, now or later."""
        if self._chat:
            content = [entry for entry in entries if isinstance(entry, TokenLogprob)]
            return {"content": rows(chat_logprob, content), "refusal": None}
        return {
            "tokens": rows(lambda entry: _token_text(entry.text), entries),
            "token_logprobs": rows(_own_logprob, entries),
            "top_logprobs": rows(_likeliest, entries) if self._alternatives else None,
            "text_offset": rows(lambda entry: self._offsets[index].next(entry.text), entries),
        }


def joined(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer of those to several prompts: the first one's head, all choices, and the sums of their usage."""
    used = [answer["usage"] for answer in answers]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    sums: dict[str, Any] = {name: sum(one[name] for one in used) for name in names}
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in used)
    return {
        **answers[0],
        "choices": [choice for answer in answers for choice in answer["choices"]],
        "usage": {**sums, "prompt_tokens_details": {"cached_tokens": cached}},
    }


def usage(finished: Finished) -> dict[str, Any]:
    """OpenAI's usage object."""
    thought = finished.reasoning_tokens
    details = {"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {}
    return {
        "prompt_tokens": finished.input_tokens,
        "completion_tokens": finished.output_tokens,
        "total_tokens": finished.input_tokens + finished.output_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        **details,
    }


def _call_chunk(call: CallDelta) -> dict[str, Any]:
    """A piece of a call in a chunk."""
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}


def _message(text: str, deltas: Sequence[Delta]) -> dict[str, Any]:
    """The whole message of a choice of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    reasoning = "".join(delta.reasoning for delta in deltas)
    if reasoning:
        message[REASONING] = reasoning
    calls = _whole_calls([call for delta in deltas for call in delta.calls])
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return message


def _whole_calls(pieces: Sequence[CallDelta]) -> list[dict[str, Any]]:
    """The calls of a choice, without those that turned out to be none."""
    refused = {piece.index for piece in pieces if piece.refused}
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.index in refused:
            continue
        if piece.name:
            function = {"name": piece.name, "arguments": ""}
            calls[piece.index] = {"id": piece.call_id, "type": "function", "function": function}
        calls[piece.index]["function"]["arguments"] += piece.arguments
    return list(calls.values())


def model_object(card: ModelCard) -> dict[str, Any]:
    """One model; ``max_model_len`` is vLLM's name for the context. ``runner`` stands there when it is no model, and
    ``digest``, that of the model's files, when it is known."""
    shown = {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": OWNER,
        "max_model_len": card.max_context,
    }
    runner = {} if card.runner == "model" else {"runner": card.runner}
    return {**shown, **runner, **({"digest": card.digest} if card.digest else {})}


def model_list(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """The models of a tenant."""
    return {"object": "list", "data": [model_object(card) for card in cards]}


def error_object(error: ApplianceError) -> dict[str, Any]:
    """OpenAI's error object: exactly message, type, param and code."""
    return {"error": {"message": error.message, "type": error.wire.kind, "param": error.param, "code": error.wire.code}}


def _error_event(error: ApplianceError, _request_id: str) -> bytes:
    return sse.event(error_object(error))


ERRORS = ErrorForm(lambda error, _request_id: error_object(error), _error_event)
"""Errors of the OpenAI API."""


class _Offsets:
    """Where in the output, in characters, each token begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, token: bytes) -> int:
        start = self._characters
        self._characters += len(self._decoder.decode(token))
        return start


def _own_logprob(entry: TokenLogprob | PromptToken) -> float | None:
    return None if entry.logprob is None else _finite(entry.logprob)


def chat_logprob(entry: TokenLogprob) -> dict[str, Any]:
    """OpenAI's object for the log-probabilities of one token of a chat."""
    chosen = _chat_token(entry.text, entry.logprob)
    return {**chosen, "top_logprobs": [_chat_token(text, logprob) for _, text, logprob in entry.top]}


def _chat_token(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(text)}


def _scored(entry: PromptToken) -> dict[str, Any] | None:
    """vLLM's object for a token of the prompt: by id the token itself and the alternatives, with their ranks as far as
    they are known; nothing for the first token."""
    if entry.logprob is None:
        return None
    ranks = {token_id: rank for rank, (token_id, _, _) in enumerate(entry.top, start=1)}
    found = {}
    for token_id, text, logprob in ((entry.token_id, entry.text, entry.logprob), *entry.top):
        found[str(token_id)] = {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": text.decode("utf-8", "replace"),
        }
    return found


def _likeliest(entry: TokenLogprob | PromptToken) -> dict[str, float] | None:
    """Alternatives and the chosen token by text; of two tokens with one text the likelier counts."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for text, logprob in [(entry.text, entry.logprob), *((text, logprob) for _, text, logprob in entry.top)]:
        name = _token_text(text)
        found[name] = max(found.get(name, LEAST_LOGPROB), _finite(logprob))
    return found


def _token_text(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        # OpenAI's spelling of a token that is part of a character: names stay distinct.
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) and logprob > LEAST_LOGPROB else LEAST_LOGPROB


ROWS_AT_ONCE = 64
"""Rows made and written in one piece: a token with twenty alternatives takes some 60 us, so less than 5 ms."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A list in a document whose items are made when they are written."""

    make: Callable[[Any], Any]
    entries: Sequence[Any]


def pieces_of(document: Any) -> Iterator[bytes]:
    """Yield the JSON of a document, without blanks, in ASCII; ``Rows`` may stand in it wherever a list may. Between two
    pieces the event loop may turn: a document with the log-probabilities of eight thousand tokens takes half a second
    to make."""
    if isinstance(document, Rows):
        yield b"["
        for start in range(0, len(document.entries), ROWS_AT_ONCE):
            rows = [document.make(entry) for entry in document.entries[start : start + ROWS_AT_ONCE]]
            yield (b"," if start else b"") + _written(rows)[1:-1]
        yield b"]"
    elif isinstance(document, dict):
        for number, (name, value) in enumerate(document.items()):
            yield (b"," if number else b"{") + _written(name) + b":"
            yield from pieces_of(value)
        yield b"}" if document else b"{}"
    elif isinstance(document, list):
        for number, value in enumerate(document):
            yield b"," if number else b"["
            yield from pieces_of(value)
        yield b"]" if document else b"[]"
    else:
        yield _written(document)


def _written(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")
