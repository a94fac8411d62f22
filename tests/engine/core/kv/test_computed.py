"""Blocks of prompts that are sent when they are computed: in order, once, within bounds, and of nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from engine.core.backend import Samples
from engine.core.engine import Engine
from engine.core.kv.backlog import BYTES_PER_S, MAX_NOTED, MAX_OF_ONE, STALE_NS, TURN_BYTES, Backlog
from engine.core.scheduler.plan import FAILED, StepPlan
from isolation.ipc.errors import RingFull
from isolation.ipc.messages import Role
from isolation.ipc.spill import Fetch, Fetched, Forget, Keep, KvTier, Miss, Share, Withdraw, mark_of
from tests.engine.core.kv.spilled import MODEL, Spilling, kv_of, prompt
from tests.engine.support import make_engine, namespace, submit
from tests.isolation.ipc.wire import Wire, connect

LONG = prompt(1, 70)
"""Seventeen blocks and a part, computed in three chunks of 32 tokens at the most."""


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A spill channel whose end at the supervisor the test holds."""
    found = connect(Role.SPILL)
    yield found
    found.close()


def engine_on(wire: Wire, *words: Share, num_blocks: int = 200, **fields: object) -> tuple[Engine, list[int]]:
    """An engine that has heard these words, and its clock, which a step moves by 10 ms."""
    engine, clock = make_engine(MODEL, num_blocks=num_blocks, max_context=80, spill=wire.guest, **fields), [0]

    def now() -> int:
        clock[0] += 10_000_000
        return clock[0]

    engine._clock_ns = now
    for word in words:
        wire.host.send(word)
    engine.look()
    return engine, clock


def told(wire: Wire) -> list[Keep | Fetch | Withdraw]:
    """What the engine has sent."""
    found: list[Keep | Fetch | Withdraw] = []
    while more := wire.host.receive(4_096):
        found += more  # type: ignore[arg-type]  # the guest's messages of this channel
    return found


def fill(wire: Wire) -> None:
    """Fill the ring with frames that nobody reads, then what is left of it."""
    for size in (1 << 20, 64):
        with suppress(RingFull):
            while True:
                wire.guest.send(Keep(namespace(1), b"x", bytes(size)))


def kept(wire: Wire) -> list[bytes]:
    """Ids of the blocks that were sent."""
    return [one.block for one in told(wire) if isinstance(one, Keep)]


def run(engine: Engine) -> None:
    """Serve all to their ends, and look once more, as an idle loop does."""
    Spilling(engine, None, None, None, {}, {}, {}).run()  # type: ignore[arg-type]
    engine.look()


def chain(engine: Engine, token_ids: list[int], **fields: object) -> list[bytes]:
    """Ids of a prompt's blocks."""
    assert engine.spill is not None
    return list(engine.spill.cache.chain(submit(0, token_ids, **fields)))


def shares(number: int = 1, *, computed: bool = True, lasts_s: int = 0) -> Share:
    """The word that a namespace's blocks are shared."""
    return Share(mark_of(namespace(number)), computed, lasts_s)


def test_blocks_of_a_prompt_are_sent_in_order_while_it_is_computed(wire: Wire) -> None:
    """Each step sends what the chunk before it filled, with the bytes that lie in the pool, while nothing is evicted.
    Blocks of the answer are not sent. Control: without the word, or with one that does not say so, nothing is."""
    engine, _ = engine_on(wire, shares())
    ids = chain(engine, LONG)
    engine.add(submit(1, LONG, 8))
    assert [one.blocks for one in told(wire) if isinstance(one, Fetch)] == [tuple(ids)], "first it asks for them"
    wire.host.send(Fetched(1, 0, b""))
    seen, each = list[Keep](), []
    while engine.has_work:
        engine.step()
        came = [one for one in told(wire) if isinstance(one, Keep)]
        seen += came
        each.append(len(came))
    assert [one for one in each if one] == [8, 8, 1] and each.index(8) < each.index(1) < len(each) - 4
    assert [one.block for one in seen] == ids
    assert [one.content for one in seen] == kv_of(engine, LONG)
    assert all((one.namespace, one.left_out) == (namespace(1), 0) for one in seen)
    assert engine.spill is not None and engine.spill.counts.dropped == 0
    for word in ((), (shares(computed=False),)):
        plain = connect(Role.SPILL)
        other, clock = engine_on(plain, *word)
        other.add(submit(1, LONG, 8))
        clock[0] += 10**10  # No answer of the store: it computes.
        run(other)
        assert kept(plain) == []
        plain.close()


