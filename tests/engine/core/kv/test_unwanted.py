"""What an engine makes of a store that lost what it had, and does not serve; and fetches that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.core.kv.prefetch import ANSWER_NS
from engine.core.kv.spill import PATIENCE_NS
from isolation.ipc.messages import Role
from isolation.ipc.spill import Fetch, Fetched, Forget, Keep, KvTier, Lost, Miss, Unwanted, mark_of
from tests.engine.core.kv.test_computed import LONG, chain, engine_on, run, shares, told
from tests.engine.core.kv.test_prefetch import TAKING, later, taken
from tests.engine.support import namespace, submit
from tests.isolation.ipc.wire import Wire, connect


@pytest.fixture
def wire() -> Iterator[Wire]:
    """A spill channel whose end at the supervisor the test holds."""
    found = connect(Role.SPILL)
    yield found
    found.close()


def test_what_a_store_lost_is_sent_again(wire: Wire) -> None:
    """A prompt in memory, which was sent, is sent again with its next request once the store has lost it, and once
    only. Control: before that word it is not sent a second time, nor after one about another namespace."""
    engine, _ = engine_on(wire, shares(lasts_s=600))
    ids = chain(engine, LONG)
    sent = list[int]()
    for number, lost in enumerate((0, 0, 2, 1, 0), 1):
        if lost:
            wire.host.send(Lost(mark_of(namespace(lost))))
            engine.look()
        engine.add(submit(number, LONG, 1))
        run(engine)
        sent.append(sum(isinstance(one, Keep) and one.block in ids for one in told(wire)))
    assert sent == [17, 0, 0, 17, 0]
    wire.host.send(Forget(mark_of(namespace(1))))
    engine.look()
    assert engine.spill is not None and not engine.spill._out.lost_ns, "nothing is kept of what is forgotten"


@pytest.mark.parametrize("miss", list(Miss))
def test_a_gap_is_what_a_store_lacks_that_serves(wire: Wire, miss: Miss) -> None:
    """A start says that the store has a gap where it serves and has lost nothing. Where it does not serve, what was
    sent still counts as sent."""
    engine, _ = engine_on(wire, shares(computed=False, lasts_s=600))
    assert engine.spill is not None
    engine.add(submit(1, LONG, 1, coming=True))
    (fetch,) = told(wire)
    assert isinstance(fetch, Fetch)
    wire.host.send(Fetched(fetch.request, 0, b"", KvTier.MEMORY, miss))
    starts = [start for _ in range(6) if (output := engine.step()) is not None for start in output.starts]
    assert [start.store_gap for start in starts] == [miss is Miss.LACKED]


def test_a_request_waits_for_its_prefix_no_longer_than_its_deadline(wire: Wire) -> None:
    """A request whose deadline comes while it waits for blocks ends by it, and its fetch is left. Control: one without
    a deadline still waits at that time."""
    engine, clock = engine_on(wire, shares())
    engine.add(submit(1, LONG, 1, coming=True, deadline_us=50_000))
    engine.add(submit(2, LONG, 1, coming=True))
    assert engine.spill is not None and engine.spill.num_waiting == 2
    later(engine, clock, 50_000_000)
    first, second, *left = told(wire)
    assert isinstance(first, Fetch) and isinstance(second, Fetch) and left == [Unwanted(first.request)]
    assert engine.spill.num_waiting == 1
    output = engine.step()
    assert output is not None and [one.request for one in output.failures] == [1]


@pytest.mark.parametrize("how", ["aborted", "late", "prefetch ended", "prefetch late"])
def test_a_fetch_that_nobody_waits_for_is_said_so(wire: Wire, how: str) -> None:
    """The supervisor is told, once, of a fetch whose request leaves or waits no longer. Control: of one that is
    answered to its end nothing is told."""
    engine, clock = engine_on(wire, shares())
    if how.startswith("prefetch"):
        engine.prefetch(taken())
        later(engine, clock)
    else:
        engine.add(submit(1, LONG, 1, coming=True))
    (fetch,) = told(wire)
    assert isinstance(fetch, Fetch)
    if how == "aborted":
        engine.abort(1)
    elif how == "prefetch ended":
        engine.abort(TAKING)
    else:
        later(engine, clock, max(PATIENCE_NS, ANSWER_NS))
    engine.look()
    assert [one for one in told(wire) if isinstance(one, Unwanted)] == [Unwanted(fetch.request)]
    engine.add(submit(2, LONG[:20], 1))
    (other,) = [one for one in told(wire) if isinstance(one, Fetch) and not one.ahead]
    wire.host.send(Fetched(other.request, 0, b"", miss=Miss.LACKED))
    run(engine)
    assert Unwanted(other.request) not in told(wire)


def test_a_namespace_that_ends_leaves_nothing_behind(wire: Wire) -> None:
    """A block was found on another host, and its namespace ends: nothing is remembered of it, also where the store is
    said to have lost it afterwards. Control: of one that goes on, it is."""
    engine, clock = engine_on(wire, shares(), shares(2))
    assert engine.spill is not None
    out = engine.spill._out
    for tenant in (1, 2):
        out.found(b"block %d" % tenant, namespace(tenant))
    for word in (Forget, Lost):
        wire.host.send(word(mark_of(namespace(1))))
        later(engine, clock, 1)
    wire.host.send(Lost(mark_of(namespace(2))))
    later(engine, clock, 1)
    assert (list(out._found), list(out.lost_ns), list(out.lasts_s)) == (
        [b"block 2"],
        [namespace(2)],
        [mark_of(namespace(2))],
    )
