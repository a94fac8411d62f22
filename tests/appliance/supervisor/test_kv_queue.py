"""What waits for the carrier of sealed KV, against a store that is a dict: whatever the order of writes and drops, and
whatever the store answers, it ends with what was written last and not dropped, and the counts are those of what waits.
"""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.common.carrier_wire import ObjectStatus
from appliance.supervisor import kv_queue
from appliance.supervisor.kv_queue import Batch, Put, WriteQueue

NAMES = [bytes([number]) * 32 for number in range(2)]
OWNERS = ["alpha", "beta", "gamma"]
BOUNDS = {"QUEUE_BYTES": 64, "MAX_PUTS": 12, "BATCH_BYTES": 24, "MAX_OBJECTS": 4}
STATUSES = st.sampled_from([ObjectStatus.OK, ObjectStatus.REFUSED, ObjectStatus.AWAY])
ANSWERS = st.one_of(STATUSES.map(lambda status: [status] * 4), st.lists(STATUSES, min_size=4, max_size=4))
"""Of the objects of one request: taken, refused, or nothing known."""


class Written(RuleBasedStateMachine):
    """Owners that write and drop, a queue, and a store."""

    def __init__(self) -> None:
        super().__init__()
        self._bounds = mock.patch.multiple(kv_queue, **BOUNDS)
        self._bounds.start()
        self.queue = WriteQueue(names_recur=True)
        self.store: dict[bytes, int] = {}
        self.may_have: dict[bytes, set[int | None]] = {name: {None} for name in NAMES}
        """By name, the numbers of the objects that the store may end with; None: none."""
        self.dropped_at = dict.fromkeys(NAMES, 0)
        """By name, the number of the last word to drop it."""
        self.clock = 0
        self.unwanted: set[int] = set()
        self.sent: Batch = ([], ())
        """The request that is under way."""

    def teardown(self) -> None:
        """All is served in the end: what was dropped is gone, and what was written behind that is there."""
        try:
            self.answer([ObjectStatus.OK] * 4, applies=True)
            for _ in range(200):
                self.send()
                self.answer([ObjectStatus.OK] * 4, applies=True)
                if not self.queue and not self.queue.num_drops:
                    break
                if not self.queue:
                    self.queue.probe()
            assert not self.queue and not self.queue.num_drops
            for name, allowed in self.may_have.items():
                assert self.store.get(name) in allowed, (NAMES.index(name), self.store.get(name), allowed)
        finally:
            self._bounds.stop()

    @initialize(there=st.sets(st.sampled_from(NAMES)))
    def other_hosts_have_written(self, there: set[bytes]) -> None:
        """The store has objects that this host knows nothing of."""
        for name in there:
            self.store[name] = 0
            self.may_have[name] = {0}

    def offer(self, name: bytes, owner: str, size: int) -> bool:
        """Write an object; whether it waits."""
        self.clock += 1
        body = bytes([self.clock % 256]) * size
        number = self.clock
        return self.queue.offer(
            Put(name, memoryview(body), lambda _status: None, lambda: number not in self.unwanted, owner)
        )

    @rule(name=st.sampled_from(NAMES), owner=st.sampled_from(OWNERS), size=st.integers(1, 10))
    def write(self, name: bytes, owner: str, size: int) -> None:
        """Who has nothing here gets what is free; nobody gets more than is left."""
        free = 64 - self.queue._all.bytes, 12 - self.queue._all.puts
        has_none = owner not in self.queue._parts
        mine = self.queue._parts.get(owner, kv_queue._Part())
        mine_bytes, mine_puts = mine.bytes, mine.puts
        taken = self.offer(name, owner, size)
        assert taken == (mine_bytes + size <= free[0] and mine_puts < free[1])
        if has_none and size <= free[0] and free[1] > 0:
            assert taken

    @rule(name=st.sampled_from(NAMES), later=st.booleans())
    def drop(self, name: bytes, *, later: bool) -> None:
        """Drop what is there, and what waits."""
        self.clock += 1
        self.dropped_at[name] = self.clock
        self.may_have[name] = {None}
        self.queue.drop(name, later=later)

    @rule(back=st.integers(0, 5))
    def want_no_more(self, back: int) -> None:
        """An object is out of its owner's books."""
        self.unwanted.add(self.clock - back)

    @rule()
    def look(self) -> None:
        """See whether the store serves."""
        if not self.queue:
            self.queue.probe()

    @precondition(lambda self: self.sent == ([], ()))
    @rule()
    def send(self) -> None:
        """A request leaves."""
        self.sent = self.queue.batch()
        puts, drops = self.sent
        assert len(puts) + len(drops) <= 4 and not (puts and drops)
        assert sum(len(body) for _, body in puts) <= max(24, *(len(body) for _, body in puts), 0)

    @precondition(lambda self: self.sent != ([], ()))
    @rule(statuses=ANSWERS, applies=st.booleans())
    def answer(self, statuses: list[ObjectStatus], *, applies: bool) -> None:
        """It is answered; ``applies``: what is not known to be carried out was."""
        (puts, drops), self.sent = self.sent, ([], ())
        if not (puts or drops):
            return
        told = statuses[: len(puts) + len(drops)]
        for (put, body), status in zip(puts, told, strict=bool(puts)):
            number = next(one for one in range(self.clock, 0, -1) if one % 256 == body[0])
            done = status is ObjectStatus.OK or (status is ObjectStatus.AWAY and applies)
            if done:
                self.store[put.name] = number
            if number > self.dropped_at[put.name]:
                if status is ObjectStatus.OK:
                    self.may_have[put.name] = {number}
                elif done:
                    self.may_have[put.name] |= {number, None}
        for name, status in zip(drops, told, strict=bool(drops)):
            if status is ObjectStatus.OK or (status is ObjectStatus.AWAY and applies):
                self.store.pop(name, None)
        self.queue.over((puts, drops), told)

    @invariant()
    def counts_are_those_of_what_waits(self) -> None:
        """Bytes wait or are on their way; objects count while they are in the queue, dropped ones too."""
        size, count = Counter[str](), Counter[str]()
        for one in self.queue._queue:
            if isinstance(one, Put):
                size[one.owner] += 0 if one.body is None else len(one.body)
                count[one.owner] += 1
        for put, body in self.sent[0]:
            size[put.owner] += len(body)
        parts = self.queue._parts
        assert {owner: part.bytes for owner, part in parts.items() if part.bytes} == {
            owner: found for owner, found in size.items() if found
        }
        assert {owner: part.puts for owner, part in parts.items() if part.puts} == dict(count)
        assert (self.queue._all.bytes, self.queue._all.puts) == (sum(size.values()), sum(count.values()))
        assert all(part.bytes or part.puts for part in parts.values())
        assert self.queue._all.bytes <= 64 and self.queue._all.puts <= 12
        named = sum(isinstance(one, bytes) for one in self.queue._queue) + len(self.sent[1])
        assert self.queue._named == named