def test_what_was_sent_when_computed_is_not_sent_again(wire: Wire) -> None:
    """In a small pool the blocks lose their place later: none is sent a second time, and all come back from the
    supervisor's memory when asked for; blocks of the answers are sent then, as before."""
    engine, clock = engine_on(wire, shares(), num_blocks=26)
    ids = chain(engine, LONG)
    sent = list[bytes]()
    for number in range(1, 5):
        engine.add(submit(number, prompt(number, 70), 8))
        clock[0] += 10**10
        run(engine)
        sent += kept(wire)
    assert kv_of(engine, LONG) == []
    assert len(sent) == len(set(sent)) and sent[: len(ids)] == ids and len(sent) > 4 * len(ids)
    engine.add(submit(9, LONG))
    assert [one.blocks for one in told(wire) if isinstance(one, Fetch)] == [tuple(ids)]


def test_what_the_store_has_forgotten_is_sent_again(wire: Wire) -> None:
    """A prompt that lies in the pool is sent once for each time for which the store keeps it, when a request finds it.
    Control: within that time, and of a namespace whose blocks last for ever, it is not sent again. The engine still
    asks its own supervisor for what lost its place."""
    engine, clock = engine_on(wire, shares(lasts_s=600), shares(2))
    ids = chain(engine, LONG)

    def again(number: int, later_s: int = 0, **fields: object) -> list[bytes]:
        clock[0] += later_s * 10**9
        engine.add(submit(number, LONG, 2, **fields))
        clock[0] += 10**10 * (number < 3)  # No answer of the store to the first ones.
        run(engine)
        return kept(wire)

    assert again(1) == ids and len(again(2, tenant=2)) == len(ids)
    assert again(3, 500) == []
    assert (again(4, 100), again(5, 1)) == (ids, [])
    assert again(6, 600) == ids
    assert again(7, 10_000, tenant=2) == []
    assert engine.spill is not None and engine.spill._out.known == {namespace(1): len(ids), namespace(2): len(ids)}


def test_what_came_from_another_host_is_sent_once_the_store_may_have_forgotten_it(wire: Wire) -> None:
    """Blocks that came from the store are sent there when half of the time is over for which it keeps a block, since
    nobody here knows how old they were. Control: before that they are not."""
    engine, clock = engine_on(wire, shares(lasts_s=600))
    assert engine.spill is not None
    ids = chain(engine, LONG)
    engine.add(submit(1, LONG, 2))
    (fetch,) = [one for one in told(wire) if isinstance(one, Fetch)]
    for index in range(len(ids)):
        wire.host.send(Fetched(fetch.request, index, bytes(engine.spill.contents.size), KvTier.STORE))
    run(engine)
    assert kept(wire) == []
    for number, (later_s, wanted) in enumerate(((290, []), (20, ids), (290, [])), 2):
        clock[0] += later_s * 10**9
        engine.add(submit(number, LONG, 2))
        run(engine)
        assert kept(wire) == wanted


def test_what_was_found_and_is_missed_later_is_sent_when_it_is_computed(wire: Wire) -> None:
    """A prompt came from the store, lost its place here, and is asked for again when the store has lost it, as after
    its restart: all of its blocks are computed and sent, not the first alone. Control: those that another prompt pushed
    out and that still came are not sent back."""
    engine, clock = engine_on(wire, shares(), num_blocks=26)
    assert engine.spill is not None
    ids, size = chain(engine, LONG), engine.spill.contents.size

    def asked(number: int, answers: int) -> list[bytes]:
        engine.add(submit(number, LONG, 2))
        (fetch,) = [one for one in told(wire) if isinstance(one, Fetch)]
        for index in range(answers):
            wire.host.send(Fetched(fetch.request, index, bytes(size), KvTier.STORE))
        if answers < len(fetch.blocks):
            wire.host.send(Fetched(fetch.request, answers, b"", miss=Miss.LACKED))
        run(engine)
        return kept(wire)

    def push_out(number: int) -> None:
        for other in (number, number + 1):
            engine.add(submit(other, prompt(other, 70), 8))
            clock[0] += 10**10
            run(engine)
            told(wire)
        assert kv_of(engine, LONG) == []

    assert not {*ids} & {*asked(1, len(ids))}
    push_out(11)
    assert not {*ids} & {*asked(2, len(ids))}
    push_out(21)
    assert [one for one in asked(3, 0) if one in ids] == ids


