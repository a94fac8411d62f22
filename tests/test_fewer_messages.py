"""Workers leave out messages that nobody uses, and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fewer_messages import LONG_S, fewer

SUITE = """
import time

import pytest


def test_passes():
    print("said by one that passes")


def test_fails():
    print("said by one that fails")
    assert 1 == 2


@pytest.mark.skip(reason="not here")
def test_is_skipped():
    pass


@pytest.mark.xfail(reason="known")
def test_is_known_to_fail():
    assert False


@pytest.fixture
def broken():
    raise OSError("no place")


def test_cannot_begin(broken):
    pass


@pytest.fixture
def unclosed():
    yield
    raise OSError("no end")


def test_cannot_end(unclosed):
    pass


@pytest.fixture
def slow():
    time.sleep(1.2)


def test_begins_late(slow):
    pass
"""

NOTES = """
def pytest_runtest_logreport(report):
    if hasattr(report, "node"):
        print(f"<{report.when} {report.outcome} {len(report.sections)}>", end="")
"""


def report(when: str, outcome: str = "passed", duration: float = 0.0, **more: Any) -> dict[str, Any]:
    """What a report's message tells."""
    data = {"when": when, "outcome": outcome, "duration": duration, "user_properties": [], "sections": [["a", "b"]]}
    return {"data": {**data, **more}}


def test_what_is_used_is_sent() -> None:
    """Of tests that pass the call; of others everything, with what they printed; set-ups that took long, and figures of
    tests; and all that tells of the worker itself."""
    sent: list[tuple[str, dict[str, Any]]] = []
    send = fewer(lambda name, **told: sent.append((name, told)), printed=False)
    for left_out in (report("setup"), report("teardown")):
        send("testreport", **left_out)
    send("logstart", nodeid="a")
    assert sent == []
    kept = [
        report("call"),
        report("setup", "failed"),
        report("setup", "skipped"),
        report("call", "failed"),
        report("teardown", "failed"),
        report("setup", duration=LONG_S),
        report("teardown", user_properties=[["figure", 1]]),
        report("setup", wasxfail="reason: x"),
    ]
    for one in kept:
        send("testreport", **one)
    for name in ("logfinish", "runtest_protocol_complete", "workerready", "collectionfinish", "internal_error"):
        send(name, told=1)
    assert [told["data"] for name, told in sent if name == "testreport"] == [one["data"] for one in kept]
    assert len(sent) == len(kept) + 5
    assert [bool(told["data"]["sections"]) for _, told in sent[: len(kept)]] == [
        one["data"]["outcome"] != "passed" for one in kept
    ]
    send = fewer(lambda name, **told: sent.append((name, told)), printed=True)
    send("testreport", **report("call"))
    assert sent[-1][1]["data"]["sections"]


@pytest.mark.parametrize("plugin", ["tests.fewer_messages", "no:fewer_messages"])
def test_a_run_of_workers_tells_the_same(root: Path, tmp_path: Path, plugin: str) -> None:
    """Counts, reasons, output of failures and long set-ups are those of a run that sends everything (control), with
    fewer reports: one for each of the tests that pass."""
    (tmp_path / "test_some.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(NOTES)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-n", "1", "-p", plugin, "-p", "no:cacheprovider"]
    words = ["--durations=3", "--durations-min=1", "-c", "/dev/null", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run([*command, *words], cwd=root, capture_output=True, text=True, timeout=100, check=False).stdout
    assert "1 failed, 3 passed, 1 skipped, 1 xfailed, 2 errors" in done, done
    for said in ("said by one that fails", "not here", "known", "no place", "no end", "setup    "):
        assert said in done, said
    assert "said by one that passes" not in done
    few = plugin == "tests.fewer_messages"
    assert done.count("<call passed") == 3
    assert (done.count("<setup passed"), done.count("<teardown passed")) == ((1, 0) if few else (5, 6))
