"""The prompt as part of an answer: its tokens with their log-probabilities, and its text, where the caller asked.

The engine sends log-probabilities part by part while it computes the prompt; ``PromptScores`` checks that the parts
follow each other and stay inside what was asked for. They are handed on in one event, before any output.
"""

from __future__ import annotations

from array import array

from appliance.gateway.generate_request import PromptToken, PromptTokens
from appliance.gateway.request.output import OutputText
from appliance.gateway.sandboxes.stream import PromptScores
from appliance.gateway.sandboxes.text_link import VocabularyTable
from isolation.ipc.messages import Finish

MAX_NUMBERS = 32_768
"""Log-probabilities of one prompt, alternatives included: some megabytes as JSON, made in less than a tenth of a
second."""


class PromptReport:
    """Makes the event that shows one prompt. ``text``: a fresh decoder, where the prompt's text is asked for."""

    def __init__(
        self, token_ids: array[int], scores: PromptScores | None, table: VocabularyTable | None, text: OutputText | None
    ) -> None:
        self._token_ids = token_ids
        self._scores = scores
        self._table = table
        self._text = text

    @property
    def ready(self) -> bool:
        """Whether the log-probabilities are complete."""
        return self._scores is None or self._scores.complete

    async def event(self) -> PromptTokens:
        """Return the event; to be called when ``ready``."""
        return PromptTokens(await self._decoded(), self._tokens())

    async def _decoded(self) -> str:
        if self._text is None:
            return ""
        delta, _ = await self._text.decode(self._token_ids.tolist(), (), Finish.LENGTH)
        return delta.text

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
