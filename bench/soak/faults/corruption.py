"""Files change or vanish under the appliance: kernels, weights, spilled KV, keys, the audit log's end, its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from bench.soak.answers import AWAY
from bench.soak.ground import Fault, Ground
from bench.soak.served import until_pid

GROUPED = AWAY | {"request_quarantined"}


@contextlib.contextmanager
def changed(path: Path, data: bytes) -> Iterator[None]:
    """Another file of the same name for the time of a block."""
    kept = path.with_name(f".{path.name}.kept")
    path.rename(kept)
    try:
        path.write_bytes(data)
        path.chmod(kept.stat().st_mode)
        yield
    finally:
        kept.replace(path)


async def _reboot(ground: Ground, role: str = "engine") -> None:
    os.kill(await until_pid(ground.served, role), signal.SIGKILL)


async def _kernels(ground: Ground) -> None:
    """An engine that finds half a library computes without."""
    assert ground.served.kernels is not None, "it was asked for before"
    path = ground.served.kernels / "kernels.so"
    whole = path.read_bytes()
    with changed(path, whole[: len(whole) // 2]):
        await _reboot(ground)
        await ground.last(6.0, 8.0)
    await _reboot(ground)


async def _weights(ground: Ground) -> None:
    """Weights that are not those that were measured at the start must not be computed with."""
    path = next(ground.served.models.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 2, len(data), 64):
        data[place] ^= 0x40
    with changed(path, bytes(data)):
        await _reboot(ground)
        await ground.last(5.0, 8.0)


async def _weights_gone(ground: Ground) -> None:
    path = next(ground.served.models.glob("*.safetensors"))
    kept = path.with_name(".away")
    path.rename(kept)
    try:
        await _reboot(ground)
        await ground.last(2.0, 4.0)
    finally:
        kept.rename(path)


async def _spill(ground: Ground) -> None:
    """Objects that are flipped, cut, gone, or no files any more."""
    for _ in range(4):
        for path in list(ground.served.room.spill.rglob("*.kv")):
            with contextlib.suppress(OSError):
                kind = ground.draw.randrange(4)
                if kind == 0:
                    with path.open("r+b") as file:
                        file.seek(ground.draw.randrange(max(1, path.stat().st_size)))
                        file.write(b"\xff\x00\xff")
                elif kind == 1:
                    os.truncate(path, path.stat().st_size // 2)
                else:
                    path.unlink()
                    if kind == 2:
                        path.mkdir()
        await ground.last(0.5, 1.0)
    for path in list(ground.served.room.spill.rglob("*.kv")):
        if path.is_dir():
            path.rmdir()


async def _spill_folder(ground: Ground) -> None:
    """The whole folder is gone, as after a mistaken clean-up; the next supervisor makes it anew."""
    for path in ground.served.room.spill.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    await ground.last(2.0, 3.0)


async def _audit_tail(ground: Ground) -> None:
    """Half an entry at the end of the log, as a crash leaves it."""
    os.kill(await until_pid(ground.served, "supervisor"), signal.SIGKILL)
    for path in sorted(ground.served.room.audit.glob("*.log"))[-1:]:
        with path.open("ab") as file:
            file.write(b'{"n": 1, "half an ent')
    await asyncio.sleep(1.0)


async def _keyring(ground: Ground) -> None:
    """Wrapped keys that do not open any more."""
    paths = [path for path in (ground.served.target.state / "keyring").iterdir() if path.is_file()]
    with contextlib.ExitStack() as held:
        for path in paths:
            held.enter_context(changed(path, b"\x00" * 60))
        await _reboot(ground, "supervisor")
        await ground.last(6.0, 8.0)
    await _reboot(ground, "supervisor")


async def _sockets(ground: Ground) -> None:
    """The sockets in the run directory are removed, as a careless clean-up does, and then the gateway dies."""
    for name in ("control.sock", "operator.sock", "notify.sock"):
        (ground.served.run_dir / name).unlink(missing_ok=True)
    await _reboot(ground, "gateway")
    await asyncio.sleep(1.0)


FAULTS = (
    Fault("corrupt-kernels", "the compiled kernels are half a file at an engine's boot", _kernels, GROUPED,
          lambda ground: "" if ground.served.kernels else "no kernels are compiled here"),
    Fault("corrupt-weights", "weights are changed behind the digest, and the engine boots", _weights, GROUPED),
    Fault("weights-gone", "the weights are gone when the engine boots", _weights_gone, GROUPED),
    Fault("corrupt-spill", "sealed KV on disk is flipped, cut, removed, replaced", _spill),
    Fault("spill-folder", "the folder of sealed KV is emptied", _spill_folder),
    Fault("audit-tail", "the supervisor dies in the middle of an audit entry", _audit_tail, GROUPED),
    Fault("corrupt-keyring", "wrapped keys are damaged, and the supervisor starts anew", _keyring, GROUPED),
    Fault("sockets-gone", "the run directory's sockets are removed, and the gateway dies", _sockets, GROUPED),
)  # fmt: skip
