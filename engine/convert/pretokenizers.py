"""How byte-level vocabularies cut text before their merges apply, by the names that GGUF files use for it.

The names are those of llama.cpp's ``src/llama-vocab.cpp``; the patterns are the published ``tokenizer.json`` files'
own. A name that is not here is refused: text that is cut otherwise than in training gives other ids.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """One way to cut text."""

    pattern: str | None
    """What a piece looks like; None for GPT-2's, which the byte-level step has built in."""
    nfc: bool = False
    """Text is brought into normal form C first."""
    whole_words: bool = False
    """A piece that is a token is taken as it is, without merges."""


_LLAMA3 = Pretokenizer(_CONTRACTIONS + "|" + _REST % r"\p{N}{1,3}", whole_words=True)
_QWEN2 = Pretokenizer(_CONTRACTIONS + "|" + _REST % r"\p{N}", nfc=True)

PRETOKENIZERS = {
    "gpt-2": Pretokenizer(None),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": Pretokenizer(_QWEN2.pattern),
    "tekken": Pretokenizer(_TEKKEN, whole_words=True),
}
"""Every way that is known."""
