"""Hosts of a fleet find each other's KV through a store that who owns it can change, and nothing that they may not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.supervisor import fleet_kv, fleet_seek
from appliance.supervisor.fleet_backend import backend_digest
from appliance.supervisor.fleet_keys.exchange import TURN_S, KeyExchange
from appliance.supervisor.fleet_keys.keeper import FOLLOW_S, Changes, FleetKeys, ShredEnd
from appliance.supervisor.fleet_keys.leases import DRIFT_S, LEASE_S, MAX_ORDERS
from appliance.supervisor.fleet_kv import EngineLife, FleetKv
from appliance.supervisor.fleet_seek import FleetSeeker
from appliance.supervisor.spill_port import SpillPort
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillFigures, SpillLimits
from engine.config import EngineConfig
from isolation.ipc.messages import Role
from isolation.ipc.spill import Fetch, Fetched, Keep, KvTier, Share, Withdraw, mark_of
from isolation.keys.fleet_seal import OVERHEAD_BYTES
from isolation.keys.keyring import Keyring
from isolation.keys.seal import Binding
from tests.appliance.supervisor.fleet_keys.fleets import HOSTS, joined
from tests.appliance.supervisor.fleet_keys.test_exchange import OwnedStore
from tests.isolation.ipc.wire import connect

SIZE = 64
LIFE = EngineLife(b"e" * 16, "00" * 32, b"b" * 32)
BLOCKS = tuple(bytes([number]) * 16 for number in range(4))
TAGS = tuple(bytes([number]) * 32 for number in range(len(HOSTS)))


class Store(OwnedStore):
    """A store that drops what it is told to."""

    def drop(self, name: bytes, *, later: bool = False) -> None:
        """Forget a value."""
        self.values.pop(name, None)


@dataclass
class Host:
    """One host: keys, objects, and what was told of both."""

    keys: FleetKeys
    kv: FleetKv
    figures: SpillFigures
    told: list[Changes]
    ends: list[ShredEnd]
    done: list[Callable[[], None]]
    """Changes that are not carried out yet, where the test holds them back."""

    def space(self, account: str = "alpha") -> bytes:
        """Namespace key of an account as it was told last."""
        found = [one[account] for one in self.told if account in one][-1]
        assert found is not None
        return found.namespace()


class Fleet:
    """All hosts over one store, with a clock that the test moves."""

    def __init__(self, folder: Path, limit: int = 1 << 20) -> None:
        self.now, self.store, self.held = 1_000.0, Store(), False
        members = joined(folder)
        self.hosts = [self.start(one, TAGS[number], limit) for number, one in enumerate(members)]

    def start(self, membership, tag: bytes, limit: int) -> Host:  # type: ignore[no-untyped-def]  # as joined
        """Start a host."""
        told, ends, done = list[Changes](), list[ShredEnd](), list[Callable[[], None]]()

        def carry_out(changes: Changes, carried: Callable[[], None]) -> None:
            told.append(changes)
            done.append(carried)
            if not self.held:
                carried()

        exchange = KeyExchange(membership, self.store, lambda: self.now)
        keys, figures = FleetKeys(exchange, carry_out, ends.append, lambda: self.now), SpillFigures()
        keys.share(["alpha", "beta"])
        limits = SpillLimits(0, store=limit, store_seconds=600)
        return Host(keys, FleetKv(keys, self.store, tag, frozenset(TAGS), limits, figures), figures, told, ends, done)

    def turns(self, count: int = 4, *, without: int = -1) -> None:
        """Some turns and looks of all hosts but one."""
        for _ in range(count):
            self.now += TURN_S
            for number, one in enumerate(self.hosts):
                if number != without:
                    one.keys.turn()
                one.keys.look()


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Three hosts with keys; the key server's start is over."""
    found = Fleet(tmp_path)
    found.now += LEASE_S + DRIFT_S
    found.turns()
    return found


def data(number: int) -> bytes:
    """Content of a block."""
    return bytes([number]) * SIZE


def kept(host: Host, space: bytes, count: int = 3) -> None:
    """Have a host write blocks."""
    for number in range(count):
        assert host.kv.keep(space, BLOCKS[number], LIFE, data(number)) == "alpha"


