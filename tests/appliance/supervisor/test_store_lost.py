"""What hosts make of a store that is away, was begun anew, or is slow: what was not written does not count as written,
and is written later."""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.common.carrier_wire import ObjectStatus
from appliance.common.kv_store_state import KvStoreState
from appliance.supervisor import fleet_seek, kv_carrier, kv_queue
from appliance.supervisor.fleet_kv import FleetKv
from appliance.supervisor.fleet_seek import FleetSeeker
from appliance.supervisor.kv_carrier import KvCarrier
from appliance.supervisor.spill_tiers import SpillFigures, SpillLimits
from isolation.ipc.spill import Fetch, Fetched, Miss
from tests.appliance.carrier.carrying import carrier
from tests.appliance.supervisor.test_fleet_kv import BLOCKS, LIFE, SIZE, TAGS, Fleet, data, fleet
from tests.appliance.supervisor.test_kv_export import wait_until as wait_for
from tests.stores import store

__all__ = ["fleet"]


class Heard:
    """What a seeker gives."""

    def __init__(self, kv: FleetKv) -> None:
        self.rung, self.found = threading.Event(), list[Fetched]()
        self.seeker = FleetSeeker(kv, LIFE, self.rung.set, "engine")
        self.seeker.start()

    def last(self, fetch: Fetch) -> Fetched:
        """The last answer to a fetch."""
        assert self.seeker.ask(fetch, 0)
        until = time.monotonic() + 30
        while not (self.found and self.found[-1].request == fetch.request and not self.found[-1].content):
            assert self.rung.wait(until - time.monotonic())
            self.rung.clear()
            self.found += self.seeker.take()
        return self.found[-1]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's questions are not late; what waits for seconds does not here."""
    monkeypatch.setattr(fleet_seek, "LINE_S", 60.0)
    for name, value in (("PATIENCE_S", 10.0), ("PROBE_S", 0.05), ("RETRY_S", 0.05)):
        monkeypatch.setattr(kv_carrier, name, value)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name:
        yield Path(name)


def way_to(folder: Path) -> KvCarrier:
    """A way for blocks in common to the carrier of a folder."""
    return KvCarrier(folder / "c", 600, names_recur=True)


def untold(way: KvCarrier) -> list[bytes]:
    """Names to drop that nobody has taken."""
    return list(way._queue.untold)


