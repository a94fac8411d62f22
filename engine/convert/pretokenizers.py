"""Pre-tokenizers of byte-level vocabularies, by the names used in GGUF files: how text is split before merges.

The names are those of llama.cpp's ``src/llama-vocab.cpp``; the patterns come from the published ``tokenizer.json``
files. An unknown name is refused: text split differently than in training gives other ids.
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
    """One way to split text before merges."""

    pattern: str | None
    """Pattern of a piece; None for GPT-2's, which is built into the byte-level step."""
    nfc: bool = False
    """Whether text is first normalised to form C."""
    whole_words: bool = False
    """Whether a piece that is itself a token is used without merges."""


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
"""Every supported pre-tokenizer by name."""
