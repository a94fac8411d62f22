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


class OutputText:
    """One request's output text, whichever way its tokens are decoded."""

    def __init__(self, assembler: Assembler | RemoteAssembler, table: VocabularyTable | None) -> None:
        self._assembler = assembler
        self._table = table

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._assembler.stopped

    async def push(
        self, token_ids: list[int], logprobs: Sequence[TokenLogprobs | None], *, hide_last: bool
    ) -> tuple[Delta, int]:
        """The delta of these tokens and how many of them count; ``hide_last``: the last one has no text."""
        if isinstance(self._assembler, Assembler) and not self._assembler.has_stops:
            # Nothing can end the output inside the batch: one look-up for all of it, the same text.
            text, used = self._assembler.push(token_ids[:-1] if hide_last else token_ids), len(token_ids)
        else:
            text, used = await self._push_each(token_ids, hide_last=hide_last)
        shown = token_ids[:used]
        found = tuple(
            self._logprob(token, item)
            for token, item in zip(shown, logprobs, strict=False)
            if item is not None
        )
        return Delta(text, tuple(shown), found), used

    async def _push_each(self, token_ids: list[int], *, hide_last: bool) -> tuple[str, int]:
        """Token by token, up to the one that completes a stop string; gives the text and how many tokens count."""
        text, used = "", 0
        for index, token in enumerate(token_ids):
            used += 1
            if hide_last and index == len(token_ids) - 1:
                break
            text += await self._push_one(token)
            if self.stopped is not None:
                break
        return text, used

    async def finish(self) -> str:
        """Text that was held back, at the end of the output."""
        if isinstance(self._assembler, Assembler):
            return self._assembler.finish()
        return await self._assembler.finish()

    async def _push_one(self, token: int) -> str:
        if isinstance(self._assembler, Assembler):
            return self._assembler.push((token,))
        return await self._assembler.push((token,))

    def _logprob(self, token: int, item: TokenLogprobs) -> TokenLogprob:
        table = self._table
        top = tuple(
            (other, table.bytes_of(other) if table else b"", value)
            for other, value in zip(item.top_ids, item.top_logprobs, strict=True)
        )
        return TokenLogprob(token, table.bytes_of(token) if table else b"", item.logprob, top)
