"""A gateway that ends: what it had served is charged once, when its process is gone and not before."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from appliance.common import control
from appliance.common.audit.entry import Entry, to_wire
from appliance.common.audit.log import open_log
from appliance.common.control import Control
from appliance.common.control_charges import ChargesUp, KeepCharges
from appliance.common.usage.open_charges import GATEWAY_LOST, OUTPUT, OpenCharge, OpenCharges, lost_requests
from appliance.supervisor import open_charges as keeper_module
from appliance.supervisor.audit import Recorder
from appliance.supervisor.control_server import ControlServer
from appliance.supervisor.open_charges import MAX_MEMORIES, ChargeKeeper
from policy.model import Price
from tests.appliance.common.audit.entries import filled

PRICE = Price(input=1, cached_input=1, output=1)


class House:
    """A keeper, and gateways that it hands memory to."""

    def __init__(self) -> None:
        self.recorded: list[Entry] = []
        self.handed: list[tuple[int, int]] = []
        self.takes = True
        self.keeper = ChargeKeeper(self.publish, self.recorded.append)

    def publish(self, message: Control, fds: tuple[int, ...]) -> bool:
        """Take the memory as a gateway's socket would."""
        assert isinstance(message, ChargesUp)
        if self.takes:
            self.handed.append((os.dup(fds[0]), os.dup(fds[1])))
        return self.takes

    def hand(self, charges: OpenCharges) -> None:
        """Give a gateway its memory."""
        self.keeper.open(KeepCharges())
        charges.use(*self.handed.pop())

    async def outcomes(self, count: int) -> list[tuple[object, object]]:
        """Requests and outcomes recorded, once they are so many."""
        async with asyncio.timeout(10):
            while len(self.recorded) < count:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        return [(one.fields["request"], one.fields["outcome"]) for one in self.recorded]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """A keeper, closed at the end."""
    made = House()
    yield made
    made.keeper.close()


def opened(charges: OpenCharges, name: str) -> None:
    """A request that streams."""
    charge = charges.open(
        filled("request", request=name, outcome=GATEWAY_LOST), Price(input=1, cached_input=1, output=1), None
    )
    charge.show(3, 0)
    charge.words[OUTPUT] = 2


def kill(charges: OpenCharges) -> None:
    """Close what the kernel closes of a process that ends."""
    os.close(charges._alive)
    charges._alive = -1


async def test_an_ended_gateway_is_charged_once(house: House) -> None:
    """After the end of its process and of its socket, in either order; an entry that had come is not made again."""
    for first in ("socket", "process"):
        house.recorded.clear()
        charges = OpenCharges()
        house.hand(charges)
        opened(charges, f"cut {first}")
        opened(charges, f"told {first}")
        house.keeper.note(filled("request", request=f"told {first}"))
        if first == "socket":
            house.keeper.gateway_left()
            await asyncio.sleep(0.05)
            assert house.recorded == [], "its process may live"
            kill(charges)
        else:
            kill(charges)
            await asyncio.sleep(0.05)
            assert house.recorded == [], "what it sent may not have been read"
            house.keeper.gateway_left()
        assert await house.outcomes(1) == [(f"cut {first}", GATEWAY_LOST)]
        house.keeper.gateway_left()
        assert len(house.recorded) == 1


async def test_a_gateway_that_was_detached_and_comes_again_is_not_charged(house: House) -> None:
    """It lives, moves what runs into new memory, and that is charged at its end, once. Memory that no gateway takes
    is forgotten, and of many only some are kept."""
    charges = OpenCharges()
    house.hand(charges)
    opened(charges, "runs")
    house.keeper.gateway_left()
    house.hand(charges)
    await asyncio.sleep(0.05)
    assert house.recorded == []
    house.keeper.gateway_left()
    kill(charges)
    assert await house.outcomes(1) == [("runs", GATEWAY_LOST)]
    house.takes, before = False, len(os.listdir("/proc/self/fd"))
    house.keeper.open(KeepCharges())
    await asyncio.sleep(0.05)
    assert len(os.listdir("/proc/self/fd")) == before
    house.takes = True
    for _ in range(2 * MAX_MEMORIES):
        house.keeper.open(KeepCharges())
    assert len(house.keeper._memories) == MAX_MEMORIES
    for pair in house.handed:
        for fd in pair:
            os.close(fd)


