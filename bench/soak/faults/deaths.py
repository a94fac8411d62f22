"""kill -9 of each kind of process, and of several at once."""

from __future__ import annotations

import asyncio
import os
import signal

from bench.soak.answers import AWAY
from bench.soak.ground import Act, Fault, Ground
from bench.soak.served import EMBED_MODEL, until_gone, until_pid

GONE_S = 60.0
"""Within which whoever was killed is buried as well, on any machine."""


def _kill(*roles: str) -> Act:
    async def act(ground: Ground) -> str:
        pids = [await until_pid(ground.served, role) for role in roles]
        await ground.last(0.0, 0.5)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await ground.last(0.5, 2.0)
        for pid in pids:
            await until_gone(pid, GONE_S)
        return f"{len(pids)} processes are gone"

    return act


async def _kill_embedder(ground: Ground) -> str:
    pid = int((await ground.served.sandboxes())[f"engine {EMBED_MODEL}"]["pid"])
    os.kill(pid, signal.SIGKILL)
    await ground.last(0.5, 2.0)
    await until_gone(pid, GONE_S)
    return "the process is gone"


async def _kill_while_it_boots(ground: Ground) -> str:
    """The supervisor dies in the middle of the boots that an engine's death has begun."""
    os.kill(await until_pid(ground.served, "engine"), signal.SIGKILL)
    await ground.last(0.1, 1.5)
    pid = await until_pid(ground.served, "supervisor")
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(1.0)
    await until_gone(pid, GONE_S)
    return "the process is gone"


AWHILE = AWAY | {"request_quarantined"}

FAULTS = (
    Fault("kill-engine", "kill -9 of the engine's sandbox", _kill("engine"), AWHILE),
    Fault("kill-text", "kill -9 of the text sandbox", _kill("text"), AWHILE),
    Fault("kill-gateway", "kill -9 of the gateway", _kill("gateway"), AWHILE),
    Fault("kill-supervisor", "kill -9 of the supervisor", _kill("supervisor"), AWHILE),
    Fault("kill-embedder", "kill -9 of the engine that embeds", _kill_embedder, AWHILE),
    Fault("kill-all", "kill -9 of both sandboxes and the gateway", _kill("engine", "text", "gateway"), AWHILE),
    Fault("kill-booting", "kill -9 of the supervisor while it boots an engine", _kill_while_it_boots, AWHILE),
)
