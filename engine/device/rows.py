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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError
from engine.kv.tags import NO_STAMP

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


NUM_FIELDS = len(Field)


@dataclass(frozen=True, slots=True)
class Numbers:
    """How a row samples, without penalties and masks."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    log_min_p: float = float("-inf")
    seed: int = 0


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
    def spare(self) -> int:
        """An address that nobody reads: copies are of one size, and what they do not need goes there."""
        return self.first_lane + self.lanes

    def fresh(self) -> Words:
        """The words before any row is admitted: all done, all lanes without a row."""
        words = np.zeros(self.spare + 1, dtype=np.int64)
        words[Field.DONE * self.lines : (Field.DONE + 1) * self.lines] = 1
        words[self.first_stop : self.first_block] = NO_STOP
        words[self.first_lane :] = self.rows
        return words


class Deltas:
    """Changes since the last copy; of two to one address the later counts, since a scatter has no order."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._first_block, self._first_stamp = layout.first_block, layout.first_stamp
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
        base = self._layout.first_stop + row * room
        for place in range(room):
            self._changes[base + place] = stop_ids[place] if place < len(stop_ids) else NO_STOP

    def resume(self, row: int, token: int, position: int) -> None:
        """The row takes part in steps from the next one on, with this newest token at this position."""
        self._set(Field.LAST, row, token)
        self._set(Field.POSITION, row, position)
        self._set(Field.DONE, row, 0)

    def put(self, row: int, index: int, block: int, stamp: int = NO_STAMP) -> None:
        """Entry ``index`` of the row's block table, and the stamp that it expects there.

        Raises:
            ConfigurationError: a table has no such entry.
        """
        width = self._layout.width
        if not 0 <= index < width:
            raise ConfigurationError(f"a row has room for {width} blocks, and is given one at {index}")
        place = row * width + index
        self._changes[self._first_block + place] = block
        self._changes[self._first_stamp + place] = stamp

    def end(self, row: int) -> None:
        """The row takes no part in steps from the next one on, whatever the device thinks of it."""
        self._set(Field.DONE, row, 1)

    def lane(self, lane: int, row: int | None) -> None:
        """Which row a lane computes."""
        self._changes[self._layout.first_lane + lane] = self._layout.rows if row is None else row

    def copies(self, room: int) -> Iterator[Words]:
        """Addresses and values, ``(2, room)`` a copy, padded to that with the spare address; then there is nothing left
        to say. Nothing to say is no copy."""
        pairs = list(self._changes.items())
        self._changes.clear()
        for start in range(0, len(pairs), room):
            part = np.array(pairs[start : start + room], dtype=np.int64)
            copy = np.empty((2, room), dtype=np.int64)
            copy[0], copy[1] = self._layout.spare, self._layout.rows
            copy[:, : len(part)] = part.T
            yield copy

    def _set(self, field: Field, row: int, value: int) -> None:
        self._changes[field * self._layout.lines + row] = value


def _bits(number: float) -> int:
    found: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return found
