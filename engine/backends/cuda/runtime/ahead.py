"""Which rows are computed by which step: steps that are run ahead of plans, and rows that join prompts.

As soon as a plan's own step is started, those of the plans to come are, for all rows that will decode then. Rows that a
plan has and the step had not are *missing*, and are computed in a step of their own.

A structured row waits for a mask before each token, so it cannot be run ahead of; the others are. When its mask has
come it *rides along* in the next step that is run ahead for them: that step has its token of this plan, and the others'
of the next one. So weights are read no more often for it, and the others' tokens are at most a step late.

Where a plan's prompts are cut, so that the next plan has some too, the step that would be run ahead behind them is
computed in one pass with them (``engine.backends.cuda.runtime.mixing`` says when), and rows that are missing ride along
in it. A row whose prompt ends in such a pass is missing in the next plan, and rides along in its pass; when prompts end
there is one step more, and then all rows are together again. Where all of a plan's prompts end, only rows that are
missing join them: the step behind has all rows, those that begin to decode included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.backends.cuda.runtime.host_rows import HostRows, Ints
from engine.backends.cuda.runtime.launches import NO_LANE, Launch, Launcher
from engine.backends.cuda.runtime.mixing import Mixing
from engine.core.scheduler.plan import Chunk

Flags = NDArray[np.bool_]

Part = tuple[Launch, Flags]
"""A step, and which of a plan's rows it has the tokens of."""

STEADY_STEPS = 4
"""Plans without a prompt after which several steps are run ahead: somebody who comes then waits for a few steps, and a
host that is late now and then holds up nothing."""

NO_ROWS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Joining:
    """Rows that are computed in one pass with a plan's prompts."""

    riders: Flags
    """Which of the plan's rows get their token of this plan."""
    coming: Ints
    """Rows that get the token of the next plan."""
    waits: bool
    """Whether the plan waits for the pass."""


