"""Disks that are full: the one of state, run directory and log, the audit log's, and the one of spilled KV."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from bench.soak.answers import AWAY
from bench.soak.faults.deaths import GONE_S
from bench.soak.ground import Act, Fault, Ground
from bench.soak.room import Room
from bench.soak.served import until_gone, until_pid

PIECE = bytes(1 << 20)

FAILING = "athanor_audit_failing"
SAID_S = 20.0
"""Within which an appliance under load has noticed: it looks every two seconds."""


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Take every byte of a disk for the time of a block."""
    ballast = folder / ".ballast"
    fd = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        piece: bytes = PIECE
        while piece:
            try:
                os.write(fd, piece)
            except OSError:
                piece = piece[: len(piece) // 2]
        yield
    finally:
        os.close(fd)
        ballast.unlink()


def refusal(folder: Path) -> str:
    """What a disk says to somebody who wants one page more; empty when it gives it."""
    path = folder / ".one-more"
    try:
        path.write_bytes(bytes(mmap.PAGESIZE))
    except OSError as error:
        return f"one page more: {(error.strerror or str(error)).lower()}"
    finally:
        path.unlink(missing_ok=True)
    return ""


def _full(choose: str) -> Act:
    async def act(ground: Ground) -> str:
        room: Room = ground.served.room
        with full(getattr(room, choose)):
            # At once: what the appliance removes because of it makes room again.
            said = refusal(getattr(room, choose))
            await ground.last(3.0, 6.0)
        return said

    return act


async def _audit(ground: Ground) -> str:
    """The appliance itself says that its log cannot be written."""

    async def says() -> str:
        return "the audit log is reported as failing" if await ground.served.metric(FAILING) else ""

    with full(ground.served.room.audit):
        await ground.last(3.0, 6.0)
        return await ground.until(says, SAID_S)


async def _full_and_dead(ground: Ground) -> str:
    """A sandbox that dies while the disk is full cannot come back before there is room."""
    pid = await until_pid(ground.served, "engine")
    with full(ground.served.room.temporary):
        said = refusal(ground.served.room.temporary)
        os.kill(pid, signal.SIGKILL)
        await ground.last(3.0, 6.0)
        await until_gone(pid, GONE_S)
    return said


FAULTS = (
    Fault("disk-state", "the disk of state, run directory and log is full", _full("temporary")),
    Fault("disk-audit", "the audit log's disk is full", _audit),
    Fault("disk-spill", "the disk of spilled KV is full", _full("spill")),
    Fault("disk-death", "the disk is full, and the engine dies", _full_and_dead, AWAY),
)
