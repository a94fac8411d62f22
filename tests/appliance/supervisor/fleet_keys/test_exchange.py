"""Hosts exchange keys by way of a store: one that does what it likes, and a real one behind a real carrier."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from appliance.carrier.service import CarrierService, listen
from appliance.common.carrier_wire import ObjectStatus
from appliance.common.errors import AccountNameError
from appliance.common.kv_store_config import KvStoreConfig
from appliance.supervisor.fleet_keys import exchange, leases
from appliance.supervisor.fleet_keys.exchange import KeyExchange, boot_clock
from appliance.supervisor.fleet_keys.leases import DRIFT_S, FLEET, FRESH_S, LEASE_S, RENEW_S
from appliance.supervisor.fleet_keys.membership import join
from appliance.supervisor.kv_carrier import KvCarrier
from tests.appliance.supervisor.fleet_keys.fleets import HOSTS, config, joined, sign
from tests.stores import store


class OwnedStore:
    """A store, and the way to it, that who owns it can read and change; ``away`` for hosts that it cuts off."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.history: list[tuple[bytes, bytes]] = []

    def get(
        self, names: Sequence[bytes], sizes: Sequence[int], _wanted: Callable[[], bool] = lambda: True
    ) -> list[tuple[ObjectStatus, bytes | bytearray]]:
        """What is under these names, where it has the length."""
        found = [self.values.get(name) for name in names]
        return [
            (ObjectStatus.ABSENT, b"") if one is None or len(one) != size else (ObjectStatus.OK, bytearray(one))
            for one, size in zip(found, sizes, strict=True)
        ]

    def offer(
        self,
        name: bytes,
        body: memoryview,
        done: Callable[[ObjectStatus], None],
        _wanted: Callable[[], bool],
        *,
        owner: str,
    ) -> bool:
        """Keep a value."""
        self.values[name] = bytes(body)
        self.history.append((name, bytes(body)))
        done(ObjectStatus.OK)
        return True

    def drop(self, name: bytes, *, later: bool = False) -> None:
        """Nothing is dropped here."""
        raise AssertionError("an exchange drops nothing")

    def close(self) -> None:
        """Nothing is held."""


class Hosts:
    """Exchanges of all hosts over one store, with a clock that the test moves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.store = folder, 1_000.0, OwnedStore()
        self.all = dict(zip(HOSTS, (self.start(one) for one in joined(folder)), strict=True))

    def start(self, membership) -> KeyExchange:  # type: ignore[no-untyped-def]  # as joined
        """Start a host's exchange."""
        found = KeyExchange(membership, self.store, lambda: self.now)
        found.share(["alpha"])
        return found

    def turns(self, seconds: float = 1.0, *, without: str = "", count: int = 3) -> None:
        """Some turns of all hosts but one."""
        for _ in range(count):
            self.now += seconds
            for host, one in self.all.items():
                if host != without:
                    one.turn()

    def held(self, account: str = "alpha") -> list[tuple[int, bytes] | None]:
        """An account's key on each host."""
        return [one.key(account) for one in self.all.values()]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    """A fleet of three."""
    return Hosts(tmp_path)


def test_members_have_the_servers_keys(hosts: Hosts) -> None:
    """After a few turns all have one key of the tenant and one of the fleet; nobody has one of a tenant that is not
    shared. A tenant that the server does not share is not had, and is lost with the next answer."""
    assert hosts.held()[1:] == [None, None]
    hosts.turns()
    assert len({*hosts.held()}) == len({*hosts.held(FLEET)}) == 1 and None not in hosts.held()
    assert hosts.held() != hosts.held(FLEET) and hosts.held("beta") == [None] * 3
    hosts.all["host-b"].share(["alpha", "beta"])
    hosts.turns()
    assert hosts.held("beta") == [None] * 3
    hosts.all["host-a"].share([])
    hosts.turns(RENEW_S)
    assert hosts.held() == [None] * 3 and None not in hosts.held(FLEET)