def test_a_host_finds_what_another_wrote_and_nothing_else(fleet: Fleet) -> None:
    """Both derive one namespace key; the blocks come back in order up to the first that nobody wrote. Another tenant's
    namespace, another backend, another model, another size and an unknown namespace find nothing; a block that is there
    is not written again."""
    one, two, _ = fleet.hosts
    space = one.space()
    assert space == two.space() != one.space("beta")
    kept(one, space)
    written = dict(fleet.store.values)
    kept(one, space)
    assert fleet.store.values == written and one.figures.fleet_stored == 3
    assert two.kv.find(space, BLOCKS, LIFE, SIZE).contents == [data(0), data(1), data(2)]
    assert two.figures.fleet_restored == 3
    for other in (replace(LIFE, backend=b"c" * 32), replace(LIFE, model="11" * 32)):
        assert two.kv.find(space, BLOCKS, other, SIZE).contents == []
    assert two.kv.find(one.space("beta"), BLOCKS, LIFE, SIZE).contents == []
    assert two.kv.find(space, BLOCKS, LIFE, SIZE - 1).contents == []
    assert two.kv.find(bytes(32), BLOCKS, LIFE, SIZE).contents == []
    assert two.kv.keep(bytes(32), BLOCKS[3], LIFE, data(3)) is None
    assert two.figures.fleet_rejected == 0


def test_a_block_that_an_engine_calls_wrong_is_dropped_for_all_hosts(fleet: Fleet) -> None:
    """Another host than the one that wrote it withdraws it: nobody finds it any more, until the writer does so too and
    writes it again. Under another tenant's namespace, or one that nobody has, nothing is dropped. Control: the blocks
    beside it stay."""
    one, two, three = fleet.hosts
    space = one.space()
    kept(one, space)
    for other in (one.space("beta"), bytes(32)):
        two.kv.withdraw(other, BLOCKS[1], LIFE)
    assert three.kv.find(space, BLOCKS, LIFE, SIZE).contents == [data(0), data(1), data(2)]
    two.kv.withdraw(space, BLOCKS[1], LIFE)
    assert three.kv.find(space, BLOCKS, LIFE, SIZE).contents == [data(0)]
    assert three.kv.find(space, BLOCKS[2:], LIFE, SIZE).contents == [data(2)]
    one.kv.withdraw(space, BLOCKS[1], LIFE)
    kept(one, space)
    assert three.kv.find(space, BLOCKS, LIFE, SIZE).contents == [data(0), data(1), data(2)]
    assert (one.figures.fleet_withdrawn, two.figures.fleet_withdrawn) == (1, 2)


@pytest.mark.parametrize("computed", [False, True], ids=["when evicted", "when computed"])
def test_an_engine_is_told_when_to_send_and_what_it_left_out_is_counted(
    fleet: Fleet, tmp_path: Path, computed: bool
) -> None:
    """The word that a namespace is shared says what the host's setting does. What an engine says that it left out is in
    the figures, and a block that it withdraws is on this host and in the store no more."""
    one, wire, ring = fleet.hosts[0], connect(Role.SPILL), Keyring(tmp_path / "keys", bytes(32))
    store, space = SpillStore(SpillLimits(1 << 20), ring), one.space()
    one.kv.writes_computed = computed
    port = SpillPort(wire.host, LIFE.model, store, {space: "alpha"}.get, "engine", fleet=(one.kv, LIFE))
    port.share(space)
    port._tell()
    assert wire.guest.receive(8) == [Share(mark_of(space), computed, one.kv.lasts_s)]
    port.serve(Keep(space, BLOCKS[0], data(0), left_out=3))
    port.serve(Keep(bytes(32), BLOCKS[1], data(1), left_out=4))
    assert one.figures.fleet_left_out == 7
    asked = Binding("alpha", LIFE.model, BLOCKS[0], port.epoch)
    assert (store.get(asked), fleet.hosts[1].kv.find(space, BLOCKS, LIFE, SIZE).contents) == (data(0), [data(0)])
    port.serve(Withdraw(space, BLOCKS[0]))
    assert (store.get(asked), fleet.hosts[1].kv.find(space, BLOCKS, LIFE, SIZE).contents) == (None, [])
    port.close()
    store.close()
    ring.close()
    wire.guest.close()
    wire.raw.close()


