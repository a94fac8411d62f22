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
from bench.soak.faults.deaths import GONE_S
from bench.soak.ground import Fault, Ground
from bench.soak.served import until_gone, until_pid

BOOT_S = 20.0
"""A start on a busy machine."""

SPILLED = "athanor_spill_blocks"
REJECTED = ("rejected_length", "rejected_seal", "absent")
REJECTED_S = 20.0
"""Within which a request wants one of the blocks that were changed."""

SPILL_ROUNDS, SPILL_LEAST = 12, 3

KERNELS_REFUSED = "no compiled kernels"
WEIGHTS_REFUSED = "is not what it was at the start"
"""What the log must say of each."""

HALF_AN_ENTRY = b'{"n": 1, "half an ent'

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


async def _comes_back(ground: Ground) -> bool:
    try:
        await ground.served.sandbox_pid("engine")
    except LookupError:
        return False
    return True


async def _kernels(ground: Ground) -> str:
    """An engine that finds halves of libraries computes without, and says so."""
    told = ground.served.log_bytes()
    assert ground.served.kernels is not None, "it was asked for before"
    with contextlib.ExitStack() as spoiled:
        for path in ground.served.kernels.glob("*.so"):
            whole = path.read_bytes()
            spoiled.enter_context(changed(path, whole[: len(whole) // 2]))
        await _reboot(ground)
        await ground.last(6.0, 8.0)
        said = await ground.until(lambda: _said(ground, told, KERNELS_REFUSED), BOOT_S)
    await _reboot(ground)
    return said


async def _said(ground: Ground, since: int, word: str) -> str:
    """Whether the log has a word since it had so many bytes."""
    return f"the log says: {word}" if word.encode() in ground.served.said_since(since) else ""


async def _weights(ground: Ground) -> str:
    """Weights that are not those that were measured at the start must not be computed with."""
    path = next(ground.served.models.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 2, len(data), 64):
        data[place] ^= 0x40
    told = ground.served.log_bytes()
    with changed(path, bytes(data)):
        await _reboot(ground)
        await ground.last(5.0, 8.0)
        said = await ground.until(lambda: _said(ground, told, WEIGHTS_REFUSED), BOOT_S)
        return "" if await _comes_back(ground) else said


async def _weights_gone(ground: Ground) -> str:
    path = next(ground.served.models.glob("*.safetensors"))
    kept = path.with_name(".away")
    path.rename(kept)
    try:
        await _reboot(ground)
        await ground.last(2.0, 4.0)
        return "" if await _comes_back(ground) else "no engine came"
    finally:
        kept.rename(path)


async def _spill(ground: Ground) -> str:
    """Objects that are flipped, cut, gone, or no files any more; that some were rejected says who met them."""
    before = [await ground.served.metric(SPILLED, outcome=outcome) for outcome in REJECTED]

    async def rejected() -> str:
        after = [await ground.served.metric(SPILLED, outcome=outcome) for outcome in REJECTED]
        more = sum(after) - sum(before)
        return f"{more:g} blocks were rejected" if more > 0 else ""

    found = ""
    for number in range(SPILL_ROUNDS):
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
        found = found or await rejected()
        if number >= SPILL_LEAST and found:
            break
    for path in list(ground.served.room.spill.rglob("*.kv")):
        if path.is_dir():
            path.rmdir()
    return found or await ground.until(rejected, REJECTED_S)


async def _spill_folder(ground: Ground) -> str:
    """The whole folder is gone, as after a mistaken clean-up; the next supervisor makes it anew."""
    removed = 0
    for path in ground.served.room.spill.iterdir():
        removed += sum(1 for one in path.rglob("*.kv")) if path.is_dir() else 1
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    await ground.last(2.0, 3.0)
    return f"{removed} objects are gone" if removed else ""


async def _audit_tail(ground: Ground) -> str:
    """Half an entry at the end of the log, as a crash leaves it."""
    pid = await until_pid(ground.served, "supervisor")
    os.kill(pid, signal.SIGKILL)
    (path,) = sorted(ground.served.room.audit.glob("*.log"))[-1:]
    with path.open("ab") as file:
        file.write(HALF_AN_ENTRY)
    await asyncio.sleep(1.0)
    await until_gone(pid, GONE_S)

    async def mended() -> str:
        return "" if HALF_AN_ENTRY in path.read_bytes() else "half an entry was cut off"

    return await ground.until(mended, BOOT_S)


async def _keyring(ground: Ground) -> str:
    """Wrapped keys that do not open any more: what they sealed is lost, and nothing can be sealed."""
    before = await ground.served.metric(SPILLED, outcome="failed")

    async def unsealed() -> str:
        more = await ground.served.metric(SPILLED, outcome="failed") - before
        return f"{more:g} blocks could not be sealed" if more > 0 else ""

    paths = [path for path in (ground.served.target.state / "keyring").iterdir() if path.is_file()]
    with contextlib.ExitStack() as held:
        for path in paths:
            held.enter_context(changed(path, b"\x00" * 60))
        await _reboot(ground, "supervisor")
        await ground.last(6.0, 8.0)
        said = await ground.until(unsealed, REJECTED_S)
    await _reboot(ground, "supervisor")
    return said


async def _sockets(ground: Ground) -> str:
    """The sockets in the run directory are removed, as a careless clean-up does, and then the gateway dies."""
    for name in ("control.sock", "operator.sock", "notify.sock"):
        (ground.served.run_dir / name).unlink(missing_ok=True)
    pid = await until_pid(ground.served, "gateway")
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(1.0)
    await until_gone(pid, GONE_S)
    return "the sockets and the process are gone"


FAULTS = (
    Fault(
        "corrupt-kernels",
        "the compiled kernels are half a file at an engine's boot",
        _kernels,
        GROUPED,
        lambda ground: "" if ground.served.kernels else "no kernels are compiled here",
    ),
    Fault("corrupt-weights", "weights are changed behind the digest, and the engine boots", _weights, GROUPED),
    Fault("weights-gone", "the weights are gone when the engine boots", _weights_gone, GROUPED),
    Fault("corrupt-spill", "sealed KV on disk is flipped, cut, removed, replaced", _spill),
    Fault("spill-folder", "the folder of sealed KV is emptied", _spill_folder),
    Fault("audit-tail", "the supervisor dies in the middle of an audit entry", _audit_tail, GROUPED),
    Fault("corrupt-keyring", "wrapped keys are damaged, and the supervisor starts anew", _keyring, GROUPED),
    Fault("sockets-gone", "the run directory's sockets are removed, and the gateway dies", _sockets, GROUPED),
)
