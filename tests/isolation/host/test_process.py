"""The one door to other programs: real programs, real failures."""

from __future__ import annotations

import os
import sys
import time

import pytest

from isolation.errors import ProcessError
from isolation.host.process import owned_children, run, spawn, start


def python(code: str) -> list[str]:
    """A small program."""
    return [sys.executable, "-I", "-S", "-c", code]


def alive(pid: int) -> bool:
    """Whether a process id is in use."""
    return os.path.exists(f"/proc/{pid}")


def test_run_gives_status_and_outputs():
    """Both outputs come back apart, with the status."""
    done = run(
        python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"), timeout_s=20, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_failure_has_a_command_to_paste_and_the_last_words():
    """The error shows the command quoted for a shell, the status and the end of the error output."""
    argv = ["sh", "-c", "echo 'it broke' >&2; exit 4"]
    with pytest.raises(ProcessError) as caught:
        run(argv, timeout_s=20)
    text = str(caught.value)
    assert "ended with status 4" in text
    assert """sh -c 'echo '"'"'it broke'"'"' >&2; exit 4'""" in text
    assert text.endswith("it broke")


def test_signal_is_said_by_name():
    """A program that a signal ended is not said to have a status."""
    with pytest.raises(ProcessError, match="was ended by SIGKILL"):
        run(["sh", "-c", "kill -9 $$"], timeout_s=20)


def test_missing_program_is_said():
    """A program that is not there is an error of ours, not an OSError."""
    with pytest.raises(ProcessError, match=r"could not be started \(No such file"):
        run(["/no/such/program"], timeout_s=1)


def test_late_program_is_ended():
    """After the time limit the program is gone."""
    before = time.monotonic()
    with pytest.raises(ProcessError, match=r"took longer than 0\.2 s"):
        run(["sleep", "60"], timeout_s=0.2)
    assert time.monotonic() - before < 10
    with owned_children() as owned:
        assert not owned


def test_environment_and_input_are_minimal():
    """No variable of ours and no terminal reach the program."""
    done = run(python("import os, sys; print(sorted(os.environ), sys.stdin.read() == '')"), timeout_s=20)
    assert done.stdout == "['LANG', 'PATH'] True\n" or done.stdout.startswith("['LANG', 'LC_CTYPE', 'PATH']")


def test_spawned_child_ends_with_its_block():
    """However the block ends, the child does too."""
    pids = []

    def fail_in_block() -> None:
        with spawn(["sleep", "60"]) as child:
            pids.append(child.pid)
            assert alive(child.pid)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_in_block()
    assert not alive(pids[0])


def test_stubborn_child_is_killed():
    """A child that ignores SIGTERM is killed after the grace time."""
    ready_read, ready_write = os.pipe()
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    child = start(python(code), stdio=ready_write)
    os.close(ready_write)
    with os.fdopen(ready_read) as ready:
        assert ready.readline() == "ready\n"
        child.end(grace_s=0.1)
    assert child.poll() == -9


def test_children_are_known_as_ours_while_they_live():
    """The reaper of orphans can tell which exit statuses are not for it."""
    with spawn(["sleep", "60"]) as child, owned_children() as owned:
        assert child.pid in owned
    with owned_children() as owned:
        assert child.pid not in owned


def test_processors_are_those_of_the_child_alone():
    """A child runs on the processors it is given and nowhere else; without any it has all of ours, and so have we after
    the start. Processors that we may not use are left out."""
    ours = os.sched_getaffinity(0)
    if len(ours) < 2:
        pytest.skip("one processor: there is nothing to choose")
    code = python("import os; print(sorted(os.sched_getaffinity(0)))")
    last = max(ours)
    assert run(code, timeout_s=20).stdout == f"{sorted(ours)}\n"
    assert run(code, timeout_s=20, cpus=(last,)).stdout == f"[{last}]\n"
    assert run(code, timeout_s=20, cpus=(last, 99_999)).stdout == f"[{last}]\n"
    assert run(code, timeout_s=20, cpus=(99_999,)).stdout == f"{sorted(ours)}\n"
    with pytest.raises(ProcessError, match="could not be started"):
        run(["/no/such/program"], timeout_s=1, cpus=(last,))
    assert os.sched_getaffinity(0) == ours
