"""The launcher and its children as real processes: ends are seen at once, and nobody is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.common.errors import StartError
from appliance.common.lock import exclusive
from appliance.operator import launcher as launcher_module
from appliance.operator.launcher import Launcher, pauses
from isolation.host.process import MINIMAL_ENVIRONMENT, Child, start


def test_a_child_that_ends_before_it_is_ready_ends_the_start(tmp_path: Path) -> None:
    """A configuration that is not understood: an error at once, with the child's status."""
    (tmp_path / "resolved").write_text("{}")
    began = time.monotonic()
    with (tmp_path / "resolved").open() as resolved, pytest.raises(StartError, match="ended with status 4 before"):
        asyncio.run(Launcher(tmp_path / "athanor.yaml", tmp_path, lambda _ready: None, resolved.fileno()).run())
    assert time.monotonic() - began < 20


async def test_a_child_that_cannot_be_started_again_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the appliance was ready a failed start is one more death, not the end of the keeper."""
    monkeypatch.setattr(launcher_module, "BASE_DELAY_S", 0.01)
    monkeypatch.setattr(launcher_module, "MAX_DELAY_S", 0.01)
    keeper = Launcher(tmp_path / "athanor.yaml", tmp_path, lambda _ready: None, -1)
    keeper._ready = asyncio.get_running_loop().create_future()
    keeper._ready.set_result(None)  # type: ignore[arg-type]
    starts: list[str] = []

    def attempt(role: str) -> Child:
        starts.append(role)
        return start((str(tmp_path / "absent") if len(starts) < 3 else "/bin/true",))

    monkeypatch.setattr(keeper, "_start", attempt)
    task = asyncio.create_task(keeper._keep("gateway"))
    async with asyncio.timeout(20):
        while len(starts) < 5:
            await asyncio.sleep(0.01)
    keeper._stop.set()
    await task


def test_a_supervisor_that_ends_at_the_stop_keeps_nobody_from_being_ended(tmp_path: Path) -> None:
    """Another thread has waited for the supervisor, and its id is nobody's any more: gateway and supervisor are ended
    all the same. Control: a signal to that id fails."""
    gone = subprocess.Popen(("/bin/true",))
    gone.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(gone.pid, 0)
    ended: list[str] = []
    keeper = Launcher(tmp_path / "athanor.yaml", tmp_path, lambda _ready: None, -1)
    for role in ("supervisor", "gateway"):
        one = SimpleNamespace(pid=gone.pid, poll=lambda: None, end=lambda _grace, role=role: ended.append(role))
        keeper._children[role] = one  # type: ignore[assignment]
    asyncio.run(keeper._end_all([]))
    assert ended == ["gateway", "supervisor"]


def test_children_read_neither_the_environment_nor_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child inherits the descriptor of the resolved configuration, and none of the launcher's ATHANOR_ variables."""
    monkeypatch.setenv("ATHANOR_SANDBOX__CORES", "7")
    seen: list[tuple[tuple[str, ...], dict[str, object]]] = []
    monkeypatch.setattr(launcher_module, "start", lambda argv, **options: seen.append((argv, options)))
    Launcher(tmp_path / "athanor.yaml", tmp_path, lambda _ready: None, 9)._start("gateway")
    ((argv, options),) = seen
    assert argv[-4:] == ("gateway", str(tmp_path / "athanor.yaml"), str(os.getpid()), "9")
    assert options["descriptors"] == (9,)
    assert [name for name in options["env"] if name.startswith("ATHANOR_")] == []  # type: ignore[attr-defined]


def test_pauses_grow_for_those_that_never_serve() -> None:
    """A child that was ready waits half a second at most, one that cannot start longer and longer, one that ran long
    not at all."""
    delay, waited = 0.0, []
    for _ in range(7):
        pause, delay = pauses(delay, 1.0, served=False)
        waited.append(pause)
    assert waited == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert pauses(delay, 5.0, served=True) == (0.5, 0.5)
    assert pauses(0.0, 5.0, served=True) == (0.0, 0.5)
    assert pauses(delay, 60.0, served=True) == (0.5, 0.0)


async def test_who_was_ready_is_the_kernels_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child's own READY counts for that child; another process' does not."""
    say = "import sys; from appliance.common import notify; notify.notify('READY=1'); sys.exit(3)"
    keeper = Launcher(tmp_path / "athanor.yaml", tmp_path, lambda _ready: None, -1)
    environment = {
        **MINIMAL_ENVIRONMENT,
        "NOTIFY_SOCKET": str(tmp_path / launcher_module.NOTIFY_SOCKET),
        "PYTHONPATH": str(Path(launcher_module.__file__).parents[2]),
    }
    with keeper._notifications():
        monkeypatch.setattr(keeper, "_start", lambda _role: start((sys.executable, "-c", say), env=environment))
        assert await keeper._one_life("gateway") == ("status 3", True)
        monkeypatch.setattr(keeper, "_start", lambda _role: start((sys.executable, "-c", "raise SystemExit(3)")))
        stranger = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", say], env=environment, check=False)
        assert stranger.returncode == 3
        assert await keeper._one_life("gateway") == ("status 3", False)


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
print(child.pid, flush=True)
time.sleep(60)
"""

CHILD = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from appliance.operator import child
child.run_supervisor = lambda *_: time.sleep(60)
sys.exit(child.main(["supervisor", "none", str(os.getppid() if sys.argv[2] == "own" else 1), "-1"]))
"""


@pytest.mark.parametrize("parent", ["own", "gone"])
def test_a_child_does_not_outlive_its_launcher(root: Path, parent: str) -> None:
    """kill -9 of the launcher ends the child, also when it came before the child could ask for that."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(root), parent], stdout=subprocess.PIPE, start_new_session=True
    )
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    pidfd = os.pidfd_open(pid)
    try:
        if parent == "own":
            wait_for_handler(pid)
            launcher.kill()
        assert_ends(pidfd)
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdout.close()
        os.close(pidfd)


def wait_for_handler(pid: int) -> None:
    """Until the process has a handler for SIGHUP, which it sets after its word to the kernel."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:") and int(line.split()[1], 16) >> (signal.SIGHUP - 1) & 1:
                return
        time.sleep(0.02)
    raise AssertionError("the child did not come up")


def assert_ends(pidfd: int) -> None:
    """The process ends within seconds."""
    import select

    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(20_000)


def test_a_lock_is_held_by_one_and_given_back(tmp_path: Path) -> None:
    """The second holder is refused with the directory's name; afterwards it may."""
    with (
        exclusive(tmp_path / "lock", "here"),
        pytest.raises(StartError, match="using here"),
        exclusive(tmp_path / "lock", "here"),
    ):
        pass
    with exclusive(tmp_path / "lock", "here"):
        pass