async def test_memory_that_never_arrives_pushes_none_out(house: House) -> None:
    """A gateway that can open no more asks for memory again and again; what runs stays in the memory that it has, and
    is charged at its end. No descriptor is left of what did not arrive."""
    charges = OpenCharges()
    house.hand(charges)
    opened(charges, "runs")
    house.keeper.gateway_left()  # and it has come again
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2 * MAX_MEMORIES):
        house.keeper.open(KeepCharges())
        for fd in house.handed.pop():
            os.close(fd)
        await asyncio.sleep(0.02)
    assert len(house.keeper._memories) == MAX_MEMORIES
    kill(charges)
    house.keeper.gateway_left()
    assert await house.outcomes(1) == [("runs", GATEWAY_LOST)]
    assert len(os.listdir("/proc/self/fd")) < before


async def test_hostile_memory_does_not_hold_the_loop(house: House) -> None:
    """A thousand slots full of text that takes longest to read: the loop has its turn after each 20 ms of processor
    time, and a gateway that ends meanwhile is charged all the same. Control: read at once they hold it longer."""
    charges, honest = OpenCharges(), OpenCharges()
    house.hand(charges)
    one = filled("request", request="r", outcome=GATEWAY_LOST, model="\N{SNOWMAN}" * 128, tenant="t" * 128)
    for number in range(1_000):
        charges.open(Entry(one.kind, one.fields | {"request": f"r{number}"}), PRICE, None)
    began = time.process_time()
    assert sum(found is not None for found in lost_requests(house.keeper._memories[0].memfd)) == 1_000
    alone_s = time.process_time() - began
    house.hand(honest)
    opened(honest, "honest")
    kill(charges)
    kill(honest)
    house.keeper.gateway_left()
    longest, then = 0.0, time.process_time()
    while len(house.recorded) <= 1_000:
        await asyncio.sleep(0)
        now = time.process_time()
        longest, then = max(longest, now - then), now
    assert longest < 0.02 < alone_s
    assert house.recorded[-1].fields["request"] == "honest"
    assert not house.keeper._settling


async def test_what_is_left_is_charged_before_the_supervisor_ends(house: House) -> None:
    """The gateway ends just before: closing charges what the steps have not reached yet, once."""
    charges = OpenCharges()
    house.hand(charges)
    for number in range(100):
        opened(charges, f"r{number}")
    kill(charges)
    house.keeper.gateway_left()
    async with asyncio.timeout(10):
        while not house.keeper._settling:
            await asyncio.sleep(0)
    house.keeper.close()
    await asyncio.sleep(0.01)
    assert sorted(str(one.fields["request"]) for one in house.recorded) == sorted(f"r{number}" for number in range(100))


async def test_an_end_that_the_loop_has_not_noticed_is_charged_at_the_close(house: House) -> None:
    """The gateway's process ends and its socket closes in the turn of the loop in which the supervisor stops: what it
    left is charged. Control: one that has left and lives is not, since it tells the next supervisor."""
    ended, lives = OpenCharges(), OpenCharges()
    for name, charges in (("ended", ended), ("lives", lives)):
        house.hand(charges)
        opened(charges, name)
    kill(ended)
    house.keeper.gateway_left()
    house.keeper.close()
    assert [one.fields["request"] for one in house.recorded] == ["ended"]
    assert not house.keeper._memories and not house.keeper._settling
    kill(lives)


async def test_a_gateway_s_end_needs_no_further_descriptor(house: House) -> None:
    """A supervisor that can open nothing more charges what the gateway left; control: it can open nothing."""
    charges = OpenCharges()
    house.hand(charges)
    opened(charges, "cut")
    kill(charges)
    await asyncio.sleep(0.05)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        house.keeper.gateway_left()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert await house.outcomes(1) == [("cut", GATEWAY_LOST)]