def test_a_cut_off_host_keeps_its_keys_for_a_lease(hosts: Hosts) -> None:
    """A shred on the server reaches one member within its turns; the other is cut off, has the old key until its lease
    has ended, and the shred is complete then and not before. It comes back with the new one."""
    hosts.turns(count=6)
    server, old = hosts.all["host-a"], hosts.held()
    began = hosts.now
    assert server.shred("alpha") and not server.settled("alpha")
    hosts.turns(RENEW_S / 2, without="host-c", count=6)
    new, seen, stale = hosts.held()
    assert new == seen != stale == old[2]
    assert server.waiting("alpha").keys() == {"host-c"}
    hosts.now = began + LEASE_S - 1.0
    assert not server.settled("alpha")
    hosts.now = began + LEASE_S
    assert hosts.held()[2] is None
    hosts.now = began + LEASE_S + DRIFT_S
    assert server.settled("alpha") and not server.waiting("alpha")
    hosts.turns()
    assert hosts.held() == [new] * 3


def test_a_shred_on_a_member_reaches_all(hosts: Hosts) -> None:
    """The member has no key at once, and the next one with the others; complete is it when all have said so."""
    hosts.turns(LEASE_S, count=2)  # The server's start is over.
    hosts.turns(count=6)
    (old, *_), member = hosts.held(), hosts.all["host-b"]
    assert member.settled("alpha") and member.shred("alpha")
    assert hosts.held()[1] is None and not member.settled("alpha") and member.waiting("alpha") == {}
    hosts.turns(RENEW_S, count=9)
    assert len({*hosts.held()}) == 1 and old not in hosts.held() and None not in hosts.held()
    assert all(one.settled("alpha") for one in hosts.all.values())


def test_a_store_that_repeats_swaps_and_changes_gives_nobody_anything(hosts: Hosts) -> None:
    """All that was ever written, under every name, over and over, and each value changed: no member's lease grows, and
    no old key comes back after a shred. Control: with an honest store the leases are renewed."""
    hosts.turns(count=4)
    old, end = hosts.held()[0], hosts.now + LEASE_S
    hosts.all["host-a"].shred("alpha")
    history = list(hosts.store.history)
    for name in list(hosts.store.values):
        for _, value in history:
            for one in (value, value[:100] + bytes([value[100] ^ 1]) + value[101:]):
                hosts.store.values = {name: one}
                hosts.turns(0.1, count=1)
    assert all(one.rejected > 10 for one in hosts.all.values())
    hosts.now = end
    assert hosts.held()[1:] == [None, None]
    for _ in range(3):
        for name, value in history:
            hosts.store.values = {name: value}
            hosts.turns(FRESH_S, count=1)
        assert old not in hosts.held()
    hosts.store.values = {}
    hosts.turns(count=4)
    assert len({*hosts.held()}) == 1 and None not in hosts.held()


def test_a_former_member_gets_nothing(hosts: Hosts) -> None:
    """The next list is without one host. Hosts that have it give it nothing, whatever it asks with its keys and the old
    list, and what it had opens nothing that they write. Control: under the list before it had the keys."""
    hosts.turns()
    before = hosts.held()
    assert before[2] is not None
    sign(hosts.folder, HOSTS[:2], version=2)
    for host in HOSTS[:2]:
        hosts.all[host] = hosts.start(join(config(hosts.folder, host)))
    hosts.turns(RENEW_S, count=10)
    hosts.now += LEASE_S
    hosts.turns(RENEW_S, count=4)
    after = hosts.held()
    assert after[0] == after[1] not in before and after[2] is None


def test_a_restarted_host_asks_anew(hosts: Hosts) -> None:
    """A member's process has the keys after a few turns, from answers to questions of its own; the server's draws new
    ones, with a higher number, and all have them."""
    hosts.turns()
    hosts.all["host-b"] = hosts.start(join(config(hosts.folder, "host-b")))
    assert hosts.held()[1] is None
    hosts.turns()
    first = hosts.held()
    assert len({*first}) == 1
    hosts.all["host-a"] = hosts.start(join(config(hosts.folder, "host-a")))
    hosts.turns(RENEW_S)
    second = hosts.held()
    assert len({*second}) == 1 and first[0] and second[0] and second[0][0] > first[0][0]


