"""The operator's socket: who is heard, what is understood, and what a shred makes known."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.common.audit.entry import Entry
from appliance.common.control import Control, Namespaces
from appliance.common.usage.book import Released, UsageAccessError
from appliance.supervisor import operator_socket
from appliance.supervisor.namespaces import Namespace
from appliance.supervisor.operator_socket import OperatorSocket
from appliance.supervisor.policy_reader import accounts_of
from appliance.supervisor.spill_service import Vault
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.keys.errors import KeyringError
from isolation.keys.keyring import Keyring
from isolation.keys.seal import Binding
from policy.loader import Source, load_policy

POLICY = """
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["*"]}
  beta: {credentials: ["key:b"], models: ["*"]}
  gamma: {credentials: ["key:c"], models: ["*"]}
sharing_groups:
  team: {tenants: [beta, gamma]}
"""


@dataclass
class Desk:
    """A socket over a real vault, and what it told the gateway."""

    path: Path
    namespace: Namespace
    store: SpillStore
    vault: Vault
    told: list[Control]
    recorded: list[Entry]

    async def say(self, line: bytes) -> dict[str, object] | None:
        """The answer to one line; None when there is none."""
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(line)
        if not line.endswith(b"\n"):
            writer.write_eof()
        try:
            answer = await reader.readline()
        except ConnectionResetError:
            answer = b""
        writer.close()
        return json.loads(answer) if answer else None


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    """A running one."""
    namespace, told = Namespace(), []

    def publish(message: Control, _fds: tuple[int, ...]) -> bool:
        told.append(message)
        return True

    store = SpillStore(SpillLimits(1 << 20), keyring := Keyring(tmp_path / "keys", os.urandom(32)))
    vault = Vault(keyring, store, namespace)
    recorded: list[Entry] = []
    policy = load_policy([Source("p.yaml", POLICY)])
    made = OperatorSocket(
        tmp_path / "operator.sock", vault, publish, recorded.append, lambda tenant: accounts_of(policy, tenant)
    )
    await made.open()
    yield Desk(tmp_path / "operator.sock", namespace, store, vault, told, recorded)
    await made.close()
    vault.close()
    assert not (tmp_path / "operator.sock").exists()


async def test_a_shred_renews_the_namespace_and_destroys_key_and_objects(desk: Desk) -> None:
    """The gateway hears of another namespace key, the old one is nobody's, and what was kept is gone; a second shred
    has nothing left to do."""
    old = desk.namespace.keys(["alpha"])["alpha"]
    desk.vault.set_retention({"alpha": 1})
    assert desk.vault.owner(bytes.fromhex(old)) == "alpha"
    desk.store.put(Binding("alpha", "00", bytes(16), b"epoch"), b"content")
    assert desk.path.stat().st_mode & 0o777 == 0o600
    wish = json.dumps({"do": "shred", "tenant": "alpha"}).encode() + b"\n"
    assert await desk.say(wish) == {"ok": True, "tenant": "alpha", "objects": 1, "had_key": True}
    (message,) = desk.told
    assert isinstance(message, Namespaces)
    assert message.keys["alpha"] != old
    assert desk.vault.owner(bytes.fromhex(old)) is None
    assert desk.vault.owner(bytes.fromhex(message.keys["alpha"])) == "alpha"
    assert await desk.say(wish) == {"ok": True, "tenant": "alpha", "objects": 0, "had_key": False}
    user = os.geteuid()
    assert [one.fields for one in desk.recorded] == [
        {"what": "shred", "tenant": "alpha", "user": user, "outcome": "OK", "count": count} for count in (1, 0)
    ]


async def test_a_shred_reaches_what_a_sharing_group_has_of_the_tenant(desk: Desk) -> None:
    """Blocks of a member are the group's, under the group's key: that is renewed too, so that no other member finds
    them any more; the other member's own key stays, and so do all of a tenant in no group (control)."""
    old = desk.namespace.keys(["alpha", "beta", "gamma", "group/team"])
    assert await desk.say(b'{"do": "shred", "tenant": "beta"}\n')
    (message,) = desk.told
    assert isinstance(message, Namespaces)
    assert message.keys.keys() == {"beta", "group/team"}
    assert not set(message.keys.values()) & set(old.values())
    assert desk.namespace.keys(["alpha", "gamma"]) == {name: old[name] for name in ("alpha", "gamma")}
    assert await desk.say(b'{"do": "shred", "tenant": "alpha"}\n')
    assert isinstance(desk.told[1], Namespaces) and desk.told[1].keys.keys() == {"alpha"}