async def test_memory_that_cannot_be_had_or_read_is_told(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory the gateway gets none and hears so, and the next question is answered (control). What cannot be
    read is logged, and what comes after it is charged."""

    def refused() -> int:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    told: list[tuple[int, ...]] = []
    monkeypatch.setattr(house.keeper, "_publish", lambda _message, fds: told.append(fds) or True)
    monkeypatch.setattr(keeper_module, "create_memory", refused)
    with capture_logs() as lines:
        house.keeper.open(KeepCharges())
    assert told == [()]
    assert [line["log_level"] for line in lines] == ["error"]
    monkeypatch.undo()
    broken, whole = OpenCharges(), OpenCharges()
    for charges in (broken, whole):
        house.hand(charges)
        opened(charges, f"of {'broken' if charges is broken else 'whole'}")

    def unreadable(memfd: int) -> Iterator[Entry | None]:
        if memfd_of.setdefault("first", memfd) == memfd:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield from lost_requests(memfd)

    memfd_of: dict[str, int] = {}
    monkeypatch.setattr(keeper_module, "lost_requests", unreadable)
    kill(broken)
    kill(whole)
    with capture_logs() as lines:
        house.keeper.gateway_left()
        assert await house.outcomes(1) == [("of whole", GATEWAY_LOST)]
    assert [line["problem"] for line in lines if line["log_level"] == "error"] == [os.strerror(errno.EIO)]


def gateway(path: Path, out: int) -> None:
    """A gateway that answers for ever: it attaches, keeps charges, writes an answer's id for each of its tokens, and
    sends entries now and then."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(str(path))
    control.send(sock, control.Attach(control.CONTROL_VERSION))
    control.send(sock, KeepCharges())
    charges = OpenCharges()
    while True:
        found = control.receive(sock)
        assert found is not None
        if isinstance(found[0], ChargesUp):
            charges.use(*found[1])
            break
    waiting, number = list[tuple[str, OpenCharge]](), 0
    while True:
        number += 1
        name = f"r{os.getpid()}-{number}"
        charge = charges.open(filled("request", request=name, outcome=GATEWAY_LOST), PRICE, None)
        charge.show(3, 0)
        for tokens in (1, 2):
            charge.words[OUTPUT] = tokens
            os.write(out, f"{name}\n".encode())
        charge.end("OK", 3, 0, 2)
        waiting.append((to_wire(filled("request", request=name, outcome="OK", output_tokens=2)), charge))
        if len(waiting) == 7:
            control.send(sock, control.Audited([text for text, _ in waiting], 0))
            for _, kept in waiting:
                kept.release()
            waiting.clear()


@pytest.mark.parametrize("kills", [10, pytest.param(300, marks=pytest.mark.full)])
async def test_a_killed_process_is_charged_once_for_what_left_it(kills: int, tmp_path: Path) -> None:
    """kill -9 at random instructions of a process at the real socket: each answer of which a byte had left is recorded
    once, with the tokens that had left, or one more. Control: some were recorded by the supervisor."""
    log = open_log(tmp_path / "audit")
    recorder, recorded, draw = Recorder(log, lambda _: None), list[Entry](), random.Random(kills)
    recorder.record = recorded.append  # type: ignore[method-assign]
    server = ControlServer(
        tmp_path / "s",
        control.Welcome(control.CONTROL_VERSION, "none", "none", []),
        on_attach=lambda: None,
        on_leave=lambda: keeper.gateway_left(),
        on_wish=lambda _wish: None,
        on_audited=recorder.take,
    )
    left = list[Entry]()

    def record(one: Entry) -> None:
        left.append(one)
        recorded.append(one)

    keeper = ChargeKeeper(server.publish, record)
    recorder.on_taken, server.on_charges = keeper.note, keeper.open
    server.open()
    path = tmp_path / "out"
    out = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for number in range(10 * kills):
        if number >= kills and left:  # few kills may all find nothing open, on a busy machine
            break
        child = os.fork()
        if not child:
            try:
                gateway(tmp_path / "s", out)
            finally:
                os._exit(1)
        async with asyncio.timeout(20):
            while f"r{child}-" not in path.read_text():
                await asyncio.sleep(0.002)
            await asyncio.sleep(draw.random() / 50)
            os.kill(child, signal.SIGKILL)
            await asyncio.to_thread(os.waitpid, child, 0)
            if number % 2:
                server.publish(control.Namespaces({}), ())  # fails, and must lose nothing that was sent
            while server._peer is not None or keeper._memories or keeper._settling:
                await asyncio.sleep(0.002)
    server.close()
    served = Counter(path.read_text().split())
    ids = Counter(str(one.fields["request"]) for one in recorded)
    assert max(ids.values()) == 1
    charged = {str(one.fields["request"]): int(one.fields["output_tokens"]) for one in recorded}
    for name, tokens in served.items():
        assert tokens <= charged[name] <= tokens + 1, name
    assert sum(charged[name] for name in charged.keys() - served.keys()) <= number + 1
    assert left
    os.close(out)
    log.close()
