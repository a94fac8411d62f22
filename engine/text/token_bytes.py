"""Tokenizer in the form required by llguidance: the bytes of every token, and the tokenisation of forced text.

One id is appended: the end. Grammars allow it exactly where the output may end, so its mask bit means "accepting"
whatever ids end a text in the model; the engine maps it to those. Special tokens have no bytes in the table, so no text
of a grammar can spell one; a rule can name one by its id, as those of calls do (``engine.text.output.spelling``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import RequestRejectedError
from engine.text.output.format import OutputFormat
from engine.text.output.spelling import Spelling

_END = b"\xffend"
"""Bytes of the appended id; 0xFF marks a token without text."""


@dataclass(frozen=True, slots=True)
class Words:
    """Facts about a model's tokenizer that grammars need."""

    entries: Sequence[bytes]
    """Bytes by token id; concatenation gives the text."""
    fragment: Callable[[str], list[int]]
    """Tokenises a piece of text; may raise ``RequestRejectedError``."""
    form: OutputFormat = field(default_factory=OutputFormat)
    """Format of the model's outputs."""
    spelling: Spelling = field(default_factory=lambda: Spelling((), {}))
    """Markers of that format in the model's tokens."""

    @property
    def mask_bytes(self) -> int:
        """Return the bytes of a mask over all ids, in whole 32-bit words."""
        return -(-len(self.entries) // 32) * 4


def build_tokenizer(words: Words) -> Any:
    """Build llguidance's tokenizer, an ``LLTokenizer``: half a second for 150,000 ids."""
    import llguidance

    adapter = _Adapter(words)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(adapter))
    adapter.greedy = tokenizer.greedy_tokenize
    return tokenizer


class _Adapter:
    """Provides the attributes and the call that ``TokenizerWrapper`` requires of a tokenizer."""

    def __init__(self, words: Words) -> None:
        end = len(words.entries)
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens = [*words.entries, _END]
        self.special_token_ids = [end]
        self.greedy: Callable[[str], list[int]] | None = None
        self._words = words

    def __call__(self, text: bytes) -> list[int]:
        """Return ids of forced bytes. Where the tokenizer would change the text (by adding a leading space), the
        longest matching tokens are used one after the other."""
        if self.greedy is None:
            return []
        piece = text.decode("utf-8", "replace")
        try:
            ids = self._words.fragment(piece)
        except RequestRejectedError:
            return self.greedy(piece)
        return ids if b"".join([self._words.entries[token_id] for token_id in ids]) == text else self.greedy(piece)
