"""The keeper of policies: the text whose digest the gateway reports is kept, and no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

from appliance.common.audit.entry import Entry, entry
from appliance.common.policy_history import PolicyHistory
from appliance.supervisor.policy_keeper import PolicyKeeper
from policy.files import read_sources
from policy.loader import load_policy

TENANT = "version: 1\ntenants: {%s: {credentials: ['key:a'], models: ['*']}}\n"


def report(digest: str, outcome: str = "ok") -> Entry:
    """What a gateway reports of a reload."""
    return entry("policy", outcome=outcome, policy=digest, tenants=1, by="user 0")


async def test_each_policy_in_force_is_kept_once(tmp_path: Path) -> None:
    """A start keeps the policy, the same digest again does not, an edit does; a failed reload, another digest than that
    of the files and files with problems keep nothing, and the keeper goes on. Signatures are kept with their policy."""
    path, history = tmp_path / "policy.yaml", PolicyHistory(tmp_path)
    keeper = PolicyKeeper(path, history)
    task = asyncio.create_task(keeper.run())

    async def told(text: str, digest: str, outcome: str = "ok") -> list[int]:
        path.write_text(text)
        keeper.note(report(digest, outcome))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            while keeper._more.is_set():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        return history.numbers()

    def digest_of(text: str) -> str:
        path.write_text(text)
        return load_policy(read_sources(path)).digest

    first, second = TENANT % "a", TENANT % "b"
    one, two = digest_of(first), digest_of(second)
    assert await told(first, one) == [1]
    assert await told(first, one) == [1]
    assert await told(second, one) == [1]
    assert await told(second, two, "failed") == [1]
    assert await told("version: 2", two) == [1]
    assert await told(second, two) == [2, 1]
    assert (history.read(2).files, history.read(2).by) == ({"policy.yaml": second}, "user 0")
    (tmp_path / "policy.yaml.sig").write_text("ed25519 ...\n")
    assert await told(first, one) == [3, 2, 1]
    assert history.read(3).files == {"policy.yaml": first, "policy.yaml.sig": "ed25519 ...\n"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
