"""Output text of a model with calls or reasoning: the text sandbox reads the tokens, and its parts become deltas."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

from appliance.common.errors import InternalError
from appliance.gateway.generate_request import CallDelta, Delta, FinishReason
from appliance.gateway.request.assembler import StopScanner
from appliance.gateway.request.output import Logprobs, made_delta
from appliance.gateway.sandboxes.output_reading import OutputReading
from appliance.gateway.sandboxes.text_link import VocabularyTable
from isolation.ipc.messages import Finish
from isolation.ipc.output import MAX_CALLS, Part, PartKind

CALL_ID_BYTES = 12
"""Random bytes of a call's id: unique among the calls of a conversation, unguessable for others."""


class ReadText:
    """Output text that a text sandbox reads.

    The sandbox is hostile to the host: calls must be of tools that the request has, and in order. What they say can
    harm the request's own answer alone.
    """

    def __init__(
        self,
        reading: OutputReading,
        names: frozenset[str],
        stops: Sequence[str],
        table: VocabularyTable | None,
        choice: int = 0,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        """``names`` are of the tools that may be called; ``stops`` end the content; ``shows_reasoning``: whether the
        caller gets it."""
        self._reading = reading
        self._names = names
        self._scanner = StopScanner(stops)
        self._table = table
        self._choice = choice
        self._shows_reasoning = shows_reasoning
        self._calls = 0
        self._open = False
        self._complete = 0
        self._over = False
        self.refused: str | None = None
        """Why text that begins like a call is none."""
        self.reasoning_tokens = 0
        """Output tokens so far that are reasoning."""

    @property
    def stopped(self) -> str | None:
        """Stop string that ended the text, if one did."""
        return self._scanner.stopped

    @property
    def over(self) -> bool:
        """Whether the output ends here, whatever the engine does."""
        return self._over or self.stopped is not None

    def reason(self, finish: Finish) -> FinishReason:
        """Return why the output ended."""
        if not self.over and finish is Finish.LENGTH:
            return FinishReason.LENGTH
        return FinishReason.TOOL_CALLS if self._complete and not self._open else FinishReason.STOP

    async def decode(self, token_ids: list[int], logprobs: Logprobs, finish: Finish) -> tuple[Delta, int]:
        """Read a batch; see ``LocalText.push``."""
        shown = token_ids[:-1] if finish is Finish.STOP else token_ids
        answer = await self._reading.push(shown, finish)
        hidden = not self._shows_reasoning and answer.reasoning_tokens > self.reasoning_tokens
        self.reasoning_tokens = answer.reasoning_tokens
        content, reasoning, used = "", "", len(token_ids)
        calls: list[CallDelta] = []
        for part in answer.parts:
            if part.kind is PartKind.CONTENT:
                content += self._scanner.push(part.text)
                if self.stopped is not None:
                    used = min(used, part.token + 1)
                    break
            elif part.kind is PartKind.REASONING:
                reasoning += part.text
            else:
                self._call(part, calls)
        if answer.over and self.stopped is None:
            self._over = True
            used = min(used, answer.parts[-1].token + 1) if answer.parts else used
        if (finish is not Finish.NONE or self._over) and self.stopped is None:
            content += self._scanner.flush()
        # Ids and log-probabilities would spell what is hidden: a batch that holds some of it has none.
        shown, scores = ([], ()) if hidden else (token_ids[:used], logprobs)
        delta = made_delta(content, shown, scores, self._table, self._choice)
        return replace(delta, reasoning=reasoning if self._shows_reasoning else "", calls=tuple(calls)), used

    def close(self) -> None:
        """End the reading."""
        self._reading.close()

    def _call(self, part: Part, calls: list[CallDelta]) -> None:
        """Take a part of a call."""
        if part.kind is PartKind.CALL:
            if self._open or part.text not in self._names or self._calls >= MAX_CALLS:
                raise InternalError("what reads the model's output told of a call that cannot be")
            self._open = True
            calls.append(CallDelta(self._calls, part.text, "call_" + secrets.token_hex(CALL_ID_BYTES)))
            return
        if part.kind is PartKind.REFUSED:
            self.refused = part.text
            if self._open:
                calls.append(CallDelta(self._calls, refused=True))
                self._next()
            return
        if not self._open:
            raise InternalError("what reads the model's output told of a call that had not begun")
        if part.kind is PartKind.CALLED:
            self._complete += 1
            self._next()
        elif calls and calls[-1].index == self._calls and not calls[-1].refused:
            calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + part.text)
        else:
            calls.append(CallDelta(self._calls, arguments=part.text))

    def _next(self) -> None:
        self._open = False
        self._calls += 1
