"""The carrier's end of a store: a real one, one that lies, and one that is not there; and who speaks to the carrier."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from appliance.carrier import store as module
from appliance.carrier.service import MAX_CONNECTIONS, CarrierService, listen
from appliance.carrier.store import KEY_PREFIX, ObjectStore
from appliance.common.carrier_wire import (
    MAX_OBJECT_BYTES,
    MAX_OBJECTS,
    REQUEST,
    CarrierRequest,
    ObjectStatus,
    Order,
    decode_request,
)
from appliance.common.errors import CarrierError
from appliance.common.kv_store_config import KvStoreConfig
from appliance.operator.doctor.carrier import carrier_problem, check_carrier
from tests.appliance.carrier.carrying import carrier
from tests.stores import RunningStore, store

NAMES = tuple(bytes([number]) * 32 for number in range(4))
BODY = bytes(range(256)) * 400
RULES = f"on >of-the-store ~{KEY_PREFIX.decode()}* -@all +set +get +unlink"


def config(address: str, **more: object) -> KvStoreConfig:
    """Of a store."""
    return KvStoreConfig.model_validate({"store": address, "size": 1 << 20, **more})


@pytest.fixture(scope="module")
def running() -> Iterator[RunningStore]:
    """A real store with the user that docs/retention-and-spill.md names."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        (Path(folder) / "password").write_text("of-the-store\n")
        with store(Path(folder), "--user", "athanor", *RULES.split()) as found:
            print(found.version)
            yield found


def with_user(running: RunningStore) -> KvStoreConfig:
    """Of the store, as its user."""
    password = Path(running.address[5:]).parent / "password"
    return config(running.address, store_user="athanor", store_password=password)


def test_objects_are_kept_found_and_dropped(running: RunningStore) -> None:
    """Under a user that may do three commands alone: what was put is found, whatever bytes it is, and is gone after
    a drop or its time; of another length nothing is read, and the store is asked on at once. A wrong password is told
    in the store's words."""
    one = ObjectStore(with_user(running))
    assert one.put([(name, bytearray(BODY)) for name in NAMES[:3]], 3, 60) == [ObjectStatus.OK] * 3
    assert one.put([(NAMES[3], bytearray(b"short"))], 1, 1) == [ObjectStatus.OK]
    sizes = [len(BODY)] * 3 + [5]
    assert list(one.get(NAMES, sizes)) == [(ObjectStatus.OK, BODY)] * 3 + [(ObjectStatus.OK, b"short")]
    assert list(one.get(NAMES[:2], [len(BODY), 7])) == [(ObjectStatus.OK, BODY), (ObjectStatus.OTHER_LENGTH, b"")]
    assert one.drop(NAMES[:2]) == [ObjectStatus.OK] * 2
    time.sleep(1.2)
    found = [status for status, _ in one.get(NAMES, sizes)]
    assert found == [ObjectStatus.ABSENT, ObjectStatus.ABSENT, ObjectStatus.OK, ObjectStatus.ABSENT]
    stranger = ObjectStore(config(running.address, store_user="nobody", store_password=Path("/dev/null")))
    assert [status for status, _ in stranger.get(NAMES[:1], [5])] == [ObjectStatus.AWAY]
    assert "WRONGPASS" in stranger.problem


