"""Busy or idle, from processor time."""

from __future__ import annotations

from appliance.supervisor.sandbox_looks import BUSY_SHARE, LoadWatch


def test_only_changes_are_news() -> None:
    """A sandbox is idle at first; busy is told once, idle again once, whatever the time between two looks."""
    watch = LoadWatch(10.0, 3.0)
    assert watch.look(11.0, 3.0 + BUSY_SHARE / 2) is None
    assert watch.look(12.0, 4.2) is True
    assert watch.look(14.0, 6.2) is None
    assert watch.look(15.0, 6.3) is False
    assert watch.look(16.0, 6.4) is None


def test_a_tree_that_lost_processes_is_idle() -> None:
    """Processor time that goes backwards, since a stub has ended, is no load."""
    watch = LoadWatch(0.0, 5.0)
    assert watch.look(1.0, 6.0) is True
    assert watch.look(2.0, 2.0) is False


def test_time_in_which_it_was_frozen_is_left_out() -> None:
    """A sandbox that computes after an hour in which it was frozen is busy at the first look behind it, where each look
    before said that it took no time; with that hour in the share it would not be (control)."""
    rested, other = LoadWatch(0.0, 5.0), LoadWatch(0.0, 5.0)
    assert rested.look(3_600.0, rested.used_s) is None
    assert rested.look(3_602.0, 7.0) is True
    assert other.look(3_602.0, 7.0) is None
