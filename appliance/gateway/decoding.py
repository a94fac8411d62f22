"""Text for tokenizers whose id-to-bytes table is not exact: one question to the text sandbox for each batch of tokens.

The window trick of incremental detokenisation: decode the tokens since the last whole character with and without the
new ones, and show the difference. So a token's text may depend on its left neighbour (WordPiece, odd decoders).
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence

from appliance.gateway.assembler import StopScanner

REPLACEMENT = "\ufffd"
"""How an unfinished character shows at the end of a decoded text."""

Decoder = Callable[["array[int]"], Awaitable[str]]
"""Asks the text sandbox for the text of ids."""


class RemoteAssembler:
    """One request's text, decoded in the text sandbox."""

    def __init__(self, decode: Decoder, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._scanner = StopScanner(stops)
        self._ids: array[int] = array("I")
        self._prefix = 0
        self._shown = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._scanner.stopped

    async def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; gives the text that became final."""
        self._ids.extend(token_ids)
        before = await self._decode(self._ids[self._prefix : self._shown])
        after = await self._decode(self._ids[self._prefix :])
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self._prefix, self._shown = self._shown, len(self._ids)
        return self._scanner.push(after[len(before) :])

    async def finish(self) -> str:
        """The rest at the end of the output."""
        before = await self._decode(self._ids[self._prefix : self._shown])
        after = await self._decode(self._ids[self._prefix :])
        return self._scanner.push(after[len(before) :]) + self._scanner.flush()
