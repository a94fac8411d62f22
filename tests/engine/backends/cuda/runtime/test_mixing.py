"""Which rows join prompts, and when a plan is told of a chunk that was not computed and that it did not wait for."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest

from engine.backends.cuda.runtime.ahead import Joining
from engine.backends.cuda.runtime.host_rows import Ints
from engine.backends.cuda.runtime.mixing import ALWAYS, NEVER, Mixing
from engine.backends.cuda.runtime.runner import MOST_AHEAD
from engine.core.engine import Engine
from engine.core.offline import Answer, collect
from engine.core.scheduler.plan import StepPlan
from isolation.ipc.engine import Submit
from isolation.ipc.messages import FailureCode
from tests.engine.backends.cuda.runtime.toy import Schedule, expected, toy_engine
from tests.engine.support import GREEDY, namespace

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = Mixing(((100, 8), (1_000, 2)), ((50, 3),), least_bytes=1_000)


@pytest.mark.parametrize(
    ("tokens", "rows", "waits", "joins"),
    [
        (1, 8, False, True),
        (100, 8, False, True),
        (100, 9, False, False),  # more rows than the line has
        (101, 3, False, False),  # the next line
        (101, 2, False, True),
        (1_001, 1, False, False),  # behind the last line
        (50, 3, True, True),  # a plan that waits has a table of its own
        (51, 3, True, False),
        (5, 0, False, False),  # nobody
    ],
)
def test_the_table_decides(tokens: int, rows: int, waits: bool, joins: bool) -> None:
    """Worked out by hand: the first line that has room for the tokens decides about the rows."""
    assert TABLE.joins(tokens, rows, waits=waits) == joins
    assert ALWAYS.joins(tokens, rows, waits=waits) == (rows > 0) and not NEVER.joins(tokens, rows, waits=waits)


def test_a_small_model_takes_two_passes() -> None:
    """A model whose weights are read in less time than a host needs has no table. Control: a large one has."""
    assert TABLE.of_model(999) is NEVER and TABLE.of_model(1_000) is TABLE and not NEVER.ever and TABLE.ever


def requests() -> list[Submit]:
    """A short prompt with a long output, and a long prompt."""
    return [
        Submit(1, namespace(1), array("I", [7, 8, 9]), 20, GREEDY, ignore_eos=True),
        Submit(2, namespace(2), array("I", range(30)), 6, GREEDY, ignore_eos=True),
    ]


def joined(engine: Engine) -> list[tuple[int, int, int, bool]]:
    """Notes of each pass that rows join: lanes, riders, rows that come, whether the plan waits."""
    found: list[tuple[int, int, int, bool]] = []
    ahead = engine.runner._ahead
    join = ahead.join

    def noted(rows: Ints, joining: Joining, run: Callable[[int], object]) -> object:
        def counted(lanes: int) -> object:
            found.append((lanes, int(np.count_nonzero(joining.riders)), len(joining.coming), joining.waits))
            return run(lanes)

        return join(rows, joining, counted)

    ahead.join = noted
    return found


def serve(engine: Engine) -> dict[int, Answer]:
    """The first request decodes when the second one comes."""
    first, second = requests()
    answers: dict[int, Answer] = {}
    engine.add(first)
    for _ in range(2):
        collect(engine, answers)
    engine.add(second)
    while engine.has_work:
        collect(engine, answers)
    return answers


def test_weights_are_read_once_for_chunks_that_go_on() -> None:
    """A prompt of 30 tokens in steps of 8 beside a row: all chunks but the last have the row's next token in their
    pass, none of which its plan waits for, and there are fewer passes. Control: without it each has two."""
    passes = []
    for mixing in (NEVER, ALWAYS):
        engine = toy_engine(Schedule(60, 8), eager=False, most_ahead=MOST_AHEAD, mixing=mixing)
        found, prefill = joined(engine), engine.runner._prefill
        chunks = 0
        run = prefill.run

        def counted(*given: object, run: Callable = run) -> object:
            nonlocal chunks
            chunks += 1
            return run(*given)

        prefill.run = counted
        answers = serve(engine)
        assert answers[1].token_ids == expected([7, 8, 9], 23, ()) and answers[2].token_ids == expected(
            [*range(30)], 36, ()
        )
        assert all(one == (1, 0, 1, False) for one in found)
        passes.append(chunks + engine.runner._launcher._turn - len(found))
        assert (len(found) >= 3) == mixing.ever
    assert passes[1] <= passes[0] - 3


def test_a_chunk_that_was_not_computed_is_told_later() -> None:
    """Nothing waits for a chunk that goes on; where its table names another's block it is not computed, the request
    fails with the next plan that has something of it, and the row beside it has its own tokens. Control: without the
    fault both answer."""
    for broken in (False, True):
        engine = toy_engine(Schedule(60, 8), eager=False, most_ahead=MOST_AHEAD, mixing=ALWAYS)
        found, prepare, faults = joined(engine), engine.runner._prepare, []

        def breaking(plan: StepPlan, engine: Engine = engine, prepare: Callable = prepare) -> None:
            prepare(plan)
            engine.runner._loop.announce(engine.runner._deltas)
            for chunk in plan.prefills:
                entries = engine.runner._loop.state.entries
                if faults:
                    # As it was: only what was told of the chunk before says that it is missing.
                    entries[chunk.row, 0] = faults[0]
                elif broken and chunk.start and not chunk.last:
                    faults.append(int(entries[chunk.row, 0]))
                    entries[chunk.row, 0] += 1

        engine.runner._prepare = breaking
        answers = serve(engine)
        assert len(faults) == broken and any(not waits for *_, waits in found)
        assert (answers[2].failure is FailureCode.INTEGRITY) == broken
        assert answers[1].failure is None and answers[1].token_ids == expected([7, 8, 9], 23, ())


def test_a_pass_that_ends_prompts_has_the_rows_that_are_missing() -> None:
    """Where the loop waits for every plan, all rows are missing, and each prompt's pass has them."""
    engine = toy_engine(Schedule(60, 8), eager=True, most_ahead=0, mixing=ALWAYS)
    found = joined(engine)
    answers = serve(engine)
    assert answers[2].token_ids == expected([*range(30)], 36, ())
    assert len(found) == 5 and all(one == (1, 1, 0, True) for one in found)
