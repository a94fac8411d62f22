"""Fixtures shared by all tests: where things are; no logic."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.native import ON_CARD, OPTION
from tests.parts import check_names, keep_part

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
"""No example is timed: on a busy machine the first one of a run takes any time."""

os.environ["OMP_WAIT_POLICY"] = "passive"
"""For torch's threads, before it is loaded: beside another worker a thread that spins until the others are there takes
the processor that they wait for, and a test on two threads then takes ten times as long."""


def _load_interpreter() -> None:
    """Triton decides at its import whether its kernels are interpreted, and torch imports it where it is installed: so
    it is done here, before anybody else."""
    if ON_CARD:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError:
        pass
    finally:
        del os.environ["TRITON_INTERPRET"]


_load_interpreter()

FULL_TIMEOUT_S = 3600
"""A full count may take this long: it is bounded so that a hang ends, not so that it is fast."""


OTHERS_NICE = 5
"""Niceness of tests outside of ``MACHINE`` in one of several workers: a third of the processor where both compute."""

MACHINE = "machine"
"""The group of files whose tests boot sandboxes or compare times: one worker runs them, one after the other."""


LONG = ("tests/test_linters.py", "tests/redteam/test_namespace.py")
"""Files outside of ``MACHINE`` with a test of half a minute and more, which would come last in the order of names. The
first ones of their workers, none of them is still under way on one core when all others have ended."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take a part of the suite."""
    parser.addoption(
        "--part", default="1/1", metavar="K/N", help="run every Nth file, from the Kth on (tests/parts.py)"
    )
    parser.addoption(OPTION, action="store_true", help="run GPU kernels on this machine's GPU, not interpreted")


def pytest_configure(config: pytest.Config) -> None:
    """Let programs of the tests take SIGINT, and compute on one thread in each of several workers: more threads than
    cores would wait for each other.

    A shell without job control starts what it puts in the background with SIGINT ignored; a program inherits that, and
    a test that interrupts it would wait for an end that does not come.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Bound full counts, and deal the tests to workers: a file's tests stay together, and so do those of ``MACHINE``.

    With more than one worker these stand first, since their worker has to begin with them to end with the others, and
    behind them those of ``LONG``.

    Raises:
        UsageError: the workers would ignore the groups, as pytest-xdist 3.8 does under pytest 9.2.
    """
    check_names(items)
    others = keep_part(items, config.getoption("part"))
    if others:
        config.hook.pytest_deselected(items=others)
    apart = {item.path for item in items if needs_machine(item)}
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(FULL_TIMEOUT_S))
        group = MACHINE if item.path in apart else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    grouped = config.getoption("loadgroup", default=False)
    if grouped:
        long = {ROOT / name for name in LONG}
        items.sort(key=lambda item: 0 if item.path in apart else 1 if item.path in long else 2)
    yield
    if grouped and not all(item.nodeid.rpartition("@")[0] for item in items):
        raise pytest.UsageError("this pytest-xdist ignores the groups of tests under this pytest; see pyproject.toml")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give tests of ``MACHINE`` the processor first: a worker that runs any other lowers its priority for good, since
    it has then no test of ``MACHINE`` left. What such tests start inherits that."""
    if gives_way(item) and os.nice(0) == 0:
        os.nice(OTHERS_NICE)


def gives_way(item: pytest.Item) -> bool:
    """Whether a test runs in a worker that gets no test of ``MACHINE`` behind it: only where groups are sent whole."""
    if not hasattr(item.config, "workerinput") or not item.config.getoption("loadgroup", default=False):
        return False
    group = item.get_closest_marker("xdist_group")
    return group is not None and group.args != (MACHINE,)


def needs_machine(item: pytest.Item) -> bool:
    """Whether a test boots sandboxes or compares times, so that a second such test beside it would disturb it."""
    return (
        item.get_closest_marker("runsc") is not None
        or item.get_closest_marker("clock") is not None
        or "runsc_path" in getattr(item, "fixturenames", ())
    )


@pytest.fixture(scope="session", autouse=True)
def short_temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary directory of a short name for everything started here, gone afterwards: a demo whose state directory
    has a long path puts its sockets there."""
    tmp_path_factory.getbasetemp()
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="ath-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o1777)  # as /tmp: tests without root go there as somebody else
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
        tempfile.tempdir = None
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public data beside the repository (traces, a trained model); the test is skipped where it is absent."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no shared data beside the repository")
    return path


@pytest.fixture
def demos_section() -> dict[str, Any]:
    """Section ``sandbox`` of an appliance that begins with the demos' checkpoints (``as_demos``). A test with this
    fixture runs behind the first demos (tests/system/conftest.py)."""
    from tests.system.conftest import as_demos

    return as_demos()


@pytest.fixture(scope="session")
def runsc_path() -> Path:
    """A runsc binary: the one `make` obtained, or one on PATH."""
    own = ROOT / ".venv" / "bin" / "runsc"
    if own.is_file():
        return own
    found = shutil.which("runsc")
    if found is None:
        pytest.skip("no runsc: run `make setup`")
    return Path(found)