@pytest.mark.parametrize("name", ["", "a" * 70, "gr\u00fcn", "a\ud800"], ids=["empty", "long", "umlaut", "surrogate"])
def test_a_name_that_no_policy_has_is_refused_where_it_comes_in(hosts: Hosts, name: str) -> None:
    """On a member and on the key server, shared or shredded: the error is typed, nothing has changed, and the turns go
    on. The longest name of a policy, that of a sharing group, has a key everywhere (control)."""
    longest = "group/" + "a" * 63
    for host in hosts.all.values():
        host.share(["alpha", longest])
        with pytest.raises(AccountNameError, match="no name of a tenant"):
            host.share(["beta", name])
        with pytest.raises(AccountNameError, match="no name of a tenant"):
            host.shred(name)
    hosts.turns()
    assert [len({*hosts.held(one)}) for one in ("alpha", longest)] == [1, 1]
    assert None not in hosts.held() + hosts.held(longest)
    assert hosts.held("beta") == [None] * 3


def test_a_member_that_starts_without_end_fills_no_log(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that starts anew before each turn gets no keys after ``MAX_LIVES`` times, and one line a minute tells
    of it; another member that does the same has a line of its own (control), and so has the next minute."""
    now = [0.0]
    monkeypatch.setattr(exchange.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(leases, "MAX_LIVES", 3)
    server = hosts.all["host-a"]

    def restart(host: str, times: int) -> None:
        for _ in range(times):
            hosts.start(join(config(hosts.folder, host))).turn()
            server.turn()

    with capture_logs() as lines:
        restart("host-b", 3)
        assert lines == []
        restart("host-b", 3)
        restart("host-c", 6)
        assert [line["host"] for line in lines] == ["host-b", "host-c"]
        now[0] += exchange.SAY_EVERY_S
        restart("host-b", 2)
    assert [(line["event"], line["host"]) for line in lines[2:]] == [
        ("a member has started too often to get keys now", "host-b")
    ]


@contextmanager
def carried(folder: Path) -> Iterator[Callable[[], KvCarrier]]:
    """A real store behind a carrier; gives how a host connects."""
    with store(folder) as running:
        section = KvStoreConfig.model_validate({"store": running.address, "size": 1 << 20})
        service = CarrierService(section, listen(folder / "carrier.sock"))
        thread = threading.Thread(target=service.run)
        thread.start()
        made = list[KvCarrier]()

        def connect() -> KvCarrier:
            made.append(KvCarrier(folder / "carrier.sock", 600))
            return made[-1]

        try:
            yield connect
        finally:
            for one in made:
                one.close()
            service.stop()
            thread.join()


def test_keys_cross_a_real_store(tmp_path: Path) -> None:
    """Three hosts, a carrier and a real store, by the machine's own clock: all have one key, also after a shred on a
    member."""
    with tempfile.TemporaryDirectory(prefix="fk-", dir="/tmp") as name, carried(Path(name)) as connect:
        found = [KeyExchange(one, connect(), boot_clock) for one in joined(tmp_path)]
        for one in found:
            one.share(["alpha"])

        def turns_until(holds: Callable[[list[tuple[int, bytes] | None]], bool]) -> list[tuple[int, bytes] | None]:
            """Turns of all hosts until their keys are as wanted."""
            until = time.monotonic() + 30
            while True:
                for one in found:
                    one.turn()
                keys = [one.key("alpha") for one in found]
                if holds(keys):
                    return keys
                assert time.monotonic() < until, keys
                time.sleep(0.02)

        (first, *_) = turns_until(lambda keys: len({*keys}) == 1)
        assert found[1].shred("alpha") and first is not None
        # The third host asks again in half a minute.
        turns_until(lambda keys: keys[0] == keys[1] != first)
        assert all(one.rejected == 0 for one in found)
