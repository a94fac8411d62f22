"""KV that leaves the engine and comes back: the same bits, never another's, never in the way."""

from __future__ import annotations

import threading
import time
from array import array
from contextlib import suppress
from pathlib import Path

import pytest

from appliance.supervisor.spill_tiers import SpillLimits
from engine.core.engine import Engine
from engine.core.kv import spill
from engine.core.kv.outbox import Sent
from engine.core.kv.spill import LONGEST_NS, MAX_SEEKING, MAX_WAITING_OF_ONE, PATIENCE_NS
from engine.serve import serve
from isolation.ipc.engine import Drain, StepOutput
from isolation.ipc.errors import RingFull
from isolation.ipc.grammar import Masks, MaskState
from isolation.ipc.messages import FailureCode, Role
from isolation.ipc.spill import Fetch, Fetched, Forget, Keep, KvTier, Share, mark_of
from tests.engine.core.kv.spilled import MODEL, Spilling, alone, kv_of, prompt, spilling
from tests.engine.support import make_engine, namespace, submit
from tests.isolation.ipc.wire import Wire, connect


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_restored_kv_is_the_same_bits_and_gives_the_same_tokens(tmp_path: Path, tier: str) -> None:
    """A prefix that others have pushed out of the pool comes back from either tier: its bytes are those that were
    computed, its tokens those of an engine without spill, and the request says that it was cached, and from where it
    came; the first request says nothing of that (control)."""
    disk = SpillLimits(1, 64 << 20, tmp_path / "spill")
    with spilling(tmp_path, limits=disk if tier == "disk" else None) as one:
        one.run(submit(1, prompt(1)))
        before = kv_of(one.engine, prompt(1))
        one.run(*(submit(number, prompt(number)) for number in range(2, 8)))
        assert kv_of(one.engine, prompt(1)) == []
        one.run(submit(11, prompt(1)))
        assert one.cached[11] == 40
        assert (one.restored[1], sum(one.restored[11])) == ((0, 0, 0), one.restored[11][tier == "disk"])
        assert 0 < one.restored[11][tier == "disk"] <= 40
        assert kv_of(one.engine, prompt(1)) == before
        assert len(before) == 10
        figures = one.store.figures
        assert (figures.disk_bytes > 0, figures.memory_bytes > 0) == (tier == "disk", tier == "memory")
        assert figures.restored >= 10
        expected = alone(submit(1, prompt(1)))
    assert one.outputs[11] == one.outputs[1] == expected[1]


def test_without_the_tier_the_same_request_computes_again(tmp_path: Path) -> None:
    """Control: the same load without spill finds nothing cached."""
    engine = make_engine(MODEL, num_blocks=24, max_context=80)
    one = Spilling(engine, None, None, None, {}, {}, {})  # type: ignore[arg-type]
    one.run(submit(1, prompt(1)))
    one.run(*(submit(number, prompt(number)) for number in range(2, 8)))
    one.run(submit(11, prompt(1)))
    assert one.cached[11] == 0


def test_nobody_gets_anothers_blocks(tmp_path: Path) -> None:
    """The same tokens of another tenant, a deterministic request, and an engine of a later life find nothing; the
    tenant itself does (control)."""
    with spilling(tmp_path) as one:
        one.run(submit(1, prompt(1)), *(submit(number, prompt(number)) for number in range(2, 8)))
        kept = one.store.figures.kept
        one.run(submit(20, prompt(1), tenant=2), submit(21, prompt(1), deterministic=True))
        assert (one.cached[20], one.cached[21]) == (0, 0)
        one.run(submit(22, prompt(1)))
        assert one.cached[22] == 40
        assert kept > 20
        one.port.epoch = bytes(16)
        one.run(*(submit(number, prompt(number)) for number in range(30, 36)))
        one.run(submit(40, prompt(1)))
        assert one.cached[40] == 0


GROUP = namespace(8)


