"""How much text one token can stand for, by tokenizer.json: a bound on the text that so many tokens can come from.

Most published byte-level vocabularies have such a bound. Others have none: normalisers that collapse blanks,
pre-tokenisers that remove them, added tokens that take the blanks around them along, models that make one unknown token
of any length of text. Everything that is not known to keep all characters counts as one of those. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MOST_COMPOSED = 4
"""Characters of which Unicode's composition makes one, at most: no canonical decomposition has more (UAX 15)."""

BYTES = 256
"""Different bytes; GPT-2's alphabet has a letter for each."""

_COMPOSE = frozenset(("NFC", "NFKC"))
_KEEP = frozenset(("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"))
_SPLIT = frozenset(("ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"))


def most_characters(spec: Mapping[str, Any], longest: int) -> int:
    """Return the characters of text that one token can stand for, at most; 0 where nothing bounds them.

    Args:
        spec: content of a tokenizer.json.
        longest: characters of the longest token, as the vocabulary spells it.
    """
    normalisers, splitters = list(_flat(spec.get("normalizer"))), list(_flat(spec.get("pre_tokenizer")))
    if any(token.get("lstrip") or token.get("rstrip") for token in spec.get("added_tokens") or []):
        return 0
    if not _spells_all(spec["model"], splitters) or not all(map(_splits, splitters)):
        return 0
    if not all(map(_keeps, normalisers)):
        return 0
    return longest * (MOST_COMPOSED if any(part.get("type") in _COMPOSE for part in normalisers) else 1)


def _flat(part: object) -> Iterator[Mapping[str, Any]]:
    """Yield a part of the pipeline, or of a sequence its parts."""
    if not isinstance(part, dict):
        return
    if part.get("type") != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or []:
        yield from _flat(inner)


def _keeps(normaliser: Mapping[str, Any]) -> bool:
    """Return whether a normaliser leaves nothing out, but for composing characters."""
    if normaliser.get("type") == "Replace":
        pattern, content = normaliser.get("pattern"), normaliser.get("content")
        old = pattern.get("String") if isinstance(pattern, dict) else None
        return isinstance(old, str) and isinstance(content, str) and len(content) >= len(old)
    return normaliser.get("type") in _COMPOSE | _KEEP


def _splits(splitter: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokeniser leaves nothing out."""
    return splitter.get("type") in _SPLIT and splitter.get("behavior") != "Removed"


def _spells_all(model: Mapping[str, Any], splitters: list[Mapping[str, Any]]) -> bool:
    """Return whether the model has a token for each byte, and so never an unknown one."""
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict):
        return False
    if any(part.get("type") == "ByteLevel" for part in splitters):
        return sum(len(token) == 1 for token in vocabulary) >= BYTES
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(BYTES))
