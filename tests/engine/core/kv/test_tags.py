"""Stamps of KV blocks: every fault in a block table is seen before anything of a foreign block is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.backends.common.block_table import BlockTables
from engine.config import EngineConfig
from engine.core.backend import Samples
from engine.core.engine import Engine
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.tags import NO_STAMP, NOWHERE, TAG_BITS, tag_of
from engine.core.offline import Answer, collect, generate
from engine.core.scheduler.plan import StepPlan
from engine.startup.load import load_engine
from isolation.ipc.messages import FailureCode, Finish
from tests.engine.model.families.table import FAMILIES, save_reference
from tests.engine.support import make_engine, model_config, namespace, random_model, submit

Fault = Callable[[Engine], None]
Run = tuple[Engine, dict[int, Answer]]

A, B, C = 1, 2, 3
"""Requests, each of the tenant of that number."""


class Make:
    """Makes engines of one random model, on one path."""

    def __init__(self, path: str, kernels: str) -> None:
        self.fields = {"deterministic": path == "tiles"}
        """Of every request."""
        self._exact = path != "plain"
        self._kernels = kernels

    def __call__(self) -> Engine:
        """A fresh engine."""
        threads = 2 if self._kernels else 1
        engine = make_engine(random_model(model_config(), packed=False), kernels=self._kernels, threads=threads)
        assert engine.runner.forward.checks_owners == bool(self._kernels)
        return engine

    def content(self, answer: Answer) -> tuple[object, ...]:
        """What is the same beside any neighbours: tokens, and log-probabilities where their bits are promised."""
        values = [(one.logprob, one.top_ids, one.top_logprobs) for one in answer.logprobs] if self._exact else []
        return answer.failure, tuple(answer.token_ids), tuple(values)


@pytest.fixture(scope="module", params=["plain", "tiles", "compiled"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes engines, on each path."""
    kernels = str(request.getfixturevalue("kernel_dir")()) if request.param == "compiled" else ""
    return Make(request.param, kernels)


def forget_stamps(engine: Engine) -> None:
    """Switch the comparison off: no block is given a stamp, and none is expected."""
    execute = engine.runner.execute

    def without_stamps(plan: StepPlan) -> Samples:
        plan.zero_stamps = []
        plan.grown_stamps = []
        plan.admissions = [one._replace(stamps=(), local_stamps=()) for one in plan.admissions]
        return execute(plan)

    engine.runner.execute = without_stamps


def run(make: Make, fault: Fault | None, *, other: Iterable[int] = range(30, 51), mute: bool = False) -> Run:
    """Three tenants decode together; after the sixth step the fault happens.

    Args:
        make: the path.
        fault: what happens, if anything.
        other: B's prompt.
        mute: no stamp is given or expected.
    """
    engine = make()
    if mute:
        forget_stamps(engine)
    answers: dict[int, Answer] = {}
    for number, prompt in ((A, range(5, 26)), (B, other), (C, range(60, 81))):
        engine.add(submit(number, prompt, 16, tenant=number, logprobs=2, **make.fields))
    for _ in range(6):
        collect(engine, answers)
    assert {number: bool(answer.token_ids) for number, answer in answers.items()} == {A: True, B: True, C: True}
    if fault is not None:
        fault(engine)
    while engine.has_work:
        collect(engine, answers)
    return engine, answers


def table(engine: Engine) -> BlockTables:
    """The block tables of all rows."""
    return engine.runner.batches._tables[0]


def row(engine: Engine, number: int) -> int:
    """Where a request's table is."""
    return engine.scheduler._live.by_id[number].row


def swap(engine: Engine) -> None:
    """A and B have each other's first block."""
    blocks, rows = table(engine).tables, [row(engine, A), row(engine, B)]
    blocks[rows, 0] = blocks[rows[::-1], 0]


def steal(engine: Engine) -> None:
    """A has B's third block besides B."""
    blocks = table(engine).tables
    blocks[row(engine, A), 2] = blocks[row(engine, B), 2]


def shuffle(engine: Engine) -> None:
    """A has two of its own blocks at each other's places."""
    blocks = table(engine).tables[row(engine, A)]
    blocks[[1, 2]] = blocks[[2, 1]]


def point(block: int) -> Fault:
    """A names a block that does not exist, or is nobody's."""

    def fault(engine: Engine) -> None:
        table(engine).tables[row(engine, A), 1] = block

    return fault