def command(folder: Path, *words: str) -> None:
    """Have the store of a folder do something."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(folder / "store.sock"))
        peer.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(one), one.encode()) for one in words))
        assert peer.recv(64) == b"+OK\r\n"


def shared(fleet: Fleet, way: KvCarrier) -> tuple[FleetKv, SpillFigures]:
    """Blocks in common over a real way to a store, with the keys of the first host."""
    host, figures = fleet.hosts[0], SpillFigures()
    limits = SpillLimits(0, store=1 << 20, store_seconds=600)
    kv = FleetKv(host.keys, way, TAGS[0], frozenset(TAGS), limits, figures)
    return kv, figures


def test_a_store_that_was_killed_and_begun_anew_is_noticed(fleet: Fleet, folder: Path, patient: None) -> None:
    """A real store with blocks is killed: what misses them meanwhile knows nothing, and the books stay as they are. One
    that is started in its place has nothing: within a few looks the host says so, counts nothing as written, and
    writes again. Control: a store that only stands still for a while has lost nothing, and of a prompt that nobody
    wrote the miss is one."""
    space, told = fleet.hosts[0].space(), list[bool]()
    absent = tuple(bytes([90 + number]) * 16 for number in range(2))
    with carrier(folder / "c", f"unix:{folder / 'store.sock'}"):
        way = way_to(folder)
        kv, figures = shared(fleet, way)
        heard = Heard(kv)

        def lost(everything: bool) -> None:
            if everything:
                told.append(everything)
                kv.lose()

        def write() -> None:
            for number in range(3):
                assert kv.keep(space, BLOCKS[number], LIFE, data(number)) == "alpha"

        way.on_look = lost
        with store(folder) as running:
            wait_for(lambda: bool(way._mark))
            told.clear()
            write()
            wait_for(lambda: figures.fleet_stored == 3)
            assert len(kv.find(space, BLOCKS, LIFE, SIZE).contents) == 3
            assert heard.last(Fetch(1, space, absent, SIZE, coming=True)).miss is Miss.LACKED
            running.process.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            running.process.send_signal(signal.SIGCONT)
            time.sleep(0.5)
            assert told == [] and kv.count("alpha") == 3
            running.process.kill()
            running.process.wait()
            assert heard.last(Fetch(2, space, BLOCKS, SIZE, coming=True)).miss is Miss.UNKNOWN
            assert (kv.count("alpha"), figures.fleet_stored) == (3, 3)
        (folder / "store.sock").unlink(missing_ok=True)
        with store(folder):
            wait_for(lambda: told == [True])
            assert kv.count("alpha") == 0
            assert heard.last(Fetch(3, space, BLOCKS, SIZE, coming=True)).miss is Miss.LACKED
            write()
            wait_for(lambda: len(kv.find(space, BLOCKS, LIFE, SIZE).contents) == 3)
            assert kv.count("alpha") == 3
        heard.seeker.close()
        way.close()


def test_what_was_offered_while_the_store_was_away_is_sent_again(fleet: Fleet, folder: Path, patient: None) -> None:
    """Blocks that were offered to no store are not in the books, and once one serves engines are told, once, to send
    those of their namespace again. Control: where all was written nothing is told, and of other namespaces neither."""
    host, told = fleet.hosts[0], list[set[bytes]]()
    space, other = host.space(), host.space("beta")
    with carrier(folder / "c", f"unix:{folder / 'store.sock'}"):
        way = way_to(folder)
        kv, figures = shared(fleet, way)

        def look(_lost: bool) -> None:
            if unwritten := kv.take_unwritten():
                told.append(unwritten)

        way.on_look = look
        kv.keep(space, BLOCKS[0], LIFE, data(0))
        wait_for(lambda: figures.store_away > 0)
        assert kv.count("alpha") == 0 and told == []
        with store(folder):
            wait_for(lambda: told == [{space}])
            for one in (space, other):
                kv.keep(one, BLOCKS[0], LIFE, data(0))
            wait_for(lambda: figures.fleet_stored == 2)
            time.sleep(0.3)
            assert told == [{space}]
        way.close()


def test_a_late_answer_keeps_nothing_from_being_written(
    fleet: Fleet, folder: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that answers one question late is asked nothing for a while, and takes what is written meanwhile: no
    engine sends anything again. Control: to a carrier that has gone nothing is offered, and that is told."""
    space = fleet.hosts[0].space()
    monkeypatch.setattr(kv_carrier, "RETRY_S", 60.0)
    with store(folder) as running:
        with carrier(folder / "c", running.address):
            way = way_to(folder)
            kv, figures = shared(fleet, way)
            kv.keep(space, BLOCKS[0], LIFE, data(0))
            wait_for(lambda: figures.fleet_stored == 1)
            monkeypatch.setattr(kv_carrier, "PATIENCE_S", 0.2)
            running.process.send_signal(signal.SIGSTOP)
            assert not kv.find(space, BLOCKS[:1], LIFE, SIZE).contents
            assert way.state is KvStoreState.STORE_AWAY
            kv.keep(space, BLOCKS[1], LIFE, data(1))
            running.process.send_signal(signal.SIGCONT)
            wait_for(lambda: figures.fleet_stored == 2)
            assert kv.take_unwritten() == set()
        wait_for(lambda: way.state is KvStoreState.CARRIER_AWAY)
        kv.keep(space, BLOCKS[2], LIFE, data(2))
        assert kv.take_unwritten() == {space} and kv.take_unwritten() == set()
        way.close()


