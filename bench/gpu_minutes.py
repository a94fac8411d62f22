"""Minutes of mixed load on the engine program under its list: requests, deaths, calls beyond the list, flat memory.

The load is that of ``athanor sandbox calls`` (``appliance/operator/calls/engine_load.py``): prompts of every length,
all numbers of a draw, masks, penalties, log-probabilities, deadlines, several choices, aborts, which are what an engine
sees of a client that cancels or disconnects, and blocks that leave the engine, come back and are forgotten. Adapters
are in it as soon as the device backend has them and ``EngineLoad`` asks for them. An engine that dies counts, and
another one is started; where its list killed it, a short run names the calls. A line comes every ``EVERY_S`` seconds;
``SIGTERM`` at any moment gives the verdict over what ran.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from appliance.operator.calls.engine_load import EngineLoad
from appliance.operator.calls.session import Mode, Trial, run
from appliance.operator.calls.text_load import TextLoad
from bench.gpu_report import Meter
from engine.config import EngineConfig

EVERY_S = 15.0
"""Seconds between two lines."""

SAMPLE_S = 1.0
"""Seconds between two looks at memory."""

READY_S = 180.0
"""Seconds that an engine has to be ready, kernels compiled meanwhile."""

WARM_S = 20.0
"""Seconds of load before memory is judged: the first long prompts come in them."""

LEAST_S = 5.0
"""Seconds of load for which another engine is started."""

NAMING_S = 10.0
"""Seconds of load of the run that names calls."""

MOST_UNREADY = 3
"""Engines in a row that are never ready, after which no other is started."""

HOST_GROWTH_MIB, CARD_GROWTH_MIB = 16.0, 4.0
"""What memory may grow by and still be called flat: the heap's own unevenness, and two segments of a driver."""

LEAST_SAMPLES = 12
"""Samples of memory without which nothing is said."""

MIB = 1 << 20


@dataclass(slots=True)
class Life:
    """One engine's memory, in MiB, a sample a second."""

    host: list[float] = field(default_factory=list)
    card: list[float] = field(default_factory=list)


def growth(samples: Sequence[float]) -> float | None:
    """Median of the last third over that of the first; None where there are too few."""
    third = len(samples) // 3
    if len(samples) < LEAST_SAMPLES:
        return None
    return statistics.median(samples[-third:]) - statistics.median(samples[:third])


def largest_growth(lives: Sequence[Sequence[float]]) -> float | None:
    """That of the engine that grew the most."""
    found = [one for one in map(growth, lives) if one is not None]
    return max(found) if found else None


