"""The gateway's end of the control socket with very many tenants: a full socket costs no attachment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.common.control import CONTROL_VERSION, Attach, Audited, Control, Namespaces, Retention, Welcome, receive
from appliance.gateway.sandboxes import supervisor_link as module
from appliance.gateway.sandboxes.namespace_keys import NamespaceKeys
from appliance.gateway.sandboxes.spend_records import MAX_WAITING, SpendRecords
from appliance.gateway.sandboxes.supervisor_link import SupervisorLink
from appliance.supervisor.control_server import ControlServer

TENANTS = [f"tenant-with-a-longer-name-{number}" for number in range(10_000)]


class Sleeper:
    """A supervisor that attaches a gateway and reads when it is told to."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen(1)
        self.peer: socket.socket | None = None

    def accept(self) -> None:
        """Take the gateway's connection and its first word."""
        self.peer, _ = self.listener.accept()
        assert receive(self.peer) == (Attach(CONTROL_VERSION), ())
        self.peer.setblocking(False)

    def read(self) -> list[Control]:
        """Everything that is there."""
        assert self.peer is not None
        found = []
        while True:
            try:
                item = receive(self.peer)
            except BlockingIOError:
                return found
            assert item is not None
            found.append(item[0])


@pytest.fixture
async def linked(tmp_path: Path) -> AsyncIterator[tuple[SupervisorLink, Sleeper, list[str]]]:
    """A link that is attached to a sleeping supervisor, and what became of it."""
    sleeper, lost = Sleeper(tmp_path / "c"), []
    link = SupervisorLink(tmp_path / "c")
    task = asyncio.create_task(link.run(lambda _message, _fds: None, lambda: lost.append("lost")))
    await asyncio.sleep(0.05)
    sleeper.accept()
    yield link, sleeper, lost
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    sleeper.listener.close()


async def test_what_finds_no_room_is_sent_later_and_in_order(linked: tuple[SupervisorLink, Sleeper, list[str]]) -> None:
    """More than the socket takes is told at once: nothing is lost, nothing overtakes, the attachment stays, and entries
    of the audit log wait behind it; once the supervisor reads everything comes."""
    link, sleeper, lost = linked
    told = [Retention(dict.fromkeys(TENANTS[:400], number)) for number in range(80)]
    for message in told:
        link.tell(message)
    assert link._unsent, "the control: the socket was full"
    assert not link.report(Audited(["{}"], 0))
    found: list[Control] = []
    async with asyncio.timeout(20):
        while len(found) < len(told):
            found += sleeper.read()
            await asyncio.sleep(0)
    assert found == told
    assert lost == []
    assert link.report(Audited(["{}"], 0))


async def test_a_supervisor_that_never_reads_is_given_up(
    linked: tuple[SupervisorLink, Sleeper, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits is bounded: beyond it the link ends, forgets what waited, and attaches again."""
    monkeypatch.setattr(module, "MAX_UNSENT", 40)
    link, _, lost = linked
    for number in range(120):
        link.tell(Retention(dict.fromkeys(TENANTS[:400], number)))
    assert lost == ["lost"]
    assert not link._unsent


async def test_ten_thousand_tenants_attach_again(tmp_path: Path) -> None:
    """A supervisor that came anew is asked about 10,000 tenants' keys, and told their retention and thousands of
    reservations, over its real socket: the attachment stays, and everything arrives."""
    left, kept, reserved = [], {}, set()
    server = ControlServer(
        tmp_path / "c", Welcome(CONTROL_VERSION, "s", "l", ["m"]), lambda: None, lambda: left.append(1), lambda _: None
    )
    server.on_retention = kept.update
    server.on_spend = lambda message: reserved.update(*message.costs.values())
    link = SupervisorLink(tmp_path / "c")
    keys = NamespaceKeys(link.tell, lambda _: None)
    spend = SpendRecords(link.tell, lambda _: None)
    keys._keys, keys._retained = dict.fromkeys(TENANTS, b"old"), dict.fromkeys(TENANTS, 1)
    waiting = [asyncio.create_task(spend.reserve(f"req_{number}", "t", 1)) for number in range(MAX_WAITING)]
    await asyncio.sleep(0)
    server.open()

    def take(message: Control, _fds: tuple[int, ...]) -> None:
        if isinstance(message, Welcome):
            keys.attached(message)
            spend.attached(message)
        elif isinstance(message, Namespaces):
            keys.take(message)

    task = asyncio.create_task(link.run(take, lambda: left.append(2)))
    async with asyncio.timeout(30):
        while len(kept) < len(TENANTS) or b"old" in keys._keys.values() or len(reserved) < MAX_WAITING:
            await asyncio.sleep(0.01)
    assert left == []
    for one in (*waiting, task):
        one.cancel()
    await asyncio.gather(*waiting, task, return_exceptions=True)
    server.close()
