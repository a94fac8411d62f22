"""The supervisor's end of the control socket against a gateway that was taken over."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog

from appliance.common import control
from appliance.common.control import (
    CONTROL_VERSION,
    Attach,
    Audited,
    Control,
    ControlError,
    Fault,
    NamespaceQuery,
    Namespaces,
    Retention,
    SandboxUse,
    SpillState,
    Welcome,
)
from appliance.supervisor import control_server, namespaces
from appliance.supervisor.control_server import ControlServer
from appliance.supervisor.namespaces import Namespace


class Watched:
    """A server and what it called back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attached = self.left = 0
        self.faults: list[Fault] = []
        self.audited: list[Audited] = []
        self.kept: list[dict[str, int]] = []
        self.keys: list[int] = []
        self.server = ControlServer(
            path,
            Welcome(CONTROL_VERSION, "s", "l", ["m"]),
            self._on_attach,
            self._on_leave,
            self.faults.append,
            on_audited=self._on_audited,
            on_keys=self.keys.append,
        )
        self.server.on_retention = self.kept.append
        self.server.open()

    def _on_attach(self) -> None:
        self.attached += 1

    def _on_leave(self) -> None:
        self.left += 1

    def _on_audited(self, message: Audited) -> None:
        if message.dropped < 0:
            raise ControlError("too few")
        self.audited.append(message)

    def connect(self) -> socket.socket:
        """A gateway."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(self.path))
        sock.setblocking(False)
        return sock


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    """A server that listens."""
    made = Watched(tmp_path / "control.sock")
    yield made
    made.server.close()


async def hear(sock: socket.socket) -> Control | None:
    """The supervisor's next word; None when it hung up."""
    async with asyncio.timeout(20):
        while True:
            try:
                item = control.receive(sock)
            except BlockingIOError:
                await asyncio.sleep(0.005)
                continue
            return item[0] if item is not None else None


async def test_nothing_is_told_before_the_version_is_agreed(watched: Watched) -> None:
    """A peer that has not attached gets no descriptors, and its first word must be Attach in our version."""
    with watched.connect() as sock:
        await asyncio.sleep(0.05)
        assert not watched.server.publish(Namespaces({}), ())
        control.send(sock, NamespaceQuery(["a"]))
        assert await hear(sock) is None
    with watched.connect() as sock:
        control.send(sock, Attach(CONTROL_VERSION + 1))
        assert await hear(sock) is None
    with watched.connect() as sock:
        control.send(sock, Attach(CONTROL_VERSION))
        assert isinstance(await hear(sock), Welcome)
        assert watched.server.publish(Namespaces({}), ())
    assert watched.attached == 1


async def test_a_level_that_is_known_is_not_sent_again(watched: Watched) -> None:
    """An idle appliance tells nothing: the same memory, disks and spill are sent once, a change is sent, and all of it
    goes again after any other message and to the next gateway."""
    memory, spill = SandboxUse("m", "engine", 5, 8), SpillState({"kept": 1})
    text = SandboxUse("m", "text", 5, 8)

    async def heard(sock: socket.socket, *told: Control) -> list[Control | None]:
        for one in (*told, Namespaces({})):
            assert watched.server.publish(one, ())
        found = []
        while not isinstance(last := await hear(sock), Namespaces):
            found.append(last)
        return found

    for _ in range(2):
        with watched.connect() as sock:
            control.send(sock, Attach(CONTROL_VERSION))
            assert isinstance(await hear(sock), Welcome)
            told = memory, spill, text, memory, SpillState({"kept": 1}), text
            assert await heard(sock, *told) == [memory, spill, text]
            assert await heard(sock, memory, memory) == [memory]
            more = SandboxUse("m", "engine", 6, 8)
            assert await heard(sock, memory, more, text, more, memory) == [memory, more, text, memory]
        while watched.server.publish(Namespaces({}), ()):
            await asyncio.sleep(0.005)


async def test_descriptors_beside_rubbish_are_closed(watched: Watched) -> None:
    """A gateway that sends descriptors with messages that are none does not use up the supervisor's."""
    before = len(os.listdir("/proc/self/fd"))
    for data in (b"{", b"[" * 50_000, b'{"type": "Attach"}'):
        with watched.connect() as sock:
            socket.send_fds(sock, [data], [sock.fileno()] * 3)
            assert await hear(sock) is None
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_flood_of_messages_lets_the_loop_turn(watched: Watched) -> None:
    """However many messages wait, only some are taken in one turn."""
    with watched.connect() as sock:
        control.send(sock, Attach(CONTROL_VERSION))
        await hear(sock)
        for number in range(100):
            control.send(sock, Fault("m", "engine", number, "x"))
        seen = []
        while len(watched.faults) < 100:
            await asyncio.sleep(0)
            seen.append(len(watched.faults))
        steps = [after - before for before, after in itertools.pairwise(seen)]
        assert max(steps) <= control_server.READ_BATCH


async def test_reports_for_the_audit_log_are_handed_on(watched: Watched) -> None:
    """Entries and questions for keys reach the recorder; a report that it does not take ends the attachment, and one
    before the attachment is none."""
    with watched.connect() as sock:
        control.send(sock, Attach(CONTROL_VERSION))
        await hear(sock)
        control.send(sock, Audited(["x"], 3))
        control.send(sock, NamespaceQuery(["a", "b"]))
        assert isinstance(await hear(sock), Namespaces)
        assert (watched.audited, watched.keys) == ([Audited(["x"], 3)], [2])
        control.send(sock, Audited([], -1))
        assert await hear(sock) is None
    with watched.connect() as sock:
        control.send(sock, Audited([], 0))
        assert await hear(sock) is None
    assert len(watched.audited) == 1