def test_an_adapter_that_is_not_there_ends_one_request_and_no_engine(tmp_path: Path) -> None:
    """A tenant of which blocks were sent away asks for an adapter that the engine left out: that request is refused as
    without spill, and asks for no blocks. Control: the next one without it gets its prefix back."""
    with spilling(tmp_path) as one:
        one.run(submit(1, prompt(1)), *(submit(number, prompt(number)) for number in range(2, 8)))
        one.engine.add(submit(20, prompt(1), adapter=b"a" * 32))
        assert one.engine.spill is not None and one.engine.spill.num_waiting == 0
        one.run()
        assert one.failures == {20: FailureCode.NO_ADAPTER}
        one.run(submit(21, prompt(1)))
        assert one.cached[21] == 40
        assert one.outputs[21] == one.outputs[1]


def test_a_groups_blocks_come_back_to_its_members_alone(tmp_path: Path) -> None:
    """What a member sent away under its group's key comes back to another member, with the bits that were computed. It
    never comes back to the same tenant outside of the group, nor does the tenant's private prompt to the group."""
    with spilling(tmp_path) as one:
        one.run(submit(1, prompt(1), group=GROUP), submit(2, prompt(2)))
        before = kv_of(one.engine, prompt(1), group=GROUP)
        assert len(before) == 10
        one.run(*(submit(number, prompt(number), tenant=3) for number in range(12, 18)))
        assert kv_of(one.engine, prompt(1), group=GROUP) == kv_of(one.engine, prompt(2)) == []
        one.run(submit(20, prompt(1)), submit(21, prompt(2), group=GROUP), submit(22, prompt(1), tenant=2))
        assert [one.cached[number] for number in (20, 21, 22)] == [0, 0, 0]
        one.run(*(submit(number, prompt(number), tenant=3) for number in range(23, 29)))
        restored = one.store.figures.restored
        one.run(submit(30, prompt(1), tenant=2, group=GROUP))
        assert one.cached[30] == 40
        assert one.store.figures.restored >= restored + 10
        assert kv_of(one.engine, prompt(1), group=GROUP) == before
        one.run(submit(31, prompt(2)))
        assert one.cached[31] == 40
        expected = alone(submit(1, prompt(1)))[1]
    assert one.outputs[30] == one.outputs[20] == one.outputs[1] == expected


def test_what_a_group_sent_away_is_forgotten_with_its_key(tmp_path: Path) -> None:
    """After the supervisor's word about the group's key its members find nothing, here or there; a member's own prefix
    still comes back (control)."""
    with spilling(tmp_path) as one:
        one.run(submit(1, prompt(1), group=GROUP), submit(2, prompt(2)))
        one.run(*(submit(number, prompt(number), tenant=3) for number in range(12, 18)))
        one.wire.host.send(Forget(mark_of(GROUP)))
        one.engine.look()
        one.run(submit(20, prompt(1), group=GROUP), submit(21, prompt(2)))
        assert (one.cached[20], one.cached[21]) == (0, 40)


def test_what_must_not_be_kept_never_leaves(tmp_path: Path) -> None:
    """Requests without retention send nothing and find nothing; neither does a namespace that the supervisor does not
    know, whatever the engine sends."""
    with spilling(tmp_path) as one:
        one.run(*(submit(number, prompt(number), retain=False) for number in range(1, 9)))
        assert one.engine.spill is not None and one.engine.spill.counts.sent == 0
        one.run(*(submit(number, prompt(number), tenant=9) for number in range(11, 19)))
        assert one.engine.spill.counts.sent > 0
        one.run(submit(19, prompt(11), tenant=9))
        assert one.cached[19] == 0
        assert one.store.figures.kept == 0


def silent(folder: Path) -> tuple[Engine, Wire, list[int]]:
    """An engine with something sent away, and a supervisor that reads nothing; the clock is the list's one entry."""
    wire = connect(Role.SPILL)
    clock = [0]
    engine = make_engine(MODEL, num_blocks=24, max_context=80, spill=wire.guest)
    engine._clock_ns = lambda: clock[0]
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    one.run(submit(1, prompt(1)), *(submit(number, prompt(number)) for number in range(2, 8)))
    return engine, wire, clock


