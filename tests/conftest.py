"""Fixtures shared by all tests: where things are; no logic."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load_interpreter() -> None:
    """Triton decides at its import whether its kernels are interpreted, and torch imports it where it is installed: so
    it is done here, before anybody else."""
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Full counts get a bound of their own where they do not name one."""
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(FULL_TIMEOUT_S))


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