async def test_a_gateway_that_reads_nothing_is_let_go(watched: Watched) -> None:
    """A full socket ends the attachment; the supervisor never waits."""
    with watched.connect() as sock:
        control.send(sock, Attach(CONTROL_VERSION))
        await hear(sock)
        big = Namespaces({f"t{number}": "00" * 32 for number in range(1_000)})
        for _ in range(1_000):
            if not watched.server.publish(big, ()):
                break
        assert watched.left == 1
    with watched.connect() as sock:
        control.send(sock, Attach(CONTROL_VERSION))
        assert isinstance(await hear(sock), Welcome)


async def test_a_message_that_is_too_large_costs_no_attachment(watched: Watched) -> None:
    """What the supervisor cannot say in one datagram is left out: the gateway stays attached, and the next message
    comes (control)."""
    with watched.connect() as sock:
        control.send(sock, Attach(CONTROL_VERSION))
        await hear(sock)
        assert not watched.server.publish(Namespaces({"t": "f" * control.MAX_DATAGRAM_BYTES}), ())
        assert watched.server.publish(Namespaces({"t": "00"}), ())
        assert await hear(sock) == Namespaces({"t": "00"})
    assert watched.left == 0


async def test_a_level_that_is_too_large_never_counts_as_sent(watched: Watched) -> None:
    """It is refused each time, logged once, and the level before it still holds; one that fits is sent again
    (control)."""
    large = SpillState({"k" * control.MAX_DATAGRAM_BYTES: 1})
    with watched.connect() as sock:
        control.send(sock, Attach(CONTROL_VERSION))
        await hear(sock)
        assert watched.server.publish(SpillState({"kept": 1}), ())
        with structlog.testing.capture_logs() as logs:
            assert [watched.server.publish(large, ()) for _ in range(3)] == [False] * 3
        assert len(logs) == 1
        assert watched.server.publish(SpillState({"kept": 2}), ())
        assert [await hear(sock), await hear(sock)] == [SpillState({"kept": 1}), SpillState({"kept": 2})]


async def test_a_second_gateway_is_refused_and_attaching_twice_is_harmless(watched: Watched) -> None:
    """One gateway at a time."""
    with watched.connect() as sock, watched.connect() as other:
        for _ in range(2):
            control.send(sock, Attach(CONTROL_VERSION))
            assert isinstance(await hear(sock), Welcome)
        assert await hear(other) is None
    assert watched.left in (0, 1)


def test_keys_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant keeps its key while it is asked for; names without end do not grow the table without end."""
    monkeypatch.setattr(namespaces, "MAX_TENANTS", 4)
    names = Namespace()
    first = names.keys(["a", "b"])
    for number in range(10):
        names.keys([f"x{number}"])
        assert names.keys(["a"])["a"] == first["a"]
    assert names.keys(["b"])["b"] != first["b"]
    assert len(names._keys) == len(names._owners) == 4


def test_a_key_tells_its_tenant_until_it_is_renewed() -> None:
    """The owner of a key is known to the supervisor alone; a renewed key is another, and the old one is nobody's."""
    names = Namespace()
    old = bytes.fromhex(names.keys(["a", "b"])["a"])
    assert (names.owner(old), names.key("a"), names.key("nobody")) == ("a", old, None)
    new = bytes.fromhex(names.renew("a"))
    assert new != old
    assert (names.owner(old), names.owner(new), names.owner(bytes(32))) == (None, "a", None)
    assert names.keys(["a"])["a"] == new.hex()


async def test_retention_is_told_after_the_greeting_only(watched: Watched) -> None:
    """What may be kept reaches the supervisor from an attached gateway, and from nobody else."""
    with watched.connect() as sock:
        control.send(sock, Retention({"a": 1}))
        assert await hear(sock) is None
    assert watched.kept == []
    with watched.connect() as sock:
        control.send(sock, Attach(CONTROL_VERSION))
        await hear(sock)
        control.send(sock, Retention({"a": 1, "b": 0}))
        control.send(sock, NamespaceQuery([]))
        assert isinstance(await hear(sock), Namespaces)
    assert watched.kept == [{"a": 1, "b": 0}]


async def test_a_socket_that_was_removed_is_there_again(watched: Watched) -> None:
    """Whoever is attached stays so, the next gateway finds the socket, and one that was not touched is left alone."""
    first = watched.connect()
    control.send(first, Attach(CONTROL_VERSION))
    await asyncio.sleep(0.05)
    before = os.stat(watched.path).st_ino
    watched.server.mend()
    assert os.stat(watched.path).st_ino == before
    watched.path.unlink()
    watched.server.mend()
    assert (watched.attached, watched.left) == (1, 0)
    first.close()
    await asyncio.sleep(0.05)
    with watched.connect() as second:
        control.send(second, Attach(CONTROL_VERSION))
        await asyncio.sleep(0.05)
        assert (watched.attached, watched.left) == (2, 1)


async def test_a_socket_that_cannot_be_made_again_is_tried_again(watched: Watched) -> None:
    """A folder that is away for a while costs a line in the log; afterwards the socket is made."""
    folder = watched.path.parent
    watched.path.unlink()
    away = folder.rename(folder.with_name("away"))
    watched.server.mend()
    away.rename(folder)
    watched.server.mend()
    watched.connect().close()
