"""``athanor audit export`` and its reader are killed with SIGKILL: a collector has each request once, all the same."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.common.audit.entry import KINDS, Entry, entry
from appliance.common.audit.log import open_log

ROOT = Path(__file__).resolve().parents[4]

REQUESTS = 600
"""Requests of a log: 0.6 MB as lines, which no pipe holds at once."""

AT_MS = 1_790_812_800_000

PATIENCE_S = 60.0

WAITS = """
import runpy, time
import isolation.host.atomic_file as files
files.write_whole = lambda *_: time.sleep(600)
runpy.run_module("appliance.operator.cli", run_name="__main__")
"""
"""The command line, in a program that waits where it would write a file."""


def request(number: int) -> Entry:
    """A request that cost its number."""
    fields: dict[str, str | int] = {name: "x" if of is str else 1 for name, of in KINDS["request"].items()}
    return entry("request", **(fields | {"tenant": "alpha", "request": f"req_{number}", "cost": number}))


def write(folder: Path, numbers: range) -> None:
    """Write further requests, and between them entries that are none."""
    audit = open_log(folder)
    audit.append([(AT_MS + number, one) for number in numbers for one in (request(number), gap())])
    audit.close()


def gap() -> Entry:
    """An entry that is no request."""
    return entry("gap", **{name: "x" if of is str else 1 for name, of in KINDS["gap"].items()})


def started(
    log: Path, *options: str, out: Any = subprocess.PIPE, program: tuple[str, str] = ("-m", "appliance.operator.cli")
) -> subprocess.Popen[bytes]:
    """An export of the log's requests, in a process of its own."""
    line = [sys.executable, *program, "audit", "export", "--form", "entries", "--kind", "request"]
    return subprocess.Popen([*line, "--from", str(log), *options], cwd=ROOT, stdout=out)


class Collector:
    """Keeps one row for each (log, n) in a database, and its position is its newest row."""

    def __init__(self, path: Path) -> None:
        self.book = sqlite3.connect(path)
        self.book.execute("CREATE TABLE IF NOT EXISTS used (log TEXT, n INT, cost INT, PRIMARY KEY (log, n))")

    def take(self, text: bytes) -> None:
        """Keep the whole lines of a text; what is behind the last one was cut."""
        rows = [json.loads(line) for line in text.split(b"\n")[:-1]]
        with self.book:
            self.book.executemany(
                "INSERT OR IGNORE INTO used VALUES (?, ?, ?)", [(one["log"], one["n"], one["cost"]) for one in rows]
            )

    @property
    def after(self) -> tuple[str, ...]:
        """What it asks for next."""
        row = self.book.execute("SELECT log, n FROM used ORDER BY n DESC LIMIT 1").fetchone()
        return () if row is None else ("--after", f"{row[0]}:{row[1]}")

    def sums(self) -> tuple[int, int]:
        """Requests, and their cost."""
        requests, cost = self.book.execute("SELECT COUNT(*), SUM(cost) FROM used").fetchone()
        return int(requests), int(cost)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log of requests 0, 1, ... between other entries."""
    write(tmp_path / "audit", range(REQUESTS))
    return tmp_path / "audit"


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    """One that has nothing yet."""
    made = Collector(tmp_path / "collected.db")
    yield made
    made.book.close()


def test_a_kill_between_lines_and_position_loses_and_doubles_nothing(
    log: Path, collector: Collector, tmp_path: Path
) -> None:
    """The export is killed when all lines are in its file and the position is not: it waits where it would write the
    position. The next call writes the same lines again, and a collector that reads both has
    each request once. Controls: the file has each line twice, and the call after that writes none."""
    position, lines, whole = tmp_path / "position", tmp_path / "lines", REQUESTS * (REQUESTS - 1) // 2
    with lines.open("ab") as out:
        export = started(log, "--resume", str(position), out=out, program=("-c", WAITS))
        until = time.monotonic() + PATIENCE_S
        while lines.read_bytes().count(b"\n") < REQUESTS:
            assert time.monotonic() < until and export.poll() is None
            time.sleep(0.02)
        export.send_signal(signal.SIGKILL)
        assert export.wait() == -signal.SIGKILL
        assert not position.exists()
        for more in (REQUESTS, 0):
            before = lines.read_bytes().count(b"\n")
            assert started(log, "--resume", str(position), out=out).wait(PATIENCE_S) == 0
            assert lines.read_bytes().count(b"\n") == before + more
    collector.take(lines.read_bytes())
    assert collector.sums() == (REQUESTS, whole)
    assert sum(json.loads(line)["cost"] for line in lines.read_bytes().splitlines()) == 2 * whole


def test_a_killed_pair_loses_and_doubles_nothing(log: Path, collector: Collector, tmp_path: Path) -> None:
    """Export and reader are killed after so many bytes, in the middle of a line too, while the log grows; each time the
    reader asks for what is behind its newest row. In the end it has each request once. Control: behind a pipe whose
    reader kept nothing, --resume goes on behind all that it never saw."""
    numbers = REQUESTS
    for taken in (1, 70_001, 200_000):
        export = started(log, *collector.after)
        assert export.stdout is not None
        text = export.stdout.read(taken)
        export.kill()
        assert export.wait() == -signal.SIGKILL and len(text) == taken
        export.stdout.close()
        collector.take(text)
        write(log, range(numbers, numbers + 10))
        numbers += 10
    assert 0 < collector.sums()[0] < REQUESTS
    rest = started(log, *collector.after).communicate(timeout=PATIENCE_S)[0]
    collector.take(rest + rest)
    assert collector.sums() == (numbers, numbers * (numbers - 1) // 2)
    position = ("--resume", str(tmp_path / "position"))
    assert len(started(log, *position).communicate(timeout=PATIENCE_S)[0].splitlines()) == numbers
    assert started(log, *position).communicate(timeout=PATIENCE_S)[0] == b""
