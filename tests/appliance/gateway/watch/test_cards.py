"""GPUs as the supervisor tells of them, as metrics: bounded, and refused where no supervisor would say it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from appliance.common.cards import MAX_CARDS, CardStatus, ModelMemory
from appliance.common.control import decode, encode
from appliance.common.control_cards import CardState
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level
from appliance.gateway.watch.cards import WatchedCards
from appliance.supervisor.cards.watch import card_state

GIB = 1 << 30
UUID = "GPU-0a1b"
CARD = CardStatus(
    index=3,
    uuid=UUID,
    state="ok",
    figures={
        "memory_total_bytes": 80 * GIB,
        "memory_used_bytes": 61 * GIB,
        "busy_percent": 93,
        "power_mw": 512_500,
        "clock_reasons": 0x44,
        "ecc_uncorrected": 0,
    },
    xids={"program": 0, "memory": 0, "bus": 0, "driver": 0, "other": 0},
    models=(ModelMemory(model="m", held=60 * GIB, share=72 * GIB), ModelMemory(model="n", held=GIB, share=0)),
)


def told(
    cards: WatchedCards,
    *statuses: CardStatus,
    problem: str = "",
    moved: dict[str, int] | None = None,
    unplaced: dict[str, str] | None = None,
) -> tuple[dict[tuple[str, ...], float], Counter[str]]:
    """Levels and counts after a state has travelled, with labels as the instruments know them."""
    message = decode(encode(card_state(statuses, problem, moved or {}, unplaced or {})))
    assert isinstance(message, CardState)
    cards.take(message)
    counts: Counter[str] = Counter()

    def count(name: str, more: int, **labels: str) -> None:
        assert labels.keys() == names.COUNTERS[name].labels
        counts[labels["kind" if "kind" in labels else "model"]] += more

    levels: list[Level] = list(cards.levels(count))
    assert all(one.labels.keys() == names.GAUGES[one.name].labels for one in levels)
    return {(one.name, *one.labels.values()): one.value for one in levels}, counts


def test_a_cards_figures_are_levels() -> None:
    """In base units, with the reasons of slow clocks and the models' memory; a figure that is not known has none."""
    levels, counts = told(WatchedCards(), CARD)
    which = "3", UUID
    assert levels[names.GPU_WATCHED,] == 1
    assert levels[names.GPU_LOST, *which] == 0
    assert levels[names.GPU_BUSY, *which] == 93
    assert levels[names.GPU_POWER, *which] == 512.5
    assert (names.GPU_TEMPERATURE, *which) not in levels
    throttled = {key[-1]: value for key, value in levels.items() if key[0] == names.GPU_THROTTLED}
    assert throttled == {"power": 1, "heat": 1, "hardware": 0}
    assert levels[names.GPU_MODEL_MEMORY, *which, "m"] == 60 * GIB
    assert {key[-1] for key in levels if key[0] == names.GPU_MODEL_SHARE} == {"m"}
    assert counts == Counter(program=0, memory=0, bus=0, driver=0, other=0)
    assert len(counts) == 5  # Series that begin at 0.


def test_nothing_is_told_without_cards_and_a_lost_one_has_no_figures() -> None:
    """No series at all where no model has a GPU; a lost card is 1 and nothing else; a hung NVML is 0 for watched."""
    cards = WatchedCards()
    assert told(cards) == ({}, Counter())
    levels, _ = told(cards, replace(CARD, state="lost"))
    assert levels == {(names.GPU_WATCHED,): 1, (names.GPU_LOST, "3", UUID): 1, (names.GPU_OUT, "3", UUID): 0}
    levels, _ = told(cards, problem="NVML has not answered for 15 s")
    assert levels == {(names.GPU_WATCHED,): 0}


def test_engines_that_were_moved_and_those_without_a_card_are_told() -> None:
    """A series for each model that has or had a card, from 0 on; moves before the first state were counted before. The
    card that gets no engine is one, and the reason for an engine without a card is kept in words."""
    cards = WatchedCards()
    away = replace(CARD, state="lost", out="card 3 is lost", engines=("m",))
    levels, counts = told(cards, replace(CARD, engines=("m", "n")), moved={"m": 2})
    which = "3", UUID
    assert [levels[names.GPU_OUT, *which], levels[names.GPU_UNPLACED, "m"], levels[names.GPU_UNPLACED, "n"]] == [
        0,
        0,
        0,
    ]
    assert (counts["m"], counts["n"]) == (0, 0)
    levels, counts = told(cards, away, moved={"m": 2, "n": 1}, unplaced={"m": "no GPU has room"})
    assert [levels[names.GPU_OUT, *which], levels[names.GPU_UNPLACED, "m"]] == [1, 1]
    assert (counts["m"], cards.unplaced) == (0, {"m": "no GPU has room"})
    levels, counts = told(cards, replace(CARD, engines=("m", "n")), moved={"m": 3, "n": 1})
    assert (counts["m"], counts["n"], levels[names.GPU_UNPLACED, "m"], cards.unplaced) == (1, 1, 0, {})


def test_events_are_counted_once() -> None:
    """What the first state has was counted before; a reader that begins anew counts from nothing."""
    cards = WatchedCards()
    counted = [told(cards, replace(CARD, xids={**CARD.xids, "bus": total}))[1]["bus"] for total in (4, 4, 6, 1)]
    assert counted == [0, 0, 2, 1]


def test_series_do_not_grow_with_tenants_or_cards() -> None:
    """Labels are the card, the model and words of closed lists, and there are no more cards than the bound; the control
    is one more, which is refused."""
    gpu = [one for name, one in {**names.GAUGES, **names.COUNTERS}.items() if name.startswith("athanor.gpu.")]
    assert len(gpu) >= 15
    assert set().union(*(one.labels for one in gpu)) == {"gpu", "gpu_uuid", "model", "reason", "kind"}
    told(WatchedCards(), *(replace(CARD, index=index) for index in range(MAX_CARDS)))
    with pytest.raises(ValueError, match="cards"):
        told(WatchedCards(), *(replace(CARD, index=index) for index in range(MAX_CARDS + 1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "melted"},
        {"figures": {"mood": 1}},
        {"figures": {"power_mw": -1}},
        {"xids": {"moon": 1}},
        {"models": (ModelMemory(model="m", held=-1, share=0),)},
    ],
)
def test_what_is_no_card_is_refused(changes: dict[str, object]) -> None:
    """States, figures and numbers that no supervisor gives."""
    with pytest.raises(ValueError, match="card"):
        told(WatchedCards(), replace(CARD, **changes))  # type: ignore[arg-type]