LIES = {
    "endless line": b"+" * 4_000,
    "no reply": b"\r\n" * 3,
    "another length": b"$99999999999\r\n",
    "negative length": b"$-7\r\n",
    "no end": b"$3\r\nxxxyyyy",
    "a number": b":1\r\n",
    "half a value": b"$3\r\nx",
    "silence": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_reply_ends_the_connection(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives no bytes within the time of an exchange, and a later question connects anew. Control: an honest reply
    is taken."""
    monkeypatch.setattr(module, "EXCHANGE_S", 0.2)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    replies = [LIES[lie], b"$3\r\nabc\r\n"]
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        listening = listen(Path(folder) / "s")

        def serve() -> None:
            for reply in replies:
                peer, _ = listening.accept()
                peer.sendall(reply)
                while peer.recv(1_024):
                    pass
                peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        asked = ObjectStore(config(f"unix:{folder}/s"))
        began = time.monotonic()
        ((status, body),) = asked.get(NAMES[:1], [3])
        assert status is not ObjectStatus.OK and not body and time.monotonic() - began < 1.0
        assert list(asked.get(NAMES[:1], [3])) == [(ObjectStatus.OK, b"abc")]
        asked.close()
        thread.join()
        listening.close()


def test_a_store_that_comes_back_is_found_by_who_asks_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who asks many times in the pause behind a failure is answered soon after the store is there again: questions that
    were not sent make the pause no longer. Control: before, all are away."""
    monkeypatch.setattr(module, "RETRY_S", 0.5)
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        asked = ObjectStore(config(f"unix:{folder}/store.sock"))
        assert [status for status, _ in asked.get(NAMES[:1], [3])] == [ObjectStatus.AWAY]
        with store(Path(folder)):
            until, found = time.monotonic() + 20, ObjectStatus.AWAY
            while found is ObjectStatus.AWAY and time.monotonic() < until:
                ((found, _),) = asked.get(NAMES[:1], [3])
                time.sleep(0.02)
            assert found is ObjectStatus.ABSENT
        asked.close()


def test_a_store_that_is_not_there_costs_nothing_but_the_answer() -> None:
    """Everything is away at once, also what has to be read from the supervisor first; after a failure no connection is
    tried for a second."""
    asked, taken = ObjectStore(config("unix:/nonexistent/s")), []

    def objects() -> Iterator[tuple[bytes, bytearray]]:
        for name in NAMES:
            taken.append(name)
            yield name, bytearray(BODY)

    began = time.monotonic()
    assert asked.put(objects(), len(NAMES), 60) == [ObjectStatus.AWAY] * 4
    assert [status for status, _ in asked.get(NAMES, [3] * 4)] == [ObjectStatus.AWAY] * 4
    assert asked.drop(NAMES) == [ObjectStatus.AWAY] * 4
    assert taken == list(NAMES) and time.monotonic() - began < 0.5 and asked.problem


def test_one_refusal_is_no_problem_for_ever(running: RunningStore) -> None:
    """What the store refused is told with that request, and no more with the next that it serves."""
    one = ObjectStore(with_user(running))
    assert one.put([(NAMES[0], bytearray(b"body"))], 1, 0) == [ObjectStatus.REFUSED] and one.problem
    assert one.put([(NAMES[0], bytearray(b"body"))], 1, 60) == [ObjectStatus.OK] and not one.problem
    one.close()


WRONG = {
    "version": REQUEST.pack(9, Order.GET, 1, 0),
    "order": REQUEST.pack(1, 9, 1, 0),
    "no objects": REQUEST.pack(1, Order.GET, 0, 0),
    "too many": REQUEST.pack(1, Order.GET, MAX_OBJECTS + 1, 0),
    "for ever": REQUEST.pack(1, Order.PUT, 1, 1 << 31),
    "no time": REQUEST.pack(1, Order.PUT, 1, 0),
    "too large": CarrierRequest(Order.PUT, NAMES[:1], (MAX_OBJECT_BYTES + 1,), 60).encode(),
    "no size": CarrierRequest(Order.GET, NAMES[:1], (0,)).encode(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_request_out_of_bounds_ends_its_connection(wrong: str) -> None:
    """Nothing is read or allocated for it. Control: a good one is answered beside it; and connections are bounded."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        path = Path(folder) / "s"
        service = CarrierService(config("unix:/nonexistent/s"), listen(path))
        thread = threading.Thread(target=service.run)
        thread.start()
        bad, good = (socket.socket(socket.AF_UNIX) for _ in range(2))
        with bad, good:
            for peer in (bad, good):
                peer.settimeout(5)
                peer.connect(str(path))
            bad.sendall(WRONG[wrong])
            assert bad.recv(1) == b""
            good.sendall(CarrierRequest(Order.GET, NAMES[:1], (3,)).encode())
            assert good.recv(5) == bytes([ObjectStatus.AWAY, 0, 0, 0, 0])
            more = [socket.socket(socket.AF_UNIX) for _ in range(MAX_CONNECTIONS)]
            for peer in more:
                peer.settimeout(5)
                peer.connect(str(path))
            assert more[-1].recv(1) == b""
            for peer in more:
                peer.close()
        service.stop()
        thread.join()


def test_a_question_that_is_left_is_no_line_of_the_log(running: RunningStore) -> None:
    """A connection that is closed before its answer was taken, as often as requests are left, is told nowhere, whatever
    of the answer was under way. Control: one that sends no request of this release is told."""
    name, size = b"n" * 32, 4 << 20
    kept = ObjectStore(config(running.address))
    assert kept.put([(name, bytearray(size))], 1, 60) == [ObjectStatus.OK]
    kept.close()
    ask = CarrierRequest(Order.GET, (name,) * 2, (size,) * 2).encode()
    with capture_logs() as told:
        for sent, lines in ((ask, 0), (ask, 0), (b"x" * 64, 1)):
            service = CarrierService(config(running.address), socket.socket())
            ours, theirs = socket.socketpair()
            with ours:
                ours.sendall(sent)
                serving = threading.Thread(target=service._serve, args=(theirs,))
                serving.start()
                if not lines:
                    assert ours.recv(1)
            serving.join(20)
            assert [one["log_level"] for one in told if one["log_level"] != "debug"] == ["warning"] * lines


def test_a_request_is_read_as_it_was_written() -> None:
    """All orders come back equal; a cut one is refused."""
    for request in (
        CarrierRequest(Order.PUT, NAMES, (1, 2, 3, 4), 60),
        CarrierRequest(Order.GET, NAMES, (1, 2, 3, 4)),
        CarrierRequest(Order.DROP, NAMES, (0,) * 4),
    ):
        data = request.encode()
        assert decode_request(data[: REQUEST.size], data[REQUEST.size :]) == request
        with pytest.raises(CarrierError):
            decode_request(data[: REQUEST.size], data[REQUEST.size : -1])


def test_doctor_asks_carrier_and_store(running: RunningStore, tmp_path: Path) -> None:
    """A finding says that nobody listens, that the store is away and that it refuses; a store that serves is found well
    (control), and where there is no carrier nothing is."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as folder:
        path = Path(folder) / "c"
        assert "cannot be asked" in str(carrier_problem(path))
        with carrier(path, "unix:/nonexistent/s"):
            away = carrier_problem(path)
        path.unlink()
        with carrier(path, running.address):
            well = carrier_problem(path)
    assert (away or "").startswith("the store does not answer the carrier") and well == ""
    said = [[(one.level, one.what) for one in check_carrier(found)] for found in (None, "", away)]
    assert [len(one) for one in said] == [0, 1, 1] and said[1] != said[2]