async def test_a_shred_destroys_what_the_group_sealed_of_the_tenant(desk: Desk) -> None:
    """Objects under the key of a member's group go with the member's own; those of a tenant outside stay (control)."""
    for owner in ("alpha", "beta", "group/team"):
        desk.store.put(Binding(owner, "00", bytes(16), b"epoch"), owner.encode())
    done = await desk.say(b'{"do": "shred", "tenant": "beta"}\n')
    assert done == {"ok": True, "tenant": "beta", "objects": 2, "had_key": True}
    names = [Binding(owner, "00", bytes(16), b"epoch") for owner in ("alpha", "beta", "group/team")]
    assert [desk.store.get(name) for name in names] == [b"alpha", None, None]


async def test_a_rotation_gives_another_key_at_once(desk: Desk) -> None:
    """What the old key sealed is gone, the tenant has a key on the medium again, and objects are kept under it."""
    desk.vault.set_retention({"alpha": 1})
    desk.namespace.keys(["alpha"])
    name = Binding("alpha", "00", bytes(16), b"epoch")
    desk.store.put(name, b"content")
    before = (desk.path.parent / "keys" / "alpha.kek").read_bytes()
    done = await desk.say(b'{"do": "rotate", "tenant": "alpha"}\n')
    assert done == {"ok": True, "tenant": "alpha", "objects": 1, "had_key": True}
    assert (desk.path.parent / "keys" / "alpha.kek").read_bytes() != before
    assert desk.store.get(name) is None
    assert desk.store.put(name, b"newer")
    assert desk.store.get(name) == b"newer"
    assert [(one.kind, one.fields["what"], one.fields["count"]) for one in desk.recorded] == [("order", "rotate", 1)]


async def test_reserved_spend_is_released_and_on_record(tmp_path: Path) -> None:
    """The answer says how many requests and how much; the audit log has who ordered it. Without a usage book, and where
    the book takes nothing, the order fails and is on record too."""
    recorded: list[Entry] = []
    found: list[Released] = [Released(2, 21)]

    def release(tenant: str) -> Released:
        assert tenant == "alpha"
        if not found:
            raise UsageAccessError("the disk is full")
        return found.pop()

    with tempfile.TemporaryDirectory(prefix="op-", dir="/tmp") as name:
        for doing in (release, release, None):
            made = OperatorSocket(Path(name) / "s", None, lambda *_: True, recorded.append, release=doing)
            await made.open()
            desk = Desk(Path(name) / "s", Namespace(), None, None, [], recorded)  # type: ignore[arg-type]
            answer = await desk.say(b'{"do": "release", "tenant": "alpha"}\n')
            assert answer is not None
            if len(recorded) == 1:
                assert answer == {"ok": True, "tenant": "alpha", "requests": 2, "cost": 21}
            else:
                problem = "the disk is full" if doing else operator_socket.NO_BOOK
                assert answer == {"ok": False, "problem": problem}
            await made.close()
    assert [(one.kind, one.fields["what"], one.fields["outcome"], one.fields["count"]) for one in recorded] == [
        ("order", "release", "OK", 2),
        ("order", "release", "FAILED", 0),
        ("order", "release", "FAILED", 0),
    ]


async def test_what_was_pulled_is_on_record(desk: Desk) -> None:
    """A command tells what it had the downloader do; with another field, a wrong type or for another deed nothing is
    recorded."""
    told = {"do": "record", "what": "pull", "model": "m", "model_digest": "9f86", "source": "s3://b/m", "outcome": "OK"}
    assert await desk.say(json.dumps({**told, "count": 7}).encode() + b"\n") == {"ok": True}
    (recorded,) = desk.recorded
    assert (recorded.kind, recorded.fields["count"], recorded.fields["user"]) == ("model", 7, os.geteuid())
    for wrong in ({}, {"count": "7"}, {"count": True}, {"count": 7, "more": 1}, {"count": 7, "what": "shred"}):
        answer = await desk.say(json.dumps({**told, **wrong}).encode() + b"\n")
        assert answer == {"ok": False, "problem": "not a command of this release"}
    assert len(desk.recorded) == 1