def test_a_tenant_leaves_room_to_others_among_what_waits_to_be_written(
    fleet: Fleet, folder: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant sends more than may wait for the store: it has half of the room, engines are told to send the rest of
    its blocks again, and the block of another tenant that comes behind it is written. Control: the other's block beyond
    its own part is told of it."""
    host = fleet.hosts[0]
    greedy, other = host.space(), host.space("beta")
    monkeypatch.setattr(kv_queue, "MAX_PUTS", 4)
    with store(folder) as running, carrier(folder / "c", running.address):
        way = way_to(folder)
        kv, figures = shared(fleet, way)
        running.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: bool(kv.keep(other, BLOCKS[0], LIFE, data(0))) and not way._queue)
        for number in range(4):
            kv.keep(greedy, BLOCKS[number], LIFE, data(number))
        assert (kv.take_unwritten(), kv.count("alpha")) == ({greedy}, 2)
        kv.keep(other, BLOCKS[1], LIFE, data(1))
        assert (kv.take_unwritten(), kv.count("beta")) == (set(), 2)
        kv.keep(other, BLOCKS[2], LIFE, data(2))
        assert kv.take_unwritten() == {other}
        running.process.send_signal(signal.SIGCONT)
        wait_for(lambda: figures.fleet_stored == 4)
        way.close()


@pytest.mark.parametrize("most", [11 * (64 << 10), 11 * (64 << 10) - 1])
def test_a_fetch_that_nobody_waits_for_ends_between_two_blocks(
    fleet: Fleet, folder: Path, patient: None, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Of a question for 16 blocks nothing is given once nobody wants it. A rest that is small is read, and the next
    question goes over the same connection; one byte more and the connection is closed. The next question is answered as
    any other, and of the store nothing is learnt: it counts as away where it did. Control: wanted, all come."""
    monkeypatch.setattr(kv_carrier, "REST_BYTES", most)
    monkeypatch.setattr(kv_carrier, "REST_S", 10.0)
    monkeypatch.setattr(kv_carrier, "PROBE_S", 60.0)
    names = [bytes([number]) * 32 for number in range(16)]
    with store(folder) as running, carrier(folder / "c", running.address):
        way, done = way_to(folder), list[ObjectStatus]()
        for name in names:
            assert way.offer(name, memoryview(bytes(64 << 10)), done.append, owner="t")
        wait_for(lambda: done == [ObjectStatus.OK] * 16)
        asked = list[None]()

        def wanted() -> bool:
            asked.append(None)
            return len(asked) <= 5

        found = way.get(names, [64 << 10] * 16, wanted)
        assert len(asked) == 6 and {status for status, _ in found} == {ObjectStatus.AWAY}
        left = way._peer
        assert not any(body for _, body in found) and (left is not None) is (most == 11 * (64 << 10))
        way._state = KvStoreState.STORE_AWAY
        way.get(names[:1], [64 << 10], lambda: False)
        assert way.state is KvStoreState.STORE_AWAY
        for _ in range(2):
            assert [status for status, _ in way.get(names, [64 << 10] * 16)] == [ObjectStatus.OK] * 16
            assert way.state is KvStoreState.SERVES
        assert left is None or way._peer is left
        way.close()


def test_a_seeker_drops_what_nobody_waits_for(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that is left while it waits in line, while it is asked for, and while its answer waits to be sent, gives
    nothing more; others are answered. An unknown number changes nothing (control)."""
    monkeypatch.setattr(fleet_seek, "LINE_S", 60.0)
    one = fleet.hosts[0]
    for number in range(4):
        one.kv.keep(one.space(), BLOCKS[number], LIFE, data(number))
    under_way, goes_on, plain = threading.Event(), threading.Event(), one.kv.find

    def find(*asked, **more):  # type: ignore[no-untyped-def]  # as FleetKv.find
        under_way.set()
        assert goes_on.wait(30)
        return plain(*asked, **more)

    monkeypatch.setattr(one.kv, "find", find)
    rung = threading.Event()
    seeker = FleetSeeker(one.kv, LIFE, rung.set, "engine")
    for number in (1, 2, 3):
        assert seeker.ask(Fetch(number, one.space(), BLOCKS, SIZE), 0)
    seeker.start()
    try:
        assert under_way.wait(30)
        for number in (1, 2, 99):
            seeker.end(number)
        goes_on.set()
        assert rung.wait(30)
        seeker.end(98)
        found = seeker.take()
        assert [(answer.request, answer.index) for answer in found] == [(3, place) for place in range(4)]
        assert seeker.ask(Fetch(4, one.space(), BLOCKS, SIZE), 0)
        wait_for(lambda: bool(seeker._found))
        seeker.end(4)
        assert seeker.take() == []
    finally:
        seeker.close()
    assert one.figures.fleet_absent == 0


def test_what_is_written_anew_is_not_dropped_by_an_earlier_word(
    fleet: Fleet, folder: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block is dropped while the store is away, and written again when it is back: the word that nobody took then is
    not told behind it, and all hosts find the block. Control: another block that was dropped with it, and not written
    again, is told and gone from a store that still had it."""
    monkeypatch.setattr(kv_carrier, "PROBE_S", 60.0)
    space = fleet.hosts[0].space()
    with carrier(folder / "c", f"unix:{folder / 'store.sock'}"), store(folder) as running:
        way = way_to(folder)
        kv, figures = shared(fleet, way)
        for number in range(3):
            kv.keep(space, BLOCKS[number], LIFE, data(number))
        wait_for(lambda: figures.fleet_stored == 3)
        running.process.send_signal(signal.SIGSTOP)
        assert kv.drop("alpha") == 3
        wait_for(lambda: len(untold(way)) == 3)
        running.process.send_signal(signal.SIGCONT)
        wait_for(lambda: bool(kv.keep(space, BLOCKS[0], LIFE, data(0))) and figures.fleet_stored == 4)
        wait_for(lambda: not untold(way) and len(kv.find(space, BLOCKS[1:2], LIFE, SIZE).contents) == 0)
        assert kv.find(space, BLOCKS, LIFE, SIZE).contents == [data(0)]
        way.close()


def test_a_block_that_waits_is_withdrawn_from_the_store_too(fleet: Fleet, folder: Path, patient: None) -> None:
    """An engine calls a block wrong while its own copy waits to be written and the store has one that came before: that
    one goes too, or all hosts would find what is wrong. Control: a block beside it stays."""
    space = fleet.hosts[0].space()
    with store(folder) as running, carrier(folder / "c", running.address):
        way = way_to(folder)
        kv, figures = shared(fleet, way)
        for number in range(2):
            kv.keep(space, BLOCKS[number], LIFE, data(number))
        wait_for(lambda: figures.fleet_stored == 2)
        kv.absent(space, BLOCKS[:1], LIFE, lacks=True)  # As where another host has written it.
        running.process.send_signal(signal.SIGSTOP)
        kv.keep(space, BLOCKS[2], LIFE, data(2))
        wait_for(lambda: not way._queue)
        kv.keep(space, BLOCKS[0], LIFE, data(0))
        kv.withdraw(space, BLOCKS[0], LIFE)
        running.process.send_signal(signal.SIGCONT)
        wait_for(lambda: figures.fleet_stored == 3)
        wait_for(lambda: kv.find(space, BLOCKS[:1], LIFE, SIZE).contents == [])
        assert kv.find(space, BLOCKS[1:3], LIFE, SIZE).contents == [data(1), data(2)]
        way.close()


def test_a_size_that_no_block_has_takes_the_store_from_nobody(
    fleet: Fleet, folder: Path, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine asks for a block of another size than it has, again and again, which it alone decides: others' blocks
    are found at once, and the store counts as serving. Control: what it asks for does not come."""
    space = fleet.hosts[0].space()
    with store(folder) as running, carrier(folder / "c", running.address):
        way = way_to(folder)
        kv, figures = shared(fleet, way)
        for number in range(3):
            kv.keep(space, BLOCKS[number], LIFE, data(number))
        wait_for(lambda: figures.fleet_stored == 3)
        for _ in range(20):
            assert kv.find(space, BLOCKS[1:], LIFE, SIZE - 1).contents == []
            assert kv.find(space, BLOCKS[:1], LIFE, SIZE).contents == [data(0)]
            assert way.state is KvStoreState.SERVES
        way.close()


def test_what_a_store_refuses_is_sent_again_once_it_does_not(fleet: Fleet, folder: Path, patient: None) -> None:
    """A store that has no memory refuses a block: its namespace is told, and not before the store has refused nothing
    for a while. Control: of another namespace, whose block came, nothing is told."""
    host = fleet.hosts[0]
    space, other = host.space(), host.space("beta")
    with store(folder, "--maxmemory-policy", "noeviction") as running, carrier(folder / "c", running.address):
        way = way_to(folder)
        kv, figures = shared(fleet, way)
        kv.keep(other, BLOCKS[0], LIFE, data(0))
        wait_for(lambda: figures.fleet_stored == 1)
        command(folder, "CONFIG", "SET", "maxmemory", "1")
        kv.keep(space, BLOCKS[0], LIFE, data(0))
        wait_for(lambda: figures.store_lost == 1)
        assert way.refuses and kv.take_unwritten(refused=not way.refuses) == set()
        command(folder, "CONFIG", "SET", "maxmemory", "0")
        assert kv.take_unwritten() == {space}
        way.close()


def test_fetches_of_tenants_have_turns(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant has three fetches of four blocks, each of which takes a question; another's comes behind them and is
    asked for in turns with the first, so that its blocks do not wait for those of all three. All of all come, each
    fetch in the order of its blocks (control)."""
    monkeypatch.setattr(fleet_seek, "LINE_S", 60.0)
    one, asked, found = fleet.hosts[0], list[bytes](), list[Fetched]()
    greedy, other, plain = one.space(), one.space("beta"), one.kv.find
    for space in (greedy, other):
        for number in range(4):
            one.kv.keep(space, BLOCKS[number], LIFE, data(number))

    def find(namespace, blocks, *more):  # type: ignore[no-untyped-def]  # as FleetKv.find
        asked.append(namespace)
        return plain(namespace, blocks[:1], *more)

    monkeypatch.setattr(one.kv, "find", find)
    rung = threading.Event()
    seeker = FleetSeeker(one.kv, LIFE, rung.set, "engine")
    for number, space in enumerate((greedy, greedy, greedy, other)):
        assert seeker.ask(Fetch(number + 1, space, BLOCKS, SIZE), 0)
    seeker.start()
    try:
        while len(found) < 16:
            assert rung.wait(30)
            rung.clear()
            found += seeker.take()
    finally:
        seeker.close()
    assert asked == [greedy, other] * 4 + [greedy] * 8
    for number in range(1, 5):
        assert [(two.index, two.content) for two in found if two.request == number] == [
            (place, data(place)) for place in range(4)
        ]
