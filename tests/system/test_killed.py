"""Commands killed with SIGKILL at random moments: everything that they started ends, and nothing of it stays."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from isolation.host.reaper import become_subreaper, command_line, descendants
from isolation.host.scratch import PREFIX
from tests.system.conftest import ATHANOR, Appliance

pytestmark = [
    pytest.mark.runsc,
    pytest.mark.skipif(os.geteuid() != 0, reason="real sandboxes of the selftest, and the soak's disks, need root"),
]

END_S = 15.0
"""Seconds after which nothing may be left."""

FULL_MOMENTS = 20
BOOT_S = 120.0
"""Seconds for a command's first sandbox to be there."""
PR_SET_CHILD_SUBREAPER = 36
GROUP = re.compile(r"/(athanor-[0-9a-f]{12})(?=/|$)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Command:
    """A command, and within how many seconds it is killed."""

    argv: Callable[[Path, random.Random], list[str]]
    span_s: float


def _selftest(_folder: Path, draw: random.Random) -> list[str]:
    """Rows that start sandboxes of their own, and rows that start whole appliances."""
    return [ATHANOR, "selftest", "--only", draw.choice(("G8", "G9", "G10", "G1"))]


def _demo(folder: Path, _draw: random.Random) -> list[str]:
    ports = [word for name in ("http", "grpc", "admin") for word in (f"--{name}-port", "0")]
    return [ATHANOR, "demo", "--json", "--state-dir", str(folder / "state"), *ports]


COMMANDS = {
    "selftest": Command(_selftest, 30.0),
    "demo": Command(_demo, 12.0),
    "bench": Command(lambda *_: [ATHANOR, "bench", "closed:2"], 15.0),
    "soak": Command(lambda *_: [sys.executable, "-m", "bench.soak", "--minutes", "1"], 25.0),
}


@dataclass(slots=True)
class Seen:
    """What was there before the kills, and stayed after them."""

    processes: int = 0
    sandboxes: int = 0
    folders: int = 0
    groups: set[Path] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


@pytest.fixture
def adopting() -> Iterator[None]:
    """Make this process the parent of every orphan below it, so that none is overlooked."""
    become_subreaper()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory for temporary files of one command alone; its name is short, because sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="k-", dir="/tmp", ignore_cleanup_errors=True) as path:
        os.chmod(path, 0o755)
        yield Path(path)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["demo", "bench"])
def test_a_killed_command_leaves_nothing(
    name: str, adopting: None, folder: Path, appliance: Appliance, root: Path
) -> None:
    """0 processes, mounts, cgroups and folders 15 s after SIGKILL; another appliance beside it lives on."""
    _kill_and_look(name, 1, folder, appliance, root)


@pytest.mark.full
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("name", COMMANDS)
def test_twenty_moments(name: str, adopting: None, folder: Path, appliance: Appliance, root: Path) -> None:
    """The count of the bar: 20 random moments of each command."""
    _kill_and_look(name, FULL_MOMENTS, folder, appliance, root)


def _kill_and_look(name: str, moments: int, folder: Path, neighbour: Appliance, root: Path) -> None:
    if name == "soak" and root.is_relative_to("/tmp"):
        pytest.skip("this checkout lies in /tmp, which is an empty disk to the soak")
    command = COMMANDS[name]
    draw = random.Random(f"{name} {moments}")
    before = neighbour.status()["models"][0]["engine"]
    seen = Seen()
    for number in range(moments):
        # The last one when sandboxes run: the control must see them.
        moment = None if number == moments - 1 else draw.uniform(0.05, command.span_s)
        _once(command.argv(folder, draw), moment, folder, root, seen)
    left, slowest = len(seen.left), seen.slowest_s
    print(f"{name}: {moments} kills, {left} left, slowest {slowest:.1f} s, {seen.sandboxes} sandboxes")
    assert seen.left == []
    # The control: there was something to leave.
    assert seen.processes >= 5
    assert seen.sandboxes > 0
    assert seen.groups
    if name != "soak":  # its folders are in a mount namespace of its own
        assert seen.folders > 0
    after = neighbour.status()["models"][0]["engine"]
    assert (after["generation"], after["pid"]) == (before["generation"], before["pid"])
    answer = neighbour.openai().completions.create(model="athanor-mini", prompt="The furnace", max_tokens=4)
    assert answer.choices[0].text


