"""Does memory grow? A robust regression over samples that were taken at rest, by room and by life of its process.

The slope is Theil's: the median of the slopes of all pairs of one life's samples, pooled over lives, which a third of
bad samples cannot move. Noise is measured, not assumed: the median distance of samples from their life's line, and what
one page-grained step of an allocator may be. What grew over the time that was looked at must be below three times that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from bench.processes import rooms
from bench.soak.served import Served

WARM_SAMPLES = 3
"""Samples at the start of a life that do not count: caches fill and pools are made."""

LEAST_PAIRS = 6
"""Pairs below which nothing is said: four samples of one life."""

LEAST_SPAN_S = 120.0
"""A life that was looked at for less says nothing: what is made on demand is still being made."""

STEP_BYTES = 1 << 20
"""Noise is at least so much: an arena of the C library or of Python grows by this."""

NOISES = 3.0
"""How many times the noise the growth may be."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One room's memory at rest."""

    room: str
    life: tuple[int, int]
    """Process and its start time: a new process begins a new line."""
    at_s: float
    size: int
    """Bytes; of shared pages its share (PSS)."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What a room's memory did."""

    room: str
    samples: int
    per_hour: float
    """Bytes."""
    grown: float
    """Bytes over the longest life that was looked at."""
    noise: float
    """Bytes."""

    @property
    def leaks(self) -> bool:
        """Whether it grew by more than noise explains."""
        return self.grown > NOISES * self.noise


def take(served: Served, sandboxes: Mapping[str, int], at_s: float) -> list[Sample]:
    """Every room's memory now; ``sandboxes``: name to sandbox process."""
    sizes: dict[str, int] = {}
    heads: dict[str, tuple[int, int]] = {}
    for pid, room in rooms(served.target.pid, sandboxes).items():
        sizes[room] = sizes.get(room, 0) + pss_bytes(pid)
        if pid in sandboxes.values() or room in ("gateway", "supervisor"):
            heads[room] = (pid, _started(pid))
    return [Sample(room, heads[room], at_s, size) for room, size in sizes.items() if room in heads]


def pss_bytes(pid: int) -> int:
    """Proportional set size of one process; 0 for one that is gone."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """What each room did, of those with enough samples. Pure."""
    by_room: dict[str, dict[tuple[int, int], list[Sample]]] = {}
    for one in samples:
        by_room.setdefault(one.room, {}).setdefault(one.life, []).append(one)
    return [found for room, lives in sorted(by_room.items()) if (found := _growth_of(room, list(lives.values())))]


def _growth_of(room: str, lives: list[list[Sample]]) -> Growth | None:
    kept = [life[WARM_SAMPLES:] for life in lives]
    kept = [life for life in kept if life and life[-1].at_s - life[0].at_s >= LEAST_SPAN_S]
    slopes = [
        (later.size - sooner.size) / (later.at_s - sooner.at_s)
        for life in kept
        for sooner, later in combinations(life, 2)
        if later.at_s > sooner.at_s
    ]
    if len(slopes) < LEAST_PAIRS:
        return None
    slope = median(slopes)
    distances = []
    for life in kept:
        level = median(one.size - slope * one.at_s for one in life)
        distances += [abs(one.size - slope * one.at_s - level) for one in life]
    span = max(life[-1].at_s - life[0].at_s for life in kept)
    noise = max(STEP_BYTES, median(distances))
    return Growth(room, sum(map(len, kept)), slope * 3_600, slope * span, noise)


def _started(pid: int) -> int:
    """Clock ticks from the boot to the start of a process; 0 for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def total_of(samples: Sequence[Sample]) -> int:
    """Bytes of all of one moment; for the report."""
    return sum(one.size for one in samples)