def test_a_fetch_that_nobody_answers_ends_in_computing(tmp_path: Path) -> None:
    """After a quarter of a second without a word, and after two seconds of crumbs, the prompt is computed; tokens are
    the same. Answers that come later, out of turn or of a wrong length change nothing."""
    engine, wire, clock = silent(tmp_path)
    assert engine.spill is not None
    expected = alone(submit(1, prompt(1)))[1]
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    for request, answer in ((50, None), (51, b"short"), (52, b"")):
        engine.add(submit(request, prompt(1)))
        fetch = [message for message in wire.host.receive(4_096) if isinstance(message, Fetch)]
        if answer is None:
            assert fetch and engine.spill.num_waiting == 1
            assert engine.step() is None
            clock[0] += PATIENCE_NS
        else:
            wire.host.send(Fetched(fetch[-1].request, 0, answer))
        one.run()
        assert one.outputs[request] == expected
        assert (engine.spill.num_waiting, one.cached[request]) == (0, 0)
        one.run(*(submit(number, prompt(number)) for number in range(10 * request - 490, 10 * request - 484)))
        wire.host.receive(4_096)
        engine.spill._out.index.update(
            dict.fromkeys(engine.spill.cache.chain(submit(0, prompt(1))), Sent(namespace(1), None))
        )
    engine.add(submit(53, prompt(1)))
    (fetch,) = [message for message in wire.host.receive(4_096) if isinstance(message, Fetch)]
    for index in range(9):
        wire.host.send(Fetched(fetch.request, index, bytes(engine.spill.contents.size)))
        clock[0] += PATIENCE_NS - 1
        if engine.spill.num_waiting:
            engine.step()
    assert clock[0] > LONGEST_NS and engine.spill.num_waiting == 0
    wire.close()


def test_an_engine_asks_for_what_another_computed_where_its_tenant_shares(tmp_path: Path) -> None:
    """After the host's word an engine asks for all whole blocks of a prompt that it never saw, with their size; the
    bytes of another engine come in, the request says that they were cached, and its tokens are those of an engine that
    computed. It asks neither for another tenant's prompt, nor for a deterministic one, nor before the word, nor after
    the namespace was forgotten."""
    with spilling(tmp_path) as producer:
        producer.run(submit(1, prompt(1)))
        blocks, expected = kv_of(producer.engine, prompt(1)), producer.outputs[1]
    wire = connect(Role.SPILL)
    engine = make_engine(MODEL, num_blocks=200, max_context=80, spill=wire.guest)
    assert engine.spill is not None
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]

    def asked(request: int, seed: int = 1, **fields: object) -> list[Fetch]:
        engine.add(submit(request, prompt(seed), **fields))
        return [message for message in wire.host.receive(4_096) if isinstance(message, Fetch)]

    assert asked(1, seed=2) == []
    wire.host.send(Share(mark_of(namespace(1))))
    one.run()
    assert asked(2, tenant=2) == asked(3, deterministic=True) == []
    (fetch,) = asked(4)
    ids = tuple(engine.spill.cache.chain(submit(0, prompt(1))))
    assert (fetch.blocks, fetch.size, len(ids), fetch.coming) == (ids, engine.spill.contents.size, 10, False)
    for index, content in enumerate(blocks):
        wire.host.send(Fetched(fetch.request, index, content, KvTier.STORE))
    one.run()
    assert (one.cached[4], one.restored[4], one.outputs[4]) == (40, (0, 0, 40), expected)
    wire.host.send(Forget(mark_of(namespace(1))))
    one.run(submit(5, prompt(3), tenant=2))
    assert asked(6, seed=4) == []
    one.run()
    wire.close()


