"""Samples of processor time are those of processes that are there from their beginning to their end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from bench.process_times import MOST_SAMPLES, steady

WAITS = [sys.executable, "-c", "input()"]


def child() -> subprocess.Popen[bytes]:
    """A child of this process that waits for its end."""
    return subprocess.Popen(WAITS, stdin=subprocess.PIPE)


def ending(*children: subprocess.Popen[bytes]) -> Callable[[], int]:
    """A sample in which the next of these children ends, while there is one; gives how many are left."""
    left = list(children)

    def sample() -> int:
        if left:
            left.pop().communicate(b"\n")
        return len(left)

    return sample


def test_a_sample_in_which_a_process_ends_is_taken_again() -> None:
    """Two children end, one in each of the first two samples: the third counts. Control: where none ends the first
    does."""
    assert steady([os.getpid()], ending(child(), child())) == (0, 3)
    assert steady([os.getpid()], ending()) == (0, 1)


def test_what_never_rests_has_no_sample() -> None:
    """A process begins in each sample: it is said so, after as many as are taken at most."""
    children = list[subprocess.Popen[bytes]]()
    try:
        with pytest.raises(RuntimeError, match="not idle"):
            steady([os.getpid()], lambda: children.append(child()))
        assert len(children) == MOST_SAMPLES
    finally:
        for one in children:
            one.communicate(b"\n")
