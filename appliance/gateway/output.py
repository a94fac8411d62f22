"""Batches of tokens to deltas: text, logprobs, and how many of the tokens count.

Tokens past a stop string are neither shown nor charged; the token that ended the answer (the model's end-of-text, a
stop id) is charged but has no text.
"""

from __future__ import annotations

from collections.abc import Sequence

from appliance.gateway.assembler import Assembler, VocabularyTable
from appliance.gateway.decoding import RemoteAssembler
from appliance.request import Delta, TokenLogprob
from isolation.ipc.messages import TokenLogprobs

Logprobs = Sequence[TokenLogprobs | None]
"""In parallel with the tokens, or empty."""


class LocalText:
    """One request's output text by the host's own table: at once, the whole batch in one look-up."""

    def __init__(self, assembler: Assembler, table: VocabularyTable) -> None:
        self._assembler = assembler
        self._table = table

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._assembler.stopped

    def push(self, token_ids: list[int], logprobs: Logprobs, *, hide_last: bool) -> tuple[Delta, int]:
        """The delta of these tokens and how many of them count; ``hide_last``: the last one has no text."""
        used = len(token_ids)
        if not self._assembler.has_stops:
            # Nothing can end the output inside the batch: one look-up for all of it, the same text.
            text = self._assembler.push(token_ids[:-1] if hide_last else token_ids)
            return _delta(text, token_ids, logprobs, self._table), used
        text = ""
        for index, token in enumerate(token_ids):
            if hide_last and index == len(token_ids) - 1:
                break
            text += self._assembler.push((token,))
            if self.stopped is not None:
                used = index + 1
                break
        return _delta(text, token_ids[:used], logprobs, self._table), used

    def finish(self) -> str:
        """Text that was held back, at the end of the output."""
        return self._assembler.finish()


class RemoteText:
    """The same for a tokenizer whose table is not exact: decoded in the text sandbox, token by token."""

    def __init__(self, assembler: RemoteAssembler, table: VocabularyTable | None) -> None:
        self._assembler = assembler
        self._table = table

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._assembler.stopped

    async def push(self, token_ids: list[int], logprobs: Logprobs, *, hide_last: bool) -> tuple[Delta, int]:
        """As ``LocalText.push``."""
        text, used = "", len(token_ids)
        for index, token in enumerate(token_ids):
            if hide_last and index == len(token_ids) - 1:
                break
            text += await self._assembler.push((token,))
            if self.stopped is not None:
                used = index + 1
                break
        return _delta(text, token_ids[:used], logprobs, self._table), used

    async def finish(self) -> str:
        """As ``LocalText.finish``."""
        return await self._assembler.finish()


def _delta(text: str, shown: list[int], logprobs: Logprobs, table: VocabularyTable | None) -> Delta:
    if not logprobs:
        return Delta(text, tuple(shown))
    found = tuple(
        _logprob(token, item, table) for token, item in zip(shown, logprobs, strict=False) if item is not None
    )
    return Delta(text, tuple(shown), found)


def _logprob(token: int, item: TokenLogprobs, table: VocabularyTable | None) -> TokenLogprob:
    top = tuple(
        (other, table.bytes_of(other) if table else b"", value)
        for other, value in zip(item.top_ids, item.top_logprobs, strict=True)
    )
    return TokenLogprob(token, table.bytes_of(token) if table else b"", item.logprob, top)
