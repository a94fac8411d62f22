"""State of all rows as one piece of memory on the device, and what the host says about it.

Everything that a decoding step needs of a row is a 64-bit word: last token, position, limit, whether it is done, the
numbers of its sampling, stop ids, block table, and the stamps that it expects of the blocks (``engine.core.kv.tags``).
Words of one meaning lie together, a row after the other, so kernels read columns as they lie. Behind them are the
*lanes*: which row each lane of the batch computes. So a change is an address and a value, and all changes since the
last step travel in one copy, whatever they are. Between changes the device advances its rows alone.

Index ``rows`` is the padding row: it is done, and lanes without a row name it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine.backends.common.penalties import has_penalties
from engine.errors import ConfigurationError
from isolation.ipc.sampling import NAMES, WIRE_CODES, Sampling, values_of

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
    PENALTY_LINE = 4
    """The row itself where it has penalties (its line of counts), else ``NO_LINE``."""
    MASK_LINE = 5
    """The row itself where it chooses under masks, else ``NO_LINE``."""
    LOGPROBS = 6
    """-1: none are reported; n: of the token and of n alternatives."""
    BIASES = 7
    """Ids whose scores have a bias; they stand in the row's line of biases."""


NUM_FIELDS = len(Field) + len(NAMES)
"""Behind the fields lie the numbers of ``isolation.ipc.sampling``, in wire order: the bits of a float64 or of an
integer of 64 bits each."""

_NUMBERS = struct.Struct("<" + WIRE_CODES.replace("I", "Q"))
_WORDS = struct.Struct(f"<{len(NAMES)}q")

NO_LINE = -1


GREEDY = Sampling(temperature=0.0)


def number_field(name: str) -> int:
    """Place of a number of ``Sampling`` among a row's fields."""
    return len(Field) + NAMES.index(name)


def words_of(sampling: Sampling) -> tuple[int, ...]:
    """Words of all numbers, in the order in which they lie behind a row's ``Field`` words."""
    return _WORDS.unpack(_NUMBERS.pack(*values_of(sampling)))


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
        """Number of rows, the padding row included."""
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

    def admit(
        self,
        row: int,
        limit: int,
        stop_ids: Sequence[int],
        sampling: Sampling = GREEDY,
        logprobs: int = -1,
        biases: int = 0,
    ) -> None:
        """A request takes a row, which takes no part in steps yet. ``biases``: ids whose scores have one.

        Raises:
            ConfigurationError: more stop ids than a row has room for.
        """
        room = self._layout.stops
        if len(stop_ids) > room:
            raise ConfigurationError(f"a row has room for {room} stop ids and is given {len(stop_ids)}")
        self._set(Field.LIMIT, row, limit)
        self._set(Field.DONE, row, 1)
        self._set(Field.PENALTY_LINE, row, row if has_penalties(sampling) else NO_LINE)
        self._set(Field.MASK_LINE, row, NO_LINE)
        self._set(Field.LOGPROBS, row, logprobs)
        self._set(Field.BIASES, row, biases)
        place, lines = len(Field) * self._layout.lines + row, self._layout.lines
        words = words_of(sampling)
        self._changes.update(zip(range(place, place + lines * len(words), lines), words, strict=True))
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
