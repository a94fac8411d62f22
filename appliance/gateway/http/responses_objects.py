"""Events -> OpenAI's objects of the Responses API: a response, whole and as a stream of numbered events; pure.

Source of the shapes: OpenAI's API specification of 2026-08.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

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
    TokenLogprob,
)
from appliance.gateway.http import sse
from appliance.gateway.http.blocks import Block, BlockKind, Blocks, Step, What
from appliance.gateway.http.dialect import ErrorForm
from appliance.gateway.http.openai_objects import chat_logprob, error_object

_PREFIXES = {BlockKind.REASONING: "rs_", BlockKind.TEXT: "msg_", BlockKind.CALL: "fc_"}
_DELTAS = {
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TEXT: "response.output_text",
    BlockKind.CALL: "response.function_call_arguments",
}


class ResponseWriter:
    """Writes the answer to one request of the Responses API."""

    REPEATED: ClassVar[tuple[str, ...]] = (
        "instructions",
        "metadata",
        "parallel_tool_calls",
        "reasoning",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_p",
        "truncation",
    )
    """Fields of the request that a response repeats."""

    def __init__(
        self,
        request: GenerateRequest,
        created: int,
        *,
        shown: Mapping[str, Any],
        kept: bool = False,
        previous: str | None = None,
        background: bool = False,
    ) -> None:
        """``shown``: the values of ``REPEATED`` in the request; ``kept``: whether the answer is to be kept;
        ``previous``: id of the response that it continues; ``background``: whether it goes on without its client."""
        self._key = key_of(request.request_id)
        self.response_id = f"resp_{self._key}"
        self._kept = kept
        self._previous = previous
        self._background = background
        self._model = request.model
        self._created = created
        self._most = request.max_tokens
        self._scored = request.logprobs >= 0
        self._shown = shown
        self._blocks = Blocks()
        self._number = 0
        self._before = ""

    def record_bytes(self, padding: Padding) -> int:
        """Bytes of each record of the answer, where it is streamed and padded."""
        return padding.size(choices=1, scored=self._scored)

    def opening(self, _started: Started) -> bytes:
        """The events before any output."""
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def event(self, event: Event) -> bytes:
        """The events for an event of the session."""
        return self.delta(event) if isinstance(event, Delta) else b""

    def delta(self, delta: Delta) -> bytes:
        """The events for new output."""
        scores = delta.logprobs if self._scored else ()
        return b"".join([self._step(step, scores) for step in self._blocks.push(delta)])

    def closing(self, finished: Finished) -> list[bytes]:
        """The end of the item that is open, and the whole response."""
        ended = b"".join([self._step(step, ()) for step in self._blocks.finish()])
        response = self._finished(finished)
        return [ended, self._event(f"response.{response['status']}", response=response)]

    def collected(self, events: Sequence[PromptTokens | Delta | ChoiceFinished], finished: Finished) -> dict[str, Any]:
        """The whole response."""
        for event in events:
            if isinstance(event, Delta):
                for _ in self._blocks.push(event):
                    pass
        return self._finished(finished)

    def whole(self, finished: Finished) -> dict[str, Any]:
        """The whole response, once all of it was written."""
        return self._finished(finished)

    def note_kept(self, *, kept: bool) -> None:
        """Say in the response whether it is kept."""
        self._kept = kept

    def _finished(self, finished: Finished) -> dict[str, Any]:
        status = "incomplete" if finished.reason is FinishReason.LENGTH else "completed"
        blocks = self._blocks.whole()
        items = [self._item(block, status if block is blocks[-1] else "completed") for block in blocks]
        return self._response(status, items, finished)

    def _response(self, status: str, output: list[dict[str, Any]], finished: Finished | None) -> dict[str, Any]:
        shown = self._shown
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": self._background,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": shown["instructions"],
            "max_output_tokens": self._most,
            "max_tool_calls": None,
            "model": self._model,
            "output": output,
            "parallel_tool_calls": shown["parallel_tool_calls"] is not False,
            "previous_response_id": self._previous,
            "reasoning": shown["reasoning"] or {"effort": None, "summary": None},
            "service_tier": "default",
            "store": self._kept,
            "temperature": 1.0 if shown["temperature"] is None else shown["temperature"],
            "text": shown["text"] or {"format": {"type": "text"}},
            "tool_choice": shown["tool_choice"] or "auto",
            "tools": shown["tools"] or [],
            "top_p": 1.0 if shown["top_p"] is None else shown["top_p"],
            "truncation": shown["truncation"] or "disabled",
            "usage": None if finished is None else _usage(finished),
            "user": None,
            "metadata": shown["metadata"] or {},
        }

    def _step(self, step: Step, scores: Sequence[TokenLogprob]) -> bytes:
        what, block, text = step
        if what is What.MORE:
            return self._more(block, text, scores)
        if what is What.BEGIN:
            self._before = self._prefix(block)
            item = self._item(block, "in_progress")
            return self._event("response.output_item.added", output_index=block.index, item=item) + self._part_begun(
                block
            )
        return self._end(block)

    def _more(self, block: Block, text: str, scores: Sequence[TokenLogprob]) -> bytes:
        """The event for more text: the same for all but its number and text."""
        if block.kind is BlockKind.TEXT:
            if scores:
                return self._event(
                    "response.output_text.delta",
                    **self._place(block),
                    delta=text,
                    logprobs=list(map(_event_logprob, scores)),
                )
            tail = ',"logprobs":[]}\n\n'
        else:
            tail = "}\n\n"
        self._number += 1
        return f'{self._before}{self._number - 1},"delta":{sse.escaped(text)}{tail}'.encode("ascii")

    def _prefix(self, block: Block) -> str:
        """What stands before the number of an event for more text of the block."""
        name = _DELTAS[block.kind] + ".delta"
        made = sse.named_event(name, {"type": name, **self._place(block), "sequence_number": 0}).decode("ascii")
        return made.removesuffix("0}\n\n")

    def _part_begun(self, block: Block) -> bytes:
        if block.kind is BlockKind.CALL:
            return b""
        return self._event("response.content_part.added", **self._place(block), part=self._part(block, ""))

    def _end(self, block: Block) -> bytes:
        """The events for the end of an item."""
        place, text, name = self._place(block), block.text, _DELTAS[block.kind]
        if block.kind is BlockKind.CALL:
            events = self._event(f"{name}.done", **place, name=block.name, arguments=text)
        else:
            scores = {"logprobs": self._scores(block, _event_logprob)} if block.kind is BlockKind.TEXT else {}
            events = self._event(f"{name}.done", **place, text=text, **scores)
            events += self._event("response.content_part.done", **place, part=self._part(block, text))
        item = self._item(block, "incomplete" if block.refused else "completed")
        return events + self._event("response.output_item.done", output_index=block.index, item=item)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind is BlockKind.CALL else {**place, "content_index": 0}

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}{self._key}_{block.index}"

    def _part(self, block: Block, text: str) -> dict[str, Any]:
        if block.kind is BlockKind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._scores(block)}

    def _scores(
        self, block: Block, made: Callable[[TokenLogprob], dict[str, Any]] = chat_logprob
    ) -> list[dict[str, Any]]:
        return list(map(made, block.logprobs)) if self._scored else []

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind is BlockKind.CALL:
            return {
                **item,
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.text,
            }
        content = [self._part(block, block.text)] if block.pieces else []
        if block.kind is BlockKind.REASONING:
            return {**item, "type": "reasoning", "summary": [], "content": content}
        return {**item, "type": "message", "role": "assistant", "content": content}

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse.named_event(name, {"type": name, **fields, "sequence_number": number})


def _event_logprob(entry: TokenLogprob) -> dict[str, Any]:
    """The log-probabilities of a token in an event for more text, which has no bytes; a part of an item has them."""
    found = chat_logprob(entry)
    bare = [{name: one[name] for name in ("token", "logprob")} for one in (found, *found["top_logprobs"])]
    return {**bare[0], "top_logprobs": bare[1:]}


def key_of(request_id: str) -> str:
    """What the ids of a response and of its items have in common."""
    return request_id.removeprefix("req_")


def _usage(finished: Finished) -> dict[str, Any]:
    return {
        "input_tokens": finished.input_tokens,
        # Writing to the cache costs nothing here, and is counted nowhere.
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.output_tokens,
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
        "total_tokens": finished.input_tokens + finished.output_tokens,
    }


def _error_event(error: ApplianceError, _request_id: str) -> bytes:
    """The event for a stream that fails: OpenAI's clients raise on its ``error``."""
    said = error_object(error)["error"]
    fields = {"type": "error", "code": said["code"], "message": said["message"], "param": said["param"], "error": said}
    return sse.named_event("error", fields)


ERRORS = ErrorForm(lambda error, _request_id: error_object(error), _error_event)
"""Errors of the Responses API."""