def put(*, wanted: bool = True) -> Put:
    """An object under the first name."""
    return Put(NAMES[0], memoryview(b"body"), lambda _status: None, lambda: wanted, "alpha")


@pytest.mark.parametrize("last", [ObjectStatus.OK, ObjectStatus.REFUSED, ObjectStatus.AWAY, None])
@pytest.mark.parametrize("later", [False, True])
def test_what_was_to_be_dropped_is_where_nothing_is_written_in_its_place(
    last: ObjectStatus | None, *, later: bool
) -> None:
    """A store that is away does not take a word to drop what an engine called wrong, and the block that is computed
    anew waits under the same name. Where that one is refused, lost on its way or wanted no more (None), the word is
    told: the store still has the wrong one. Control: where it is written, the word is not told."""
    queue = WriteQueue(names_recur=True)
    queue.drop(NAMES[0], later=False)
    if later:  # The word has come back before the block comes, else while it waits.
        queue.over(queue.batch(), [ObjectStatus.AWAY])
    assert queue.offer(put(wanted=last is not None))
    if not later:
        queue.over(queue.batch(), [ObjectStatus.AWAY])
    sent = queue.batch()
    assert bool(sent[0]) is (last is not None)
    if last is not None:
        queue.over(sent, [last])
    told = [*queue.untold, *queue.batch()[1]]  # A store that refuses an object takes words.
    assert (told, queue.num_drops) == (([], 0) if last is ObjectStatus.OK else (NAMES[:1], 1))


def test_an_object_that_left_before_the_word_is_what_it_drops() -> None:
    """An object is on its way when it is dropped, and the next one of its name is wanted no more: that the first one
    was written does not settle the word. Control: dropped before both, it does."""
    queue = WriteQueue(names_recur=True)
    assert queue.offer(put())
    sent = queue.batch()
    queue.drop(NAMES[0], later=True)
    assert queue.offer(put(wanted=False))
    queue.over(sent, [ObjectStatus.OK])
    assert queue.batch() == ([], ()) and list(queue.untold) == NAMES[:1]
    assert queue.offer(put()) and queue.offer(put(wanted=False))
    sent = queue.batch()
    assert len(sent[0]) == 1
    queue.over(sent, [ObjectStatus.OK])
    assert not queue.num_drops


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        ((ObjectStatus.REFUSED, ObjectStatus.OK), []),
        ((ObjectStatus.OK, ObjectStatus.REFUSED), []),
        ((ObjectStatus.REFUSED, ObjectStatus.REFUSED), NAMES[:1]),
    ],
)
def test_of_two_objects_of_a_name_in_one_request_one_that_is_written_settles_the_word(
    statuses: tuple[ObjectStatus, ObjectStatus], told: list[bytes]
) -> None:
    """The word to drop that was not taken is not told where either of them is in the store now. Control: neither is."""
    queue = WriteQueue(names_recur=True)
    queue.drop(NAMES[0], later=False)
    queue.over(queue.batch(), [ObjectStatus.AWAY])
    assert queue.offer(put()) and queue.offer(put())
    sent = queue.batch()
    assert len(sent[0]) == 2
    queue.over(sent, statuses)
    assert [*queue.untold, *queue.batch()[1]] == told


TestWritten = Written.TestCase
TestWritten.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, phases=[Phase.generate])