LAST = 64
FAULTS: dict[str, tuple[Fault, set[int]]] = {
    "swapped": (swap, {A, B}),
    "stolen": (steal, {A}),
    "out of order": (shuffle, {A}),
    "the null block": (point(0), {A}),
    "a free block": (point(LAST), {A}),
    "one behind the last": (point(LAST + 1), {A}),
    "far behind the last": (point(1 << 40), {A}),
    "below the first": (point(-1), {A}),
    "far below the first": (point(-(1 << 40)), {A}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_table_ends_exactly_the_requests_that_it_concerns(make: Make, name: str) -> None:
    """The requests whose tables are wrong get no further token and end as INTEGRITY; all others give the bits of a run
    without a fault, and the engine goes on."""
    fault, struck = FAULTS[name]
    _, sound = run(make, None)
    engine, answers = run(make, fault)
    for number, answer in answers.items():
        if number in struck:
            assert answer.failure is FailureCode.INTEGRITY
            assert answer.finish is Finish.NONE
            assert answer.token_ids == sound[number].token_ids[: len(answer.token_ids)]
            assert len(answer.token_ids) < 7
        else:
            assert make.content(answer) == make.content(sound[number])
    engine.scheduler.check_integrity()
    prompt, later = range(5, 26), {"logprobs": 2, **make.fields}
    again = generate(engine, [submit(20 + number, prompt, 16, tenant=number, **later) for number in (A, B)])
    assert {make.content(answer) for answer in again.values()} == {make.content(sound[A])}


@pytest.mark.parametrize("fault", [swap, steal])
def test_without_the_comparison_the_same_fault_reads_anothers_kv(make: Make, fault: Fault) -> None:
    """Control: with stamps muted nothing fails, and what A is answered depends on B's prompt; without a fault it does
    not."""
    seen = []
    for harm in (fault, None):
        answers = []
        for prompt in (range(30, 51), range(31, 52)):
            _, given = run(make, harm, other=prompt, mute=True)
            answers.append(make.content(given[A]))
        assert all(answer[0] is None for answer in answers)
        seen.append(len(set(answers)))
    assert seen == [2, 1]


def test_a_block_given_twice_is_seen_at_the_next_step(make: Make) -> None:
    """A pool that takes one of A's blocks for a free one and gives it to the next who asks: it is zeroed and stamped
    for that one, so A, who still names it, ends in the same step, and reads nothing of it."""
    engine = make()
    answers: dict[int, Answer] = {}
    for number in (A, B):
        engine.add(submit(number, range(21), 16, tenant=number, **make.fields))
    for _ in range(6):
        collect(engine, answers)
    count, beside = len(answers[A].token_ids), len(answers[B].token_ids)
    engine.scheduler._pool._free.append(engine.scheduler._live.by_id[A].kv.blocks[1])
    engine.add(submit(C, [7, 8, 9], 4, tenant=C, **make.fields))
    collect(engine, answers)
    assert (answers[A].failure, len(answers[A].token_ids)) == (FailureCode.INTEGRITY, count)
    assert (len(answers[B].token_ids), len(answers[C].token_ids)) == (beside + 1, 1)


def test_a_prefix_of_another_tenant_is_refused(make: Make) -> None:
    """A pool that takes B's blocks for A's own and finds them under the ids of A's prompt: the blocks' stamps are not
    those of A's, so A ends unread. Found under its own ids by B (control), the same blocks serve."""
    engine = make()
    first = submit(B, range(30, 51), 4, tenant=B, **make.fields)
    sound = generate(engine, [first])[B]
    cache, pool = engine.scheduler._live._cache, engine.scheduler._pool
    again = generate(engine, [replace(first, request=8)])[8]
    assert (make.content(again), again.cached_tokens) == (make.content(sound), 20)
    probe = submit(A, range(5, 26), 4, tenant=A, **make.fields)
    request = engine.scheduler._request(probe, now_ns=0)
    for index, block in enumerate(pool._cached.all()[-1:-3:-1]):
        pool.contents.by_id[cache._id(request.kv, request.token_ids, index)] = block
        pool.contents.owners[block] = namespace(A)
    answer = generate(engine, [probe])[A]
    assert (answer.failure, answer.token_ids, answer.cached_tokens) == (FailureCode.INTEGRITY, [], 8)


def test_a_prompt_in_chunks_is_compared_at_every_chunk(make: Make) -> None:
    """A fault between two chunks of a long prompt, whose log-probabilities are asked for: the request ends before its
    first token, its neighbour's answers stay in their places."""
    beside = submit(2, range(40), 6, tenant=2, logprobs=1, **make.fields)
    sound = generate(make(), [beside])[2]
    engine = make()
    answers: dict[int, Answer] = {}
    engine.add(submit(1, range(90), 4, prompt_logprobs=1, **make.fields))
    collect(engine, answers)
    table(engine).tables[row(engine, 1), 0] = LAST
    engine.add(beside)
    while engine.has_work:
        collect(engine, answers)
    assert (answers[1].failure, answers[1].token_ids) == (FailureCode.INTEGRITY, [])
    assert make.content(answers[2]) == make.content(sound)
    engine.scheduler.check_integrity()


def test_nothing_is_written_into_a_foreign_block(make: Make) -> None:
    """The block that a wrong table names keeps its bytes, also where the step would have written a token into it."""
    kept: list[bytes] = []

    def aim(engine: Engine) -> None:
        tensors = engine.runner.storage.tensors
        request, victim = (engine.scheduler._live.by_id[number] for number in (A, B))
        last = request.num_computed // 4
        table(engine).tables[request.row, last] = victim.kv.blocks[0]
        kept.extend(tensor[victim.kv.blocks[0]].numpy().tobytes() for tensor in tensors)
        collect(engine, {})
        assert [tensor[victim.kv.blocks[0]].numpy().tobytes() for tensor in tensors] == kept

    run(make, aim)
    assert any(any(part) for part in kept)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["take", "release", "discard"]), st.integers(1, 4)), max_size=60))
