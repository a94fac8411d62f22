"""What follows from samples, and how lines become samples: pure."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.common.cards import MAX_CARDS, SHARE_MARGIN_BYTES, allowed_bytes, xid_kind
from appliance.supervisor.boot import BootPlan
from appliance.supervisor.cards.engines import engine_on_cards
from appliance.supervisor.cards.judge import ABOVE_SAMPLES, EngineOnCards, Judge, held_bytes, status
from appliance.supervisor.cards.samples import CardSample, parse
from engine.config import EngineConfig
from isolation.gpu.bundle_additions import gpu_access
from isolation.ipc.messages import Role
from tests.isolation.gpu.gpu_machine import FACTS, RUNSC

GIB = 1 << 30


def engine(**changes: Any) -> EngineOnCards:
    """One with half of a card."""
    base: dict[str, Any] = {"sandbox": "engine-m", "model": "m", "tenant": "", "generation": 1, "cards": (0,)}
    return EngineOnCards(**{**base, "share": 50, "pids": frozenset({7, 8}), **changes})


def sample(processes: dict[int, int] | None, state: str = "ok", index: int = 0) -> CardSample:
    """A card of 80 GiB."""
    return CardSample(index, "GPU-1", state, {"memory_total_bytes": 80 * GIB}, processes)


def test_memory_of_an_engine_is_that_of_its_processes() -> None:
    """All of its processes count; a list without any of them says nothing about it, and none at all neither."""
    assert held_bytes(sample({7: 3, 8: 4, 9: 5}), engine()) == 7
    assert held_bytes(sample({9: 5}), engine()) is None
    assert held_bytes(sample(None), engine()) is None


def test_one_sample_above_the_share_ends_nothing() -> None:
    """Two in a row do; one below between them begins anew, and so does another generation of the sandbox."""
    most = allowed_bytes(80 * GIB, 50)
    assert most == 40 * GIB + SHARE_MARGIN_BYTES
    above, below = sample({7: most + 1}), sample({7: most})
    judge = Judge()
    assert [bool(judge.look([one], [engine()])) for one in (above, below, above, above)] == [False, False, False, True]
    judge = Judge()
    assert [bool(judge.look([above], [engine(generation=number)])) for number in (1, 2, 2)] == [False, False, True]
    assert ABOVE_SAMPLES == 2


def test_shares_of_a_models_engines_add_up() -> None:
    """A tenant's own engine is added to the shared one; another model stands apart; the rest is not ours."""
    engines = [engine(), engine(sandbox="own", tenant="a", pids=frozenset({9})), engine(model="n", pids=frozenset({1}))]
    told = status(sample({7: 1, 9: 2, 1: 4, 55: 8}), engines)
    assert [(one.model, one.held, one.share) for one in told.models] == [("m", 3, 80 * GIB), ("n", 4, 40 * GIB)]
    assert told.unknown_bytes == 8


def test_a_card_that_was_never_there_ends_nothing() -> None:
    """Not listed is lost only for a card that was: a driver may know it under another number, and the engine is not
    ended for that."""
    judge = Judge()
    assert judge.look([sample(None, "absent")], [engine()]) == []
    judge.look([sample({})], [engine()])
    assert len(judge.look([sample(None, "absent")], [engine()])) == 1


def test_xid_events_have_kinds_of_a_closed_list() -> None:
    """By their numbers in NVIDIA's table; one that is not in ours is other."""
    assert [xid_kind(number) for number in (31, 48, 79, 119, 999)] == ["program", "memory", "bus", "driver", "other"]


ROW = {"index": 0, "uuid": "GPU-1", "state": "ok", "figures": {}, "processes": [], "events": True, "xids": []}
ROW |= {"last_xid": 0}


def test_a_line_of_the_reader_is_taken_to_the_letter() -> None:
    """The control is a line as the reader prints it; every other key, type or number is refused, and a process whose
    memory is not told makes all of them unknown."""
    (found,) = parse(json.dumps({"cards": [ROW]}))
    assert (found.processes, found.xids) == ({}, dict.fromkeys(("program", "memory", "bus", "driver", "other"), 0))
    (unknown,) = parse(json.dumps({"cards": [{**ROW, "processes": [[7, 5], [8, -1]], "events": False}]}))
    assert (unknown.processes, unknown.xids) == (None, None)
    bad: list[dict[str, Any]] = [
        {"state": "melted"},
        {"figures": {"mood": 1}},
        {"figures": {"power_mw": -1}},
        {"uuid": "GPU\n"},
        {"xids": [[1]]},
        {"more": 1},
    ]
    for change in bad:
        with pytest.raises(ValueError, match="line|card"):
            parse(json.dumps({"cards": [{**ROW, **change}]}))
    for text in ("NVML: Driver Not Loaded", "[]", json.dumps({"cards": [ROW] * (MAX_CARDS + 1)})):
        with pytest.raises(ValueError, match="no line"):
            parse(text)


def plan(role: Role = Role.ENGINE, *, gpu: bool = True) -> BootPlan:
    """Plan of an engine with the card of a real description, or without."""
    access = gpu_access(FACTS, "auto", RUNSC) if gpu else None
    configuration = EngineConfig(model_dir="/m", model_digest="00", gpu_share=60).to_json()
    spec: Any = SimpleNamespace(gpu=access, cpus=(), limits=SimpleNamespace(memory_bytes=1))
    return BootPlan("engine-m", "m", role, spec, Path("/x"), configuration, tenant="a")


def test_an_engines_cards_are_those_of_its_sandbox() -> None:
    """By the device nodes that it is given, with the share of its configuration; a text sandbox and an engine without a
    GPU have none."""
    found = engine_on_cards(plan(), 3, 4242)
    assert found is not None
    assert (found.cards, found.share, found.tenant, found.generation, found.pids) == ((0,), 60, "a", 3, {4242})
    assert engine_on_cards(plan(), 3, None) is not None
    assert engine_on_cards(plan(gpu=False), 3, 4242) is None
    assert engine_on_cards(plan(Role.TEXT), 3, 4242) is None
