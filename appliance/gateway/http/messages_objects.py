"""Events -> Anthropic's objects: a message, whole and as a stream of events, and errors; pure.

Source of the shapes: Anthropic's API reference of the Messages API, version 2023-06-01 as of 2026-10.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from appliance.common.errors import ApplianceError
from appliance.gateway.front.padding import Padding
from appliance.gateway.generate_request import (
    ChoiceFinished,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PromptTokens,
    Started,
)
from appliance.gateway.http import sse
from appliance.gateway.http.blocks import Block, BlockKind, Blocks, Step, What
from appliance.gateway.http.dialect import ErrorForm

_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status -> Anthropic's type of error; ``OTHER_KIND`` for others."""

OTHER_KIND = "api_error"

_DELTAS = {
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageWriter:
    """Writes the answer to one request of the Messages API."""

    def __init__(self, request: GenerateRequest, _created: int) -> None:
        self._id = "msg_" + request.request_id.removeprefix("req_")
        self._model = request.model
        self._blocks = Blocks()
        self._template: sse.ChunkTemplate | None = None

    def record_bytes(self, padding: Padding) -> int:
        """Bytes of each record of the answer, where it is streamed and padded."""
        return padding.size(choices=1, scored=False)

    def opening(self, started: Started) -> bytes:
        """The event before any output."""
        used = _usage(started.input_tokens, started.cached_tokens, 0)
        return sse.named_event(
            "message_start", {"type": "message_start", "message": self._message([], None, None, used)}
        )

    def event(self, event: Event) -> bytes:
        """The events for an event of the session."""
        return self.delta(event) if isinstance(event, Delta) else b""

    def delta(self, delta: Delta) -> bytes:
        """The events for new output."""
        return b"".join(map(self._step, self._blocks.push(delta)))

    def closing(self, finished: Finished) -> list[bytes]:
        """The end of the block that is open, reason and usage, the end."""
        ended = b"".join(map(self._step, self._blocks.finish()))
        reason, stop = _reason(finished)
        used = _usage(finished.input_tokens, finished.cached_tokens, finished.output_tokens)
        last = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": stop}, "usage": used}
        return [
            ended,
            sse.named_event("message_delta", last),
            sse.named_event("message_stop", {"type": "message_stop"}),
        ]

    def collected(self, events: Sequence[PromptTokens | Delta | ChoiceFinished], finished: Finished) -> dict[str, Any]:
        """The whole message."""
        for event in events:
            if isinstance(event, Delta):
                for _ in self._blocks.push(event):
                    pass
        used = _usage(finished.input_tokens, finished.cached_tokens, finished.output_tokens)
        reason, stop = _reason(finished)
        return self._message([_whole(block) for block in self._blocks.whole()], reason, stop, used)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, used: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": used,
        }

    def _step(self, step: Step) -> bytes:
        what, block, text = step
        if what is What.MORE:
            if self._template is None:
                self._template = sse.ChunkTemplate.around(lambda hole: _more(block, hole), "content_block_delta")
            return self._template.fill(text)
        self._template = None
        if what is What.BEGIN:
            begun = {"type": "content_block_start", "index": block.index, "content_block": _begun(block)}
            return sse.named_event("content_block_start", begun)
        return sse.named_event("content_block_stop", {"type": "content_block_stop", "index": block.index})


def _more(block: Block, text: str) -> dict[str, Any]:
    kind, name = _DELTAS[block.kind]
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}


def _begun(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
    if block.kind is BlockKind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _whole(block: Block) -> dict[str, Any]:
    begun = _begun(block)
    if block.kind is not BlockKind.CALL:
        return {**begun, _DELTAS[block.kind][1]: block.text}
    try:
        found = json.loads(block.text)
    except ValueError:
        # A call that was cut off.
        found = {}
    return {**begun, "input": found if isinstance(found, dict) else {}}


def _reason(finished: Finished) -> tuple[str, str | None]:
    """Anthropic's reason, and the stop sequence."""
    if finished.stop is not None and finished.reason is FinishReason.STOP:
        return "stop_sequence", finished.stop
    return _REASONS[finished.reason], None


def _usage(prompt: int, cached: int, output: int) -> dict[str, int]:
    """Tokens of a message; those found in the cache are counted apart."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def error_document(error: ApplianceError, request_id: str) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = KINDS.get(error.wire.http, OTHER_KIND)
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def _error_event(error: ApplianceError, request_id: str) -> bytes:
    return sse.named_event("error", error_document(error, request_id))


ERRORS = ErrorForm(error_document, _error_event)
"""Errors of the Messages API."""
