"""Tests of the gate at which a boot waits for memory."""

from __future__ import annotations

import threading
import time

import pytest

from appliance.supervisor.gate import Latch
from isolation.errors import SandboxStartError


def test_an_open_gate_holds_nothing_back() -> None:
    """A boot that waits for nobody passes at once, again and again."""
    gate = Latch()
    assert not gate.wait("engine-m", threading.Event())
    gate.open()
    assert not gate.wait("engine-m", threading.Event())
    assert gate.waited_s < 0.1


def test_a_shut_gate_lets_go_when_it_is_opened() -> None:
    """What waits goes on when the gate is opened, not at the end of a slice, and the wait is counted."""
    gate = Latch()
    gate.shut()
    timer = threading.Timer(0.05, gate.open)
    timer.start()
    assert gate.wait("engine-m", threading.Event())
    assert 0.04 < gate.waited_s < 0.2
    assert not gate.wait("engine-m", threading.Event())
    timer.join()


def test_a_boot_that_is_not_wanted_waits_no_longer() -> None:
    """A boot that was given up ends at a gate that nobody opens, and says whose it was."""
    gate, stop = Latch(), threading.Event()
    gate.shut()
    stop.set()
    began = time.monotonic()
    with pytest.raises(SandboxStartError, match="engine-m was not wanted any more"):
        gate.wait("engine-m", stop)
    assert time.monotonic() - began < 2.0
