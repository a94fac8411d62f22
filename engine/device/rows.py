"""State of all rows as one piece of memory on the device, and what the host says about it.

Everything that a decoding step needs of a row is a 64-bit word: last token, position, limit, whether it is done, the
numbers of its sampling, stop ids, block table, and the stamps that it expects of the blocks (``engine.kv.tags``). Words
of one meaning lie together, a row after the other, so kernels read columns as they lie. Behind them are the *lanes*:
which row each lane of the batch computes. So a change is an address and a value, and all changes since the last step
travel in one copy, whatever they are. Between changes the device advances its rows alone.

Row ``rows`` is nobody's: it is done, and lanes without a row name it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError

Words = NDArray[np.int64]

NO_STOP = -1
"""In place of a stop id; also what a row without a finite logit chooses, so nothing is compared with it."""


class Field(IntEnum):
    """Words of which a row has one, in the order in which they lie."""

    LAST = 0
    """The newest token; it is computed in the next step."""
    POSITION = 1
    """Its position."""
    LIMIT = 2
    """Tokens of prompt and output at which the output ends."""
    DONE = 3
    """1: the row takes no part in steps."""
    TEMPERATURE = 4
    """Bits of a float64, like the next that is no whole number; 0: the maximum is taken."""
    TOP_K = 5
    """0 for no limit."""
    TOP_P = 6
    LOG_MIN_P = 7
    """The logarithm of min-p; minus infinity for none."""
    SEED = 8
    """Bits of the unsigned seed."""
    REPETITION = 9
    """Bits of a float64, and so are the next two."""
    PRESENCE = 10
    FREQUENCY = 11
    PENALTY_LINE = 12
    """The row itself where it has penalties (its line of counts), else ``NO_LINE``."""
    MASK_LINE = 13
    """The row itself where it chooses under masks, else ``NO_LINE``."""
    LOGPROBS = 14
    """-1: none are reported; n: of the token and of n alternatives."""


NUM_FIELDS = len(Field)

NO_LINE = -1


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a row samples, without masks."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    log_min_p: float = float("-inf")
    seed: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    logprobs: int = -1

    @property
    def penalised(self) -> bool:
        """Whether what occurred has an influence."""
        return (self.repetition, self.presence, self.frequency) != (1, 0, 0)


GREEDY = Numbers()


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where things lie in the words."""

    rows: int
    lanes: int
    stops: int
    """Stop ids that a row can have."""
    width: int
    """Entries of a block table."""

    def __post_init__(self) -> None:
        if min(self.rows, self.lanes, self.width) < 1 or self.stops < 0:
            raise ConfigurationError(f"device rows need at least one row, lane and block, and have {self}")

    @property
    def lines(self) -> int:
        """Rows, and nobody's."""
        return self.rows + 1

    @property
    def first_stop(self) -> int:
        """Address of the first row's first stop id."""
        return NUM_FIELDS * self.lines

    @property
    def first_block(self) -> int:
        """Address of the first row's block table."""
        return self.first_stop + self.stops * self.lines

    @property
    def first_stamp(self) -> int:
        """Address of the stamps that the first row expects, one beside each entry of its block table."""
        return self.first_block + self.width * self.lines

    @property
    def first_lane(self) -> int:
        """Address of the first lane."""
        return self.first_stamp + self.width * self.lines

    @property
    def size(self) -> int:
        """Words in all."""
        return self.first_lane + self.lanes

    def fresh(self) -> Words:
        """The words before any row is admitted: all done, all lanes without a row."""
        words = np.zeros(self.size, dtype=np.int64)
        words[Field.DONE * self.lines : (Field.DONE + 1) * self.lines] = 1
        for field in (Field.PENALTY_LINE, Field.MASK_LINE, Field.LOGPROBS):
            words[field * self.lines : (field + 1) * self.lines] = NO_LINE
        words[self.first_stop : self.first_block] = NO_STOP
        words[self.first_lane :] = self.rows
        return words


