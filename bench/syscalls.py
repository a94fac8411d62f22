"""Figures of the host's system calls: of any process tree, and of the whole appliance for each output token.

Counted by the kernel's own tracepoint ``raw_syscalls:sys_enter`` through perf_event_open(2), on every thread of the
tree and every thread that it starts meanwhile; needs root. A guest's call that gVisor catches is not entered and not
counted; what the sentry and its stubs do for it is. Beside the appliance two sandboxes sleep for the same time: what
idle runsc makes by itself is told apart. Gaps are the time between two chunks of one stream, as the client sees them.

Run: ``python bench/syscalls.py [--streams 32] [--tokens 200]``, or ``python bench/syscalls.py --pid PID --seconds 10``.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ctypes
import json
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.process_times import name_of, tree

PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
PERF_TYPE_TRACEPOINT = 2
ATTR_BYTES = 112
INHERIT = 1 << 1
EVENT = "events/raw_syscalls/sys_enter/id"
LIBC = ctypes.CDLL(None, use_errno=True)


def tracepoint() -> int:
    """The number of the event; mounts tracefs for a moment where it is not mounted. Needs root."""
    path = Path("/sys/kernel/tracing") / EVENT
    if path.exists():
        return int(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        if LIBC.mount(b"none", folder.encode(), b"tracefs", 0, None) != 0:
            raise OSError(ctypes.get_errno(), f"tracefs cannot be mounted: {os.strerror(ctypes.get_errno())}")
        try:
            return int((Path(folder) / EVENT).read_text())
        finally:
            LIBC.umount(folder.encode())


class Counter:
    """Counts the calls of some processes, threads to come included."""

    def __init__(self, pids: Iterable[int]) -> None:
        event, number = tracepoint(), PERF_EVENT_OPEN[os.uname().machine]
        attr = struct.pack("=IIQQQQQ", PERF_TYPE_TRACEPOINT, ATTR_BYTES, event, 0, 0, 0, INHERIT)
        attr = ctypes.create_string_buffer(attr.ljust(ATTR_BYTES, b"\0"), ATTR_BYTES)
        self._fds: list[tuple[int, int]] = []
        for pid in pids:
            try:
                tasks = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
            except OSError:
                continue
            for task in tasks:
                fd = LIBC.syscall(number, attr, task, -1, -1, 0)
                if fd >= 0:
                    self._fds.append((pid, fd))
        if not self._fds:
            raise OSError(ctypes.get_errno(), f"no thread can be counted: {os.strerror(ctypes.get_errno())}")

    def read(self) -> collections.Counter[int]:
        """Calls so far, by process."""
        counts: collections.Counter[int] = collections.Counter()
        for pid, fd in self._fds:
            counts[pid] += struct.unpack("=Q", os.read(fd, 8))[0]
        return counts

    def close(self) -> None:
        """Stop counting."""
        for _, fd in self._fds:
            os.close(fd)
        self._fds.clear()


def named(counts: collections.Counter[int]) -> dict[str, int]:
    """Counts by what the processes are; a stub belongs to its sentry."""
    names: collections.Counter[str] = collections.Counter()
    for pid, count in counts.items():
        names[name_of(pid)] += count
    return {name: count for name, count in names.most_common() if count}


async def stream(client: object, url: str, key: str, tokens: int, gaps: list[float]) -> None:
    """One stream to its end; notes the gaps between its chunks."""
    body = {
        "model": "athanor-mini",
        "prompt": "Count from one:",
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    headers = {"authorization": f"Bearer {key}"}
    async with client.stream("POST", url + "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        last = 0.0
        async for _ in answer.aiter_bytes():
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now


def measure(streams: int, tokens: int) -> dict[str, object]:
    """The whole appliance under load, and two sleeping sandboxes beside it."""
    import httpx

    from bench.sandbox import sleeping
    from tests.system.conftest import running

    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "state") as appliance, sleeping(2) as sleepers:
        url, keys = appliance.ready["http"], [appliance.key("alpha"), appliance.key("beta")]

        async def load(count: int, length: int, gaps: list[float]) -> None:
            async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=count)) as client:
                jobs = (stream(client, url, keys[index % 2], length, gaps) for index in range(count))
                await asyncio.gather(*jobs)

        asyncio.run(load(streams, 8, []))
        time.sleep(1.0)
        ours, idle, gaps = Counter(tree([appliance.process.pid])), Counter(tree(sleepers)), []
        begun, before, idle_before = time.perf_counter(), ours.read(), idle.read()
        asyncio.run(load(streams, tokens, gaps))
        wall, after, idle_after = time.perf_counter() - begun, ours.read(), idle.read()
        # An idle appliance, for the same figure at rest.
        time.sleep(2.0)
        rest, idle_rest = ours.read(), idle.read()
        time.sleep(10.0)
        rest, idle_rest = ours.read() - rest, idle.read() - idle_rest
        by_name, rest_by_name = named(after - before), named(rest)
        ours.close()
        idle.close()
    done, gaps = streams * tokens, sorted(gaps)
    total, runsc = sum(by_name.values()), (idle_after - idle_before).total()
    return {
        "streams": streams,
        "tokens": done,
        "wall_s": round(wall, 2),
        "tokens_per_s": round(done / wall),
        "calls": total,
        "idle_runsc_calls": runsc,
        "calls_per_token": round((total - runsc) / done, 3),
        "by_process_per_token": {name: round(count / done, 3) for name, count in by_name.items()},
        "gap_ms": {"p50": round(gaps[len(gaps) // 2] * 1e3, 2), "p99": round(gaps[int(len(gaps) * 0.99)] * 1e3, 2)},
        "chunks_per_token": round((len(gaps) + streams) / done, 3),
        "idle_calls_per_s": {
            "appliance": rest.total() / 10,
            "two sleeping sandboxes": idle_rest.total() / 10,
            "by process": {name: count / 10 for name, count in rest_by_name.items()},
        },
    }


def main() -> int:
    """Measure and print as JSON."""
    parser = argparse.ArgumentParser(description="Figures of system calls.")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each stream")
    parser.add_argument("--pid", type=int, help="count this process and its descendants instead")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    if options.pid is None:
        print(json.dumps(measure(options.streams, options.tokens), indent=1))
        return 0
    counter = Counter(tree([options.pid]))
    before = counter.read()
    time.sleep(options.seconds)
    counts = counter.read() - before
    print(json.dumps({"calls_per_s": counts.total() / options.seconds, "by_process": named(counts)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
