"""Output text of a model that reasons between two tokens, told apart on the host: no hop to the text sandbox.

It is for requests without tools. Reasoning stands at the beginning of an output, between a token that begins it and one
that ends it; white space around it is the format's own and is dropped, as the text sandbox does where it reads an
output (``engine.text.output.parts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from appliance.gateway.generate_request import Delta
from appliance.gateway.request.assembler import Assembler
from appliance.gateway.request.output import Logprobs, PlainText, made_delta
from appliance.gateway.sandboxes.text_link import VocabularyTable
from isolation.ipc.messages import Finish
from isolation.ipc.output import Thinking

SPACE = " \t\r\n"
"""White space of JSON and of chat templates."""


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """Ids of the tokens around reasoning."""

    begins: int
    ends: int


class _Reasoning:
    """Text of the reasoning: without the white space at its beginning and its end."""

    def __init__(self, table: VocabularyTable) -> None:
        self._assembler = Assembler(table)
        self._begun = False
        self._space = ""

    def push(self, token_ids: Sequence[int], *, ends: bool) -> str:
        """Add tokens; returns what is certain. ``ends``: whether no more will come."""
        text = self._assembler.push(token_ids)
        if ends:
            text += self._assembler.finish()
        if not self._begun:
            text = text.lstrip(SPACE)
        kept = text.rstrip(SPACE)
        if not kept:
            self._space += text if self._begun else ""
            return ""
        shown, self._space, self._begun = self._space + kept, text[len(kept) :], True
        return shown


class ThinkingText(PlainText):
    """Output text with its reasoning apart, by the host's own vocabulary table."""

    def __init__(
        self,
        table: VocabularyTable,
        stops: Sequence[str],
        marks: ThinkingMarks,
        state: Thinking,
        choice: int = 0,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        """``stops`` end the content; ``state``: where the prompt leaves the reasoning; ``shows_reasoning``: whether the
        caller gets it."""
        super().__init__()
        self._table = table
        self._marks = marks
        self._choice = choice
        self._shows_reasoning = shows_reasoning
        self._content = Assembler(table, stops)
        self._reasoning = _Reasoning(table)
        self._state = state
        self._may_repeat = state is Thinking.BEGUN
        self._lead: list[int] = []
        """Tokens of white space before what may be reasoning."""
        self._trims = False
        """Whether white space at the beginning of the content is dropped, as it stands behind reasoning."""
        self.reasoning_tokens = 0

    async def decode(self, token_ids: list[int], logprobs: Logprobs, finish: Finish) -> tuple[Delta, int]:
        """Decode a batch; see ``LocalText.push``."""
        return self.push(token_ids, logprobs, finish)

    def push(self, token_ids: list[int], logprobs: Logprobs, finish: Finish) -> tuple[Delta, int]:
        """Return the delta of these tokens and how many of them count; see ``LocalText.push``."""
        shown = token_ids[:-1] if finish is Finish.STOP else token_ids
        thought = self.reasoning_tokens
        reasoning, at = self._think(shown, over=finish is not Finish.NONE)
        text, used = self._answer(shown, at, len(token_ids))
        if finish is not Finish.NONE and self.stopped is None:
            text += self._trimmed(self._content.push(self._lead) + self._content.finish())
            self.stopped = self._content.stopped
        # Ids and log-probabilities would spell what is hidden: a batch that holds some of it has none.
        hidden = not self._shows_reasoning and self.reasoning_tokens > thought
        delta = made_delta(
            text, [] if hidden else token_ids[:used], () if hidden else logprobs, self._table, self._choice
        )
        return replace(delta, reasoning=reasoning) if reasoning and self._shows_reasoning else delta, used

    def _think(self, token_ids: list[int], *, over: bool) -> tuple[str, int]:
        """Take the tokens of the reasoning; returns its new text and the place of the first token behind it. ``over``:
        whether the output ends."""
        marks, at = self._marks, 0
        while self._state is Thinking.POSSIBLE and at < len(token_ids):
            token = token_ids[at]
            if token == marks.begins:
                self._state, self._lead = Thinking.BEGUN, []
                self.reasoning_tokens += 1
            elif self._is_text(token):
                self._state = Thinking.NONE
                break
            else:
                self._lead.append(token)
            at += 1
        if self._state is not Thinking.BEGUN:
            return "", at
        rest = token_ids[at:]
        end = rest.index(marks.ends) if marks.ends in rest else len(rest)
        text = self._reasoning.push(self._without_repeat(rest[:end]), ends=over or end < len(rest))
        self.reasoning_tokens += min(end + 1, len(rest))
        if end < len(rest):
            self._state, self._trims = Thinking.NONE, True
        return text, at + min(end + 1, len(rest))

    def _without_repeat(self, token_ids: list[int]) -> list[int]:
        """Leave out the token that begins reasoning where the prompt has begun it and a model begins it again."""
        for place, token in enumerate(token_ids if self._may_repeat else ()):
            if token == self._marks.begins:
                self._may_repeat = False
                return token_ids[place + 1 :]
            if self._is_text(token):
                self._may_repeat = False
                break
        return token_ids

    def _is_text(self, token: int) -> bool:
        return bool(self._table.bytes_of(token).decode("utf-8", "replace").strip(SPACE))

    def _answer(self, token_ids: list[int], at: int, count: int) -> tuple[str, int]:
        """Take the tokens of the content; returns its new text and how many of ``count`` tokens were used."""
        if at == len(token_ids):
            return "", count
        text = self._trimmed(self._content.push(self._lead)) if self._lead else ""
        self._lead = []
        if not self._content.has_stops:
            return text + self._trimmed(self._content.push(token_ids[at:])), count
        for index in range(at, len(token_ids)):
            text += self._trimmed(self._content.push((token_ids[index],)))
            if self._content.stopped is not None:
                self.stopped = self._content.stopped
                return text, index + 1
        return text, count

    def _trimmed(self, text: str) -> str:
        if not self._trims:
            return text
        text = text.lstrip(SPACE)
        self._trims = not text
        return text
