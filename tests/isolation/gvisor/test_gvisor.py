"""Real sandboxes under gVisor, driven as root: what they cannot do, how they end, what they leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from isolation.errors import IsolationError, SandboxStartError
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import RunscCommand, find_runsc
from isolation.gvisor.spec import Mount
from isolation.host.cgroup_tree import parse_mountinfo, parse_own_groups
from isolation.host.cores import format_cpu_list
from isolation.host.oom_score import END_FIRST
from isolation.host.process import run
from isolation.host.reaper import children, descendants
from isolation.host.rundir import parent_group

pytestmark = pytest.mark.runsc

SLEEP = "import time; print('up', flush=True); time.sleep(60)"
SECRETS = ("/etc/passwd", "/etc/shadow", "/root", "/home", "/bin/sh", "/usr/bin", "/proc/1/root/etc/passwd")


def own_address() -> str:
    """An address of this machine other than loopback; a datagram socket finds it without sending."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address besides loopback")
        return probe.getsockname()[0]


def leftovers(run_dir: Path) -> dict[str, list[str]]:
    """Everything that a sandbox of this run directory could leave behind: processes, mounts, cgroups, files.

    Groups of other supervisors are none of ours: this machine, or the one around this container, may run several.
    """
    needle = os.fspath(run_dir)
    processes = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if needle.encode() in Path(f"/proc/{entry}/cmdline").read_bytes() and int(entry) != os.getpid():
                processes.append(entry)
        except OSError:
            continue
    groups = [
        os.path.join(top, name)
        for top, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if os.path.basename(top) == parent_group(run_dir)
    ]
    return {
        "processes": processes,
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if needle in line],
        "cgroups": groups,
        "files": [os.fspath(path) for part in ("bundles", "runsc") for path in (run_dir / part).iterdir()],
    }


def nothing_left(run_dir: Path) -> bool:
    """Whether ``leftovers`` finds nothing."""
    return not any(leftovers(run_dir).values())


def wait_for_line(lines: list[str], arrived: threading.Event) -> None:
    """Wait until the sandbox has printed something."""
    assert arrived.wait(20), lines


@pytest.fixture
def printed():
    """A line callback, the lines it got and an event for the first."""
    lines: list[str] = []
    arrived = threading.Event()

    def on_line(line: str) -> None:
        lines.append(line)
        arrived.set()

    return on_line, lines, arrived


def test_walls(runtime, make_spec, probe_code, tmp_path):
    """The same program reaches the network and the host's files outside, and nothing of them inside."""
    address = own_address()
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = str(server.getsockname()[1])
        arguments = (port, address, port, *SECRETS, os.fspath(tmp_path))
        outside = json.loads(
            subprocess.run(
                [sys.executable, "-c", probe_code, "outside", *arguments], capture_output=True, check=True
            ).stdout
        )
        sandbox = runtime.boot(make_spec("walls", probe_code, "inside", *arguments))
        status, tail = sandbox.wait(30), sandbox.output_tail
        sandbox.delete()
    assert status == 0, tail()
    inside = json.loads("".join(json_line(tail())))

    assert (outside["loopback"], outside["outside"]) == ("ok", "ok"), "the control must reach the host"
    assert inside["loopback"] == "ConnectionRefusedError"
    assert inside["outside"] == "OSError"
    assert inside["interfaces"] == ["lo"]
    assert inside["ids"] == [65532, 65532, 65532, 65532, []]
    assert set(inside["caps"].values()) == {0}
    assert any(outside["caps"].values())
    assert inside["pid"] == 1
    assert {path for path, result in inside["writes"].items() if result == "ok"} == {"/tmp/x", "/dev/shm/x"}
    assert outside["paths"]["/etc/passwd"]
    assert not any(inside["paths"].values())
    assert set(inside["root"]) <= {"dev", "etc", "lib", "lib64", "opt", "proc", "sys", "tmp", "usr"}
    assert all(".so" in name or name.endswith("-gnu") for name in inside["lib"])
    assert inside["site"] == []
    assert inside["setuid"] == inside["chroot"] == "PermissionError"
    assert inside["core"] == [0, 0]
    assert inside["hostname"] == "sandbox"