def test_a_block_is_written_again_before_the_store_forgets_it(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that sends a block again after the time that it was told has it written, also where the first one was a
    few seconds on its way here; the store keeps it for longer than that. Control: one that comes at half of the time is
    not written."""
    now = [1_000.0]
    monkeypatch.setattr(fleet_kv, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limits, ttl = SpillLimits(1 << 20, store=1 << 20, store_seconds=600), 600
    host = fleet.hosts[0]
    kv = FleetKv(host.keys, fleet.store, TAGS[0], frozenset(TAGS), limits, host.figures)
    assert kv.lasts_s < ttl
    sent_at, lag_s = now[0], 4.0
    now[0] += lag_s
    kv.keep(host.space(), BLOCKS[0], LIFE, data(0))
    for at, written in ((sent_at + kv.lasts_s / 2, 1), (sent_at + kv.lasts_s, 2)):
        now[0] = at
        kv.keep(host.space(), BLOCKS[0], LIFE, data(0))
        assert host.figures.fleet_stored == written


def test_what_a_store_has_lost_is_written_again(fleet: Fleet) -> None:
    """A store that was started anew has nothing: a host that misses a block there writes it, and those behind it, when
    its engine sends them again. Control: until it has missed one, it believes them there and writes nothing."""
    one, two, _ = fleet.hosts
    space = one.space()
    kept(one, space)
    fleet.store.values.clear()
    kept(one, space)
    assert two.kv.find(space, BLOCKS, LIFE, SIZE).contents == []
    one.kv.absent(space, BLOCKS, LIFE, lacks=True)
    kept(one, space)
    assert two.kv.find(space, BLOCKS, LIFE, SIZE).contents == [data(0), data(1), data(2)]
    assert one.kv.count("alpha") == 3


def test_what_counts_as_not_written_takes_room_in_the_store(tmp_path: Path) -> None:
    """An engine names all that it has sent behind a block that there is not, and sends more: the store has never more
    of this host's than its part. Control: what was sent last is found."""
    part = 4 * (SIZE + OVERHEAD_BYTES)
    fleet = Fleet(tmp_path, part)
    fleet.now += LEASE_S + DRIFT_S
    fleet.turns()
    one, keys = fleet.hosts[0], set(fleet.store.values)
    space = one.space()
    for begin in range(0, 24, 4):
        blocks = [bytes([number]) * 16 for number in range(begin, begin + 4)]
        for block in blocks:
            one.kv.keep(space, block, LIFE, data(begin))
        assert len(one.kv.find(space, blocks, LIFE, SIZE).contents) == 4
        one.kv.absent(space, [b"none" * 4, *blocks], LIFE, lacks=True)
        assert sum(len(value) for name, value in fleet.store.values.items() if name not in keys) <= part


def test_a_store_that_changes_and_swaps_gives_nothing(fleet: Fleet) -> None:
    """Each object flipped, all objects under each other's names, and objects of the generation before under names of
    this one: nothing opens, and each is counted. Control: unchanged they open."""
    one, two, _ = fleet.hosts
    space, before = one.space(), set(fleet.store.values)
    kept(one, space)
    names = [name for name in fleet.store.values if name not in before]
    whole = {name: fleet.store.values[name] for name in names}
    for name in names:
        changed = bytearray(whole[name])
        changed[-20] ^= 1
        fleet.store.values[name] = bytes(changed)
    assert two.kv.find(space, BLOCKS, LIFE, SIZE).contents == [] and two.figures.fleet_rejected == 1
    for place, name in enumerate(names):
        fleet.store.values[name] = whole[names[place - 1]]
    assert two.kv.find(space, BLOCKS, LIFE, SIZE).contents == [] and two.figures.fleet_rejected == 2
    fleet.store.values.update(whole)
    assert len(two.kv.find(space, BLOCKS, LIFE, SIZE).contents) == 3
    assert one.keys.shred("alpha")
    fleet.turns(10)
    known = set(fleet.store.values)
    kept(one, one.space())
    for old, new in zip(names, [name for name in fleet.store.values if name not in known], strict=True):
        fleet.store.values[new] = whole[old]
    assert two.kv.find(two.space(), BLOCKS, LIFE, SIZE).contents == [] and two.figures.fleet_rejected == 3


@pytest.mark.parametrize("ordered_on", [0, 1], ids=["server", "member"])
def test_a_shred_ends_what_was_written_on_all_hosts_and_says_when(fleet: Fleet, ordered_on: int) -> None:
    """At once nothing is read or written on the host that ordered it; within its turns every host has another
    namespace key, and the objects, which the store still has, are found under none. The end is told once, and other
    tenants keep their keys. Control: before the order they were found."""
    one, two, three = fleet.hosts
    space, beta = one.space(), one.space("beta")
    kept(one, space)
    assert len(two.kv.find(space, BLOCKS, LIFE, SIZE).contents) == 3
    ordering = fleet.hosts[ordered_on]
    assert ordering.keys.shred("alpha") and ordering.keys.waiting == 1
    assert (
        ordering.kv.find(space, BLOCKS, LIFE, SIZE).contents == []
        and ordering.kv.keep(space, BLOCKS[3], LIFE, b"x") is None
    )
    fleet.turns(16)
    assert [(end.account, end.complete) for end in ordering.ends] == [("alpha", True)] and ordering.keys.waiting == 0
    assert ordering.ends[0].seconds < LEASE_S
    fresh = {host.space() for host in (one, two, three)}
    assert len(fresh) == 1 and space not in fresh
    for host in (one, two, three):
        assert (
            host.kv.find(space, BLOCKS, LIFE, SIZE).contents
            == host.kv.find(host.space(), BLOCKS, LIFE, SIZE).contents
            == []
        )
        assert host.keys.current(beta) is not None
    assert not ordering.keys.shred("gamma"), "a tenant that does not share has nothing to end"


def test_a_cut_off_host_stops_with_its_lease_and_holds_up_no_shred(fleet: Fleet) -> None:
    """A host without the store goes on for a lease and then tells that it has no generation: its engines are to forget.
    The shred meanwhile is complete by then, and not before."""
    one, _, three = fleet.hosts
    assert one.keys.shred("alpha")
    fleet.turns(30, without=2)
    assert one.ends == [] and three.keys.current(three.space()) is not None
    fleet.turns(int((LEASE_S + DRIFT_S) / TURN_S), without=2)
    assert [end.complete for end in one.ends] == [True]
    assert three.told[-1] == {"alpha": None, "beta": None} and three.keys.namespaces == []
    assert not three.keys.holds_keys and one.keys.holds_keys


def test_a_member_does_not_say_that_it_forgot_before_its_engines_did(fleet: Fleet) -> None:
    """While a host has not carried a change out it takes no turn, so the shred waits for it: until its lease ends.
    Control: once it has, the shred is complete within some turns."""
    one, two, _ = fleet.hosts
    fleet.held = True
    two.done.clear()
    assert one.keys.shred("alpha")
    fleet.turns(1)
    for host in (one, fleet.hosts[2]):
        host.done[-1]()
    fleet.turns(8)
    assert len(two.done) == 1 and one.ends == []
    fleet.held = False
    for host in fleet.hosts:
        for carried in host.done:
            carried()
    fleet.turns(12)
    assert [end.complete for end in one.ends] == [True]


def test_a_shred_that_nobody_confirms_is_not_called_complete(fleet: Fleet) -> None:
    """The key server is gone: the member that ordered says in the end that it was not told, and follows it no more."""
    two = fleet.hosts[1]
    assert two.keys.shred("alpha")
    fleet.turns(int(FOLLOW_S / TURN_S) + 2, without=0)
    assert [(end.complete, end.seconds > FOLLOW_S) for end in two.ends] == [(False, True)] and two.keys.waiting == 0


def test_all_generations_end_under_which_an_engine_wrote_that_died(fleet: Fleet) -> None:
    """On a member: of more accounts than orders may wait, and of one that shares there no more, no host takes the old
    generation in the end; the member itself takes none of them from the moment on. Control: another tenant keeps its
    key."""
    one, two, _ = fleet.hosts
    names = [f"tenant-{number:03}" for number in range(MAX_ORDERS + 6)]
    for host in fleet.hosts:
        host.keys.share([*names, "alpha", "beta"])
    fleet.turns(10)
    spaces = {name: one.space(name) for name in names}
    two.keys.share([*names[1:], "beta"])
    fleet.turns(2)
    assert all(one.keys.current(space) and two.keys.current(spaces[names[-1]]) for space in spaces.values())
    two.keys.end(names)
    assert two.keys.waiting == len(names) and not any(two.keys.current(space) for space in spaces.values())
    fleet.turns(16)
    for host in fleet.hosts:
        assert not any(host.keys.current(space) for space in spaces.values())
        assert host.keys.current(one.space("beta")) is not None
    assert {end.account for end in two.ends if end.complete} == {*names}


def test_a_host_has_no_more_in_the_store_than_its_part(tmp_path: Path) -> None:
    """With room for two objects the first is dropped from the store when the third comes; what a tenant has there goes
    when it ceases to share."""
    fleet = Fleet(tmp_path, 2 * (SIZE + OVERHEAD_BYTES))
    fleet.turns()
    one, before = fleet.hosts[0], set(fleet.store.values)
    kept(one, one.space())
    assert len(set(fleet.store.values) - before) == 2
    assert one.kv.find(one.space(), BLOCKS, LIFE, SIZE).contents == []
    assert one.kv.find(one.space(), BLOCKS[1:], LIFE, SIZE).contents == [data(1), data(2)]
    assert one.kv.drop("alpha") == 2 and set(fleet.store.values) <= before


def test_a_seeker_passes_over_what_nobody_waits_for(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches that waited in line longer than their engine does are not asked for; one that came later is answered."""
    monkeypatch.setattr(fleet_seek, "LINE_S", 1.0)
    one, rung = fleet.hosts[0], threading.Event()
    kept(one, one.space())
    seeker = FleetSeeker(one.kv, LIFE, rung.set, "engine")
    assert seeker.ask(Fetch(1, one.space(), BLOCKS, SIZE), 0) and seeker.ask(Fetch(2, one.space(), BLOCKS, SIZE), 0)
    time.sleep(1.0)
    assert seeker.ask(Fetch(3, one.space(), BLOCKS, SIZE), 0)
    seeker.start()
    try:
        assert rung.wait(10)
        assert [(found.request, found.index) for found in seeker.take()] == [(3, 0), (3, 1), (3, 2)]
    finally:
        seeker.close()
    assert one.figures.fleet_restored == 3


def test_a_seeker_answers_each_fetch_to_its_end(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one fetch asks for comes in order from the place where the engine's own blocks ended, with a block without
    content where the first is absent; a second fetch is answered too."""
    monkeypatch.setattr(fleet_seek, "LINE_S", 60.0)  # The machine may be busy.
    one, two, _ = fleet.hosts
    kept(one, one.space())
    rung = threading.Event()
    seeker = FleetSeeker(two.kv, LIFE, rung.set, "engine")
    seeker.start()
    try:
        found = list[Fetched]()
        assert seeker.ask(Fetch(1, two.space(), BLOCKS, SIZE), 1) and seeker.ask(Fetch(2, bytes(32), BLOCKS, SIZE), 0)
        while sum(not one.content for one in found) < 2:
            assert rung.wait(10)
            rung.clear()
            found += seeker.take()
    finally:
        seeker.close()
    store = KvTier.STORE
    first, second = ([one for one in found if one.request == number] for number in (1, 2))
    assert first[:2] == [Fetched(1, 1, data(1), store), Fetched(1, 2, data(2), store)]
    assert [(one.request, one.index, one.content) for one in (*first[2:], *second)] == [(1, 3, b""), (2, 0, b"")]
    assert two.figures.fleet_absent == 1, "a block of nobody who shares does not count"


@pytest.mark.parametrize("coming", [True, False], ids=["coming", "not coming"])
def test_a_block_that_is_on_its_way_is_waited_for(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, coming: bool) -> None:
    """Of a prompt that another host has just computed, blocks that are written after the question are taken, in order;
    meanwhile other fetches are answered. One that does not come ends the fetch after its time, and any other question
    ends at once."""
    monkeypatch.setattr(fleet_seek, "LINE_S", 60.0)  # The machine may be busy.
    monkeypatch.setattr(fleet_seek, "WAIT_S", 2.0)
    one, two, _ = fleet.hosts
    kept(one, one.space(), 1)
    rung, found = threading.Event(), list[Fetched]()

    def hear(request: int, index: int) -> Fetched:
        deadline = time.monotonic() + 30
        while not (found and (found[-1].request, found[-1].index) == (request, index)):
            assert rung.wait(deadline - time.monotonic()), found
            rung.clear()
            found.extend(seeker.take())
        return found[-1]

    seeker = FleetSeeker(two.kv, LIFE, rung.set, "engine")
    seeker.start()
    try:
        assert seeker.ask(Fetch(1, two.space(), BLOCKS, SIZE, coming), 0)
        assert hear(1, 0).content == data(0)
        if coming:
            assert seeker.ask(Fetch(2, bytes(32), BLOCKS, SIZE), 0) and not hear(2, 0).content
            assert [answer.request for answer in found] == [1, 2]
            kept(one, one.space(), 3)
            assert hear(1, 2).content == data(2)
        began = time.monotonic()
        assert not hear(1, 3 if coming else 1).content
        assert (time.monotonic() - began > 1.0) == coming
        assert two.figures.fleet_absent == 1, "however often it was asked for"
    finally:
        seeker.close()


def test_the_backend_is_all_that_changes_bits() -> None:
    """Data type, weights' form, block size, threads and the kernels' form give another digest; places and sizes of
    pools give the same one."""
    plain = EngineConfig(model_dir="/model", model_digest="00")

    def digest(form: int = 1, **changes: object) -> bytes:
        return backend_digest(replace(plain, **changes).to_json(), {"form": form, "kv_blocks": 9})  # type: ignore[arg-type]

    same = {"model_dir": "/other", "kv_bytes": 1 << 20, "max_num_seqs": 3, "kernels": "/kernels"}
    assert digest(**same) == digest() and json.loads(plain.to_json())["kv_bytes"] != 1 << 20
    others = [{"dtype": "float32"}, {"quantization": "int8"}, {"block_size": 32}, {"threads": 2}, {"backend": "plain"}]
    found = {digest(), digest(2), *(digest(**one) for one in others)}
    assert len(found) == 2 + len(others)


def test_what_nobody_waits_for_is_asked_last_and_is_no_miss(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt that another host still computes the store is asked behind what requests wait for, though that came
    later; that it has not got a block of it counts as nothing, however often it is asked, and has nothing written a
    second time. Control: the same question of a request counts, and what this host wrote counts as lost."""
    monkeypatch.setattr(fleet_seek, "LINE_S", 60.0)  # The machine may be busy.
    one, rung, found = fleet.hosts[0], threading.Event(), list[Fetched]()
    kept(one, one.space(), 1)
    missing = b"m" * 16
    seeker = FleetSeeker(one.kv, LIFE, rung.set, "engine")
    for number in (1, 2, 3):
        assert seeker.ask(Fetch(number, one.space(), (missing, BLOCKS[0]), SIZE, ahead=True), 0)
    assert seeker.ask(Fetch(4, one.space(), (BLOCKS[0],), SIZE), 0)
    seeker.start()

    def hear(count: int) -> None:
        while len(found) < count:
            assert rung.wait(10)
            rung.clear()
            found.extend(seeker.take())

    try:
        hear(4)
        order = [(answer.request, bool(answer.content)) for answer in found]
        assert order == [(4, True), (1, False), (2, False), (3, False)]
        kept(one, one.space(), 1)
        assert (one.figures.fleet_absent, one.figures.fleet_stored) == (0, 1)
        assert seeker.ask(Fetch(5, one.space(), (missing, BLOCKS[0]), SIZE), 0)
        hear(5)
        kept(one, one.space(), 1)
        assert (one.figures.fleet_absent, one.figures.fleet_stored) == (1, 2)
    finally:
        seeker.close()