class Deltas:
    """Changes since the last copy; of two to one address the later counts, since a scatter has no order."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._first_block, self._to_stamp = layout.first_block, layout.first_stamp - layout.first_block
        self._changes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def admit(self, row: int, limit: int, stop_ids: Sequence[int], numbers: Numbers = GREEDY) -> None:
        """A request takes a row, which takes no part in steps yet.

        Raises:
            ConfigurationError: more stop ids than a row has room for.
        """
        room = self._layout.stops
        if len(stop_ids) > room:
            raise ConfigurationError(f"a row has room for {room} stop ids and is given {len(stop_ids)}")
        self._set(Field.LIMIT, row, limit)
        self._set(Field.DONE, row, 1)
        self._set(Field.TEMPERATURE, row, _bits(numbers.temperature))
        self._set(Field.TOP_K, row, numbers.top_k)
        self._set(Field.TOP_P, row, _bits(numbers.top_p))
        self._set(Field.LOG_MIN_P, row, _bits(numbers.log_min_p))
        self._set(Field.SEED, row, numbers.seed - (numbers.seed >> 63 << 64))
        self._set(Field.REPETITION, row, _bits(numbers.repetition))
        self._set(Field.PRESENCE, row, _bits(numbers.presence))
        self._set(Field.FREQUENCY, row, _bits(numbers.frequency))
        self._set(Field.PENALTY_LINE, row, row if numbers.penalised else NO_LINE)
        self._set(Field.MASK_LINE, row, NO_LINE)
        self._set(Field.LOGPROBS, row, numbers.logprobs)
        base = self._layout.first_stop + row * room
        for place in range(room):
            self._changes[base + place] = stop_ids[place] if place < len(stop_ids) else NO_STOP

    def guide(self, row: int) -> None:
        """The row chooses its tokens under masks from now on."""
        self._set(Field.MASK_LINE, row, row)

    def resume(self, row: int, token: int, position: int) -> None:
        """The row takes part in steps from the next one on, with this newest token at this position."""
        self._set(Field.LAST, row, token)
        self._set(Field.POSITION, row, position)
        self._set(Field.DONE, row, 0)

    def put(self, row: int, first: int, blocks: Sequence[int], stamps: Sequence[int]) -> None:
        """Entries of the row's block tables from ``first`` on, and the stamps that it expects there.

        Raises:
            ConfigurationError: a row has no such entries.
        """
        self._check(first, first + len(blocks) - 1)
        place = self._first_block + row * self._layout.width + first
        self._changes.update(zip(range(place, place + len(blocks)), blocks, strict=True))
        place += self._to_stamp
        self._changes.update(zip(range(place, place + len(blocks)), stamps, strict=True))

    def extend(self, row: int, place: int, block: tuple[int, int], spare: tuple[int, int]) -> None:
        """A block and its stamp at an entry, and the spare one with its own behind it; see ``put``."""
        self._check(place, place + 1)
        changes, to_stamp = self._changes, self._to_stamp
        place += self._first_block + row * self._layout.width
        changes[place], changes[place + to_stamp] = block
        changes[place + 1], changes[place + 1 + to_stamp] = spare

    def _check(self, first: int, last: int) -> None:
        if not 0 <= first <= last + 1 <= self._layout.width:
            width = self._layout.width
            raise ConfigurationError(f"a row has room for {width} blocks, and is given some up to {last}")

    def end(self, row: int) -> None:
        """The row takes no part in steps from the next one on, whatever the device thinks of it."""
        self._set(Field.DONE, row, 1)

    def lane(self, lane: int, row: int | None) -> None:
        """Which row a lane computes."""
        self._changes[self._layout.first_lane + lane] = self._layout.rows if row is None else row

    def take(self) -> Words:
        """Addresses and values, ``(2, changes)``; then there is nothing left to say."""
        changes = self._changes
        copy = np.empty((2, len(changes)), dtype=np.int64)
        copy[0] = np.fromiter(changes.keys(), dtype=np.int64, count=len(changes))
        copy[1] = np.fromiter(changes.values(), dtype=np.int64, count=len(changes))
        changes.clear()
        return copy

    def _set(self, field: Field, row: int, value: int) -> None:
        self._changes[field * self._layout.lines + row] = value


def _bits(number: float) -> int:
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found
