"""Starts steps on the device and fetches their tokens: lanes, buckets, and the way back through page-locked memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.cuda.runtime.copying import Copies
from engine.backends.cuda.runtime.loop import RING_STEPS, DeviceLoop
from engine.backends.cuda.runtime.replay import Replayer
from engine.backends.cuda.runtime.rows import Deltas

Ints = NDArray[np.int64]

NO_LANE = -1
"""Lane of a row that a step does not compute, and row of an unused lane."""

FINE = 8
"""Up to so many lanes buckets are powers of two, then multiples, of which each is at most half as large again."""


def buckets(lanes: int) -> tuple[int, ...]:
    """Numbers of lanes for which steps are recorded: 1, 2, 4, 8, 12, 16, 24, 32, 48 ... and all of them."""
    found, size = [], 1
    while size < lanes:
        found.append(size)
        if size >= FINE and size + size // 2 < lanes:
            found.append(size + size // 2)
        size *= 2
    return (*found, lanes)


@dataclass(frozen=True, slots=True)
class Launch:
    """A step that was started."""

    turn: int
    """Its number, counted from the loop's beginning."""
    lane_of: Ints
    """By row its lane, or ``NO_LANE``."""
    positions: Ints
    """By row the position that it computes, if it is still live then."""
    reports: bool
    """Whether log-probabilities of some rows are fetched."""


class Launcher:
    """Steps in the order of the device's queue."""

    def __init__(self, loop: DeviceLoop, replayer: Replayer, deltas: Deltas) -> None:
        self._loop = loop
        self._replayer = replayer
        self._deltas = deltas
        self._buckets = buckets(loop.layout.lanes)
        self._lanes: Ints = np.full(loop.layout.lanes, NO_LANE, dtype=np.int64)
        self._placed: Ints | None = None
        """The rows that have the first lanes, if it was rows that were placed last; never changed in place."""
        self._bucket = 0
        self._lane_of: Ints = np.full(loop.layout.lines, NO_LANE, dtype=np.int64)
        self._turn = 0
        self._tokens, self._reports = _Back(loop.ring, loop.copies), _Back(loop.reports, loop.copies)

    def launch(
        self, rows: Ints, positions: Ints, *, reports: bool = False, run: Callable[[int], object] | None = None
    ) -> Launch:
        """Start a step of these rows.

        Args:
            rows: which.
            positions: of all rows; what these compute.
            reports: whether some of them ask for log-probabilities.
            run: computes the step for as many lanes as there are rows, as part of a pass that has more; None: it is one
                by itself, recorded or not.
        """
        if rows is not self._placed:
            self._bucket = self._place(rows)
            self._placed = rows
            self._lane_of.fill(NO_LANE)
            self._lane_of[self._lanes[: len(rows)]] = np.arange(len(rows))
        if run is None:
            turn = self._run(self._bucket, self._replayer.run, reports=reports)
        else:
            turn = self._run(len(rows), run, reports=reports)
        return Launch(turn, self._lane_of.copy(), positions.copy(), reports)

    def tokens(self, launch: Launch) -> Ints:
        """What a step gave, by lane; waits for it."""
        return self._tokens.line(launch.turn)

    def reports(self, launch: Launch) -> NDArray[np.int32]:
        """Words of a step's reports (``engine.backends.cuda.runtime.sampling_state``), by lane; waits for them."""
        assert launch.reports, "nobody has asked for this step's log-probabilities"
        return self._reports.line(launch.turn)

    def warm(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Run every bucket that is not recorded twice without any row: all code is loaded then, and every step is
        recorded. The largest come first: recordings share one pool of memory, and what the largest needs of it holds
        all others. ``enough`` is asked before each: the rest is recorded another time."""
        self._placed = None
        self._clear(0, self._loop.layout.lanes)
        for bucket in reversed(self._buckets):
            if self._replayer.recorded(bucket):
                continue
            if enough():
                return
            for _ in range(2):
                turn = self._run(bucket, self._replayer.run, reports=True)
                self._tokens.line(turn)
                self._reports.line(turn)

    def reset(self) -> None:
        """Begin anew, with the loop and its rows as they were at first; recordings stay. Nobody may be on a row."""
        self._placed = None
        self._lanes.fill(NO_LANE)
        self._deltas.take()
        self._turn = 0
        self._loop.reset()

    @property
    def recorded(self) -> tuple[int, ...]:
        """Buckets whose next step is a replay."""
        return tuple(bucket for bucket in self._buckets if self._replayer.recorded(bucket))

    def _run(self, lanes: int, run: Callable[[int], object], *, reports: bool) -> int:
        """Start a step; gives its number."""
        self._loop.announce(self._deltas)
        run(lanes)
        turn, self._turn = self._turn, self._turn + 1
        self._tokens.send(turn)
        if reports:
            self._reports.send(turn)
        return turn

    def _place(self, rows: Ints) -> int:
        """Give the rows the first lanes, each the one that it has if it has one of them; gives the bucket."""
        count = len(rows)
        bucket = next(size for size in self._buckets if size >= count)
        stays = np.isin(self._lanes[:count], rows)
        if not stays.all():
            holes = np.flatnonzero(~stays)
            coming = np.setdiff1d(rows, self._lanes[:count][stays])
            self._lanes[holes] = coming
            for lane, row in zip(holes.tolist(), coming.tolist(), strict=True):
                self._deltas.lane(lane, row)
        self._clear(count, self._loop.layout.lanes)
        return bucket

    def _clear(self, start: int, stop: int) -> None:
        for lane in (np.flatnonzero(self._lanes[start:stop] != NO_LANE) + start).tolist():
            self._deltas.lane(lane, None)
        self._lanes[start:stop] = NO_LANE


class _Back:
    """A ring's mirror on the host. On a GPU a step's line is copied behind the step, and a fence tells when it is
    there: a thread that waits for it sleeps."""

    def __init__(self, ring: Tensor, copies: Copies) -> None:
        self._ring = ring
        self._copies = copies
        self._host = copies.mirror(ring)
        self._lines: NDArray[Any] = self._host.numpy()
        self._fences = copies.fences(RING_STEPS)

    def send(self, turn: int) -> None:
        """Start the copy of a step's line."""
        if self._fences:
            slot = turn % RING_STEPS
            self._copies.carry(self._host[slot], self._ring[slot])
            self._fences[slot].record()

    def line(self, turn: int) -> NDArray[Any]:
        """A step's line, as soon as it is there; valid until ``RING_STEPS`` further steps."""
        slot = turn % RING_STEPS
        if self._fences:
            self._fences[slot].wait()
        line: NDArray[Any] = self._lines[slot]
        return line
