"""Messages of the text sandbox: text to ids, ids to text, and the table of its tokens (``isolation.ipc.messages``)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum


class SourceKind(IntEnum):
    """What ``Encode.source`` holds."""

    TEXT = 1
    """UTF-8 text, tokenised as it is, with the tokenizer's own special tokens added."""
    CHAT = 2
    """UTF-8 JSON for the template: ``{"messages": [], "tools": []?, "template_kwargs": {}?}``."""


@dataclass(frozen=True, slots=True)
class Encode:
    """Turn text or a conversation into token ids."""

    request: int
    kind: SourceKind
    source: bytes
    max_tokens: int
    """More ids than this is ``TOO_LONG``."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Answer to ``Encode``."""

    request: int
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class Decode:
    """Turn ids into text, for tokenizers whose table is not exact."""

    request: int
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class Decoded:
    """Answer to ``Decode``: UTF-8 without special tokens; an unfinished end shows as U+FFFD."""

    request: int
    text: bytes


@dataclass(frozen=True, slots=True)
class ReadVocabulary:
    """Ask for the id-to-bytes table from ``start`` on."""

    request: int
    start: int


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A slice of the id-to-bytes table; special tokens have no bytes."""

    request: int
    start: int
    entries: tuple[bytes, ...]
