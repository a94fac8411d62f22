"""Whose exit status is whose, with real children and real orphans."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from isolation.host.process import run, spawn
from isolation.host.reaper import Reaper, _children_by_walk, children, descendants

ORPHAN = (
    "import os, sys, time\n"
    "pid = os.fork()\n"
    "if pid: print(pid, flush=True); os._exit(0)\n"
    "os.close(1); os.close(2); time.sleep({seconds}); os._exit(5)"
)


def make_orphan(seconds: float) -> int:
    """Start a program that leaves a child behind; give the child's process id."""
    return int(run([sys.executable, "-I", "-S", "-c", ORPHAN.format(seconds=seconds)], timeout_s=20).stdout)


@pytest.fixture
def reaper():
    """A reaper that has collected what earlier tests left; the test process stays a subreaper, which harms nothing."""
    made = Reaper()
    made.reap_orphans()
    return made


def test_claimed_orphan_gives_its_status(reaper):
    """The status of a process that another program left to us is ours to read, once it was claimed."""
    with reaper.adopting():
        claim = reaper.claim(make_orphan(0.2))
    assert claim.poll() is None
    # Orphans of earlier tests may end only now; they are reaped, and this one is not.
    assert claim.pid not in reaper.orphans()
    reaper.reap_orphans()
    assert claim.pid in children()
    assert claim.wait(20) == 5
    reaper.release(claim)
    assert claim.poll() == 5


def test_what_comes_while_another_is_adopted_is_not_reaped(reaper):
    """Two blocks run at once, and neither's orphan is reaped before it is claimed, though both have ended; one
    that was there before (the control) is."""
    earlier = make_orphan(0)
    with reaper.adopting() as before:
        first = make_orphan(0)
        with reaper.adopting() as later:
            second = make_orphan(0)
            for pid in (earlier, first, second):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            reaper.reap_orphans()
            assert (earlier in children(), {first, second} <= children()) == (False, True)
            assert (earlier in before, first in before, first in later) == (True, False, True)
            claim = reaper.claim(second)
        reaper.reap_orphans()
        assert first in children()
    reaper.reap_orphans()
    assert (first in children(), claim.wait(20)) == (False, 5)
    reaper.release(claim)


def test_killed_claim_gives_minus_the_signal(reaper):
    """A signal is told from a status."""
    with reaper.adopting():
        claim = reaper.claim(make_orphan(60))
    os.kill(claim.pid, signal.SIGKILL)
    assert claim.wait(20) == -signal.SIGKILL
    reaper.release(claim)


def test_orphans_are_reaped_and_owned_children_are_not(reaper):
    """An orphan is collected; a child of ``isolation.host.process`` keeps its status for its owner."""
    with spawn(["sh", "-c", "exit 6"]) as child:
        orphan = make_orphan(60)
        assert orphan in reaper.orphans()
        assert child.pid not in reaper.orphans()
        pidfd = os.pidfd_open(orphan)
        os.kill(orphan, signal.SIGKILL)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        os.close(pidfd)
        assert reaper.reap_orphans() >= 1
        assert orphan not in children()
        assert child.wait(20) == 6


def test_children_and_descendants_agree_with_a_walk():
    """Both ways to list children give the same, at depth one and below."""
    with spawn(["sh", "-c", "sleep 60 & wait"]) as child:
        while not descendants(child.pid):
            pass
        assert child.pid in children()
        assert _children_by_walk(os.getpid()) == children()
        (grandchild,) = descendants(child.pid)
        assert descendants(os.getpid()) >= {child.pid, grandchild}
        os.kill(grandchild, signal.SIGKILL)
