"""Log-probabilities inside a ``StepOutput``: of its tokens, and of prompts; their types and their columns.

* logprobs: columns index n x u32, logprob n x f64, alternatives of each n x u8, then all ids n x u32 and all values
  n x f64;
* prompts: heads n x (request u64, start u32, positions u32, alternatives of each u8), then all logprobs n x f64, ids
  n x u32 and values n x f64.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import isfinite

from isolation.ipc.frame import Frame, require, require_array, require_length, require_range, take_array
from isolation.ipc.messages import MAX_TOKENS_PER_FRAME, MAX_TOKENS_PER_REQUEST, MAX_TOP_LOGPROBS

_LOGPROB_BYTES = 4 + 8 + 1
_ALTERNATIVE_BYTES = 4 + 8
_PROMPT = struct.Struct("<QIIB")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities beside one token event."""

    index: int
    """Position in the frame's parallel arrays; ascends within a frame, each at most once."""
    logprob: float
    """Finite, as are the alternatives'."""
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens of one request, each given the tokens before it. A request's
    entries follow each other without a gap, from position 1 on, and are complete before its first token.

    Three columns: ``logprobs`` (typecode ``d``) one a position; ``top_ids`` (``I``) and ``top_logprobs`` (``d``) the
    alternatives, position after position, the same number for each, at most ``MAX_TOP_LOGPROBS``."""

    request: int
    start: int
    """Position of the first token."""
    logprobs: array[float]
    top_ids: array[int] = field(default_factory=lambda: array("I"))
    top_logprobs: array[float] = field(default_factory=lambda: array("d"))

    @property
    def width(self) -> int:
        """Alternatives of each position."""
        return len(self.top_ids) // len(self.logprobs)


def logprobs_size(num_entries: int, num_alternatives: int) -> int:
    """Bytes of the columns of the tokens' entries."""
    return _LOGPROB_BYTES * num_entries + _ALTERNATIVE_BYTES * num_alternatives


def prompts_size(num_entries: int, num_positions: int, num_alternatives: int) -> int:
    """Bytes of the prompts' entries."""
    return _PROMPT.size * num_entries + 8 * num_positions + _ALTERNATIVE_BYTES * num_alternatives


def check_logprobs(entries: tuple[TokenLogprobs, ...], num_tokens: int) -> None:
    """Raise ``OutOfBoundsError`` unless these entries fit a frame of so many tokens."""
    require(
        all(before.index < after.index for before, after in pairwise(entries))
        and entries[0].index >= 0
        and entries[-1].index < num_tokens,
        "positions of logprobs do not ascend within the frame's tokens",
    )
    for entry in entries:
        require_length("alternatives", len(entry.top_ids), MAX_TOP_LOGPROBS)
        require(len(entry.top_ids) == len(entry.top_logprobs), "alternatives and their logprobs have different lengths")
        require(isfinite(entry.logprob) and all(map(isfinite, entry.top_logprobs)), "a logprob is not finite")


def check_prompts(entries: tuple[PromptLogprobs, ...]) -> None:
    """Raise ``OutOfBoundsError`` unless these entries fit a frame."""
    require_length("positions of prompts", sum(len(entry.logprobs) for entry in entries), MAX_TOKENS_PER_FRAME)
    for entry in entries:
        require_array("logprobs of a prompt", entry.logprobs, "d")
        require_array("alternatives of a prompt", entry.top_ids, "I")
        require_array("their logprobs", entry.top_logprobs, "d")
        positions = len(entry.logprobs)
        require_range("positions of a prompt", positions, 1, MAX_TOKENS_PER_REQUEST)
        require_range("start", entry.start, 1, MAX_TOKENS_PER_REQUEST)
        require(
            len(entry.top_ids) == len(entry.top_logprobs) == entry.width * positions
            and entry.width <= MAX_TOP_LOGPROBS,
            "alternatives of a prompt are not the same number for each position",
        )
        require(
            all(map(isfinite, entry.logprobs)) and all(map(isfinite, entry.top_logprobs)), "a logprob is not finite"
        )


def pack_logprobs(entries: tuple[TokenLogprobs, ...]) -> tuple[bytes, ...]:
    """The columns of some entries."""
    return (
        array("I", [entry.index for entry in entries]).tobytes(),
        array("d", [entry.logprob for entry in entries]).tobytes(),
        bytes(len(entry.top_ids) for entry in entries),
        array("I", chain.from_iterable(entry.top_ids for entry in entries)).tobytes(),
        array("d", chain.from_iterable(entry.top_logprobs for entry in entries)).tobytes(),
    )


def pack_prompts(entries: tuple[PromptLogprobs, ...]) -> tuple[bytes, ...]:
    """Heads and columns of some entries."""
    return (
        *(_PROMPT.pack(one.request, one.start, len(one.logprobs), one.width) for one in entries),
        *(one.logprobs.tobytes() for one in entries),
        *(one.top_ids.tobytes() for one in entries),
        *(one.top_logprobs.tobytes() for one in entries),
    )


def unpack_logprobs(columns: Frame, num_entries: int, num_alternatives: int) -> tuple[TokenLogprobs, ...]:
    """Entries of columns whose total length the caller has checked."""
    at_chosen = 4 * num_entries
    at_counts = at_chosen + 8 * num_entries
    at_ids = at_counts + num_entries
    at_values = at_ids + 4 * num_alternatives
    indices = take_array("I", columns, 0, at_chosen)
    chosen = array("d", columns[at_chosen:at_counts])
    counts = columns[at_counts:at_ids]
    ids = take_array("I", columns, at_ids, at_values)
    values = array("d", columns[at_values:])
    require(sum(counts) == num_alternatives, "alternatives do not sum up to their total")
    entries = []
    start = 0
    for index, logprob, count in zip(indices, chosen, counts, strict=True):
        end = start + count
        entries.append(TokenLogprobs(index, logprob, tuple(ids[start:end]), tuple(values[start:end])))
        start = end
    return tuple(entries)


def unpack_prompts(columns: Frame, num_entries: int, num_positions: int) -> tuple[PromptLogprobs, ...]:
    """Entries of columns whose total length the caller has checked."""
    at_logprobs = _PROMPT.size * num_entries
    at_ids = at_logprobs + 8 * num_positions
    heads = list(_PROMPT.iter_unpack(columns[:at_logprobs]))
    require(sum(head[2] for head in heads) == num_positions, "positions of prompts do not sum up to their total")
    num_alternatives = sum(positions * width for _, _, positions, width in heads)
    at_values = at_ids + 4 * num_alternatives
    require(at_values + 8 * num_alternatives == len(columns), "alternatives of prompts do not sum up to their total")
    entries = []
    for request, start, positions, width in heads:
        ends = at_logprobs + 8 * positions, at_ids + 4 * positions * width, at_values + 8 * positions * width
        entries.append(
            PromptLogprobs(
                request,
                start,
                array("d", columns[at_logprobs : ends[0]]),
                take_array("I", columns, at_ids, ends[1]),
                array("d", columns[at_values : ends[2]]),
            )
        )
        at_logprobs, at_ids, at_values = ends
    return tuple(entries)
