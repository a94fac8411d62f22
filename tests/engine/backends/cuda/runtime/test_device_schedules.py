"""The real scheduler around rows that run ahead of it: every request gets the tokens of its plainest loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.backends.cuda.runtime.ahead import Joining
from engine.backends.cuda.runtime.exact import TilePiece
from engine.backends.cuda.runtime.host_rows import HostRows, Ints
from engine.backends.cuda.runtime.launches import NO_LANE
from engine.backends.cuda.runtime.mixing import ALWAYS
from engine.backends.cuda.runtime.runner import MOST_AHEAD, DeviceRunner
from engine.core.engine import Engine
from engine.core.kv.layout import FULL, Reach
from engine.core.scheduler.plan import RowMask, StepPlan
from engine.errors import ConfigurationError
from tests.engine.backends.cuda.runtime.toy import Schedule, differs, draw_schedule, run_schedule, toy_engine

pytestmark = pytest.mark.usefixtures("one_thread")


REACHES = {
    "one table": (FULL,),
    "windows": (Reach("window", 6),),
    "three tables": (FULL, Reach("window", 7), Reach("chunk", 6), Reach("window", 7)),
}
"""Of the toy model's layers."""

SOME_REACHES = [
    pytest.param(reaches, id=name, marks=() if name == "three tables" else pytest.mark.full)
    for name, reaches in REACHES.items()
]
"""One table and windows are among the three tables, which every run has; by themselves they are of the full counts."""


def ahead(schedule: Schedule) -> Engine:
    """Recorded steps, run ahead."""
    return toy_engine(schedule, eager=False, most_ahead=MOST_AHEAD)


def plain(schedule: Schedule) -> Engine:
    """The eager loop, which waits for every plan."""
    return toy_engine(schedule, eager=True, most_ahead=0)


@pytest.mark.parametrize("schedules", [3, pytest.param(500, marks=[pytest.mark.full, pytest.mark.timeout(3_600)])])
@pytest.mark.parametrize("reaches", SOME_REACHES)
def test_both_loops_give_the_tokens_of_the_plainest(schedules: int, reaches: tuple[Reach, ...]) -> None:
    """Arrivals, ends, stop ids, aborts, preemptions, shared prefixes, budgets, sampling, penalties, late masks and
    log-probabilities drawn at random, with one block table a row and with several, whose windows give blocks back:
    recorded steps that run ahead and eager ones that wait give each request the tokens and log-probabilities of a loop
    over nothing but its own tokens."""
    early = preempted = aborted = stopped = 0
    for seed in range(schedules):
        schedule = draw_schedule(seed, reaches)
        engine, waiting = ahead(schedule), plain(schedule)
        answers = run_schedule(engine, schedule)
        assert not differs(schedule, answers), seed
        assert not differs(schedule, run_schedule(waiting, schedule)), seed
        assert isinstance(engine.runner, DeviceRunner)
        early += engine.runner.num_ahead
        preempted += engine.scheduler.num_preempted
        aborted += sum(answer.failure is not None for answer in answers.values())
        stopped += sum(answer.finish.name == "STOP" for answer in answers.values())
        engine.scheduler.check_integrity()
    tokens = early / schedules
    # Windows give blocks back, and several tables share them: of a few schedules none preempts there.
    rare = reaches != REACHES["one table"] and schedules < 100
    assert tokens > 20 and (preempted > 0 or rare) and aborted > 0 and stopped > 0, "the schedules show nothing"


@pytest.mark.parametrize("schedules", [2, pytest.param(500, marks=[pytest.mark.full, pytest.mark.timeout(3_600)])])
@pytest.mark.parametrize("reaches", SOME_REACHES)
def test_one_pass_of_prompts_and_rows_gives_the_tokens_of_the_plainest(
    schedules: int, reaches: tuple[Reach, ...]
) -> None:
    """Over the schedules, with deterministic requests among them: where decoding rows join prompts, run ahead or not,
    recorded or eager, each request gets the tokens and log-probabilities of its plainest loop. Rows join prompts that
    go on, prompts that end, and as those that are missing; deterministic rows never do."""
    kinds: Counter[tuple[bool, bool, bool]] = Counter()
    waited = 0
    for seed in range(schedules):
        schedule = draw_schedule(seed, reaches, exact=0.2 * (seed % 2))
        engine = toy_engine(schedule, eager=False, most_ahead=MOST_AHEAD, mixing=ALWAYS)
        waiting = toy_engine(schedule, eager=True, most_ahead=0, mixing=ALWAYS)
        join = engine.runner._ahead.join

        def counted(rows: Ints, joining: Joining, run: Callable, join: Callable = join, engine: Engine = engine) -> Any:
            kinds[bool(joining.riders.any()), len(joining.coming) > 0, joining.waits] += 1
            assert not engine.runner._rows.intake.exact.intersection(
                rows[joining.riders].tolist() + joining.coming.tolist()
            )
            return join(rows, joining, run)

        engine.runner._ahead.join = counted
        assert not differs(schedule, run_schedule(engine, schedule)), seed
        assert not differs(schedule, run_schedule(waiting, schedule)), seed
        waited += waiting.runner.num_mixed
        engine.scheduler.check_integrity()
    assert waited > 0 and sum(kinds.values()) > 0, "the schedules show nothing"
    assert schedules < 100 or set(kinds) == {
        (False, True, False),
        (False, True, True),
        (True, False, True),
        (True, True, True),
    }


