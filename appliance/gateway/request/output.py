"""Batches of tokens to deltas: text, log-probabilities, and the number of tokens to charge.

Tokens past a stop string are neither shown nor charged. The token that ended the answer (the model's end-of-text token,
a stop id) is charged and has no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from appliance.gateway.generate_request import Delta, FinishReason, TokenLogprob
from appliance.gateway.request.assembler import Assembler, StopScanner
from appliance.gateway.sandboxes.text_link import VocabularyTable
from isolation.ipc.logprob import TokenLogprobs
from isolation.ipc.messages import Finish

REPLACEMENT = "\ufffd"
"""Character that stands for an unfinished one at the end of a decoded text."""

Logprobs = Sequence[TokenLogprobs | None]
"""Log-probabilities, one entry a token, or empty."""

Decoder = Callable[["array[int]"], Awaitable[str]]
"""Asks the text sandbox for the text of token ids."""


class OutputText(Protocol):
    """Text of one output: decoded in this process, decoded in the text sandbox, or read there."""

    refused: str | None
    """Why text that begins like a call is none, where there was some."""
    reasoning_tokens: int
    """Output tokens so far that are reasoning."""

    @property
    def stopped(self) -> str | None:
        """Stop string that ended the text, if one did."""
        ...

    @property
    def over(self) -> bool:
        """Whether the output ends here, whatever the engine does."""
        ...

    def reason(self, finish: Finish) -> FinishReason:
        """Return why the output ended; ``finish`` is the engine's reason."""
        ...

    async def decode(self, token_ids: list[int], logprobs: Logprobs, finish: Finish) -> tuple[Delta, int]:
        """Return the delta of these tokens and how many of them count; ``finish`` says how the last one ends the
        output.

        Raises:
            ApplianceError: the text sandbox could not make it.
        """
        ...

    def close(self) -> None:
        """End the text, before its output has ended or behind it."""
        ...


class PlainText:
    """What outputs without calls and reasoning have in common."""

    __slots__ = ("stopped",)
    refused: str | None = None
    reasoning_tokens = 0

    def __init__(self) -> None:
        self.stopped: str | None = None
        """Stop string that ended the text, if one did."""

    @property
    def over(self) -> bool:
        """Whether the output ends here, whatever the engine does."""
        return self.stopped is not None

    def reason(self, finish: Finish) -> FinishReason:
        """Return why the output ended; ``finish`` is the engine's reason."""
        return FinishReason.LENGTH if finish is Finish.LENGTH and self.stopped is None else FinishReason.STOP

    def close(self) -> None:
        """End the text; nothing is held elsewhere."""


class LocalText(PlainText):
    """Output text by the host's own vocabulary table: a batch is decoded at once, without waiting."""

    __slots__ = ("_assembler", "_choice", "_table")

    def __init__(self, assembler: Assembler, table: VocabularyTable, choice: int = 0) -> None:
        super().__init__()
        self._assembler = assembler
        self._table = table
        self._choice = choice

    def push(self, token_ids: list[int], logprobs: Logprobs, finish: Finish) -> tuple[Delta, int]:
        """Return the delta of these tokens and how many of them count; ``finish`` says how the last one ends the
        output."""
        assembler, used = self._assembler, len(token_ids)
        shown = token_ids[:-1] if finish is Finish.STOP else token_ids
        if not assembler.has_stops:
            # Nothing can end the output inside the batch, so one look-up for the batch gives the same text.
            text = assembler.push(shown)
        else:
            text, used = self._push_singly(shown, used)
        if finish is not Finish.NONE and self.stopped is None:
            text += assembler.finish()
            self.stopped = assembler.stopped
        return made_delta(text, token_ids[:used], logprobs, self._table, self._choice), used

    async def decode(self, token_ids: list[int], logprobs: Logprobs, finish: Finish) -> tuple[Delta, int]:
        """Decode a batch; see ``LocalText.push``."""
        return self.push(token_ids, logprobs, finish)

    def _push_singly(self, shown: list[int], count: int) -> tuple[str, int]:
        """Decode token by token up to a stop string; returns the text and how many of ``count`` tokens were used."""
        text = ""
        for index, token in enumerate(shown):
            text += self._assembler.push((token,))
            if self._assembler.stopped is not None:
                self.stopped = self._assembler.stopped
                return text, index + 1
        return text, count


class RemoteText(PlainText):
    """Output text of a tokenizer whose vocabulary table is not exact: the text sandbox decodes token by token.

    Incremental detokenization with a window: the tokens since the last whole character are decoded with and without the
    new one, and the difference is shown. So a token's text may depend on its left neighbour (as in WordPiece).
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str], table: VocabularyTable | None, choice: int = 0) -> None:
        super().__init__()
        self._decoder = decoder
        self._scanner = StopScanner(stops)
        self._table = table
        self._choice = choice
        self._ids: array[int] = array("I")
        self._prefix = 0
        self._shown = 0

    async def decode(self, token_ids: list[int], logprobs: Logprobs, finish: Finish) -> tuple[Delta, int]:
        """Decode a batch; see ``LocalText.push``."""
        text, used = "", len(token_ids)
        for index, token in enumerate(token_ids[:-1] if finish is Finish.STOP else token_ids):
            text += await self._push(token)
            if self._scanner.stopped is not None:
                used = index + 1
                break
        if finish is not Finish.NONE and self._scanner.stopped is None:
            before, after = await self._window()
            text += self._scanner.push(after[len(before) :]) + self._scanner.flush()
        self.stopped = self._scanner.stopped
        return made_delta(text, token_ids[:used], logprobs, self._table, self._choice), used

    async def _push(self, token: int) -> str:
        self._ids.append(token)
        before, after = await self._window()
        if after.endswith(REPLACEMENT) or len(after) <= len(before):
            return ""
        self._prefix, self._shown = self._shown, len(self._ids)
        return self._scanner.push(after[len(before) :])

    async def _window(self) -> tuple[str, str]:
        """Text of the window without the tokens not shown yet, and with them."""
        before = await self._decoder(self._ids[self._prefix : self._shown])
        return before, await self._decoder(self._ids[self._prefix :])


def made_delta(text: str, shown: list[int], logprobs: Logprobs, table: VocabularyTable | None, choice: int) -> Delta:
    """Return the delta of some tokens with their text."""
    if not logprobs:
        return Delta(text, tuple(shown), (), choice)
    found = tuple(
        _logprob(token, item, table) for token, item in zip(shown, logprobs, strict=False) if item is not None
    )
    return Delta(text, tuple(shown), found, choice)


def _logprob(token: int, item: TokenLogprobs, table: VocabularyTable | None) -> TokenLogprob:
    top = tuple(
        (other, table.bytes_of(other) if table else b"", value)
        for other, value in zip(item.top_ids, item.top_logprobs, strict=True)
    )
    return TokenLogprob(token, table.bytes_of(token) if table else b"", item.logprob, top)
