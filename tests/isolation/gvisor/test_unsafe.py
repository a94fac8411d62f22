"""The runtime without a wall keeps every promise but the wall."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from isolation.errors import SandboxStartError
from isolation.gvisor.spec import Limits, Mount, Rootfs, SandboxSpec
from isolation.gvisor.unsafe_runtime import UnsafeRuntime, host_argv, host_environment, to_host

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def unsafe(run_dir):
    """A runtime in a private run directory."""
    runtime = UnsafeRuntime(run_dir)
    yield runtime
    runtime.cleanup_stale()
    runtime.close()


def test_paths_are_translated_by_the_longest_prefix():
    """What lies below a mount is found on the host; what does not stays."""
    table = {"/opt/python": "/usr", "/opt/python/bin": "/srv/bin", "/model": "/srv/m"}
    assert to_host("/opt/python/bin/python3", table) == "/srv/bin/python3"
    assert to_host("/opt/python/lib", table) == "/usr/lib"
    assert to_host("/model", table) == "/srv/m"
    assert to_host("/modelx", table) == "/modelx"


def test_command_and_environment_are_the_hosts(make_spec, tmp_path):
    """Interpreter, module path and mounts name host files; the rest of the command stays."""
    spec = make_spec("x", "pass", "/model/a", "word", mounts=[Mount(tmp_path, "/model")])
    argv = host_argv(spec)
    assert os.path.exists(argv[0])
    assert argv[-2:] == [f"{tmp_path}/a", "word"]
    assert os.fspath(ROOT) in host_environment(spec)["PYTHONPATH"].split(":")


def test_program_runs_with_the_roles_modules(unsafe, make_spec):
    """The same spec as for gVisor imports the same modules and gives its status and output."""
    sandbox = unsafe.boot(make_spec("x", "import tokenizers, isolation.ipc; print('ok'); raise SystemExit(9)"))
    assert sandbox.wait(30) == 9
    sandbox.delete()
    assert sandbox.output_tail() == ("ok",)
    assert sandbox.ending().status == 9
    assert unsafe.label == "unsafe/none"
    assert unsafe.cgroups.enforced == ()


def test_limits_that_need_no_cgroup_hold(unsafe, make_spec):
    """No core file, no more descriptors than stated; in a session of its own."""
    code = (
        "import json, os, resource, sys; sys.stdin.read()\n"
        "while resource.getrlimit(resource.RLIMIT_CORE) != (0, 0): pass\n"
        "print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), os.getsid(0) == os.getpid()]))"
    )
    sandbox = unsafe.boot(make_spec("x", code, nofile=300))
    assert sandbox.wait(30) == 0
    sandbox.delete()
    assert json.loads(sandbox.output_tail()[0]) == [[300, 300], True]


def test_a_program_is_pinned(unsafe, make_spec):
    """It has the processors of its spec; one without any has all of ours."""
    ours = sorted(os.sched_getaffinity(0))
    if len(ours) < 2:
        pytest.skip("one processor: there is nothing to choose")
    spec = make_spec("x", "import os; print(sorted(os.sched_getaffinity(0)))")
    for cpus, expected in (((), ours), ((ours[-1],), ours[-1:])):
        sandbox = unsafe.boot(replace(spec, cpus=cpus))
        assert sandbox.wait(30) == 0
        sandbox.delete()
        assert sandbox.output_tail() == (str(expected),)


def test_delete_ends_the_whole_group(unsafe, make_spec, run_dir):
    """A child of the program ends with it."""
    code = "import os, time\npid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(60)"
    sandbox = unsafe.boot(make_spec("x", code))
    while not sandbox.output_tail():
        assert sandbox.poll() is None
    grandchild = int(sandbox.output_tail()[0])
    pidfd = os.pidfd_open(grandchild)
    sandbox.delete()
    sandbox.delete()
    assert ended(pidfd)
    os.close(pidfd)
    assert sandbox.poll() == -signal.SIGKILL
    assert not list((run_dir / "bundles").iterdir())


def test_missing_program_fails_the_boot(unsafe, run_dir):
    """Nothing is left of a boot that failed."""
    rootfs = Rootfs("/no/such/python", (), ())
    with pytest.raises(SandboxStartError, match="could not be started"):
        unsafe.boot(SandboxSpec("x", rootfs.argv("m"), (), rootfs, (), Limits(1 << 30)))
    assert not list((run_dir / "bundles").iterdir())


def test_a_start_that_is_given_up_while_it_is_held_leaves_nothing(unsafe, make_spec, run_dir):
    """What the wait for memory raises ends the start before there is a program."""

    def give_up() -> None:
        raise SandboxStartError("not wanted any more")

    with pytest.raises(SandboxStartError, match="not wanted any more"):
        unsafe.boot(make_spec("held", "raise SystemExit"), hold=give_up)
    assert not list((run_dir / "bundles").iterdir())


STAY = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from isolation.gvisor.spec import Limits, Rootfs, SandboxSpec
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
rootfs = Rootfs(sys.executable, (), ())
spec = SandboxSpec("x", (sys.executable, "-c", "import time; time.sleep(600)"), (), rootfs, (), Limits(1 << 30))
print(UnsafeRuntime(Path({run!r})).boot(spec).pid, flush=True)
time.sleep(600)
"""


def test_a_killed_supervisor_is_cleared_up_after(run_dir):
    """The next supervisor ends what the killed one left, and no process that merely has its number."""
    code = STAY.format(root=os.fspath(ROOT), run=os.fspath(run_dir))
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(first.stdout.readline())
    pidfd = os.pidfd_open(pid)
    first.kill()
    first.communicate()
    (run_dir / "bundles/other").mkdir()
    (run_dir / "bundles/other/pid").write_text(f"{os.getpid()} 1")
    runtime = UnsafeRuntime(run_dir)
    assert runtime.cleanup_stale() == ("other", "x")
    runtime.close()
    assert ended(pidfd)
    os.close(pidfd)


def ended(pidfd: int) -> bool:
    """Whether a process has ended, within ten seconds."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(10_000))
