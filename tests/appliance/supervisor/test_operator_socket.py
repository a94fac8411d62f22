"""The operator's socket: who is heard, what is understood, and what a shred makes known."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.control import Control, Namespaces
from appliance.supervisor import operator_socket
from appliance.supervisor.namespaces import Namespace
from appliance.supervisor.operator_socket import OperatorSocket
from appliance.supervisor.spill_store import SpillLimits, SpillStore
from appliance.supervisor.vault import Vault
from isolation.keys.keyring import Keyring
from isolation.keys.seal import Binding


@dataclass
class Desk:
    """A socket over a real vault, and what it told the gateway."""

    path: Path
    namespace: Namespace
    store: SpillStore
    vault: Vault
    told: list[Control]

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
    made = OperatorSocket(tmp_path / "operator.sock", vault, publish)
    await made.open()
    yield Desk(tmp_path / "operator.sock", namespace, store, vault, told)
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


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"{\n", b"[]\n", b'{"do": "shred"}\n', b'{"do": "list", "tenant": "a"}\n', b'{"do":1,"tenant":"a"}\n',
     b'{"do": "shred", "tenant": 5}\n', b'{"do": "shred", "tenant": "../a"}\n', b"[" * 4_000 + b"\n"],
)  # fmt: skip
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