def test_no_stamp_is_given_twice(deeds: list[tuple[str, int]]) -> None:
    """Whatever is taken, released and discarded by whom: at any time all blocks' stamps differ, and none ever comes
    back."""
    pool, held, seen = BlockPool(8), [], set[int]()
    for deed, number in deeds:
        if deed == "take" and pool.num_available:
            block = pool.take(1, namespace(number))[0]
            held.append((block, number))
            mine, others = (pool.contents.stamps([block], namespace(one))[0] for one in (number, number + 1))
            assert mine != others
        elif held:
            block, _ = held.pop(number % len(held))
            (pool.release if deed == "release" else pool.discard)([block])
        drained = pool.contents.drain_dirty()
        stamps = pool.contents.new_stamps(drained)
        assert seen.isdisjoint(stamps)
        assert len(set(stamps)) == len(drained)
        seen.update(stamps)
    for block, number in held:
        assert pool.contents.stamps([block, 0], namespace(number))[1] == NO_STAMP


def test_tags_are_wide_and_differ() -> None:
    """Ten thousand owners have ten thousand tags that leave room for generations; nobody has none."""
    tags = {tag_of(number.to_bytes(32, "little")) for number in range(10_000)}
    assert len(tags) == 10_000
    assert max(tags).bit_length() == TAG_BITS
    assert tag_of(b"") == NO_STAMP


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 5), st.integers(1, 6), st.integers(0, 11), st.integers(-3, 9))
def test_mismatches_are_those_of_the_definition(begin: int, width: int, place: int, block: int) -> None:
    """Any one entry overwritten by anything: the row shows exactly when the place is looked at and the block there is
    not the expected one, whether or not rows begin behind a window."""
    stamps = np.array([NO_STAMP, 11, 12, 13, 14, 15, 16, NOWHERE])
    tables = BlockTables(3, 48, 4)
    for number, blocks in enumerate([(1, 2, 3, 4, 5, 6) * 2, (6, 5, 4, 3, 2, 1) * 2]):
        tables.assign(number, blocks, tuple(int(stamps[one]) for one in blocks))
    before = int(tables.tables[0, place])
    tables.tables[0, place] = block
    begins = np.array([begin, 0])
    found = tables.mismatched(stamps, np.array([0, 1]), begins if begin else None, begins + width)
    looked_at = begin <= place < begin + width
    assert (found is None) == (not looked_at or block == before)
    assert found is None or found.tolist() == [True, False]


def test_windows_are_compared_too(tmp_path: Path) -> None:
    """A model with several block tables: what lies behind a window may be anybody's, a fault inside it is seen."""
    save_reference(tmp_path, "gemma3", **next(iter(FAMILIES["gemma3"].cases.values())))
    config = EngineConfig(
        model_dir=str(tmp_path),
        model_digest="00",
        block_size=4,
        kv_bytes=1 << 19,
        max_num_seqs=4,
        max_num_batched_tokens=16,
    )
    work = [submit(number, range(3, 60), 30, tenant=number) for number in (1, 2)]
    sound = generate(load_engine(config), work)
    assert all(answer.failure is None for answer in sound.values())
    engine = load_engine(config)
    assert len(engine.runner.batches._tables) > 1
    answers: dict[int, Answer] = {}
    for one in work:
        engine.add(one)
    while not all(number in answers and len(answers[number].token_ids) > 3 for number in (1, 2)):
        collect(engine, answers)
    local = engine.runner.batches._tables[1]
    first, last = 0, engine.scheduler._live.by_id[1].num_computed // local.block_size
    local.tables[row(engine, 1), first] = local.tables[row(engine, 2), last]
    collect(engine, answers)
    assert answers[1].failure is None
    local.tables[row(engine, 1), last] = local.tables[row(engine, 2), last]
    while engine.has_work:
        collect(engine, answers)
    assert answers[1].failure is FailureCode.INTEGRITY
    assert answers[2].token_ids == sound[2].token_ids
