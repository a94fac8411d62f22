"""The messages of structured output: which tokens may come next, asked of the text sandbox and told to the engine.

Bounds and integers are as in ``messages``, of which these are a part.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum

MAX_GRAMMAR_BYTES = 256 << 10
"""Bytes of the grammar in one ``OpenGrammar``: twice the largest published JSON schemas that one answers by."""
MAX_MASK_ROWS = 4_096
"""Requests in one ``Advance`` or ``Masks``, as many as an engine runs at once."""
GRAMMAR_TENANT_BYTES = 16
"""Bytes of the name that stands for a tenant where compiled grammars are kept."""


class GrammarKind(IntEnum):
    """What ``OpenGrammar.source`` holds, UTF-8."""

    JSON_SCHEMA = 1
    """A JSON Schema; a keyword that is known and not implemented is refused."""
    JSON_SCHEMA_LENIENT = 2
    """A JSON Schema; a keyword that is known and not implemented is passed over."""
    REGEX = 3
    """A regular expression for the whole output."""
    LARK = 4
    """A grammar in llguidance's dialect of Lark."""
    CHOICE = 5
    """A JSON array of strings, one of which is the output."""


class MaskState(IntEnum):
    """What the output so far is to its grammar."""

    OPEN = 0
    """It must go on."""
    ACCEPTING = 1
    """It may end here."""
    BROKEN = 2
    """The grammar cannot be followed further: it is too complex, or its process ended. The mask is empty."""


@dataclass(frozen=True, slots=True)
class OpenGrammar:
    """Compile a grammar, or find it compiled for this tenant, and follow it for this request. Answered by ``Masks``
    with the request's first row, or by ``Failed``: ``INVALID``, ``TOO_LONG`` (it takes too much to compile),
    ``OVERLOADED``."""

    request: int
    tenant: bytes
    """``GRAMMAR_TENANT_BYTES`` bytes that stand for whose it is."""
    kind: GrammarKind
    source: bytes
    keep: bool = True
    """Whether what was compiled may serve later requests of the tenant; if not, it goes with the last that follows
    it."""


@dataclass(frozen=True, slots=True)
class Advance:
    """The next token of each of these requests, in parallel arrays (typecodes ``Q`` and ``I``); each is answered by
    a row of ``Masks``, a request that is not open by nothing."""

    requests: array[int]
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class CloseGrammar:
    """The request has ended. Idempotent; an unknown id is ignored."""

    request: int


@dataclass(frozen=True, slots=True)
class Masks:
    """Which tokens may come next, one row a request, from the text sandbox to the host and on to the engine.

    ``requests`` (typecode ``Q``), ``positions`` (``I``) and ``states`` run in parallel; ``words`` holds for each of
    them the same number of 32-bit words, bit ``i % 32`` of word ``i // 32`` for token ``i``. Ids beyond are not
    allowed."""

    requests: array[int] = field(default_factory=lambda: array("Q"))
    positions: array[int] = field(default_factory=lambda: array("I"))
    """Output tokens of the request before the one that the mask is for."""
    states: bytes = b""
    """One ``MaskState`` a request."""
    words: bytes = b""

    @property
    def width(self) -> int:
        """Bytes of one row's mask."""
        return len(self.words) // len(self.requests) if self.requests else 0
