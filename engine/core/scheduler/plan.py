"""What one step runs: flat lists of ints, made by the scheduler and read by the runner.

A plan holds no reference to scheduler state, so it could be sent to further ranks as it is. Requests appear as *rows*:
places ``0..max_num_seqs - 1`` in the runner's own state, given at admission and returned at the end.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from isolation.ipc.engine import RequestFailure, Started
from isolation.ipc.grammar import Masks, MaskState
from isolation.ipc.logit_bias import LogitBias
from isolation.ipc.sampling import Sampling

NO_ROWS: frozenset[int] = frozenset()

FAILED = -1
"""In place of a sampled id: the row's logits were not finite."""


class Admission(NamedTuple):
    """A request takes a row. It replaces whatever the runner kept for that row."""

    row: int
    token_ids: array[int]
    """All tokens known: the prompt and, after a preemption, the output so far (typecode ``I``)."""
    num_prompt: int
    sampling: Sampling
    logprobs: int
    """As in ``Submit``: -1 none, 0 the chosen token's, n with n alternatives."""
    blocks: tuple[int, ...]
    """Block table of whole contexts, long enough for ``token_ids``; empty when no layer keeps everything."""
    local: tuple[tuple[int, ...], ...] = ()
    """Tables of windows and chunks, as far as they are known; what the prompt needs comes with its chunks."""
    stamps: tuple[int, ...] = ()
    """Stamps (``engine.core.kv.tags``) that the request expects of ``blocks``, in parallel; empty: none was given
    any."""
    local_stamps: tuple[tuple[int, ...], ...] = ()
    """Stamps that the request expects of ``local``, in parallel."""
    deterministic: bool = False
    """Whether its numbers must not depend on the batch."""
    prompt_logprobs: int = -1
    """As ``logprobs``, for tokens of the prompt."""
    adapter: int = 0
    """Adapter of the weights, 0 for none."""
    limit: int = 0
    """Tokens of prompt and output at which the output ends at the latest; 0: not told."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end it. This and ``limit`` are for backends that run ahead of plans; the scheduler ends requests."""
    logit_bias: LogitBias | None = None
    """Numbers added to the scores of some ids."""


@dataclass(frozen=True, slots=True)
class RowMask:
    """Which tokens one row may choose."""

    words: bytes
    """32-bit words, little-endian: bit ``i % 32`` of word ``i // 32`` for token ``i``."""
    accepting: bool
    """Whether the output may end here."""


def row_masks(masks: Masks) -> Iterator[tuple[int, int, RowMask]]:
    """Request, position and mask of each entry of a message; a broken one allows no token."""
    width = masks.width
    for place, (request, position) in enumerate(zip(masks.requests, masks.positions, strict=True)):
        words = masks.words[place * width : (place + 1) * width]
        yield request, position, RowMask(words, masks.states[place] == MaskState.ACCEPTING)


class Chunk(NamedTuple):
    """A stretch of one prompt: positions ``start .. start + length`` of the row's tokens, half-open."""

    row: int
    start: int
    length: int
    last: bool
    """Whether all known tokens are then computed, so that the next one is sampled."""
    score_from: int = 0
    """First position of the prompt whose log-probabilities are wanted from this chunk."""
    num_scored: int = 0
    """How many of them; each comes from the logits of the position before it, which is in this chunk."""


@dataclass(slots=True)
class StepPlan:
    """One step. The runner works through the fields in this order."""

    zero_blocks: list[int] = field(default_factory=list)
    """Blocks whose bytes must be zero before anything is computed."""
    zero_stamps: list[int] = field(default_factory=list)
    """The stamp that each of them has from then on."""
    admissions: list[Admission] = field(default_factory=list)
    grown_rows: list[int] = field(default_factory=list)
    """Rows of which a block table gets one more block; parallel to the next four."""
    grown_indices: list[int] = field(default_factory=list)
    grown_blocks: list[int] = field(default_factory=list)
    grown_stamps: list[int] = field(default_factory=list)
    """What the row expects of the block."""
    grown_tables: list[int] = field(default_factory=list)
    """Which of the row's tables; empty when there is only one, which keeps everything."""
    decode_rows: list[int] = field(default_factory=list)
    """Rows that compute their last token; each gives a sample. The scheduler keeps this list too: read only."""
    prefills: list[Chunk] = field(default_factory=list)
    masks: dict[int, RowMask] = field(default_factory=dict)
    """By row, for those that sample: which tokens may be chosen. Rows without one may choose any."""

    def grow(self, row: int, blocks: Iterable[tuple[int, int, int]]) -> None:
        """Add blocks to tables of a row: number of the table, place in it, block."""
        for table, index, block in blocks:
            self.grown_rows.append(row)
            self.grown_tables.append(table)
            self.grown_indices.append(index)
            self.grown_blocks.append(block)

    def computing(self, rows: Container[int]) -> StepPlan:
        """What this plan computes of these rows, and nothing else of it."""
        return StepPlan(
            decode_rows=[row for row in self.decode_rows if row in rows],
            prefills=[chunk for chunk in self.prefills if chunk.row in rows],
            masks={row: mask for row, mask in self.masks.items() if row in rows},
        )

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.decode_rows) + sum(chunk.length for chunk in self.prefills)

    @property
    def completes_prompt(self) -> bool:
        """Whether a row gets its first token."""
        return bool(self.prefills) and any(chunk.last for chunk in self.prefills)

    @property
    def sample_rows(self) -> list[int]:
        """Rows that get a new token, in the order of the runner's answer; not to be changed."""
        if not self.prefills:
            return self.decode_rows
        return self.decode_rows + [chunk.row for chunk in self.prefills if chunk.last]

    @property
    def logit_lines(self) -> list[tuple[int, int]]:
        """What the lines of the step's logits are for: row and -1 for a new token, in the order of ``sample_rows``,
        then row and position for each token of a prompt that is scored."""
        lines = [(row, -1) for row in self.sample_rows]
        for chunk in self.prefills:
            lines += [(chunk.row, chunk.score_from + index) for index in range(chunk.num_scored)]
        return lines


@dataclass(slots=True)
class StepResult:
    """What a committed step gave, in the terms of the wire. The three first fields run in parallel."""

    requests: array[int] = field(default_factory=lambda: array("Q"))
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    finishes: bytearray = field(default_factory=bytearray)
    broken: list[int] = field(default_factory=list)
    """Places in the plan's ``sample_rows`` that gave no token; tokens of later places move up."""
    starts: list[Started] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    """Requests whose prompts were scored: one for each chunk of the plan that has something to score, in its order."""
