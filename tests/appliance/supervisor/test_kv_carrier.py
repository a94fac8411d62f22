"""The supervisor's way to the carrier of sealed KV: what waits, what is told again, and what it says of the carrier."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from appliance.common.carrier_wire import (
    ANSWER,
    ENTRY,
    MAX_OBJECTS,
    REQUEST,
    ObjectStatus,
    Order,
    check_head,
    decode_request,
    read_exactly,
)
from appliance.common.errors import CarrierError
from appliance.common.kv_store_state import KvStoreState
from appliance.supervisor import kv_carrier, kv_queue, store_tier
from appliance.supervisor.kv_carrier import KvCarrier


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    until = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_is_dropped_before_it_is_written_never_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a carrier that does not answer yet, the queue has a bound on objects, and one that is dropped there is
    neither sent nor dropped outside; nor is one sent that its owner wants there no more. One that was on its way is
    dropped there (control)."""
    monkeypatch.setattr(kv_queue, "MAX_PUTS", 4)
    told: list[ObjectStatus] = []
    names = [bytes([number]) * 32 for number in range(6)]
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, socket.socket(socket.AF_UNIX) as listening:
        path = Path(name) / "c"
        listening.bind(str(path))
        listening.listen()
        way = KvCarrier(path, 60)
        assert way.offer(names[0], memoryview(b"zero"), told.append, owner="zero")
        peer = listening.accept()[0]
        with peer:
            assert _orders(peer) == (Order.PUT, (names[0],))
            taken = [
                way.offer(one, memoryview(b"more"), told.append, partial(names[4].__ne__, one), owner=str(one))
                for one in names[1:]
            ]
            assert taken == [True, True, True, True, False]
            for one in (names[2], names[0]):
                way.drop(one)
            peer.sendall(bytes([ObjectStatus.OK]))
            assert _orders(peer) == (Order.PUT, (names[1], names[3]))
            peer.sendall(bytes([ObjectStatus.OK] * 2))
            assert _orders(peer) == (Order.DROP, (names[0],))
            peer.sendall(bytes([ObjectStatus.OK]))
            assert told == [ObjectStatus.OK] * 3
            way.close()


@pytest.mark.parametrize("first", [ObjectStatus.AWAY, ObjectStatus.REFUSED], ids=["away", "refused"])
def test_all_that_a_policy_withdraws_is_told_to_the_store(monkeypatch: pytest.MonkeyPatch, first: ObjectStatus) -> None:
    """The queue takes the names of all objects that the books of the store can have; those beyond its bound are not
    kept. While no carrier is there, and while the store behind it is away or refuses, as one does that reads its memory
    back, all names are kept and told again; once both serve each is taken once. Names that were made up to probe the
    store are not among those kept."""
    assert kv_queue.MAX_DROPS >= store_tier.MAX_STORE_OBJECTS
    monkeypatch.setattr(kv_queue, "MAX_DROPS", 300)
    monkeypatch.setattr(kv_carrier, "PROBE_S", 0.02)
    names = [number.to_bytes(32, "little") for number in range(303)]
    answer, told = [first], list[tuple[ObjectStatus, bytes]]()

    def take_drops(listening: socket.socket) -> None:
        """Answer all requests of one connection alike."""
        with listening.accept()[0] as peer, contextlib.suppress(CarrierError):
            while True:
                order, dropped = _orders(peer)
                assert order is Order.DROP
                told.extend((answer[0], one) for one in dropped)
                peer.sendall(bytes([told[-1][0]] * len(dropped)))

    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, socket.socket(socket.AF_UNIX) as listening:
        way = KvCarrier(Path(name) / "c", 60)
        with way._changed:
            for one in names:
                way.drop(one)
        wait_until(lambda: len(way._queue.untold) == way._queue.num_drops == 300)
        listening.bind(str(Path(name) / "c"))
        listening.listen()
        carrier = threading.Thread(target=take_drops, args=(listening,))
        carrier.start()
        wait_until(lambda: len(told) > 3)
        assert len(way._queue.untold) == 300
        way.drop(names[301])
        answer[0] = ObjectStatus.OK
        wait_until(lambda: way._queue.num_drops == 0)
        way.close()
        carrier.join()
    taken = [one for status, one in told if status is ObjectStatus.OK and one in names]
    assert sorted(taken) == sorted(names[:300])
    assert not way._queue.untold


