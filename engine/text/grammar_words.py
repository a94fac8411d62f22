"""A tokenizer as llguidance takes it: the bytes of every token, and how a forced piece of text is cut into tokens.

One id is added behind the last: the end. Grammars allow it exactly where the output may end, so its bit of a mask says
"accepting" whatever ids end a text in the model; which those are is the engine's business. Special tokens have no
bytes in the table, so no grammar can ask for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestRejectedError

_END = b"\xffend"
"""Bytes of the added id; 0xFF marks a token that stands for no text."""


@dataclass(frozen=True, slots=True)
class Words:
    """What grammars need to know of a model's tokenizer."""

    entries: Sequence[bytes]
    """Bytes by token id; joining them gives the text."""
    fragment: Callable[[str], list[int]]
    """Ids of a piece of text as the tokenizer cuts it; may raise ``RequestRejectedError``."""

    @property
    def mask_bytes(self) -> int:
        """Bytes of a mask over all ids, in whole 32-bit words."""
        return -(-len(self.entries) // 32) * 4


def build_tokenizer(words: Words) -> Any:
    """llguidance's tokenizer, an ``LLTokenizer``: half a second for 150,000 ids."""
    import llguidance

    adapter = _Adapter(words)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(adapter))
    adapter.greedy = tokenizer.greedy_tokenize
    return tokenizer


class _Adapter:
    """The attributes and the call that ``TokenizerWrapper`` asks of a tokenizer."""

    def __init__(self, words: Words) -> None:
        end = len(words.entries)
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens = [*words.entries, _END]
        self.special_token_ids = [end]
        self.greedy: Callable[[str], list[int]] | None = None
        self._words = words

    def __call__(self, text: bytes) -> list[int]:
        """Ids of forced bytes. Where the tokenizer would change the text (a space put before it), the longest tokens
        that fit are taken one after the other."""
        if self.greedy is None:
            return []
        piece = text.decode("utf-8", "replace")
        try:
            ids = self._words.fragment(piece)
        except RequestRejectedError:
            return self.greedy(piece)
        return ids if b"".join([self._words.entries[token_id] for token_id in ids]) == text else self.greedy(piece)
