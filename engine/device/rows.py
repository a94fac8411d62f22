"""State of all rows as one piece of memory on the device, and what the host says about it.

Everything a decoding step needs of a row is in its *line* of 64-bit words: last token, position, limit, whether it is
done, stop ids, block table. Behind the lines are the *lanes*: which row each lane of the batch computes. So a change is
an address and a value, and all changes since the last step travel in one copy, whatever they are. Between changes the
device advances its rows alone.

Line ``rows`` belongs to nobody: it is done, and lanes without a row name it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigurationError

Words = NDArray[np.int64]

LAST = 0
"""The row's newest token; it is computed in the next step."""

POSITION = 1
"""Its position."""

LIMIT = 2
"""Tokens of prompt and output at which the output ends."""

DONE = 3
"""1: the row takes no part in steps."""

STOPS = 4
"""Here begin the stop ids."""

NO_STOP = -1
"""In place of a stop id; also what a row without a finite logit chooses, so nothing is compared with it."""


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
    def line(self) -> int:
        """Words of a row."""
        return STOPS + self.stops + self.width

    @property
    def tables(self) -> int:
        """Where in a line the block table begins."""
        return STOPS + self.stops

    @property
    def first_lane(self) -> int:
        """Address of the first lane."""
        return (self.rows + 1) * self.line

    @property
    def spare(self) -> int:
        """An address that nobody reads: copies are of one size, and what they do not need goes there."""
        return self.first_lane + self.lanes

    def fresh(self) -> Words:
        """The words before any row is admitted: all done, all lanes without a row."""
        words = np.zeros(self.spare + 1, dtype=np.int64)
        words[: self.first_lane].reshape(self.rows + 1, self.line)[:, DONE] = 1
        words[self.first_lane :] = self.rows
        return words


class Deltas:
    """Changes since the last copy; of two to one address the later counts, since a scatter has no order."""

    def __init__(self, layout: RowLayout) -> None:
        self._layout = layout
        self._changes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def admit(
        self, row: int, token: tuple[int, int], limit: int, stop_ids: Sequence[int], blocks: Sequence[int]
    ) -> None:
        """A request takes a row: its newest token with its position, its limit, stop ids and blocks.

        Raises:
            ConfigurationError: more stop ids or blocks than a line has room for.
        """
        layout = self._layout
        if len(stop_ids) > layout.stops or len(blocks) > layout.width:
            raise ConfigurationError(
                f"a row has room for {layout.stops} stop ids and {layout.width} blocks, "
                f"and is given {len(stop_ids)} and {len(blocks)}"
            )
        stops = (*stop_ids, *(NO_STOP,) * (layout.stops - len(stop_ids)))
        base = row * layout.line
        for place, value in enumerate((*token, limit, 0, *stops, *blocks)):
            self._changes[base + place] = value

    def grow(self, row: int, index: int, block: int) -> None:
        """Entry ``index`` of the row's block table."""
        self._changes[row * self._layout.line + self._layout.tables + index] = block

    def end(self, row: int) -> None:
        """The row takes no part in steps from the next one on, whatever the device thinks of it."""
        self._changes[row * self._layout.line + DONE] = 1

    def lane(self, lane: int, row: int | None) -> None:
        """Which row a lane computes."""
        self._changes[self._layout.first_lane + lane] = self._layout.rows if row is None else row

    def copies(self, room: int) -> Iterator[tuple[Words, Words]]:
        """Addresses and values, ``room`` of each a copy, padded to that with the spare address; then there is nothing
        left to say. Nothing to say is no copy."""
        pairs = list(self._changes.items())
        self._changes.clear()
        for start in range(0, len(pairs), room):
            part = np.array(pairs[start : start + room], dtype=np.int64)
            addresses = np.full(room, self._layout.spare, dtype=np.int64)
            values = np.full(room, self._layout.rows, dtype=np.int64)
            addresses[: len(part)], values[: len(part)] = part[:, 0], part[:, 1]
            yield addresses, values
