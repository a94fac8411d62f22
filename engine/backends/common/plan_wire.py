"""A step plan as flat 64-bit ints, for further ranks: what blocks and rows need, without what only sampling reads.

Every list stands behind its length. Numbers of sampling, masks, log-probabilities and ends stay with the rank that
samples; the others get the tokens that it chose.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from engine.core.scheduler.plan import Admission, Chunk, StepPlan
from engine.errors import RankError
from isolation.ipc.sampling import EXAMPLE
from isolation.ipc.wiping import wipe

_CHUNK_INTS = 6


def flatten(plan: StepPlan) -> array[int]:
    """What other ranks need of a plan."""
    flat = array("q", (len(plan.admissions),))
    for one in plan.admissions:
        flat.extend((one.row, one.num_prompt, one.deterministic, one.adapter))
        for values in (one.token_ids, one.blocks, one.stamps):
            _put(flat, values)
        flat.append(len(one.local))
        for values in one.local:
            _put(flat, values)
        flat.append(len(one.local_stamps))
        for values in one.local_stamps:
            _put(flat, values)
    for numbers in (plan.zero_blocks, plan.zero_stamps, *_grown(plan), plan.decode_rows):
        _put(flat, numbers)
    flat.append(len(plan.prefills))
    for chunk in plan.prefills:
        flat.extend(chunk)
    return flat


def unflatten(flat: array[int], decode_rows: list[int]) -> StepPlan:
    """The plan again.

    Args:
        flat: from ``flatten``.
        decode_rows: those of the plan before: the same list goes on, as in the scheduler, where the rows are the same.

    Raises:
        RankError: the ints are no plan.
    """
    reader = _Reader(flat)
    try:
        plan = StepPlan(admissions=[_admission(reader) for _ in range(reader.number())])
        plan.zero_blocks, plan.zero_stamps = reader.values(), reader.values()
        plan.grown_rows, plan.grown_indices, plan.grown_blocks = reader.values(), reader.values(), reader.values()
        plan.grown_stamps, plan.grown_tables = reader.values(), reader.values()
        rows = reader.values()
        plan.decode_rows = decode_rows if rows == decode_rows else rows
        for _ in range(reader.number()):
            row, start, length, last, score_from, num_scored = reader.take(_CHUNK_INTS)
            plan.prefills.append(Chunk(row, start, length, bool(last), score_from, num_scored))
    except (IndexError, ValueError) as error:
        raise RankError("what rank 0 told is no plan; ranks are out of step") from error
    if reader.place != len(flat):
        raise RankError("a plan of rank 0 does not end where its ints end; ranks are out of step")
    return plan


def _grown(plan: StepPlan) -> tuple[list[int], ...]:
    return plan.grown_rows, plan.grown_indices, plan.grown_blocks, plan.grown_stamps, plan.grown_tables


def _put(flat: array[int], values: Iterable[int]) -> None:
    place = len(flat)
    flat.append(0)
    flat.extend(values.tolist() if isinstance(values, array) else values)
    flat[place] = len(flat) - place - 1


def _admission(reader: _Reader) -> Admission:
    row, num_prompt, deterministic, adapter = reader.take(4)
    token_ids, blocks, stamps = array("I", reader.values()), tuple(reader.values()), tuple(reader.values())
    local = tuple(tuple(reader.values()) for _ in range(reader.number()))
    local_stamps = tuple(tuple(reader.values()) for _ in range(reader.number()))
    return Admission(
        row=row,
        token_ids=token_ids,
        num_prompt=num_prompt,
        sampling=EXAMPLE,
        logprobs=-1,
        blocks=blocks,
        local=local,
        stamps=stamps,
        local_stamps=local_stamps,
        deterministic=bool(deterministic),
        adapter=adapter,
    )


class _Reader:
    """Takes ints in order."""

    def __init__(self, flat: array[int]) -> None:
        self._flat = flat
        self.place = 0

    def number(self) -> int:
        """The next one."""
        value = self._flat[self.place]
        self.place += 1
        return value

    def take(self, count: int) -> list[int]:
        """The next ones, exactly so many; ``ValueError`` where the caller gets fewer than it names."""
        begin = self.place
        self.place += count
        part = self._flat[begin : self.place]
        values = part.tolist()
        wipe(part)
        return values

    def values(self) -> list[int]:
        """A list behind its length."""
        count = self.number()
        if not 0 <= count <= len(self._flat) - self.place:
            raise ValueError(count)
        return self.take(count)
