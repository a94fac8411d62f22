"""What the supervisor tells of spill, and the tenants' ports of their connections, as metrics."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.common.control import SpillState
from appliance.common.kv_store_state import FLEET_SHREDS, FLEET_STATE, STORE_STATE
from appliance.gateway.front.connections import Places
from appliance.gateway.front.handshakes import Handshakes
from appliance.gateway.front.starts import Starts
from appliance.gateway.front.stranger_time import StrangerTime
from appliance.gateway.http.event_window import BackgroundRuns
from appliance.gateway.telemetry import names
from appliance.gateway.watch import gauges as gauges_module
from appliance.gateway.watch.gauges import KNOWN, REST_S, DoorGauges, Gauges, SpillGauges
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from isolation.keys.keyring import Keyring
from isolation.keys.seal import OVERHEAD_BYTES, Binding


class Desk:
    """The metrics, noted."""

    def __init__(self) -> None:
        self.gauges: dict[tuple[str, ...], float] = {}
        self.counts: Counter[tuple[str, ...]] = Counter()

    def look(self, gauges: SpillGauges | DoorGauges) -> None:
        """Note the levels, whose labels must be known."""
        for level in gauges.levels(self.count):
            assert level.labels.keys() == names.GAUGES[level.name].labels
            self.gauges[level.name, *level.labels.values()] = level.value

    def count(self, name: str, amount: int, **labels: str) -> None:
        """Note a counter likewise."""
        assert labels.keys() == names.COUNTERS[name].labels
        self.counts[name, *labels.values()] += amount


def test_levels_are_fresh_while_requests_run_and_once_behind_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector is sent the last tokens of the last request with the next look, not ``REST_S`` later; an appliance
    that serves nobody looks every ``REST_S`` (control)."""
    now, looks = [0.0], list[float]()
    gauges = object.__new__(Gauges)
    gauges._service, gauges._refreshed, gauges._served = SimpleNamespace(live=[]), 0.0, False  # type: ignore[assignment]

    def refresh(one: Gauges) -> None:
        looks.append(now[0])
        one._refreshed = now[0]

    monkeypatch.setattr(Gauges, "refresh", refresh)
    monkeypatch.setattr(gauges_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for at, live in ((2.0, []), (4.0, [1]), (6.0, [1]), (8.0, []), (10.0, []), (8.0 + REST_S, []), (20.0, [])):
        now[0], gauges._service.live = at, live  # type: ignore[misc, assignment]
        gauges.keep_fresh()
    assert looks == [4.0, 6.0, 8.0, 8.0 + REST_S]


def block(number: int) -> Binding:
    """The name of a block."""
    return Binding("alpha", "00", bytes([number]) * 16, b"epoch")


def test_a_store_tells_what_becomes_of_blocks(tmp_path: Path) -> None:
    """Kept, found, missed, evicted; cut and changed ones by their reason; bytes and objects of both tiers."""
    keyring = Keyring(tmp_path / "keys", os.urandom(32))
    size = 100 + OVERHEAD_BYTES
    store = SpillStore(SpillLimits(2 * size, 3 * size, tmp_path / "spill"), keyring)
    for number in range(6):
        store.put(block(number), bytes(100))
    assert store.get(block(5)) == bytes(100)
    assert store.get(block(0)) is None
    told = store.figures.told()
    assert told.keys() == KNOWN - {STORE_STATE, FLEET_STATE, FLEET_SHREDS}
    assert (told["memory_objects"], told["disk_objects"], told["memory_bytes"]) == (2, 3, 2 * size)
    first, second, _ = sorted((tmp_path / "spill").iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    whole = second.read_bytes()
    second.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for number in range(1, 4):
        store.get(block(number))
    told = store.figures.told()
    assert (told["kept"], told["absent"], told["evicted"]) == (6, 1, 1)
    assert (told["rejected_length"], told["rejected_seal"], told["restored"]) == (1, 1, 2)
    assert told["disk_objects"] == 1
    store.close()
    assert store.figures.told()["memory_bytes"] == store.figures.told()["disk_objects"] == 0
    keyring.close()


def test_sums_are_counted_once_and_begin_anew_with_a_supervisor() -> None:
    """What the first state has was counted by an earlier gateway; the same state twice adds nothing; less than before
    is another supervisor, whose sums are added whole."""
    gauges, desk = SpillGauges(), Desk()
    desk.look(gauges)
    assert not desk.gauges
    for kept in (5, 5, 9, 2):
        gauges.take(SpillState(dict.fromkeys(KNOWN, 0) | {"kept": kept, "disk_bytes": 7 * kept}))
        desk.look(gauges)
    assert desk.counts[names.SPILL_BLOCKS, "kept"] == 6
    assert desk.counts[names.SPILL_BLOCKS, "rejected_seal"] == 0
    assert (names.SPILL_BLOCKS, "rejected_seal") in desk.counts
    assert desk.gauges[names.SPILL_BYTES, "disk"] == 14


def test_the_door_tells_what_waits_there() -> None:
    """Levels and counters of the tenants' ports have labels that their metrics take."""
    handshakes, starts = Handshakes(time.monotonic), Starts(time.monotonic)
    places = {("http", ""): Places(4, 8, 2), ("http", "acme"): Places(4, 8, 2)}
    gauges, desk = DoorGauges(places, handshakes, starts, StrangerTime(starts.strangers), BackgroundRuns()), Desk()
    slot = places["http", ""].admit("192.0.2.1")
    desk.look(gauges)
    assert slot is not None and desk.gauges[names.CONNECTIONS, "http", "", "stranger"] == 1
    assert desk.gauges[names.CONNECTIONS, "http", "acme", "stranger"] == desk.gauges[names.BACKGROUND_STREAMS,] == 0
    assert desk.gauges[names.WAITING_STRANGERS, "request"] == desk.gauges[names.WAITING_STRANGERS, "connection"] == 0


@pytest.mark.parametrize("figures", [{}, {"kept": 1}, dict.fromkeys(KNOWN, -1), dict.fromkeys(KNOWN, 0) | {"more": 1}])
def test_what_is_no_state_is_refused(figures: dict[str, int]) -> None:
    """Missing, further and negative figures."""
    with pytest.raises(ValueError, match="figures of spill"):
        SpillGauges().take(SpillState(figures))