def test_names_that_are_never_taken_are_told_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes objects and no drops, by malice or because its user may not drop, is told as many names behind
    each request that it serves as one request has, and not all that it did not take."""
    monkeypatch.setattr(kv_carrier, "PROBE_S", 60.0)
    drops = list[int]()
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{name}/c")
        listening.listen()

        def says(order: Order) -> ObjectStatus:
            drops.append(order is Order.DROP)
            return ObjectStatus.AWAY if order is Order.DROP else ObjectStatus.OK

        threading.Thread(target=carry, args=(listening, says), daemon=True).start()
        way = KvCarrier(Path(name) / "c", 60)
        for number in range(1_000):
            way.drop(number.to_bytes(32, "little"))
        wait_until(lambda: len(way._queue.untold) == 1_000)
        drops.clear()
        for number in range(10):
            written = threading.Event()
            assert way.offer(
                bytes([number]) * 31 + b"x", memoryview(b"body"), lambda _status, done=written: done.set(), owner="t"
            )
            assert written.wait(10)
        wait_until(lambda: len(way._queue.untold) == way._queue.num_drops == 1_000)
        way.close()
    assert (drops.count(False), drops.count(True)) == (10, 10)


def _orders(peer: socket.socket) -> tuple[Order, tuple[bytes, ...]]:
    """Read one request as a carrier does."""
    until = time.monotonic() + 5
    head = bytes(read_exactly(peer, REQUEST.size, until))
    request = decode_request(head, bytes(read_exactly(peer, check_head(head)[1] * ENTRY.size, until)))
    if request.order is Order.PUT:
        read_exactly(peer, sum(request.sizes), until)
    return request.order, request.names


def test_a_question_that_waited_for_another_says_nothing_of_the_carrier(tmp_path: Path) -> None:
    """While one engine's question is under way, another's is answered in time as away; the carrier still counts as
    there. Control: one that does not listen counts as away after a question."""
    way = KvCarrier(tmp_path / "nobody", 60)
    with way._asking:
        assert way.get([bytes(32)], [8]) == [(ObjectStatus.AWAY, b"")]
    assert way.offer(bytes(32), memoryview(b"body"), lambda _status: None, owner="t")
    wait_until(lambda: not way.offer(bytes(32), memoryview(b"body"), lambda _status: None, owner="t"))
    way.close()


def carry(listening: socket.socket, says: Callable[[Order], ObjectStatus | None]) -> None:
    """Answer as a carrier does what ``says`` gives for the kind of a request; None: never."""

    def serve(peer: socket.socket) -> None:
        with peer, contextlib.suppress(CarrierError, OSError):
            while True:
                order, names = _orders(peer)
                status = says(order)
                if status is None:
                    continue
                head = ANSWER.pack(status, 0) if order is Order.GET else bytes([status])
                peer.sendall(head * len(names))

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()


def test_what_is_late_is_told_in_one_word_as_long_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store hangs, questions end before the carrier gives up: the state is the store's all the time, or an
    alert that waits for five minutes would never come. Where the carrier hangs, it is the carrier's once the writing
    thread has seen it. Control: where both answer, it serves."""
    for name, value in (("PATIENCE_S", 0.05), ("RETRY_S", 0.0), ("PROBE_S", 0.02), ("WRITE_S", 0.8), ("LATE_S", 1.0)):
        monkeypatch.setattr(kv_carrier, name, value)
    answers: dict[Order, ObjectStatus] = {Order.DROP: ObjectStatus.AWAY}
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{name}/c")
        listening.listen()
        threading.Thread(target=carry, args=(listening, answers.get), daemon=True).start()
        way = KvCarrier(Path(name) / "c", 60)

        def states() -> set[KvStoreState]:
            """The states that are seen while questions come."""
            found = set()
            for _ in range(8):
                assert way.get([bytes(32)], [8])[0][0] in (ObjectStatus.AWAY, ObjectStatus.ABSENT)
                found |= {way.state, (time.sleep(0.01), way.state)[1]}
            return found

        assert states() == {KvStoreState.STORE_AWAY}
        answers.clear()
        wait_until(lambda: way.state is KvStoreState.CARRIER_AWAY)
        assert states() == {KvStoreState.CARRIER_AWAY}
        monkeypatch.setattr(kv_carrier, "PATIENCE_S", 5.0)
        answers |= {Order.DROP: ObjectStatus.OK, Order.GET: ObjectStatus.ABSENT}
        wait_until(lambda: way.state is KvStoreState.SERVES)
        assert states() == {KvStoreState.SERVES}
        way.close()


def test_what_was_lost_is_dropped_behind_what_is_written() -> None:
    """Ten thousand names are dropped later, and then an object is written: it is the next request, and behind each that
    is served some names are told, until all are. Control: what is dropped at once is told before."""
    orders = list[Order]()

    def says(order: Order) -> ObjectStatus:
        orders.append(order)
        return ObjectStatus.OK

    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{name}/c")
        listening.listen()
        threading.Thread(target=carry, args=(listening, says), daemon=True).start()
        way = KvCarrier(Path(name) / "c", 60)
        for later, before in ((False, True), (True, False)):
            orders.clear()
            with way._changed:
                for number in range(10_000):
                    way.drop(number.to_bytes(32, "little"), later=later)
                assert way.offer(bytes(31) + b"x", memoryview(b"body"), lambda _status: None, owner="t")
            wait_until(lambda: Order.PUT in orders and way._queue.num_drops == 0)
            assert (orders.index(Order.PUT) > 100) is before
            assert orders.count(Order.DROP) >= 10_000 // MAX_OBJECTS
        way.close()


def test_a_slow_store_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of whose blocks some come in time, and the rest late, serves: they are given, and the next question is
    asked. Control: one of which nothing comes in time is not asked for a while."""
    monkeypatch.setattr(kv_carrier, "PATIENCE_S", 0.3)
    monkeypatch.setattr(kv_carrier, "RETRY_S", 60.0)
    asked, first = list[int](), [1]
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{name}/c")
        listening.listen()

        def serve(peer: socket.socket) -> None:
            """Answer the first objects of a question, and no more."""
            with peer, contextlib.suppress(CarrierError, OSError):
                while True:
                    asked.append(len(_orders(peer)[1]))
                    peer.sendall((ANSWER.pack(ObjectStatus.OK, 4) + b"body") * first[0])

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=take, daemon=True).start()
        way = KvCarrier(Path(name) / "c", 60)
        names = [bytes([number]) * 32 for number in range(3)]
        for _ in range(2):
            assert [status for status, _ in way.get(names, [4] * 3)] == [ObjectStatus.OK] + [ObjectStatus.AWAY] * 2
        assert (asked, way.state) == ([3, 3], KvStoreState.SERVES)
        first[0] = 0
        for _ in range(2):
            assert [status for status, _ in way.get(names, [4] * 3)] == [ObjectStatus.AWAY] * 3
        assert (asked, way.state) == ([3, 3, 3], KvStoreState.STORE_AWAY)
        way.close()