def test_what_other_hosts_do_not_look_for_is_not_sent(wire: Wire) -> None:
    """Prompts that are not kept, deterministic ones, those behind a public prefix and those of a namespace that was not
    named, or no longer, are not sent. Control: the same tenant's next prompt is."""
    engine, clock = engine_on(wire, shares())
    for number, fields in enumerate(
        ({"retain": False}, {"deterministic": True}, {"public": bytes(32)}, {"tenant": 2}, {"choices": 2}), 1
    ):
        engine.add(submit(10 * number, prompt(number, 70), 2, **fields))
        clock[0] += 10**10
        run(engine)
        assert kept(wire) == ([] if number < 5 else chain(engine, prompt(number, 70)))
    wire.host.send(Forget(mark_of(namespace(1))))
    engine.look()
    engine.add(submit(90, prompt(9, 70), 2))
    run(engine)
    assert kept(wire) == []


def test_what_waits_is_forgotten_with_its_namespace(wire: Wire) -> None:
    """The word to forget comes between two chunks: nothing of what was computed is sent behind it."""
    engine, clock = engine_on(wire, shares())
    engine.add(submit(1, LONG, 2))
    clock[0] += 10**10
    engine.step()
    wire.host.send(Forget(mark_of(namespace(1))))
    run(engine)
    assert kept(wire) == []


def test_a_cached_prompt_is_sent_when_it_was_not_yet(wire: Wire) -> None:
    """A prompt was computed before the word came: the next request that finds it in the pool has it sent. A block that
    came from another host is not sent back there."""
    engine, clock = engine_on(wire)
    engine.add(submit(1, LONG, 2))
    run(engine)
    wire.host.send(shares())
    engine.look()
    engine.add(submit(2, LONG, 2))
    clock[0] += 10**10
    run(engine)
    assert kept(wire) == chain(engine, LONG)
    assert engine.spill is not None
    other = prompt(5, 70)
    engine.add(submit(3, other, 2))
    (fetch,) = [one for one in told(wire) if isinstance(one, Fetch)]
    for index in range(4):
        wire.host.send(Fetched(fetch.request, index, bytes(engine.spill.contents.size), KvTier.STORE))
    wire.host.send(Fetched(fetch.request, 4, b""))
    run(engine)
    assert kept(wire) == chain(engine, other)[4:]


def test_a_supervisor_that_lags_holds_up_nobody(wire: Wire) -> None:
    """The ring is full: steps go on and give their tokens, what waits is kept for a while, then left out and counted;
    the next block that is sent says how many. Control: what waits no longer than that is sent, in order."""
    engine, clock = engine_on(wire, shares(), shares(2))
    engine.add(submit(1, LONG, 2))
    clock[0] += 10**10
    fill(wire)
    run(engine)
    assert not engine.has_live_requests and 0 < engine.idle_wait_s(1.0) < 0.1, "it looks again soon"
    told(wire)
    engine.look()
    assert kept(wire) == chain(engine, LONG)
    fill(wire)
    engine.add(submit(2, prompt(2, 70), 2, tenant=2))
    clock[0] += 10**10
    run(engine)
    clock[0] += STALE_NS
    engine.look()
    told(wire)
    engine.look()
    assert told(wire) == [] and engine.idle_wait_s(1.0) == 1.0, "nothing waits any more"
    engine.add(submit(3, prompt(3, 70), 2))
    clock[0] += 10**10
    run(engine)
    assert [one.left_out for one in told(wire) if isinstance(one, Keep)][:2] == [17, 0]


