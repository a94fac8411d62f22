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
    """A start keeps the policy, the same digest again does not, an edit does; a failed reload keeps nothing, nor does
    one of what the history has as its newest. Of files with problems the digest is kept, and their text in its place
    once it can be read. Signatures are kept with their policy."""
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
    assert await told("version: 2", two) == [2, 1]
    assert history.read(2).unread
    assert await told(second, two) == [2, 1]
    assert not history.read(2).unread
    assert (history.read(2).files, history.read(2).by) == ({"policy.yaml": second}, "user 0")
    (tmp_path / "policy.yaml.sig").write_text("ed25519 ...\n")
    assert await told(first, one) == [3, 2, 1]
    assert history.read(3).files == {"policy.yaml": first, "policy.yaml.sig": "ed25519 ...\n"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_policy_that_is_replaced_at_once_is_not_missing(tmp_path: Path) -> None:
    """Three policies come into force before the supervisor has read the first's file: the history has all three, the
    first two by digest, time and who put them in force, the last with its text. Files that a gateway which was taken
    over could not have put there are not taken for what it reports."""
    path, history = tmp_path / "policy.yaml", PolicyHistory(tmp_path)
    keeper, digests = PolicyKeeper(path, history), []
    for name in "abc":
        path.write_text(TENANT % name)
        digests.append(load_policy(read_sources(path)).digest)
        keeper.note(report(digests[-1]))
    task = asyncio.create_task(keeper.run())
    async with asyncio.timeout(10):
        while len(history.numbers()) < 3:
            await asyncio.sleep(0.01)
    found = [history.read(number) for number in (1, 2, 3)]
    assert [one.digest for one in found] == digests
    assert [one.unread for one in found] == [True, True, False]
    assert {one.by for one in found} == {"user 0"} and found[0].since_ms <= found[2].since_ms
    assert found[2].files == {"policy.yaml": TENANT % "c"}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_policy_that_comes_back_behind_an_unread_one_is_the_newest(tmp_path: Path) -> None:
    """A policy is in force, another replaces it and is itself replaced by the first one before its file was read: the
    history ends with the one that is in force, with its text. Control: the one in between is there by its digest."""
    path, history = tmp_path / "policy.yaml", PolicyHistory(tmp_path)
    keeper, digests = PolicyKeeper(path, history), []
    for name in "ab":
        path.write_text(TENANT % name)
        digests.append(load_policy(read_sources(path)).digest)
    path.write_text(TENANT % "a")
    task = asyncio.create_task(keeper.run())
    async with asyncio.timeout(10):
        for count, reported in ((1, digests[:1]), (3, [digests[1], digests[0]])):
            for digest in reported:
                keeper.note(report(digest))
            while len(history.numbers()) < count:
                await asyncio.sleep(0.01)
    found = [history.read(number) for number in (1, 2, 3)]
    assert [(one.digest, one.unread) for one in found] == [(digests[0], False), (digests[1], True), (digests[0], False)]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_no_digest_leaves_no_file(tmp_path: Path) -> None:
    """A gateway that was taken over reports what is no digest of a policy: nothing is kept of it, neither a file that
    nobody lists or removes nor one elsewhere. A digest is kept (control)."""
    path, history = tmp_path / "policy.yaml", PolicyHistory(tmp_path)
    keeper = PolicyKeeper(path, history)
    path.write_text(TENANT % "a")
    task = asyncio.create_task(keeper.run())
    for one in ("x" * 64, "ab" * 31, "AB" * 32, "../../..", "ab/cd", ""):
        keeper.note(report(one))
    keeper.note(report("ab" * 32))
    async with asyncio.timeout(10):
        while not history.numbers():
            await asyncio.sleep(0.01)
    assert [one.name for one in (tmp_path / "policies").iterdir()] == ["000001-abababababab-unread.json"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
