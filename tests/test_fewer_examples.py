"""Tests of drawn examples draw fewer where full counts are left out, and all otherwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fewer_examples import KEPT, LEAST, SETTINGS, fewer, reduce

DRAWS = """
from hypothesis import given, settings, strategies

drawn = []


@given(strategies.integers())
@settings(max_examples=90, database=None)
def test_draws(number):
    drawn.append(number)


def test_counts():
    print(f"drawn {len(drawn)}")
"""


def test_counts_are_a_third_and_small_ones_stay() -> None:
    """A third, ten at least, and never more than was asked for."""
    assert [fewer(count) for count in (1, 3, LEAST, 30, 31, 300)] == [1, 3, LEAST, 10, 10, 100]


def test_a_test_without_examples_is_left_alone() -> None:
    """Only what Hypothesis has decorated is changed, and only its count."""

    def plain() -> None:
        pass

    @given(st.integers())
    @settings(max_examples=60, derandomize=True)
    def drawn(number: int) -> None:
        pass

    reduce(plain)
    reduce(drawn)
    assert not hasattr(plain, SETTINGS)
    assert (getattr(drawn, SETTINGS).max_examples, getattr(drawn, SETTINGS).derandomize) == (20, True)


def test_folders_that_keep_their_counts_are_there() -> None:
    """What is named exists."""
    assert all(folder.is_dir() for folder in KEPT)


@pytest.mark.parametrize(("selected", "least", "most"), [("not full", 20, 45), ("", 90, 200)])
def test_a_run_draws_as_many(root: Path, tmp_path: Path, selected: str, least: int, most: int) -> None:
    """A run without full counts draws a third; control: another run draws all."""
    (tmp_path / "test_drawn.py").write_text(DRAWS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  full: full counts\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.fewer_examples", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", selected, "--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(tmp_path)],
        cwd=root,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (count,) = [int(line.rpartition("drawn ")[2]) for line in done.stdout.splitlines() if "drawn " in line]
    assert least <= count <= most
