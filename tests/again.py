"""A pytest plugin and a program: run the tests that failed beside others once more, alone.

Three workers share two cores, so a test may fail for want of the processor: one that waits for a thread, or compares
times. Such a failure is written like any other; ``make test`` then runs the test by itself, and ends well where it
passes. A fault that is there fails twice. More than ``MOST`` failures are not
tried again, and neither is a run that was interrupted or lost a worker. CPython's ``regrtest --rerun`` does the same.

As a program it takes the file that ``--failed-to`` wrote: ``python -m tests.again .venv/failed.json``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OPTION = "--failed-to"

MOST = 8
"""Failures of a run that are tried again; where more fail, something is broken."""


class Failures:
    """Names of tests that failed in a run of several workers, as pytest takes them."""

    def __init__(self, path: Path, grouped: bool) -> None:
        """``grouped``: workers add ``@`` and the group to a test's name (pytest-xdist's ``--dist loadgroup``)."""
        self._path = path
        self._grouped = grouped
        self._names: dict[str, None] = {}
        self._crashed = False
        path.unlink(missing_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember a failure, and whether a worker died in it."""
        if report.failed:
            self._names[report.nodeid.rpartition("@")[0] if self._grouped else report.nodeid] = None
            self._crashed |= report.when not in ("setup", "call", "teardown")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write them where the run came to its end and tests are all that failed."""
        if exitstatus == pytest.ExitCode.TESTS_FAILED and not self._crashed:
            self._path.write_text(json.dumps(list(self._names)))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the file."""
    parser.addoption(OPTION, metavar="FILE", help="write the names of tests that failed (tests/again.py)")


def pytest_configure(config: pytest.Config) -> None:
    """Collect failures in the process that has the workers' reports."""
    path = config.getoption(OPTION)
    if path is not None and not hasattr(config, "workerinput"):
        grouped = config.getoption("dist", "no") == "loadgroup"
        config.pluginmanager.register(Failures(Path(path), grouped))


def run_again(path: Path) -> int:
    """Run the failed tests of a file alone; gives 0 where all of them pass, and says which those are."""
    try:
        names = json.loads(path.read_text())
    except FileNotFoundError:
        print("not tried again: the run was interrupted, lost a worker or had no failed test", file=sys.stderr)
        return 1
    if not 0 < len(names) <= MOST:
        print(f"not tried again: {len(names)} tests failed, more than {MOST}", file=sys.stderr)
        return 1
    if subprocess.run([sys.executable, "-m", "pytest", "-q", *names]).returncode:
        return 1
    print("\nfailed beside others, passed alone:", *names, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(run_again(Path(sys.argv[1])))
