"""Memory runs short: the limit of a sandbox's group, or of the gateway's, is brought down to what it has."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from appliance.selftest.raw_http import request_bytes, talk
from bench.soak.answers import AWAY
from bench.soak.census import group_parents
from bench.soak.ground import Act, Fault, Ground
from bench.soak.served import until_pid
from isolation.host.process import spawn

LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
MARGIN_BYTES = 1 << 20
GROUP = "athanor-soak-"
"""And our process: two runs beside each other have two."""

MOVE_CHARGES, ALL_CHARGES = "memory.move_charge_at_immigrate", "3"
"""What a process has moves with it into a group of cgroup v1 (memory.txt, section 8)."""

GLUTTON = """
import sys, time
while not any(line.endswith("/" + sys.argv[1] + "\\n") for line in open("/proc/self/cgroup")):
    time.sleep(0.05)
held = [b"x" * (1 << 20) for _ in range(64)]
time.sleep(60)
"""
"""A program that wants 64 MiB once it is in the group of this name."""

LARGE, LARGE_BYTES, LARGE_S = 16, 3 << 20, 4.0
"""Bodies that are sent at once, bytes of one, and patience with them."""


def _group_of(ground: Ground, role: str) -> Path | None:
    for parent in group_parents(ground.served):
        for group in parent.glob(f"{role}-athanor-mini*"):
            if _limit_file(group) is not None:
                return group
    return None


def _limit_file(group: Path) -> Path | None:
    return next((group / name for name in LIMIT_FILES if (group / name).exists()), None)


@contextlib.contextmanager
def _tight(group: Path, size: int) -> Iterator[None]:
    """As low as the kernel lets the limit go, from this size on upwards."""
    file = _limit_file(group)
    assert file is not None, "a group of another controller"
    before = file.read_text()
    for extra in range(0, 256 << 20, 4 << 20):
        try:
            file.write_text(str(size + extra))
            break
        except OSError:
            continue
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.write_text(before)


def _made(group: Path) -> int:
    """Bytes of a group that no file stands behind; the others the kernel simply lets go, and there are many of them
    in the group that was the first to read a library."""
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(stat["active_anon"]) + int(stat["inactive_anon"])


def _refused(group: Path) -> int:
    """How often the kernel has found the group at its limit."""
    with contextlib.suppress(OSError):
        return int((group / "memory.failcnt").read_text())
    with contextlib.suppress(OSError):
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
        return int(events["max"])
    return 0


def _bitten(before: int, group: Path, pid: int) -> str:
    if not Path(f"/proc/{pid}").exists():
        return "the process was ended for it"
    refused = _refused(group) - before
    return f"the limit was met {refused} times" if refused > 0 else ""


def _sandbox(role: str) -> Act:
    async def act(ground: Ground) -> str:
        group = _group_of(ground, role)
        assert group is not None, "it was asked for before"
        watched = await until_pid(ground.served, role)
        before = _refused(group)
        hungry = (sys.executable, "-S", "-c", GLUTTON, group.name)
        with _tight(group, _made(group) // 2), spawn(hungry) as glutton:
            # The sandbox uses what it has again and again: only somebody who wants more meets the limit.
            (group / "cgroup.procs").write_text(str(glutton.pid))
            await ground.last(3.0, 6.0)
            # The count does not always move (seen with Linux 6.18), but then somebody is ended.
            ended = "who wanted more was ended for it" if glutton.poll() is not None else ""
            return _bitten(before, group, watched) or ended

    return act


async def _gateway(ground: Ground) -> str:
    """The gateway in a group of the harness's, with no more than it has."""
    pid = await until_pid(ground.served, "gateway")
    home = memory_home()
    assert home is not None, "it was asked for before"
    group = home / f"{GROUP}{os.getpid()}"
    group.mkdir()
    try:
        with contextlib.suppress(OSError):
            (group / MOVE_CHARGES).write_text(ALL_CHARGES)
        (group / "cgroup.procs").write_text(str(pid))
        before = _refused(group)
        with _tight(group, MARGIN_BYTES):
            # What it has it uses again and again: only what is more than that meets the limit.
            await asyncio.gather(*(_large(ground) for _ in range(LARGE)))
            await ground.last(2.0, 4.0)
            return _bitten(before, group, pid)
    finally:
        for line in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (home / "cgroup.procs").write_text(line)
        group.rmdir()


async def _large(ground: Ground) -> None:
    """Send a body of the largest size, and leave."""
    proof = ("authorization", f"Bearer {ground.served.keys['alpha']}"), ("content-type", "application/json")
    body = b'{"prompt": "' + b"x" * LARGE_BYTES + b'"}'
    with contextlib.suppress(OSError, TimeoutError):
        await talk(ground.served.http_port, request_bytes("POST", "/v1/completions", body, *proof), LARGE_S)


def memory_home() -> Path | None:
    """Our own group of the memory controller of v1, below which a group can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            home = Path("/sys/fs/cgroup/memory" + path)
            return home if home.is_dir() else None
    return None


def _needs_group(role: str) -> str:
    return f"no limit of memory is enforced on the {role} sandbox here"


FAULTS = (
    Fault(
        "memory-engine",
        "the engine's memory limit falls to half of what it uses",
        _sandbox("engine"),
        AWAY,
        lambda ground: "" if _group_of(ground, "engine") else _needs_group("engine"),
    ),
    Fault(
        "memory-text",
        "the text sandbox's falls",
        _sandbox("text"),
        AWAY,
        lambda ground: "" if _group_of(ground, "text") else _needs_group("text"),
    ),
    Fault(
        "memory-gateway",
        "the gateway may have no more memory than it has",
        _gateway,
        AWAY,
        lambda _ground: "" if memory_home() else "no memory controller of cgroup v1 here",
    ),
)