class Minutes:
    """What is known at any moment."""

    def __init__(self, out: Path, every_s: float = EVERY_S, warm_s: float = WARM_S) -> None:
        self._out, self._every_s, self._warm_s = out, every_s, warm_s
        self._began = time.monotonic()
        self._meter = Meter()
        self._pid = 0
        self._load: EngineLoad | TextLoad | None = None
        self._served_since = 0.0
        self._before: dict[str, int] = {}
        """Requests of engines that have ended, by how they ended."""
        self._tokens = 0
        self._spilled: dict[str, int] = {}
        """Blocks that left engines that have ended, and what became of them."""
        self.served_s = 0.0
        self.starts = self.deaths = self.outside = 0
        self.lives: list[Life] = []
        self.by_process = False
        """Whether the card's driver tells the engine's own memory; else it is that of the whole card."""
        self.closed = False
        self._lock = threading.RLock()
        """Of what is told, so that nothing comes behind a verdict. A signal may come while this thread holds it."""

    # What a trial tells.

    def started(self, pid: int) -> None:
        """An engine is there."""
        self._pid, self.starts = pid, self.starts + 1

    def serving(self, load: EngineLoad | TextLoad) -> None:
        """It is ready."""
        self.lives.append(Life())
        self._load, self._served_since = load, time.monotonic()

    def ended(self) -> None:
        """It has ended; what it served counts from now on as served before."""
        load, self._load, self._pid = self._load, None, 0
        if load is not None:
            self._before = _sum(self._before, load.ended)
            self._tokens += load.tokens
            if isinstance(load, EngineLoad) and load.spill is not None:
                self._spilled = _sum(self._spilled, load.spill.figures())
            self.served_s += time.monotonic() - self._served_since

    # What is told.

    def figures(self) -> dict[str, Any]:
        """All of it."""
        load, served, ended, tokens = self._load, self.served_s, self._before, self._tokens
        spilled = self._spilled
        if isinstance(load, EngineLoad) and load.spill is not None:
            spilled = _sum(spilled, load.spill.figures())
        if load is not None:
            served += time.monotonic() - self._served_since
            ended, tokens = _sum(ended, load.ended), tokens + load.tokens
        lives = list(self.lives)
        return {
            "at_s": round(time.monotonic() - self._began, 1),
            "served_s": round(served, 1),
            "requests": sum(ended.values()),
            "tokens": tokens,
            "ended": ended,
            "blocks": spilled,
            "starts": self.starts,
            "deaths": self.deaths,
            "outside": self.outside,
            "host_mib": lives[-1].host[-1] if lives and lives[-1].host else None,
            "card_mib": lives[-1].card[-1] if lives and lives[-1].card else None,
            "card_memory_of": "the process" if self.by_process else "the whole card",
        }

    def verdict(self, cut: bool) -> dict[str, Any]:
        """The figures, and what they say."""
        figures = self.figures()
        host = largest_growth([life.host for life in self.lives])
        card = largest_growth([life.card for life in self.lives])
        flat = None if host is None else host <= HOST_GROWTH_MIB
        if self.by_process and card is not None:
            flat = bool(flat) and card <= CARD_GROWTH_MIB
        met = figures["requests"] > 0 and not self.deaths and not self.outside and flat is not False
        met = met and not figures["blocks"].get("changed")
        return {**figures, "host_growth_mib": host, "card_growth_mib": card, "flat": flat, "cut": cut, "met": met}

    def put(self, kind: str, values: Mapping[str, Any]) -> None:
        """One line, to the file and the console at once, without a buffer."""
        line = (json.dumps({"kind": kind, **values}) + "\n").encode()
        with suppress(OSError):
            os.write(1, line)
        file = os.open(self._out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def watch(self) -> None:
        """Look at memory and tell figures, until the process ends."""
        told = time.monotonic()
        while not self.closed:
            time.sleep(SAMPLE_S)
            self._sample()
            if time.monotonic() - told >= self._every_s:
                told = time.monotonic()
                with self._lock:
                    if not self.closed:
                        self.put("minutes", self.figures())

    def cut(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """The time is over before its end: the verdict first, then the engine's end."""
        if self.closed:
            return
        code = self.close(cut=True)
        pid = self._pid
        if pid:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        raise SystemExit(code)

    def close(self, *, cut: bool) -> int:
        """Tell the verdict; gives the exit status."""
        with self._lock:
            self.closed = True
            verdict = self.verdict(cut)
            self.put("verdict", verdict)
        return 0 if verdict["met"] else 1

    def _sample(self) -> None:
        load, pid = self._load, self._pid
        if load is None or not pid or time.monotonic() - self._served_since < self._warm_s:
            return
        life = self.lives[-1]
        with suppress(OSError, StopIteration, ValueError):
            text = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
            line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
            life.host.append(int(line.split()[1]) / 1024)
        own = self._meter.process_bytes(pid)
        used = self._meter.used_bytes() if own is None else own
        if used is not None:
            self.by_process = own is not None
            life.card.append(used / MIB)


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    # A copy: the load goes on while it is counted.
    both = dict(one)
    for name, count in list(other.items()):
        both[name] = both.get(name, 0) + count
    return both


def begin_minutes(options: argparse.Namespace) -> Minutes:
    """What is known from now on; a signal tells it and ends this process."""
    state = Minutes(options.out, options.every, 0.0 if options.rehearse else WARM_S)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, state.cut)
    return state


def run_minutes(
    state: Minutes, options: argparse.Namespace, config: EngineConfig, environment: Mapping[str, str]
) -> int:
    """Load for ``options.minutes``; gives 0 when engines lived, made no call beyond the list and stayed flat."""
    threading.Thread(target=state.watch, daemon=True, name="minutes").start()
    left, unready, seed = 60.0 * options.minutes, 0, 0
    while left > 0 and unready < MOST_UNREADY:
        trial = Trial(
            config=config,
            mode=Mode.ENFORCE,
            seconds=left,
            environment=environment,
            ready_timeout_s=READY_S,
            seed=seed,
            watch=state,
        )
        outcome = run(trial)
        state.ended()
        seed += 1
        left = 60.0 * options.minutes - state.served_s
        if outcome.lived:
            break
        state.deaths += 1
        unready = unready + 1 if not outcome.ready_s else 0
        told = {"status": outcome.status, "problem": outcome.problem, "said": outcome.said[-800:]}
        if outcome.killed:
            state.outside += 1
            named = run(replace(trial, mode=Mode.OUTSIDE, seconds=NAMING_S, watch=None))
            told["outside"] = named.outside  # type: ignore[assignment]
        state.put("death", told)
        if left < LEAST_S:
            break
    sys.stdout.flush()
    return state.close(cut=False)
