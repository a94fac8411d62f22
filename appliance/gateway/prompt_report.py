"""The prompt as part of an answer: its tokens with their log-probabilities, and its text, where the caller asked.

The engine sends log-probabilities part by part while it computes the prompt; ``PromptScores`` checks that the parts
follow each other and stay inside what was asked for. They are handed on in one event, before any output.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from appliance.gateway.assembler import VocabularyTable
from appliance.gateway.output import LocalText, RemoteText
from appliance.request import PromptToken, PromptTokens
from isolation.ipc.messages import PromptLogprobs

MAX_NUMBERS = 32_768
"""Log-probabilities of one prompt, alternatives included: some megabytes as JSON, made in less than a tenth of a
second."""


@dataclass(slots=True)
class PromptScores:
    """What has arrived of one prompt's log-probabilities."""

    length: int
    """Tokens of the prompt."""
    alternatives: int
    """Asked for beside each token."""
    place: int = 1
    """Position that comes next; the first token has none."""
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    top_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("d"))

    @property
    def complete(self) -> bool:
        """Whether every token but the first has its number."""
        return self.place >= self.length

    @property
    def width(self) -> int:
        """Alternatives of each position: those asked for, or fewer in a tiny vocabulary."""
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0

    def take(self, part: PromptLogprobs, vocab_size: int) -> bool:
        """Add a part; says whether it is one that may come now."""
        fits = (
            part.start == self.place
            and self.place + len(part.logprobs) <= self.length
            and part.width <= self.alternatives
            and (not self.logprobs or part.width == self.width)
            and max(part.top_ids, default=0) < vocab_size
        )
        if fits:
            self.place += len(part.logprobs)
            self.logprobs.extend(part.logprobs)
            self.top_ids.extend(part.top_ids)
            self.top_logprobs.extend(part.top_logprobs)
        return fits


class PromptReport:
    """Makes the event for one prompt. ``text``: a fresh decoder, where the prompt's text is wanted."""

    def __init__(
        self,
        token_ids: array[int],
        scores: PromptScores | None,
        table: VocabularyTable | None,
        text: LocalText | RemoteText | None,
    ) -> None:
        self._token_ids = token_ids
        self._scores = scores
        self._table = table
        self._text = text

    @property
    def ready(self) -> bool:
        """Whether nothing is missing any more."""
        return self._scores is None or self._scores.complete

    async def event(self) -> PromptTokens:
        """The prompt; only when ``ready``."""
        return PromptTokens(await self._decoded(), self._tokens())

    async def _decoded(self) -> str:
        if self._text is None:
            return ""
        pushed = self._text.push(self._token_ids.tolist(), (), hide_last=False)
        delta, _ = pushed if isinstance(pushed, tuple) else await pushed
        rest = self._text.finish()
        return delta.text + (rest if isinstance(rest, str) else await rest)

    def _tokens(self) -> tuple[PromptToken, ...]:
        scores = self._scores
        if scores is None:
            return ()
        ids, width = self._token_ids, scores.width
        found = [PromptToken(ids[0], self._bytes(ids[0]), None)]
        for index, logprob in enumerate(scores.logprobs):
            part = slice(index * width, (index + 1) * width)
            top = tuple(
                (one, self._bytes(one), value)
                for one, value in zip(scores.top_ids[part], scores.top_logprobs[part], strict=True)
            )
            found.append(PromptToken(ids[index + 1], self._bytes(ids[index + 1]), logprob, top))
        return tuple(found)

    def _bytes(self, token_id: int) -> bytes:
        return self._table.bytes_of(token_id) if self._table is not None else b""