def _once(argv: list[str], moment_s: float | None, folder: Path, root: Path, seen: Seen) -> None:
    others = descendants(os.getpid())
    process = subprocess.Popen(
        argv,
        cwd=root,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    started = time.monotonic()
    if moment_s is None:
        while time.monotonic() < started + BOOT_S:
            ours = descendants(process.pid)
            if _boots(ours) and _groups(ours):
                break
            time.sleep(0.1)
    else:
        time.sleep(moment_s)
    ours = descendants(process.pid)
    seen.processes = max(seen.processes, len(ours))
    seen.sandboxes += _boots(ours)
    seen.folders += len(_folders(folder))
    groups = _groups(ours)
    seen.groups |= groups
    process.kill()
    process.wait()
    killed = time.monotonic()
    while (left := _left(others, folder, groups)) and time.monotonic() < killed + END_S:
        time.sleep(0.1)
    seen.slowest_s = max(seen.slowest_s, time.monotonic() - killed)
    seen.left += (f"after {killed - started:.2f} s of {' '.join(argv[1:4])}: {one}" for one in left)


def _boots(pids: set[int]) -> int:
    """How many sandboxes are among these processes."""
    return sum("boot" in command_line(pid) for pid in pids)


def _new(others: set[int]) -> set[int]:
    """Processes below this one that are neither among the others nor below one of them, as a browser's are."""
    return descendants(os.getpid()) - others - {pid for one in others for pid in descendants(one)}


def _left(others: set[int], folder: Path, groups: set[Path]) -> list[str]:
    _reap(others)
    found = [f"process {pid} {' '.join(command_line(pid))[:120]}" for pid in _new(others)]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found += [f"mount {line}" for line in mounts if str(folder) in line]
    found += [f"folder {path}" for path in _folders(folder)]
    return found + [f"group {path}" for path in groups if path.exists()]


def _folders(folder: Path) -> list[Path]:
    """Everything in the directory for temporary files, except the state that a demo keeps; its run directory counts."""
    kept = folder / "state"
    return [path for path in (*folder.iterdir(), kept / "run") if path != kept and path.exists()]


def _groups(pids: set[int]) -> set[Path]:
    """Directories of the cgroups above the sandboxes of these processes, in every hierarchy."""
    names = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            names |= set(GROUP.findall(Path(f"/proc/{pid}/cgroup").read_text()))
    top = Path("/sys/fs/cgroup")
    return {path for name in names for depth in range(5) for path in top.glob("/".join([*["*"] * depth, name]))}


def _reap(others: set[int]) -> None:
    """Reap adopted orphans; statuses of the children of other tests are left alone."""
    for pid in _new(others):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_next_start_sweeps_what_a_guard_could_not(adopting: None, folder: Path, root: Path) -> None:
    """Command, guard and worker killed at once: sandboxes and folders stay, which is the control; the next command
    removes them, and leaves the folder of a living one alone."""
    others, environment = descendants(os.getpid()), {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen([ATHANOR, "bench", "closed:1"], env=environment, cwd=root, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not _boots(descendants(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    everything = descendants(process.pid)
    groups = _groups(everything)
    chain = [process.pid, *(pid for pid in everything if "isolation.host.guard" in command_line(pid))]
    chain += [pid for pid in everything if "bench" in command_line(pid)]
    launchers = [pid for pid in everything if "serve" in command_line(pid)]
    for pid in (*chain, *launchers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 19)
    for pid in chain:
        os.kill(pid, 9)
    process.wait()
    (dead,) = folder.glob(f"{PREFIX}*")
    assert any(str(dead) in " ".join(command_line(pid)) for pid in descendants(os.getpid()))
    for pid in launchers:
        os.kill(pid, 18)
    done = subprocess.run(
        [ATHANOR, "selftest", "--only", "G2", "--json"], env=environment, cwd=root, capture_output=True, check=False
    )
    assert f"removed what a killed command left in {dead}" in done.stderr.decode()
    assert json.loads(done.stdout)
    deadline = time.monotonic() + END_S
    while (left := _left(others, folder, groups)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
