"""What overwriting freed memory costs: processor time of gateway and text sandbox, with and without.

Two appliances with the null engine, alike but for ``wipe_memory``, serve the same loads in turns: each pair of turns
begins with the other one. ``tokens`` streams short prompts to long answers, so it is the gateway's cost for a token;
``prompts`` sends prompts of some kilobytes for few tokens, so it is the text sandbox's. Processor time is divided by
tokens or requests; a row's figure is the median of the pairs' ratios, beside all of them, since a crowded machine moves
single ones by a tenth.

``python bench/wiping.py [--pairs 6] [--seconds 6] [--load tokens prompts] [--front-end http] [--json]``
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.selftest.processes import CpuClock
from bench.host import Served, drive, null_appliance

STREAMS = 64
STEP_US = 11_765
"""Microseconds of a step at 85 steps a second, as in ``bench/host.py``."""

TOKENS = {"tokens": 256, "prompts": 4}
"""Output tokens of a request, by load."""

REPEATS = {"tokens": 1, "prompts": 60}
"""How often the prompt's sentence is in a prompt, by load: the longer one has 3 kB."""

ROOM_OF = {"tokens": "gateway", "prompts": "text"}
"""Whom a load is to weigh."""


@dataclass(frozen=True, slots=True)
class Row:
    """One load: microseconds of processor time a token (or a request, where prompts are weighed) in each turn."""

    load: str
    front_end: str
    room: str
    without: tuple[float, ...]
    with_wiping: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Of each pair: with, divided by without."""
        return [one / other for one, other in zip(self.with_wiping, self.without, strict=True)]


def turn(served: Served, clock: CpuClock, load: str, front_end: str, requests: int) -> dict[str, float]:
    """Microseconds of each room for a token, or for a request."""
    before = clock.read()
    seen = drive(served, front_end, STREAMS, requests, TOKENS[load], repeats=REPEATS[load])
    if seen["failures"]:
        raise RuntimeError(f"{seen['failures']} requests failed: such figures say nothing")
    done = seen["tokens"] if load == "tokens" else seen["tokens"] / TOKENS[load]
    return {room: (value - before[room]) / 1e3 / done for room, value in clock.read().items()}


def measure(load: str, front_end: str, pairs: int, seconds: float) -> list[Row]:
    """A row for gateway and text sandbox."""
    with ExitStack() as stack:
        both = []
        for wipes in (False, True):
            served = stack.enter_context(null_appliance(STEP_US, wipe_memory=wipes))
            both.append((served, CpuClock(served.process.pid, served.sandboxes())))
        requests = max(1, round(seconds * 1e6 / STEP_US / TOKENS[load]))
        requests = min(requests, 24)  # A request with a long prompt takes longer than its tokens.
        for served, clock in both:
            turn(served, clock, load, front_end, 2)
        found: list[list[dict[str, float]]] = [[], []]
        for pair in range(pairs):
            for which in (0, 1) if pair % 2 else (1, 0):
                found[which].append(turn(*both[which], load, front_end, requests))
    return [
        Row(load, front_end, room, *(tuple(one[room] for one in turns) for turns in found))  # type: ignore[arg-type]
        for room in ("gateway", "text")
    ]


def show(row: Row) -> None:
    """Two lines of the table."""
    unit = "token" if row.load == "tokens" else "request"
    mark = "*" if ROOM_OF[row.load] == row.room else " "
    print(
        f"{mark} {row.load:8s} {row.front_end:5s} {row.room:8s} {median(row.without):9.2f} us a {unit} without,"
        f" {median(row.with_wiping):9.2f} with: {median(row.ratios):.3f} (pairs {min(row.ratios):.2f} to"
        f" {max(row.ratios):.2f}; sums {sum(row.with_wiping) / sum(row.without):.3f})",
        flush=True,
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What overwriting freed memory costs.")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=6.0, help="about how long a turn lasts")
    parser.add_argument("--load", choices=tuple(TOKENS), nargs="+", default=list(TOKENS))
    parser.add_argument("--front-end", choices=("http", "grpc"), nargs="+", default=["http"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for load in arguments.load:
        for front_end in arguments.front_end:
            rows += measure(load, front_end, arguments.pairs, arguments.seconds)
            if not arguments.json:
                for row in rows[-2:]:
                    show(row)
    if arguments.json:
        print(json.dumps([{**asdict(row), "ratios": row.ratios} for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