class RunAhead:
    """The steps that are under way for plans to come."""

    def __init__(self, launcher: Launcher, host: HostRows, mixing: Mixing, most_ahead: int) -> None:
        """``most_ahead``: steps that are run ahead at once; 0 for none."""
        self._launcher = launcher
        self._host = host
        self._mixing = mixing
        self._most_ahead = most_ahead
        self.pending: deque[Launch] = deque()
        self.steady = 0
        """Plans since one that had a prompt."""
        self.num_early = self.num_mixed = 0
        """Rows' tokens that were there before their plan came, and passes that rows and prompts had in common."""
        self._all = np.ones(0, dtype=np.bool_)
        self._none = ~self._all

    def admit(self, row: int) -> None:
        """A request takes the row: what was run ahead for the one before it is not its own."""
        for launch in self.pending:
            launch.lane_of[row] = NO_LANE

    def take(self, rows: Ints) -> tuple[list[Part], Flags]:
        """What was run ahead for this plan's rows, and which of them are missing; these are where the plan says."""
        host = self._host
        if len(self._all) != len(rows):
            self._all = np.ones(len(rows), dtype=np.bool_)
            self._none = ~self._all
        if not len(rows):
            return [], self._none
        parts, missing = [], self._all
        if self.pending:
            launch = self.pending.popleft()
            there = (launch.lane_of[rows] != NO_LANE) & (launch.positions[rows] == host.position[rows])
            if host.any_guided:
                # A row that is guided was not run ahead of, or not yet under its mask.
                there &= ~host.guided[rows]
            count = int(np.count_nonzero(there))
            self.num_early += count
            if count == len(rows):
                return [(launch, self._all)], self._none
            parts.append((launch, there))
            missing = ~there
        host.resume(rows[missing])
        return parts, missing

    def joining(self, chunks: list[Chunk], rows: Ints, missing: Flags) -> Joining | None:
        """The rows that are computed in one pass with these prompts; None: there are none, or two passes are better."""
        if not chunks or not len(rows) or not self._mixing.ever:
            return None
        waits, cut = missing is not self._none, False
        for chunk in chunks:
            waits |= chunk.last or chunk.num_scored > 0
            cut |= not chunk.last
        coming = self._coming((), rows) if cut and self._most_ahead and not self.pending else NO_ROWS
        count = len(coming) + int(np.count_nonzero(missing))
        if not self._mixing.joins(sum(chunk.length for chunk in chunks), count, waits=waits):
            return None
        return Joining(missing, coming, waits)

    def join(self, rows: Ints, joining: Joining, run: Callable[[int], object]) -> list[Part]:
        """Start a pass of these rows and of prompts; ``run`` computes it for so many lanes."""
        riders, coming = joining.riders, joining.coming
        own = rows if riders is self._all else rows[riders]
        together = np.concatenate((own, coming)) if len(own) and len(coming) else own if len(own) else coming
        launch = self._launch(together, run)
        self.num_mixed += 1
        self.steady = 0
        if len(coming):
            self.pending.append(launch)
        return [(launch, riders)] if len(own) else []

    def start(self, rows: Ints, missing: Flags, parts: list[Part]) -> Flags:
        """Start a step of the rows that are missing; gives those that are to ride along with the next step that is run
        ahead."""
        if missing is self._none:
            return missing
        riders = missing & self._host.guided[rows]
        if self._most_ahead and (riders == missing).all():
            return riders
        parts.append((self._launch(rows if missing is self._all else rows[missing]), missing))
        return self._none

    def run(self, chunks: list[Chunk], rows: Ints, riders: Flags | None, *, prompts: bool) -> list[Part]:
        """Start the steps of plans to come, unless some are under way, and that of the riders; gives the latter.

        Args:
            chunks: those of the plan whose rows decode afterwards.
            rows: the plan's.
            riders: which of them ride along; None: none.
            prompts: whether the plan has any.
        """
        self.steady = 0 if prompts else self.steady + 1
        parts: list[Part] = []
        enough = 0
        if riders is not None and riders is not self._none and riders.any():
            coming = self._coming(chunks, rows)
            joined = len(coming) > 0 and len(self.pending) < self._most_ahead
            launch = self._launch(np.concatenate((rows[riders], coming)) if joined else rows[riders])
            parts.append((launch, riders))
            if joined:
                self.pending.append(launch)
                # The plan waits for this one, so there should be one more behind it.
                enough = 1
        if len(self.pending) > enough:
            return parts
        coming = self._coming(chunks, rows)
        if len(coming):
            quiet = self.steady >= STEADY_STEPS and not self._host.any_guided
            depth = min(self._most_ahead if quiet else 1, self._most_ahead - len(self.pending))
            self.pending.extend(self._launch(coming) for _ in range(depth))
        return parts

    def _launch(self, rows: Ints, run: Callable[[int], object] | None = None) -> Launch:
        host = self._host
        reports = host.any_asked and bool((host.asked[rows] >= 0).any())
        launch = self._launcher.launch(rows, host.ahead, reports=reports, run=run)
        host.ahead[rows] += 1
        return launch

    def _coming(self, chunks: Sequence[Chunk], rows: Ints) -> Ints:
        """Rows that will decode after this plan, whatever it gives, and wait for nothing."""
        host, coming, after = self._host, rows, self._host.position[rows] + 1
        ending = [(chunk.row, chunk.start + chunk.length) for chunk in chunks if chunk.last]
        if ending:
            some = np.array(ending, dtype=np.int64).T
            coming, after = np.concatenate((rows, some[0])), np.concatenate((after, some[1]))
        ahead = host.ahead[coming]
        # Only those that are in all steps under way: the next one of another would be taken for a later plan's. The
        # plan's token stands at ``ahead``, and with it there is one token more than that.
        wanted = (ahead == after + len(self.pending)) & (ahead + 1 < host.limit[coming])
        if host.any_guided:
            wanted &= ~host.guided[coming]
        # The same array as long as the rows are the same: the launcher looks at no row then.
        return coming if wanted.all() else coming[wanted]