def test_all_blocks_are_asked_for_of_a_prompt_that_another_host_has_just_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose prompt is coming asks for all its blocks and says that they come; the same prompt without that
    word is asked for as far as an engine asks for what nobody may have, and of a tenant that does not share nothing."""
    monkeypatch.setattr(spill, "MAX_SOUGHT", 4)
    wire = connect(Role.SPILL)
    engine = make_engine(MODEL, num_blocks=200, max_context=80, spill=wire.guest)
    wire.host.send(Share(mark_of(namespace(1))))
    engine.look()
    for number, tenant, coming in ((1, 1, True), (2, 1, False), (3, 2, True)):
        engine.add(submit(number, prompt(1), tenant=tenant, coming=coming))
    asked = [message for message in wire.host.receive(4_096) if isinstance(message, Fetch)]
    assert [(len(one.blocks), one.coming) for one in asked] == [(10, True), (4, False)]
    wire.close()


def test_what_comes_for_a_forgotten_namespace_is_not_taken(tmp_path: Path) -> None:
    """Blocks that were on their way when the supervisor had the engine forget their namespace are not put into the
    pool: the request that waited for them goes on at once, and its tokens are those that it computes."""
    engine, wire, _ = silent(tmp_path)
    assert engine.spill is not None
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    engine.add(submit(50, prompt(1)))
    (fetch,) = [message for message in wire.host.receive(4_096) if isinstance(message, Fetch)]
    wire.host.send(Forget(mark_of(namespace(1))))
    for index in range(len(fetch.blocks)):
        wire.host.send(Fetched(fetch.request, index, bytes(engine.spill.contents.size), KvTier.STORE))
    one.run()
    assert (one.cached[50], engine.spill.counts.restored, engine.spill.counts.late) == (0, 0, 0)
    assert one.outputs[50] == alone(submit(1, prompt(1)))[1]
    wire.close()


def test_waiting_for_other_hosts_leaves_places_to_who_waits_for_this_one(tmp_path: Path) -> None:
    """However many requests of tenants that share come, half of the places for requests that wait is not theirs, and of
    theirs some are left for another tenant; what was sent from here is asked for meanwhile."""
    engine, wire, _ = silent(tmp_path)
    assert engine.spill is not None
    tenants = range(2, 2 + MAX_SEEKING // MAX_WAITING_OF_ONE + 1)
    for tenant in tenants:
        wire.host.send(Share(mark_of(namespace(tenant))))
    engine.look()
    for tenant in tenants:
        for number in range(MAX_WAITING_OF_ONE):
            engine.add(submit(100 * tenant + number, prompt(50 + number), tenant=tenant))
    seeking = engine.spill.num_waiting
    assert MAX_SEEKING - MAX_WAITING_OF_ONE < seeking < MAX_SEEKING
    engine.add(submit(50, prompt(1)))
    assert engine.spill.num_waiting == seeking + 1
    asked = [message for message in wire.host.receive(4_096) if isinstance(message, Fetch)]
    assert [bool(one.size) for one in asked] == [True] * seeking + [False]
    wire.close()


def test_waiting_requests_can_be_aborted_and_do_not_share_ids(tmp_path: Path) -> None:
    """An abort ends a request that waits for its prefix at once; a second one under its id ends both."""
    engine, wire, _ = silent(tmp_path)
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    engine.add(submit(50, prompt(1)))
    assert engine.spill is not None and engine.spill.num_waiting == 1
    engine.abort(50)
    engine.add(submit(51, prompt(1)))
    engine.add(submit(51, prompt(2)))
    assert engine.spill.num_waiting == 0
    one.take(engine.step())
    assert one.failures == {50: FailureCode.ABORTED, 51: FailureCode.INVALID}
    assert not engine.has_work and not engine.has_live_requests
    wire.close()


def test_the_first_mask_may_come_while_a_prefix_does(tmp_path: Path) -> None:
    """A structured request that waits for its prefix keeps the mask that comes meanwhile, and its first token is under
    it; without a mask it gives none."""
    with spilling(tmp_path) as one:
        one.run(*(submit(number, prompt(number)) for number in range(1, 8)))
        for request, masked in ((11, True), (12, False)):
            one.engine.add(submit(request, prompt(1), 1, structured=True))
            assert one.engine.spill is not None
            if masked:
                assert one.engine.spill.num_waiting == 1
                only_5 = (1 << 5).to_bytes(16, "little")
                states = bytes([MaskState.OPEN])
                one.engine.set_masks(Masks(array("Q", [request]), array("I", [0]), states, only_5))
                one.run()
            else:
                for _ in range(100):
                    one.engine.step()
        assert one.cached[11] == 40
        assert one.outputs[11] == [5]
        assert 12 not in one.outputs


@pytest.mark.parametrize("first_ends", [False, True], ids=["all run", "the first ends before it starts"])
def test_what_came_back_for_several_outputs_is_told_once(tmp_path: Path, first_ends: bool) -> None:
    """A prompt's prefix comes back once for all outputs, so its tokens are told with the first output that starts: with
    the second where the first was ended before."""
    with spilling(tmp_path) as one:
        one.run(*(submit(number, prompt(number)) for number in range(1, 8)))
        one.engine.add(submit(50, prompt(1), 2, choices=2))
        assert one.engine.spill is not None and one.engine.spill.num_waiting == 1
        while one.engine.spill.num_waiting:
            one.engine.look()
            time.sleep(0.001)
        if first_ends:
            one.engine.abort(50)
        one.run()
        told = {request: one.restored[request] for request in (50, 51) if request in one.restored}
        assert told == ({51: (40, 0, 0)} if first_ends else {50: (40, 0, 0), 51: (0, 0, 0)})
        assert one.cached[51] == 40


def test_nobody_fills_the_queue_of_fetches(tmp_path: Path) -> None:
    """Of one namespace a few requests wait at a time; the next computes its own prompt."""
    engine, wire, _ = silent(tmp_path)
    for number in range(MAX_WAITING_OF_ONE + 3):
        engine.add(submit(50 + number, prompt(1)))
    assert engine.spill is not None
    assert (engine.spill.num_waiting, engine.scheduler.num_waiting) == (MAX_WAITING_OF_ONE, 3)
    wire.close()


def test_a_full_ring_drops_blocks_and_holds_up_nobody(tmp_path: Path) -> None:
    """When the supervisor reads nothing, steps go on, tokens are right, and the blocks that found no room are
    counted."""
    wire = connect(Role.SPILL)
    engine = make_engine(MODEL, num_blocks=24, max_context=80, spill=wire.guest)
    frames = 0
    for size in (1 << 20, 64):  # Fill the ring with frames that nobody reads, then what is left of it.
        with suppress(RingFull):
            while True:
                wire.guest.send(Keep(namespace(1), b"x", bytes(size)))
                frames += 1
    one = Spilling(engine, wire, None, None, {}, {}, {})  # type: ignore[arg-type]
    one.run(*(submit(number, prompt(number)) for number in range(1, 8)))
    assert engine.spill is not None
    assert frames and engine.spill.counts.sent == 0 and engine.spill.counts.dropped > 0
    assert one.outputs[3] == alone(submit(3, prompt(3)))[3]
    wire.close()


def test_forget_makes_a_namespace_unfindable_and_zero(tmp_path: Path) -> None:
    """After the supervisor's word the tenant's cached blocks are zero in memory, and nothing of it is asked for;
    another tenant's are untouched."""
    with spilling(tmp_path, num_blocks=40) as one:
        one.run(submit(1, prompt(1)), submit(2, prompt(2), tenant=2))
        assert one.engine.spill is not None
        pool, contents = one.engine.spill.pool, one.engine.spill.contents
        mine = [block for block in range(1, 41) if pool.owner(block) == namespace(1)]
        assert any(any(contents.read(block)) for block in mine)
        one.wire.host.send(Forget(mark_of(namespace(1))))
        one.engine.look()
        one.run()
        assert not any(any(contents.read(block)) for block in mine)
        pool.check_integrity()
        one.run(submit(3, prompt(1)), submit(4, prompt(2), tenant=2))
        assert (one.cached[3], one.cached[4]) == (0, 40)