@pytest.mark.parametrize("schedules", [1, pytest.param(500, marks=[pytest.mark.full, pytest.mark.timeout(3_600)])])
@pytest.mark.parametrize("reaches", SOME_REACHES)
def test_deterministic_rows_get_the_tokens_of_the_plainest(schedules: int, reaches: tuple[Reach, ...]) -> None:
    """A third of the requests, and all of them, are of the deterministic class, whose rows are computed in tiles beside
    others that are run ahead of: every request gets its tokens and log-probabilities."""
    early = tiles = preempted = 0
    for seed in range(schedules):
        for share in (0.35, 1.0):
            schedule = draw_schedule(seed, reaches, exact=share)
            engine = ahead(schedule)
            compute = engine.runner._exact._compute

            def counted(tile: list[TilePiece], compute: Callable = compute) -> object:
                nonlocal tiles
                tiles += 1
                return compute(tile)

            engine.runner._exact._compute = counted
            assert not differs(schedule, run_schedule(engine, schedule)), (seed, share)
            early += engine.runner.num_ahead if share < 1 else 0
            preempted += engine.scheduler.num_preempted
            engine.scheduler.check_integrity()
    assert early > 0 and tiles > schedules and (preempted > 0 or schedules < 100)


def lose_moves(engine: Engine) -> None:
    """What was written into spare blocks stays there."""
    rows: HostRows = engine.runner._rows
    take = rows.take_moves

    def lost() -> list[object]:
        take()
        return []

    rows.take_moves = lost


def lose_growth(engine: Engine) -> None:
    """The device is not told of blocks that rows get."""
    rows: HostRows = engine.runner._rows
    rows.extend = lambda *_: None


def lose_tables(engine: Engine) -> None:
    """Blocks of windows are told as if they were of the first table."""
    rows: HostRows = engine.runner._rows
    extend = rows.extend

    def first(rows: list[int], _tables: list[int], *rest: list[int]) -> None:
        extend(rows, [], *rest)

    rows.extend = first


def lose_counts(engine: Engine) -> None:
    """The device is not told which tokens a row with penalties has."""
    engine.runner._choices.admit = lambda _: None


def lose_masks(engine: Engine) -> None:
    """No mask but a row's first reaches the device."""
    put, seen = engine.runner._choices.put, set()

    def once(masks: dict[int, RowMask]) -> None:
        put({row: mask for row, mask in masks.items() if row not in seen})
        seen.update(masks)

    engine.runner._choices.put = once


@pytest.mark.parametrize("fault", [lose_moves, lose_growth, lose_tables, lose_counts, lose_masks])
def test_a_fault_between_host_and_device_is_noticed(fault: Callable[[Engine], None]) -> None:
    """Positive controls: each of these makes some request differ."""
    for seed in range(20):
        schedule = draw_schedule(seed, REACHES["three tables" if fault is lose_tables else "one table"])
        engine = ahead(schedule)
        fault(engine)
        try:
            if differs(schedule, run_schedule(engine, schedule)):
                return
        except (AssertionError, KeyError, ConfigurationError):
            return
    pytest.fail("no schedule noticed")


@pytest.mark.full
def test_what_was_run_ahead_is_not_taken_by_the_next_request_of_a_row() -> None:
    """A step in which a row computed for a request that was given up has no lane for the row's next request."""
    seen = 0
    for seed in range(6):
        schedule = draw_schedule(seed)
        engine = ahead(schedule)
        prepare = engine.runner._prepare

        def checked(plan: StepPlan, engine: Engine = engine, prepare: Callable = prepare) -> None:
            nonlocal seen
            before = [launch.lane_of.copy() for launch in engine.runner._ahead.pending]
            prepare(plan)
            for admission in plan.admissions:
                seen += sum(lanes[admission.row] != NO_LANE for lanes in before)
                assert all(launch.lane_of[admission.row] == NO_LANE for launch in engine.runner._ahead.pending)

        engine.runner._prepare = checked
        run_schedule(engine, schedule)
    assert seen > 0, "no row changed hands while it was run ahead"
