"""The guard of a command: descendants and folder end with it, whichever of its three processes is killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from isolation.host.reaper import become_subreaper, children, command_line, descendants

PR_SET_CHILD_SUBREAPER = 36
SOON_S = 30.0
"""Seconds to wait for what normally takes one, or five with a program that ignores SIGTERM."""

BEGIN = """\
import os, signal, subprocess, sys, time
from isolation.host.guard import guarded
from isolation.host.scratch import Scratch
made = Scratch.make()
guarded(made, temporary=True)
"""

SERVES = """\
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
orphan = "import os, sys, time; os.fork() and sys.exit(); os.setsid(); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
subprocess.run([sys.executable, "-c", orphan])
open(made.path / "file", "w").close()
try:
    print(made.path, os.getpid(), flush=True)  # inside: what it prints is answered by a signal
    time.sleep(600)
finally:
    print("cleaned", flush=True)
"""


@pytest.fixture(autouse=True)
def adopting() -> Iterator[None]:
    """Make this process the parent of every orphan below it, so that none is overlooked."""
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a guarded program, with its temporary files in a directory of the test."""
    started = []

    def begin(program: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        argv = (sys.executable, "-c", BEGIN + program)
        process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def serving(process: subprocess.Popen[str]) -> tuple[Path, int]:
    """Folder and worker of a program that serves."""
    assert process.stdout is not None
    folder, worker = process.stdout.readline().split()
    return Path(folder), int(worker)


def guard_of(process: subprocess.Popen[str]) -> int:
    """Process id of the guard."""
    (guard,) = children(process.pid)
    assert "isolation.host.guard" in command_line(guard)
    return guard


def await_end(pids: set[int], folder: Path) -> None:
    """Wait until none of these processes is left, zombies aside, and the folder is gone."""
    deadline = time.monotonic() + SOON_S
    while (left := {pid for pid in pids if command_line(pid)}) or folder.exists():
        assert time.monotonic() < deadline, (left, folder.exists())
        for pid in children():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG) if pid in pids else None
        time.sleep(0.05)


ENDS = {"command": -9, "guard": 128 + 9, "worker": 128 + 9, "SIGTERM": 128 + 15, "SIGINT": 128 + 2}
"""How a program that serves is ended, by the kill of one of its processes or by a signal; and the command's code."""


def ended(start: Start, how: tuple[str, ...]) -> dict[str, tuple[set[int], Path, subprocess.Popen[str]]]:
    """Start a program that serves for each way, then end each: all of them have to wait for the one that ignores
    SIGTERM, so they wait at the same time. Gives processes, folder and command of each."""
    started = {one: start(SERVES) for one in how}
    found = {}
    for one, process in started.items():
        folder, worker = serving(process)
        pids = descendants(process.pid)
        assert len(pids) == 4, "the control: guard, worker, the stubborn one and the orphan"
        assert (folder / "file").exists()
        found[one] = pids, folder, process
        if one.startswith("SIG"):
            process.send_signal(signal.Signals[one])
        else:
            victims = {"command": process.pid, "guard": guard_of(process), "worker": worker}
            os.kill(victims[one], signal.SIGKILL)
    return found


def test_whichever_is_killed_everything_ends_and_a_signal_reaches_the_worker(start: Start) -> None:
    """Command, guard or worker is killed, or the command gets a signal: a program that ignores SIGTERM and an orphan in
    a session of its own end, the folder is removed, and the command ends with the right code. After a signal the
    worker's context managers have done their work."""
    for one, (pids, folder, process) in ended(start, tuple(ENDS)).items():
        await_end(pids, folder)
        assert process.wait(SOON_S) == ENDS[one], one
        if one.startswith("SIG"):
            assert process.stdout is not None
            assert process.stdout.read() == "cleaned\n", one


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(3)", 3), ("pass", 0), ("os.kill(os.getpid(), 9)", 137)])
def test_the_command_ends_as_the_worker_ended(start: Start, tmp_path: Path, ends: str, code: int) -> None:
    """Exit codes pass through, and nothing is printed twice."""
    process = start(f"print('once', flush=True); {ends}\n")
    assert process.communicate(timeout=SOON_S)[0] == "once\n"
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_are_made_in_the_folder(start: Start) -> None:
    """Those of the worker, and of the programs that it starts with its environment."""
    process = start("import tempfile; print(tempfile.gettempdir() == os.environ['TMPDIR'] == str(made.path))\n")
    assert process.communicate(timeout=SOON_S)[0] == "True\n"


def test_the_worker_ends_orderly_when_command_and_guard_are_killed(start: Start) -> None:
    """The kernel sends it SIGTERM: its context managers do their work. What remains is swept by the next command."""
    process = start(SERVES)
    _, worker = serving(process)
    pids = descendants(process.pid)
    for pid in (process.pid, guard_of(process)):
        os.kill(pid, signal.SIGSTOP)
    for pid in (process.pid, *(pid for pid in pids if "isolation.host.guard" in command_line(pid))):
        os.kill(pid, signal.SIGKILL)
    assert process.stdout is not None
    assert process.stdout.readline() == "cleaned\n"
    for pid in pids - {worker}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
