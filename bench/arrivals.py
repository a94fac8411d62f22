"""Many streams that arrive one after the other and go on: failures, connections that do not stay, waits, memory.

Starts the appliance with a null engine in its real sandboxes, has streams arrive over some seconds, and each of them
ask again over its own connection until its time is over. Seen are failed answers, connections that the server closed
between two answers, the time to first token from the request's last byte on, and the gateway's memory (proportional set
size, each second): its growth from the moment at which all streams are there to the end.

``python bench/arrivals.py [--streams 256] [--arrive 10] [--run 60] [--front-end chat] [--step-us 50000] [--json]``;
ends with status 1 where a bar is missed: no failure, no closed connection, 99 % of first tokens within 300 ms, memory
within 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.host import drive, null_appliance, quantile
from bench.host_client import APIS
from bench.process_times import label, tree

TTFT_MS = 300.0
GROWTH = 0.05
"""Share by which the gateway's memory may have grown."""

SETTLE_S = 5.0
"""From the last arrival until memory is taken as that of all streams."""


class Memory(threading.Thread):
    """Looks at a process's memory each second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._rollup = Path(f"/proc/{pid}/smaps_rollup")
        self._over = threading.Event()
        self.began = time.monotonic()
        self.seen: list[tuple[float, int]] = []
        """Seconds since the begin, and KiB."""

    def run(self) -> None:
        """Look until it is stopped."""
        while not self._over.wait(1.0):
            pss = next(line for line in self._rollup.read_text().splitlines() if line.startswith("Pss:"))
            self.seen.append((time.monotonic() - self.began, int(pss.split()[1])))

    def stop(self) -> None:
        """End."""
        self._over.set()
        self.join()

    def growth(self, since_s: float, until_s: float) -> float:
        """Share by which memory grew: the middle of the last quarter of the time over that of the first."""
        values = [kib for at, kib in self.seen if since_s <= at <= until_s]
        part = max(1, len(values) // 4)
        first, last = sorted(values[:part]), sorted(values[-part:])
        return last[part // 2] / first[part // 2] - 1 if values else 0.0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    with null_appliance(arguments.step_us, max_num_seqs=max(256, arguments.streams)) as served:
        gateway = next(pid for pid in tree([served.process.pid]) if label(pid) == "gateway")
        drive(served, arguments.front_end, 4, 1, 64)
        memory = Memory(gateway)
        memory.start()
        seen = drive(
            served,
            arguments.front_end,
            arguments.streams,
            1,
            arguments.tokens,
            span_s=(arguments.arrive, arguments.run),
        )
        memory.stop()
    return {
        "front_end": arguments.front_end,
        "streams": arguments.streams,
        "answers": len(seen["firsts"]),
        "tokens_per_s": seen["tokens"] / seen["wall_s"],
        "failures": seen["failures"],
        "closed": seen["closed"],
        "ttft_p50_ms": quantile(seen["firsts"], 0.5) * 1e3,
        "ttft_p99_ms": quantile(seen["firsts"], 0.99) * 1e3,
        "gap_p99_ms": quantile(seen["gaps"], 0.99) * 1e3,
        "memory_mib": max(kib for _, kib in memory.seen) / 1024,
        "growth": memory.growth(arguments.arrive + SETTLE_S, arguments.run),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Many streams that arrive one after the other and go on.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--arrive", type=float, default=10.0, help="seconds over which they arrive")
    parser.add_argument("--run", type=float, default=60.0, help="seconds for which each goes on")
    parser.add_argument("--front-end", choices=tuple(APIS), default="chat")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each request")
    parser.add_argument("--step-us", type=int, default=50_000, help="microseconds of a step of the null engine")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    row = measure(arguments)
    met = not (row["failures"] or row["closed"]) and row["ttft_p99_ms"] <= TTFT_MS and row["growth"] <= GROWTH
    if arguments.json:
        print(json.dumps(row | {"met": met}))
    else:
        for name, value in row.items():
            print(f"{name:14s} {value:.3f}" if isinstance(value, float) else f"{name:14s} {value}")
        print("met" if met else "missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
