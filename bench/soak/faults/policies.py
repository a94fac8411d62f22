"""Reloads in a loop: good policies, bad ones, none at all, keys that cannot be read, and a death in between."""

from __future__ import annotations

import asyncio
import os
import signal

from bench.soak.answers import AWAY
from bench.soak.errors import BreachError
from bench.soak.faults.deaths import GONE_S
from bench.soak.ground import Fault, Ground
from bench.soak.served import POLICY, until_gone, until_pid

ROUNDS = 6
BAD_POLICIES = ("version: 1\ntenants: {alpha: {credential: []}}\n", "{", "version: 99\n", "\x00\xff", "- " * 9_000)
REFUSED = 409
RELOADS = "athanor_policy_reloads"
RELOADED_S = 20.0


async def reload_policy(ground: Ground, *, good: bool, what: str) -> None:
    """Have the operator's listener reload.

    Raises:
        BreachError: it does not answer as it must.
    """
    status, said = await ground.served.ask_admin("POST", "/reload")
    if status != (200 if good else REFUSED):
        raise BreachError(f"a reload of {what} was answered with {status}: {str(said)[:300]}")


async def _policies(ground: Ground) -> str:
    path = ground.served.target.state / "policy.yaml"
    without = POLICY.partition("  gamma:")[0]
    try:
        for _ in range(ROUNDS):
            path.write_text(ground.draw.choice(BAD_POLICIES))
            await reload_policy(ground, good=False, what="a bad policy")
            path.unlink()
            await reload_policy(ground, good=False, what="no policy")
            path.write_text(ground.draw.choice((without, POLICY.replace("concurrency: 512", "concurrency: 500"))))
            await reload_policy(ground, good=True, what="a good policy")
            await ground.last(0.1, 0.6)
    finally:
        path.write_text(POLICY)
    await reload_policy(ground, good=True, what="the first policy")
    return f"{2 * ROUNDS} were refused, {ROUNDS + 1} taken"


async def _credentials(ground: Ground) -> str:
    """Keys that cannot be read change nothing, until the gateway dies: then there is no service before they can."""
    path = ground.served.target.state / "credentials.json"
    before = path.read_bytes()
    try:
        path.write_bytes(before[: len(before) // 2])
        await reload_policy(ground, good=False, what="half a table of keys")
        pid = await until_pid(ground.served, "gateway")
        os.kill(pid, signal.SIGKILL)
        await ground.last(1.5, 3.0)
        await until_gone(pid, GONE_S)
        return "the table was refused, and the process is gone"
    finally:
        path.write_bytes(before)


async def _signals(ground: Ground) -> str:
    """SIGHUP as fast as it can be sent."""
    before = await ground.served.metric(RELOADS)
    pid = await until_pid(ground.served, "gateway")
    for _ in range(200):
        os.kill(pid, signal.SIGHUP)
        await asyncio.sleep(0.005)

    async def reloaded() -> str:
        more = await ground.served.metric(RELOADS) - before
        return f"{more:g} reloads" if more > 0 else ""

    return await ground.until(reloaded, RELOADED_S)


FAULTS = (
    Fault(
        "policy-loop",
        "good, bad and missing policies are reloaded by turns",
        _policies,
        frozenset({"unauthenticated", "permission_denied"}),
    ),
    Fault("policy-signals", "two hundred SIGHUPs within a second", _signals),
    Fault("credentials-broken", "the table of keys is damaged, and the gateway dies", _credentials, AWAY),
)