def processors_of(pids: set[int]) -> set[str]:
    """Lists of the processors that the threads of these processes may use."""
    found = set()
    for status in (path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/status")):
        found |= {line.split()[1] for line in status.read_text().splitlines() if line.startswith("Cpus_allowed_list")}
    return found


def test_every_process_of_a_sandbox_is_pinned(runtime, make_spec, printed):
    """All threads of sentry, gofer and stubs have the processors of the spec; without any they have all of ours. All
    processes have the score by which they end before us where memory runs out."""
    on_line, lines, arrived = printed
    ours = os.sched_getaffinity(0)
    if len(ours) < 2:
        pytest.skip("one processor: there is nothing to choose")
    for name, cpus, expected in (("free", (), ours), ("pinned", (max(ours),), {max(ours)})):
        arrived.clear()
        sandbox = runtime.boot(replace(make_spec(name, SLEEP), cpus=cpus), on_line=on_line)
        wait_for_line(lines, arrived)
        family = sandbox.peer_pids | descendants(sandbox.pid)
        found = processors_of(family)
        scores = {Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in family}
        sandbox.delete()
        assert len(family) > 2, "sentry, gofer and at least one stub"
        assert found == {format_cpu_list(expected)}
        assert scores == {str(END_FIRST)}, "where memory runs out the kernel ends these before their supervisor"
    assert os.sched_getaffinity(0) == ours


def json_line(lines: tuple[str, ...]) -> list[str]:
    """The line that is the probe's report."""
    return [line for line in lines if line.startswith("{")]


def test_output_reaches_callback_and_tail(runtime, make_spec, printed):
    """Output reaches the callback line by line and the tail keeps it."""
    on_line, lines, _ = printed
    sandbox = runtime.boot(make_spec("lines", "for i in range(3): print('line', i)"), on_line)
    assert sandbox.wait(20) == 0
    sandbox.delete()
    assert lines == ["line 0", "line 1", "line 2"] == list(sandbox.output_tail())


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.abort()", 128 + 6)])
def test_exit_status(runtime, make_spec, code, expected):
    """The program's own status is reported, a signal inside as 128 plus its number."""
    sandbox = runtime.boot(make_spec("status", code))
    assert sandbox.wait(20) == expected
    ending = sandbox.ending()
    assert ending is not None
    assert not ending.out_of_memory
    sandbox.delete()
    assert sandbox.poll() == expected


def test_killed_from_outside_leaves_nothing(runtime, make_spec, run_dir, printed):
    """After SIGKILL to the sandbox's process the end is seen on the pidfd and ``delete`` leaves nothing."""
    on_line, lines, arrived = printed
    sandbox = runtime.boot(make_spec("left-kill", SLEEP), on_line)
    wait_for_line(lines, arrived)
    there = leftovers(run_dir)
    assert there["processes"] and there["files"], "the control: something is there while it runs"
    assert bool(there["cgroups"]) == bool(runtime.cgroups.enforced), "the control of cgroups, where they are enforced"
    os.kill(sandbox.pid, signal.SIGKILL)
    assert sandbox.wait(20) == -signal.SIGKILL
    sandbox.delete()
    assert nothing_left(run_dir), leftovers(run_dir)
    assert sandbox.pidfd == -1


def test_delete_of_a_running_one_is_idempotent(runtime, make_spec, run_dir):
    """``delete`` ends a running sandbox, may be called again, and leaves nothing."""
    sandbox = runtime.boot(make_spec("left-delete", SLEEP))
    sandbox.delete()
    sandbox.delete()
    assert sandbox.poll() == -signal.SIGKILL
    assert nothing_left(run_dir), leftovers(run_dir)


def test_a_frozen_one_goes_on_and_ends_all_the_same(runtime, make_spec, run_dir, printed):
    """Frozen it takes no processor time, thawed it goes on; ended while frozen it leaves nothing, also for the next
    supervisor after one that was killed."""
    on_line, lines, arrived = printed
    sandbox = runtime.boot(make_spec("frozen", "import time\nwhile True: print(time.monotonic(), flush=True)"), on_line)
    wait_for_line(lines, arrived)
    if not sandbox.freeze():
        pytest.skip("no group can be frozen here")
    time.sleep(0.5)
    used, count = sandbox.processor_s(), len(lines)
    time.sleep(0.5)
    assert (sandbox.processor_s(), len(lines)) == (used, count)
    sandbox.thaw()
    deadline = time.monotonic() + 10
    while len(lines) == count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sandbox.freeze()
    runtime.cleanup_stale()
    # Killed itself, or ended because one of its processes was killed first.
    assert sandbox.wait(10) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    sandbox.delete()
    again = runtime.boot(make_spec("frozen", SLEEP))
    assert again.freeze()
    again.delete()
    assert nothing_left(run_dir), leftovers(run_dir)


def test_name_can_be_used_again(runtime, make_spec):
    """A name is taken while its sandbox is there, and free after ``delete``."""
    first = runtime.boot(make_spec("again", SLEEP))
    with pytest.raises(SandboxStartError, match="exists already"):
        runtime.boot(make_spec("again", SLEEP))
    first.delete()
    runtime.boot(make_spec("again", SLEEP)).delete()


def test_a_names_beginning_is_nobody(runtime, make_spec, runsc_path, run_dir) -> None:
    """Removing ``chat``, which is not there, leaves ``chat-large`` alive; said without its end, runsc takes the one
    for the other."""
    sandbox = runtime.boot(make_spec("chat-large", "import time; time.sleep(60)"))
    try:
        run(RunscCommand(runsc_path, run_dir / "runsc", runtime.profile).delete("chat"), timeout_s=20.0)
        time.sleep(0.5)
        assert sandbox.poll() is None
        run([os.fspath(runsc_path), f"--root={run_dir / 'runsc'}", "kill", "chat", "KILL"], timeout_s=20.0)
        assert sandbox.wait(20.0) is not None
    finally:
        sandbox.delete()


def test_failed_start_says_why_and_leaves_nothing(runtime, make_spec, run_dir):
    """A program that does not exist fails the boot with runsc's reason; nothing is left."""
    spec = replace(make_spec("left-none", SLEEP), argv=("/opt/none",))
    with pytest.raises(SandboxStartError, match="/opt/none"):
        runtime.boot(spec)
    assert nothing_left(run_dir), leftovers(run_dir)


def test_a_start_that_is_given_up_while_it_is_held_leaves_nothing(runtime, make_spec, run_dir):
    """When a start is held back the sandbox is made and its program does not run; what the wait raises is the start's
    error, and nothing of the sandbox is left."""
    there = []

    def give_up() -> None:
        there.append(leftovers(run_dir))
        raise SandboxStartError("not wanted any more")

    with pytest.raises(SandboxStartError, match="not wanted any more"):
        runtime.boot(make_spec("held", "print('it ran', flush=True)"), there.append, hold=give_up)
    assert len(there) == 1 and any(there[0].values()), "made, and no word of the program"
    assert nothing_left(run_dir), leftovers(run_dir)


def test_memory_limit_kills_and_is_told_apart(runtime, make_spec):
    """A sandbox over its memory limit is ended and says so; one that merely fails does not."""
    if "memory" not in runtime.cgroups.enforced:
        pytest.skip(runtime.cgroups.describe())
    hog = "data = []\nwhile True: data.append(b'x' * (16 << 20))"
    sandbox = runtime.boot(make_spec("hog", hog, memory_mib=256))
    assert sandbox.wait(40) not in (None, 0)
    ending = sandbox.ending()
    assert ending is not None
    assert ending.out_of_memory
    assert ending.reason == "ran out of memory"
    sandbox.delete()
    assert sandbox.ending() == ending

    sandbox = runtime.boot(make_spec("fails", "raise SystemExit(1)", memory_mib=256))
    sandbox.wait(20)
    assert sandbox.ending().out_of_memory is False
    sandbox.delete()


def test_cpu_quota_holds(runtime, make_spec):
    """A busy loop under a quota of a fifth of a core is throttled by the kernel; one without a quota is not."""
    if "cpu" not in runtime.cgroups.enforced:
        pytest.skip(runtime.cgroups.describe())
    busy = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass"
    throttled = {}
    for name, quota in (("held", 0.2), ("free", None)):
        sandbox = runtime.boot(make_spec(name, busy, cpu_quota_cores=quota))
        book = cpu_book(sandbox.pid)
        assert sandbox.wait(30) == 0
        throttled[name] = int(dict(line.split() for line in book.read_text().splitlines())["nr_throttled"])
        sandbox.delete()
    assert throttled["held"] >= 3, throttled
    assert throttled["free"] == 0


def cpu_book(pid: int) -> Path:
    """The kernel's account of the cpu cgroup that a process is in."""
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    groups = parse_own_groups(Path(f"/proc/{pid}/cgroup").read_text())
    key = "cpu" if "cpu" in groups else ""
    root, point = mounts[key]
    return point / os.path.relpath(groups[key], root) / "cpu.stat"


def test_guest_connects_to_a_socket_on_a_mount(runtime, make_spec, tmp_path):
    """The one way out: a socket in a read-only directory; the peer's process id is one of the sandbox's."""
    tmp_path.chmod(0o755)
    code = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/ipc/host.sock'); s.sendall(b'hello')"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(tmp_path / "host.sock"))
        os.chmod(tmp_path / "host.sock", 0o666)
        server.listen(1)
        server.settimeout(20)
        sandbox = runtime.boot(make_spec("ipc", code, mounts=[Mount(tmp_path, "/ipc")]))
        peer, _ = server.accept()
        with peer:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            assert int.from_bytes(credentials[:4], sys.byteorder) in sandbox.peer_pids
            assert peer.recv(5) == b"hello"
        assert sandbox.wait(20) == 0
        sandbox.delete()


def test_two_supervisors_cannot_share_a_directory(runtime, runsc_path, run_dir):
    """The run directory is locked, else one supervisor's start would end the other's sandboxes."""
    with pytest.raises(IsolationError, match="in use by another supervisor"):
        GvisorRuntime(find_runsc([runsc_path]), run_dir)


def test_lives_leak_nothing_of_ours(runtime, make_spec):
    """After a sandbox's life this process has no more descriptors, threads and children than before; a thread of an
    earlier test may end meanwhile."""

    def holdings() -> tuple[int, int, set[int]]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), children()

    def life(number: int) -> None:
        runtime.boot(make_spec(f"life-{number}", "print('x')")).delete()

    life(0)
    before = holdings()
    life(1)
    life(2)
    files, threads, left = holdings()
    assert files <= before[0] and threads <= before[1] and left <= before[2]


def test_four_boot_at_once(runtime, make_spec, run_dir):
    """Boots and deletes from several threads do not take each other's processes."""
    results: list[int | None] = []

    def life(number: int) -> None:
        sandbox = runtime.boot(make_spec(f"left-par-{number}", f"raise SystemExit({number})"))
        results.append(sandbox.wait(30))
        sandbox.delete()

    threads = [threading.Thread(target=life, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [1, 2, 3, 4]
    assert nothing_left(run_dir), leftovers(run_dir)
