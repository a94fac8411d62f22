"""Does memory grow? A robust regression over samples that were taken at rest, by room and by life of its process.

What is counted is what a process has made: its anonymous and shared memory (by proportional set size), not the files
that it has mapped, whose share changes whenever another process of the machine maps them or ends. The rings between
gateway and sandboxes are left out as well. They have a size that is sealed, and their pages come one by one as the
cursors walk over them for the first time, so each link looks like a leak of up to 16 MiB for its first minutes; that
there are as many of them as before is what ``census`` counts.

A heap that serves a mixture of requests and faults finds its size in the first minutes, too: what is in use stays the
same, and what lies between grows up to a plateau. So the first half of a life is not judged. The slope of the second is
Theil's: the median of the slopes of all pairs of one life's samples, pooled over lives, which a third of bad samples
cannot move. Noise is measured, not assumed: the median distance of samples from their life's line, and what one
page-grained step of an allocator may be. What grew over the time that was judged must be below three times that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from appliance.selftest.processes import rooms
from bench.soak.served import Served

WARM_SAMPLES = 3
"""Samples at the start of a life that do not count at least: caches fill and pools are made."""

LEAST_PAIRS = 6
"""Pairs below which nothing is said: four samples of one life."""

LEAST_SPAN_S = 120.0
"""Of the judged half of a life; a shorter one says nothing. A text sandbox finds its size in its first minutes
under load (forked processes come to copies of their own), and no line tells that from a leak."""

RINGS = "/memfd:athanor-ipc"
"""Name of the mappings that are left out (``isolation.ipc.segment``)."""

STEP_BYTES = 1 << 20
"""Noise is at least so much: an arena of the C library or of Python grows by this."""

FEW_SAMPLES = 10
"""Fewer samples than this lie close to any line: noise counts double."""

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
    """Bytes that its processes have made; of shared ones their share (PSS)."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What a room's memory did."""

    room: str
    samples: int
    """That were judged."""
    per_hour: float
    """Bytes."""
    grown: float
    """Bytes over the longest time that was judged."""
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
        sizes[room] = sizes.get(room, 0) + made_bytes(pid)
        if pid in sandboxes.values() or room in ("gateway", "supervisor"):
            heads[room] = (pid, _started(pid))
    return [Sample(room, heads[room], at_s, size) for room, size in sizes.items() if room in heads]


def made_bytes(pid: int) -> int:
    """Anonymous and shared memory of one process (proc_pid_smaps(5)) without rings; 0 for one that is gone."""
    try:
        total = Path(f"/proc/{pid}/smaps_rollup").read_text()
        mappings = Path(f"/proc/{pid}/smaps").read_text()
    except OSError:
        return 0
    made = sum(int(size) for size in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB", total, re.MULTILINE))
    for mapping in mappings.split(RINGS)[1:]:
        found = re.search(r"^Pss:\s+(\d+) kB", mapping, re.MULTILINE)
        made -= int(found[1]) if found else 0
    return max(0, made) << 10


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """What each room did, of those with enough samples. Pure."""
    by_room: dict[str, dict[tuple[int, int], list[Sample]]] = {}
    for one in samples:
        by_room.setdefault(one.room, {}).setdefault(one.life, []).append(one)
    return [found for room, lives in sorted(by_room.items()) if (found := _growth_of(room, list(lives.values())))]


def _growth_of(room: str, lives: list[list[Sample]]) -> Growth | None:
    kept = [life[max(WARM_SAMPLES, len(life) // 2) :] for life in lives]
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
    samples = sum(map(len, kept))
    noise = max(STEP_BYTES, median(distances)) * (2 if samples < FEW_SAMPLES else 1)
    return Growth(room, samples, slope * 3_600, slope * span, noise)


def _started(pid: int) -> int:
    """Clock ticks from the boot to the start of a process; 0 for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
