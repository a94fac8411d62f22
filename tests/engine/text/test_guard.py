"""engine.text.guard: time and memory of untrusted work."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.text import guard
from engine.text.guard import OutOfTimeError, run_guarded

MIB = 1 << 20


def spin() -> None:
    """Never ends by itself."""
    while True:
        pass


def stubborn() -> None:
    """Swallows everything an ordinary program can swallow, twice over."""
    while True:
        try:
            spin()
        except Exception:  # noqa: BLE001 - that is the point
            continue


def test_results_and_errors_pass_through() -> None:
    """Work that behaves is not changed."""
    assert run_guarded(lambda: 7, seconds=5, memory_bytes=MIB) == 7
    with pytest.raises(KeyError):
        run_guarded(lambda: {}["x"], seconds=5, memory_bytes=MIB)


@pytest.mark.parametrize("work", [spin, stubborn])
def test_time_ends_work(work) -> None:
    """Endless work ends soon after its time, whatever it catches."""
    start = time.monotonic()
    with pytest.raises(OutOfTimeError, match=r"longer than 0\.1 s"):
        run_guarded(work, seconds=0.1, memory_bytes=64 * MIB)
    assert time.monotonic() - start < 20


def test_memory_ends_work() -> None:
    """An allocation beyond the bound fails; one within it does not."""
    assert len(run_guarded(lambda: bytearray(16 * MIB), seconds=5, memory_bytes=64 * MIB)) == 16 * MIB
    with pytest.raises(MemoryError):
        run_guarded(lambda: bytearray(256 * MIB), seconds=5, memory_bytes=64 * MIB)


def test_a_tighter_limit_of_the_process_stays() -> None:
    """A soft limit that is set already is never loosened."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = guard.own_size()
    assert size is not None
    resource.setrlimit(resource.RLIMIT_AS, (size.bytes() + 64 * MIB, before[1]))
    try:
        with pytest.raises(MemoryError):
            run_guarded(lambda: bytearray(256 * MIB), seconds=5, memory_bytes=1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_the_process_is_left_as_it_was() -> None:
    """Timers, handler and limits are put back after success and after failure."""

    def state():
        return (
            signal.getsignal(signal.SIGALRM),
            signal.getitimer(signal.ITIMER_REAL)[0] > 0,
            signal.getitimer(signal.ITIMER_VIRTUAL),
            resource.getrlimit(resource.RLIMIT_AS),
        )

    before = state()
    run_guarded(lambda: None, seconds=5, memory_bytes=MIB)
    assert state() == before
    with pytest.raises(OutOfTimeError):
        run_guarded(spin, seconds=0.05, memory_bytes=64 * MIB)
    assert state() == before


def test_an_outer_timer_goes_on() -> None:
    """A timer that ran before rings later, with the time of the work taken off."""
    rung = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        run_guarded(lambda: time.sleep(0.1), seconds=5, memory_bytes=MIB)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.25
        assert not rung
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, handler)


def test_without_proc_only_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the used memory cannot be read, work runs without a bound on memory."""
    monkeypatch.setattr(guard, "own_size", lambda: None)
    assert len(run_guarded(lambda: bytearray(32 * MIB), seconds=5, memory_bytes=MIB)) == 32 * MIB


def test_what_ignores_the_alarm_ends_the_process(root: Path) -> None:
    """A comparison inside C that would take years ends the process by the second timer."""
    code = """
from engine.text import guard
guard.GRACE_S = 0.2
a, b = [1], [1]
for _ in range(50):
    a, b = [a, a], [b, b]
guard.run_guarded(lambda: a == b, seconds=0.2, memory_bytes=1 << 26)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False)
    assert done.returncode == -signal.SIGVTALRM