async def test_keys_are_wrapped_anew_and_open_what_they_sealed(desk: Desk) -> None:
    """Sealed objects open as before, the keyring opens with the new root key, and no longer with another; an order
    with a wrong key is refused, changes nothing, and is on record too."""
    name = Binding("alpha", "00", bytes(16), b"epoch")
    desk.store.put(name, b"content")
    root = os.urandom(32)
    assert await desk.say(json.dumps({"do": "rewrap", "root": root.hex()}).encode() + b"\n") == {"ok": True, "keys": 1}
    assert desk.store.get(name) == b"content"
    for wrong in ("ab", "zz" * 32):
        answer = await desk.say(json.dumps({"do": "rewrap", "root": wrong}).encode() + b"\n")
        assert answer is not None
        assert (answer["ok"], wrong in str(answer["problem"])) == (False, False)
    outcomes = [(one.fields["outcome"], one.fields["count"]) for one in desk.recorded]
    assert outcomes == [("OK", 1), ("FAILED", 0), ("FAILED", 0)]
    assert root.hex() not in str(desk.recorded)
    desk.vault.close()
    again = Keyring(desk.path.parent / "keys", root)
    again.derive("alpha", bytes(32), b"test")
    again.close()
    other = Keyring(desk.path.parent / "keys", os.urandom(32))
    with pytest.raises(KeyringError, match="another root key"):
        other.derive("alpha", bytes(32), b"test")
    other.close()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"{\n",
        b"[]\n",
        b'{"do": "shred"}\n',
        b'{"do": "list", "tenant": "a"}\n',
        b'{"do":1,"tenant":"a"}\n',
        b'{"do": "shred", "tenant": 5}\n',
        b'{"do": "shred", "tenant": "../a"}\n',
        b"[" * 4_000 + b"\n",
        b'{"do": "rewrap", "tenant": "a"}\n',
        b'{"do": "rewrap", "root": 7}\n',
        b'{"do": ["shred"], "tenant": "a"}\n',
        b'{"do": "rotate", "tenant": "../a"}\n',
    ],
)
async def test_what_is_no_command_is_refused(desk: Desk, line: bytes) -> None:
    """A typed answer, and nothing is destroyed or told."""
    answer = await desk.say(line)
    assert answer is not None
    assert (answer["ok"], desk.told) == (False, [])


async def test_a_line_without_end_and_another_user_are_let_go(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither gets an answer."""
    assert await desk.say(b"x" * 100_000) is None
    monkeypatch.setattr(operator_socket, "_admissible", lambda _peer: False)
    assert await desk.say(b'{"do": "shred", "tenant": "alpha"}\n') is None


async def test_a_tenant_that_wants_nothing_kept_any_more_is_forgotten(desk: Desk) -> None:
    """Nobody's blocks are kept before the policy was told; when it says none, what was kept goes."""
    key = bytes.fromhex(desk.namespace.keys(["alpha"])["alpha"])
    assert desk.vault.owner(key) is None
    desk.vault.set_retention({"alpha": 1})
    name = Binding("alpha", "00", bytes(16), b"epoch")
    desk.store.put(name, b"content")
    desk.vault.set_retention({"beta": 1})
    assert desk.store.get(name) == b"content"
    desk.vault.set_retention({"alpha": 0})
    assert (desk.vault.owner(key), desk.store.get(name)) == (None, None)


async def test_a_socket_that_was_removed_is_there_again(tmp_path: Path) -> None:
    """An operator finds the socket again, with the mode that it had; a folder that is away is waited for."""
    folder = tmp_path / "run"
    folder.mkdir()
    made = OperatorSocket(folder / "operator.sock", None, lambda _message, _fds: True, lambda _entry: None)
    await made.open()
    (folder / "operator.sock").unlink()
    folder.rename(tmp_path / "away")
    await made.mend()
    (tmp_path / "away").rename(folder)
    await made.mend()
    assert (folder / "operator.sock").stat().st_mode & 0o777 == 0o600
    reader, writer = await asyncio.open_unix_connection(folder / "operator.sock")
    writer.write(b'{"do": "shred", "tenant": "alpha"}\n')
    assert json.loads(await reader.readline())["ok"] is False
    writer.close()
    await made.close()
    assert not (folder / "operator.sock").exists()


async def test_calls_of_the_operators_api_are_recorded(desk: Desk) -> None:
    """With who called, as told by the API's process, and nothing is done; a field too many, too few or of another type
    is no command. What an older process of the API does not tell is empty."""
    told = {"method": "athanor.policy.v1.PolicyService/Apply", "user": 1_000, "roles": "security,viewer"}
    told |= {"subject": "", "request": "req_1", "outcome": "OK", "tenant": "alpha"}
    elsewhere = {**told, "user": 65_534, "caller": "oidc:corp:ann", "reason": ""}
    for one in (told, elsewhere):
        assert await desk.say(json.dumps({"do": "called", **one}).encode() + b"\n") == {"ok": True}
    for wrong in ({**told, "user": "root"}, {**told, "more": 1}, {"method": "x"}):
        answer = await desk.say(json.dumps({"do": "called", **wrong}).encode() + b"\n")
        assert answer is not None and answer["ok"] is False
    known = {**told, "caller": "", "reason": ""}
    assert [(one.kind, one.fields) for one in desk.recorded] == [("call", known), ("call", elsewhere)]
    assert desk.told == []