def test_blocks_that_turn_out_to_be_wrong_are_withdrawn(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a prompt's last chunk are broken, as where its KV is: all of its blocks that were sent, or came
    from another host, are withdrawn, and sent again when they are computed anew. Control: a sound prompt's are not."""
    engine, clock = engine_on(wire, shares())
    engine.add(submit(1, prompt(2, 70), 2))
    clock[0] += 10**10
    run(engine)
    assert engine.spill is not None and not [one for one in told(wire) if isinstance(one, Withdraw)]
    execute = engine.runner.execute

    def broken(plan: StepPlan) -> Samples:
        samples = execute(plan)
        return replace(samples, token_ids=[FAILED] * len(samples.token_ids))

    monkeypatch.setattr(engine.runner, "execute", broken)
    engine.add(submit(2, LONG, 2))
    ids = chain(engine, LONG)
    (fetch,) = [one for one in told(wire) if isinstance(one, Fetch)]
    for index in range(4):
        wire.host.send(Fetched(fetch.request, index, bytes(engine.spill.contents.size), KvTier.STORE))
    wire.host.send(Fetched(fetch.request, 4, b""))
    run(engine)
    messages = told(wire)
    assert [one.block for one in messages if isinstance(one, Keep)] == ids[4:12], "the last chunk was not sent yet"
    withdrawn = [(one.namespace, one.block) for one in messages if isinstance(one, Withdraw)]
    assert sorted(withdrawn) == sorted((namespace(1), one) for one in ids[:12])
    assert engine.spill.counts.withdrawn == 12
    monkeypatch.undo()
    engine.add(submit(3, LONG, 2))
    clock[0] += 10**10
    run(engine)
    assert kept(wire) == ids, "control: computed anew it is sent"


def test_a_turn_copies_a_bounded_number_of_bytes() -> None:
    """At once no more than a turn's bytes and a block, and on and on no more than a second's; namespaces take turns,
    and each one's blocks stay in order."""
    backlog, size, now = Backlog(), 64 << 10, 0

    def turn() -> list[tuple[bytes, bytes]]:
        backlog.begin_turn(now)
        taken = []
        while (first := backlog.first()) is not None:
            taken.append(first)
            backlog.drop_first(size)
        return taken

    for number in (1, 2):
        backlog.begin(mark_of(namespace(number)))
        backlog.note(namespace(number), [bytes([number]) + at.to_bytes(2, "big") for at in range(4_000)])
    now = 10**12
    first = turn()
    assert len(first) == TURN_BYTES // size
    assert [key for key, _ in first[:4]] == [namespace(1), namespace(2)] * 2
    for number in (1, 2):
        mine = [one for key, one in first if key == namespace(number)]
        assert mine == sorted(mine)
    assert turn() == []
    copied = 0
    for _ in range(200):
        now += 5_000_000
        copied += len(turn()) * size
    assert abs(copied - BYTES_PER_S) < TURN_BYTES


def test_what_waits_is_bounded_for_all_and_for_one() -> None:
    """A namespace has half of the places where it is alone, and each further one half of what is left; the first blocks
    of a prompt have them, and what found none is counted. A namespace that was not named has none."""
    backlog = Backlog()
    ids = [at.to_bytes(3, "big") for at in range(MAX_OF_ONE + 10)]
    backlog.note(namespace(1), ids)
    assert (len(backlog), backlog.left_out) == (0, 0)
    for number in (1, 2, 3):
        backlog.begin(mark_of(namespace(number)))
        backlog.note(namespace(number), ids)
    parts = [MAX_OF_ONE, MAX_OF_ONE // 2, MAX_OF_ONE // 4]
    left_out = 3 * len(ids) - sum(parts)
    assert (len(backlog), backlog.left_out) == (sum(parts), left_out)
    backlog.end(mark_of(namespace(1)))
    assert len(backlog) == sum(parts[1:])
    backlog.begin_turn(1_000_000_000)
    assert backlog.first() == (namespace(2), ids[0])
    assert backlog.take_left_out() == left_out and backlog.take_left_out() == 0


def test_what_cannot_be_sent_for_long_is_left_out() -> None:
    """Time counts from the first turn that could not send, and begins anew when one can: a step that takes longer than
    the bound leaves nothing out."""
    backlog = Backlog()
    backlog.begin(mark_of(namespace(1)))
    backlog.note(namespace(1), [b"a", b"b", b"c"])
    backlog.begin_turn(10**10)
    backlog.delay()
    backlog.begin_turn(10**10 + 5 * STALE_NS)
    backlog.drop_first(1)
    backlog.delay()
    assert len(backlog) == 2
    backlog.begin_turn(10**10 + 6 * STALE_NS)
    backlog.delay()
    assert (len(backlog), backlog.left_out, backlog.first()) == (0, 2, None)


def test_who_comes_behind_greedy_tenants_has_a_place() -> None:
    """Two namespaces note more blocks than may wait in all: one has half of the room where it is alone, and a third
    that comes behind both has all blocks of its prompt noted. What is beyond is counted as left out (control)."""
    backlog = Backlog()
    for number in (1, 2, 3):
        backlog.begin(mark_of(namespace(number)))
    ids = [number.to_bytes(16, "little") for number in range(MAX_NOTED)]
    backlog.note(namespace(1), ids)
    assert len(backlog) == MAX_OF_ONE
    backlog.note(namespace(2), ids)
    before, left_out = len(backlog), backlog.left_out
    assert before + left_out == 2 * MAX_NOTED
    backlog.note(namespace(3), ids[:1_000])
    assert (len(backlog) - before, backlog.left_out) == (1_000, left_out)