def test_hundreds_of_words_keep_no_block_waiting(tmp_path: Path) -> None:
    """Before the blocks of a request lie words about 200 namespaces, among them its own: one turn takes them all.
    Whoever is named twice has the last word: a namespace that is shared again behind a word to forget is asked for."""
    engine, wire, _ = silent(tmp_path)
    assert engine.spill is not None
    engine.spill.contents.make_room = lambda: 3  # type: ignore[method-assign]
    engine.add(submit(50, prompt(1)))
    wire.host.receive(4_096)
    wire.host.send(Share(mark_of(namespace(1))))
    for number in range(200):
        wire.host.send(Forget(mark_of(namespace(number))))
    wire.host.send(Share(mark_of(namespace(2))))
    returned = engine.spill.take(0)
    assert [one.submit.request for one in returned] == [50] and engine.spill.num_waiting == 0
    engine.add(submit(51, prompt(60)))
    engine.add(submit(52, prompt(60), tenant=2))
    assert [one.namespace for one in wire.host.receive(4_096) if isinstance(one, Fetch)] == [namespace(2)]
    wire.close()


def test_a_word_to_forget_reaches_a_sleeping_engine_at_once(tmp_path: Path) -> None:
    """The port's thread sleeps without an end and is woken by the word, and so is an engine that waits for the
    supervisor's bell; the end of the port does not wait either."""
    with spilling(tmp_path) as one:
        one.run(submit(1, prompt(1)))
        time.sleep(0.05)  # The thread sleeps.
        assert not one.wire.guest.wait(0.05), "control: nothing comes by itself"
        one.port.forget(namespace(1))
        began = time.monotonic()
        assert one.wire.guest.wait(20.0)
        one.port.close()
        one.port.close()
        assert time.monotonic() - began < 5.0, "the thread's sleep is far longer"
        assert one.wire.guest.receive(8) == [Forget(mark_of(namespace(1)))]


