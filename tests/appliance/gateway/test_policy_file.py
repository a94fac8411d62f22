"""The policy in force and its replacement."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path

import pytest

from appliance.common.errors import ConfigError
from appliance.common.policy_signature import sign_policy
from appliance.gateway.policy_file import PolicyFile
from appliance.gateway.request.ledger import Ledger
from isolation.keys.signing import load_or_make
from policy.errors import PolicyError
from policy.files import read_sources, shadow_file
from policy.model import PolicySet
from tests.policy.broken_policies import broken_policies

POLICY = 'version: 1\ntenants:\n  alpha: {credentials: ["key:alpha"], models: ["*"]}\n'


async def fetch_nothing(_names: list[str]) -> dict[str, bytes]:
    """Namespace keys of nobody."""
    return {}


async def nothing_wrong(_policy: PolicySet) -> list[str]:
    """Whatever a policy needs is there."""
    return []


async def test_a_reload_takes_in_the_drop_ins_and_says_what_is_loose(tmp_path: Path) -> None:
    """A drop-in comes into force with the reload; a model and a key that are nowhere, and a file that is not read, are
    warnings. A drop-in with a mistake changes nothing. Control: before, there is nothing to warn of but the key."""
    for name, content in (("policy.yaml", POLICY), ("credentials.json", '{"keys": {}}'), ("pepper", "x" * 32)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    files = PolicyFile(tmp_path / "policy.yaml", tmp_path / "credentials.json", tmp_path / "pepper", ["m"])
    ledger = Ledger(files.load(), {})
    outcome = await files.reload(ledger, fetch_nothing, nothing_wrong)
    assert outcome.warnings == ("tenants.alpha.credentials[0]: no key in force has the id 'alpha'",)
    drop_ins = tmp_path / "policy.d"
    drop_ins.mkdir()
    (drop_ins / "10.yml").write_text("")
    (drop_ins / "20.yaml").write_text(
        'version: 1\ntenants: {beta: {credentials: ["spiffe://athanor.local/tenant/b"], models: ["other"]}}\n'
    )
    outcome = await files.reload(ledger, fetch_nothing, nothing_wrong)
    assert (outcome.ok, sorted(ledger.policy.tenants)) == (True, ["alpha", "beta"])
    told = "\n".join(outcome.warnings)
    assert all(word in told for word in ("10.yml: not read", "no model is named 'other'", "'alpha'")), told
    (drop_ins / "30.yaml").write_text(POLICY)
    outcome = await files.reload(ledger, fetch_nothing, nothing_wrong)
    assert (outcome.ok, sorted(ledger.policy.tenants)) == (False, ["alpha", "beta"])
    assert "stands in" in outcome.problems[0]
    assert "policy.yaml" in outcome.problems[0]


async def test_a_reload_takes_in_a_changed_group(tmp_path: Path) -> None:
    """A reload puts what tenants inherit in force, from a drop-in with groups and defaults; equal content keeps the
    digest, and a group that does not fit a tenant changes nothing and is told at its place. Control: the tenant without
    a group stays as it is."""
    tenants = (
        "version: 1\ntenants:\n"
        '  alpha: {inherits: interns, credentials: ["key:alpha"], kv: {reservation: 20%}}\n'
        '  beta: {credentials: ["key:beta"], models: ["*"], limits: {concurrency: 7}}\n'
    )
    groups = "version: 1\ntenants: {}\ntenant_groups:\n  interns: {models: ['*'], limits: {concurrency: 2}}\n"
    for name, content in (("policy.yaml", tenants), ("credentials.json", '{"keys": {}}'), ("pepper", "x" * 32)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "policy.d").mkdir()
    drop_in = tmp_path / "policy.d" / "10-groups.yaml"
    drop_in.write_text(groups)
    files = PolicyFile(tmp_path / "policy.yaml", tmp_path / "credentials.json", tmp_path / "pepper", ["m"])
    ledger = Ledger(files.load(), {})

    def concurrency() -> list[int]:
        return [ledger.policy.tenants[name].limits.concurrency for name in ("alpha", "beta")]

    assert concurrency() == [2, 7]
    drop_in.write_text(groups.replace("concurrency: 2", "concurrency: 3"))
    assert (await files.reload(ledger, fetch_nothing, nothing_wrong)).ok
    assert concurrency() == [3, 7]
    digest = ledger.policy.digest
    drop_in.write_text(
        groups.replace("limits: {concurrency: 2}", "inherits: all")
        + "  all: {limits: {concurrency: 3}}\ndefaults: {limits: {concurrency: 9}}\n"
    )
    outcome = await files.reload(ledger, fetch_nothing, nothing_wrong)
    assert outcome.ok and outcome.digest == digest and concurrency() == [3, 7]
    drop_in.write_text(groups.replace("limits:", "kv: {cap: 10%}, limits:"))
    outcome = await files.reload(ledger, fetch_nothing, nothing_wrong)
    assert not outcome.ok and concurrency() == [3, 7]
    assert outcome.problems == (
        f"{drop_in}:4:38: tenant_groups.interns.kv.cap: the cap, 10%, is below the reservation, 20%, or nothing; "
        "tenant alpha inherits it",
    )


async def test_a_reload_stands_in_nobodys_way(tmp_path: Path) -> None:
    """While the policy is read, which takes as long as the operator's file system likes, the event loop goes on; what
    is read then is in force."""
    for name, content in (("policy.yaml", POLICY), ("credentials.json", '{"keys": {}}'), ("pepper", "x" * 32)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    files = PolicyFile(tmp_path / "policy.yaml", tmp_path / "credentials.json", tmp_path / "pepper", ["m"])
    ledger, keys = Ledger(files.load(), {}), files.keys
    (tmp_path / "policy.yaml").unlink()
    os.mkfifo(tmp_path / "policy.yaml")
    turned = threading.Event()

    def feed() -> None:
        # A reload that kept the loop from turning would wait for this, and this for the loop.
        turned.wait(5.0)
        (tmp_path / "policy.yaml").write_text(POLICY.replace("alpha", "beta") if turned.is_set() else POLICY)

    writer = threading.Thread(target=feed)
    writer.start()
    reloading = asyncio.ensure_future(files.reload(ledger, fetch_nothing, nothing_wrong))
    asyncio.get_running_loop().call_soon(turned.set)
    outcome = await reloading
    writer.join()
    assert outcome.ok
    assert list(ledger.policy.tenants) == ["beta"]
    assert files.keys is not keys


async def test_two_hundred_mistakes_leave_the_policy_in_force(tmp_path: Path) -> None:
    """Each reload of a policy with one mistake names file, line and column, and neither policy nor keys change.
    Control: the reload of a valid one after them changes both."""
    for name, content in (("policy.yaml", POLICY), ("credentials.json", '{"keys": {}}'), ("pepper", "x" * 32)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    path = tmp_path / "policy.yaml"
    files = PolicyFile(path, tmp_path / "credentials.json", tmp_path / "pepper", ["m"])
    ledger = Ledger(files.load(), {})
    policy, keys, count = ledger.policy, files.keys, 0
    for broken in broken_policies(200, seed=2):
        path.write_text(broken.text)
        outcome = await files.reload(ledger, fetch_nothing, nothing_wrong)
        assert not outcome.ok and outcome.digest == policy.digest, broken.kind
        assert outcome.problems[0].startswith(f"{path}:{broken.line}:"), (broken, outcome.problems)
        assert ledger.policy is policy and files.keys is keys
        count += 1
    path.write_text(POLICY.replace("alpha", "beta"))
    assert count == 200 and (await files.reload(ledger, fetch_nothing, nothing_wrong)).ok
    assert list(ledger.policy.tenants) == ["beta"] and files.keys is not keys


@pytest.mark.parametrize("right", [True, False], ids=["a valid policy", "a broken one"])
async def test_nothing_is_collected_while_a_policy_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """The garbage collector rests while a reload reads, in which it would hold all threads up, and works again after
    it, whatever came of the reload."""
    seen: list[bool] = []
    for name, content in (("policy.yaml", POLICY), ("credentials.json", '{"keys": {}}'), ("pepper", "x" * 32)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    files = PolicyFile(tmp_path / "policy.yaml", tmp_path / "credentials.json", tmp_path / "pepper", ["m"])
    ledger, read = Ledger(files.load(), {}), files.read

    def watched() -> object:
        seen.append(gc.isenabled())
        if not right:
            raise PolicyError([])
        return read()

    monkeypatch.setattr(files, "read", watched)
    assert gc.isenabled()
    assert (await files.reload(ledger, fetch_nothing, nothing_wrong)).ok is right
    assert seen == [False] and gc.isenabled()


async def test_an_unsigned_policy_changes_nothing(tmp_path: Path) -> None:
    """With keys to sign by, a start with a policy that none of them signed is refused, and a reload leaves the one in
    force; signed, it comes into force."""
    for name, content in (("policy.yaml", POLICY), ("credentials.json", '{"keys": {}}'), ("pepper", "x" * 32)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    path, key = tmp_path / "policy.yaml", load_or_make(tmp_path / "key")[0]
    files = PolicyFile(path, tmp_path / "credentials.json", tmp_path / "pepper", ["m"], [key.public.hex()])
    with pytest.raises(ConfigError, match="not signed as it is now"):
        files.load()
    sign_policy(read_sources(path), path, key)
    ledger = Ledger(files.load(), {})
    path.write_text(POLICY.replace("alpha: {", "beta: {weight: 2, "))
    outcome = await files.reload(ledger, fetch_nothing, nothing_wrong)
    assert (outcome.ok, list(ledger.policy.tenants)) == (False, ["alpha"])
    assert "athanor policy sign" in outcome.problems[0]
    sign_policy(read_sources(path), path, key)
    outcome = await files.reload(ledger, fetch_nothing, nothing_wrong)
    assert (outcome.ok, list(ledger.policy.tenants)) == (True, ["beta"])


async def test_a_shadow_is_read_with_the_drop_ins_and_never_stops_a_reload(tmp_path: Path) -> None:
    """The file beside the policy is the shadow's, with the policy's own drop-ins; its mistakes are warnings and end the
    trial, not the reload; without the file there is none."""
    for name, content in (("policy.yaml", POLICY), ("credentials.json", '{"keys": {}}'), ("pepper", "x" * 32)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "policy.d").mkdir()
    (tmp_path / "policy.d" / "b.yaml").write_text(POLICY.replace("alpha", "beta"))
    files = PolicyFile(tmp_path / "policy.yaml", tmp_path / "credentials.json", tmp_path / "pepper", ["m"])
    ledger = Ledger(files.load(), {})
    assert (files.shadow, files.shadow_status(None).digest) == (None, "")
    shadow = shadow_file(tmp_path / "policy.yaml")
    assert shadow.name == "policy.shadow.yaml"
    shadow.write_text(POLICY.replace("alpha: {", "alpha: {weight: 3, "))
    assert (await files.reload(ledger, fetch_nothing, nothing_wrong)).ok
    assert files.shadow is not None
    assert (sorted(files.shadow.tenants), files.shadow.tenants["alpha"].weight) == (["alpha", "beta"], 3)
    assert ledger.policy.tenants["alpha"].weight == 1
    shadow.write_text("version: 2")
    outcome = await files.reload(ledger, fetch_nothing, nothing_wrong)
    assert (outcome.ok, files.shadow) == (True, None)
    assert outcome.warnings[0].startswith("shadow policy: ")
    assert files.shadow_status(None).problems
    shadow.unlink()
    assert "shadow" not in "".join((await files.reload(ledger, fetch_nothing, nothing_wrong)).warnings)