def test_a_word_to_forget_reaches_an_engine_whose_requests_all_wait_for_masks(tmp_path: Path) -> None:
    """A tenant's cached blocks are zero within a second of the supervisor's word, while the only live request waits for
    a mask that nobody sends; the request goes on afterwards."""
    gateway = connect()
    with spilling(tmp_path, num_blocks=40) as one:
        one.run(submit(1, prompt(1)))
        assert one.engine.spill is not None
        pool, contents = one.engine.spill.pool, one.engine.spill.contents
        mine = [block for block in range(1, 41) if pool.owner(block) == namespace(1)]
        assert any(any(contents.read(block)) for block in mine)
        loop = threading.Thread(target=serve, args=(one.engine, gateway.guest, one.wire.guest))
        loop.start()
        gateway.host.send(submit(2, prompt(2), 1, tenant=2, structured=True))
        try:
            while not one.engine.scheduler.num_running + one.engine.scheduler.num_waiting:
                time.sleep(0.001)
            time.sleep(0.2)  # The loop sleeps, past its first look.
            assert any(any(contents.read(block)) for block in mine), "control: nothing is forgotten by itself"
            one.port.forget(namespace(1))
            began = time.monotonic()
            while any(any(contents.read(block)) for block in mine) and time.monotonic() < began + 5.0:
                time.sleep(0.005)
            assert time.monotonic() - began < 1.0, "the engine's longest sleep is ten times that"
            only_5 = (1 << 5).to_bytes(16, "little")
            gateway.host.send(Masks(array("Q", [2]), array("I", [0]), bytes([MaskState.OPEN]), only_5))
            gateway.host.send(Drain())
            loop.join(20.0)
            tokens = [list(one.token_ids) for one in gateway.host.receive() if isinstance(one, StepOutput)]
            assert [5] in tokens
        finally:
            gateway.host.close()
            loop.join(20.0)
    gateway.close()


def test_a_random_load_with_spill_gives_the_tokens_of_one_without(tmp_path: Path) -> None:
    """Forty requests of three tenants over a few prefixes in a pool that is far too small: same tokens, books in
    order after every step, and restores were many."""
    import random

    rng = random.Random(7)
    submits = [
        submit(
            number,
            prompt(rng.randrange(9), rng.choice((12, 29, 41, 60))),
            rng.randint(1, 9),
            tenant=rng.randint(1, 3),
            retain=rng.random() < 0.9,
        )
        for number in range(100, 140)
    ]
    with spilling(tmp_path, num_blocks=26, limits=SpillLimits(60 << 10, 64 << 20, tmp_path / "spill")) as one:
        for at in range(0, 40, 4):
            one.run(*submits[at : at + 4])
            assert one.engine.spill is not None
            one.engine.spill.pool.check_integrity()
        figures = one.store.figures
        assert figures.restored > 30 and figures.rejected == figures.failed == 0
        assert figures.disk_bytes > 0
    assert one.outputs == alone(*submits)
