"""The ring: against a queue as its model, at its edges, and with a hostile peer."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from isolation.ipc.codec import decode, encode
from isolation.ipc.engine import Abort
from isolation.ipc.errors import LocalProtocolError, RemoteProtocolError, RingFull
from isolation.ipc.frame import HEADER_BYTES
from isolation.ipc.messages import MAX_FRAME_BYTES
from isolation.ipc.ring import CONTROL_BYTES, RingReader, RingWriter
from isolation.ipc.text import Decoded
from tests.isolation.ipc.fuzz import fuzz_ring

CAPACITY = MAX_FRAME_BYTES + 64
TAIL, HEAD = 0, 16


class Arena:
    """An arena in private memory, with the words a peer could write."""

    def __init__(self, cursor: int = 0, capacity: int = CAPACITY) -> None:
        self.view = memoryview(bytearray(CONTROL_BYTES + capacity))
        self.words = self.view[:CONTROL_BYTES].cast("Q")
        self.data = self.view[CONTROL_BYTES:]
        self.words[TAIL] = self.words[HEAD] = cursor


def bytes_frame(size: int, fill: int = 0) -> bytes:
    """A frame of this size: its length, then one byte again and again."""
    return size.to_bytes(4, "little") + bytes([fill]) * (size - 4)


def room(size: int) -> int:
    """Bytes that a frame takes in the ring."""
    return (size + 7) // 8 * 8


class RingMachine(RuleBasedStateMachine):
    """A writer and a reader that behave like one bounded queue, wherever the cursors stand."""

    def __init__(self) -> None:
        super().__init__()
        # Near the end of the data, so that frames wrap at once.
        self.arena = Arena(cursor=(1 << 30) * CAPACITY - 8 * 40)
        self.writer = RingWriter(self.arena.view)
        self.reader = RingReader(self.arena.view)
        self.model: deque[bytes] = deque()
        self.used = 0
        self.fill = 0

    @rule(size=st.one_of(st.integers(HEADER_BYTES, 200), st.integers(CAPACITY // 8, CAPACITY // 3)))
    def push(self, size: int) -> None:
        """A frame goes in exactly when there is room."""
        self.fill = (self.fill + 1) % 256
        frame = bytes_frame(size, self.fill)
        if self.used + room(size) <= CAPACITY:
            self.writer.push(frame)
            self.model.append(frame)
            self.used += room(size)
        else:
            with pytest.raises(RingFull):
                self.writer.push(frame)

    @rule()
    def pop(self) -> None:
        """The oldest frame comes out, or none."""
        expected = self.model.popleft() if self.model else None
        assert self.reader.pop() == expected
        if expected is not None:
            self.used -= room(len(expected))

    @rule()
    def resume_writer(self) -> None:
        """Another process may go on where this one stopped."""
        self.writer = RingWriter(self.arena.view)

    @rule()
    def resume_reader(self) -> None:
        """The same at the reader's end."""
        self.reader = RingReader(self.arena.view)

    @precondition(lambda self: self.model)
    @rule()
    def drain(self) -> None:
        """All frames come out in order."""
        while self.model:
            self.pop()

    @invariant()
    def pending_tells(self) -> None:
        """``pending`` says whether the model holds anything."""
        assert self.reader.pending() == bool(self.model)


TestRingModel = RingMachine.TestCase
TestRingModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)


@pytest.mark.parametrize("before_end", range(8, HEADER_BYTES + 41, 8))
def test_a_frame_wraps_at_every_place(before_end):
    """Wherever the end of the data cuts a frame, it comes out whole."""
    arena = Arena(cursor=CAPACITY - before_end)
    writer, reader = RingWriter(arena.view), RingReader(arena.view)
    frames = [bytes(encode(Abort(number))) for number in range(5)]
    frames.append(encode(Decoded(1, b"0123456789")))
    for frame in frames:
        writer.push(frame)
    assert [reader.pop() for _ in frames] == frames
    assert reader.pop() is None


def test_the_largest_frame_passes_and_fills():
    """The largest frame fits into an empty ring and nothing fits beside it."""
    arena = Arena(cursor=8 * 1001, capacity=MAX_FRAME_BYTES)
    writer, reader = RingWriter(arena.view), RingReader(arena.view)
    frame = bytes_frame(MAX_FRAME_BYTES, 7)
    writer.push(frame)
    with pytest.raises(RingFull):
        writer.push(bytes_frame(HEADER_BYTES))
    assert reader.pop() == frame
    writer.push(bytes_frame(HEADER_BYTES))


@pytest.mark.parametrize(
    "frame",
    [b"", bytes_frame(HEADER_BYTES)[:-1], bytes_frame(HEADER_BYTES) + b"x", bytes_frame(MAX_FRAME_BYTES + 1)],
    ids=["empty", "short", "longer than it says", "too large"],
)
def test_what_is_no_frame_is_not_pushed(frame):
    """Bytes that do not begin with their own length never reach the peer."""
    arena = Arena()
    with pytest.raises(LocalProtocolError):
        RingWriter(arena.view).push(frame)
    assert RingReader(arena.view).pop() is None


@pytest.mark.parametrize("length", [CONTROL_BYTES, CONTROL_BYTES + MAX_FRAME_BYTES + 4])
def test_a_useless_arena_is_refused(length):
    """An arena too small for the largest frame, or off the grid, is our own mistake."""
    with pytest.raises(LocalProtocolError):
        RingReader(memoryview(bytearray(length)))


@pytest.mark.parametrize(
    "tail",
    [0, 8, 64 - 8, 64 + 1, 64 + CAPACITY + 8, (1 << 64) - 8, 1 << 63],
    ids=["zero", "back", "one back", "off the grid", "past", "end", "half"],
)
def test_reader_refuses_a_hostile_tail(tail):
    """A writer's cursor that went back, off the grid or past the capacity ends the reading."""
    arena = Arena(cursor=64)
    reader = RingReader(arena.view)
    arena.words[TAIL] = tail
    for look in (reader.pop, reader.pending):
        with pytest.raises(RemoteProtocolError):
            look()


def test_a_tail_that_goes_back_after_it_was_seen_is_refused():
    """The reader remembers the last cursor it saw; a smaller one later is a breach."""
    arena = Arena()
    writer, reader = RingWriter(arena.view), RingReader(arena.view)
    for _ in range(3):
        writer.push(bytes_frame(HEADER_BYTES))
    assert reader.pop() is not None
    arena.words[TAIL] = 2 * HEADER_BYTES
    assert [reader.pop() is not None for _ in range(2)] == [True, True]
    with pytest.raises(RemoteProtocolError):
        reader.pop()


@pytest.mark.parametrize(
    "head", [0, 56, 64 + 4, 64 + CAPACITY, (1 << 64) - 8], ids=["zero", "back", "odd", "past", "end"]
)
def test_writer_refuses_a_hostile_head(head):
    """A reader's cursor that went back, off the grid or past the writer's ends the writing."""
    arena = Arena(cursor=64)
    writer = RingWriter(arena.view)
    writer.push(bytes_frame(MAX_FRAME_BYTES))
    arena.words[HEAD] = head
    with pytest.raises(RemoteProtocolError):
        writer.push(bytes_frame(MAX_FRAME_BYTES))


@pytest.mark.parametrize("end", [RingReader, RingWriter])
@pytest.mark.parametrize("cursor", [(1 << 62) + 8, (1 << 64) - 8, 12])
def test_an_impossible_cursor_is_not_resumed(end, cursor):
    """A process that takes a channel over refuses cursors no honest ring can have."""
    with pytest.raises(RemoteProtocolError):
        end(Arena(cursor=cursor).view)


@pytest.mark.parametrize("length", [0, HEADER_BYTES - 1, 24 + 1, MAX_FRAME_BYTES + 1, 0xFFFF_FFFF])
def test_reader_refuses_a_hostile_length(length):
    """A length below a header, above what was published or above the limit is refused."""
    arena = Arena()
    reader = RingReader(arena.view)
    arena.data[:4] = length.to_bytes(4, "little")
    arena.words[TAIL] = 24
    with pytest.raises(RemoteProtocolError):
        reader.pop()


def test_reader_refuses_a_length_above_the_limit_that_was_published():
    """Even where that many bytes are there, no frame is longer than the limit."""
    arena = Arena()
    reader = RingReader(arena.view)
    arena.data[:4] = (MAX_FRAME_BYTES + 1).to_bytes(4, "little")
    arena.words[TAIL] = CAPACITY
    with pytest.raises(RemoteProtocolError):
        reader.pop()


def test_a_length_changed_after_the_look_is_found():
    """A peer that changes the length between our look and our copy (a double fetch) gains nothing:
    the copy has the size that was checked, and the codec refuses it."""

    class Flipping:
        """The view of lengths, with a peer that is always just behind us."""

        def __init__(self, lengths: memoryview) -> None:
            self.lengths = lengths

        def __getitem__(self, place: int) -> int:
            seen = self.lengths[place]
            self.lengths[place] = 0xFFFF_FFF0
            return seen

    arena = Arena()
    writer, reader = RingWriter(arena.view), RingReader(arena.view)
    writer.push(encode(Abort(1)))
    reader._lengths = Flipping(reader._lengths)
    frame = reader.pop()
    assert frame is not None
    assert len(frame) == len(encode(Abort(1)))
    with pytest.raises(RemoteProtocolError, match="claims a length"):
        decode(frame)


def test_random_arenas_stay_within_the_protocol():
    """Arenas with random cursors and content give frames or RemoteProtocolError, nothing else."""
    rng = random.Random(3)
    content = b"".join(encode(Abort(number)) + bytes(number % 2 * 8) for number in range(20))
    for _ in range(300):
        head = rng.choice([0, 8, 24, rng.getrandbits(64), 8 * rng.randrange(1000)])
        tail = rng.choice([head, head + 24, head + 8 * rng.randrange(100), rng.getrandbits(64)])
        data = bytearray(content)
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        cursors = tail % (1 << 64), head
        fuzz_ring(b"".join(cursor.to_bytes(8, "little") for cursor in cursors) + bytes(data))


def test_flags_are_taken_once():
    """The sleeper's flag and the waiter's go up on one side and down on the other."""
    arena = Arena()
    writer, reader = RingWriter(arena.view), RingReader(arena.view)
    assert not writer.take_sleeper()
    reader.set_asleep(asleep=True)
    assert writer.take_sleeper()
    assert not writer.take_sleeper()
    assert not reader.take_waiter()
    writer.set_waiting(waiting=True)
    assert reader.take_waiter()
    assert not reader.take_waiter()
    reader.set_asleep(asleep=True)
    reader.set_asleep(asleep=False)
    assert not writer.take_sleeper()


def test_a_nap_is_broken_by_what_is_urgent_and_by_a_ring_half_full():
    """A reader that naps is left alone by plain frames until they fill half the ring."""
    arena = Arena()
    writer, reader = RingWriter(arena.view), RingReader(arena.view)
    reader.set_asleep(asleep=True, napping=True)
    assert not writer.take_sleeper(urgent=False)
    assert writer.take_sleeper()
    assert not writer.take_sleeper()
    reader.set_asleep(asleep=True, napping=True)
    content = bytes_frame(CAPACITY // 8 // 8 * 8)
    pushed = 0
    while not writer.take_sleeper(urgent=False):
        writer.push(content)
        pushed += len(content)
    assert CAPACITY // 2 < pushed <= CAPACITY // 2 + len(content)
    while reader.pop() is not None:
        pass
    reader.set_asleep(asleep=True, napping=True)
    assert not writer.take_sleeper(urgent=False)
    reader.set_asleep(asleep=True)
    assert writer.take_sleeper(urgent=False)


def test_what_was_read_lies_there_no_longer() -> None:
    """Once a frame is out of the ring its bytes are zero, also where it wrapped; one that is not read is there
    (control)."""
    arena = Arena(cursor=(1 << 30) * CAPACITY - 64)
    writer, reader = RingWriter(arena.view), RingReader(arena.view)
    for size in (200, 40):
        writer.push(bytes_frame(size, 7))
    assert reader.pop() == bytes_frame(200, 7)
    assert bytes(arena.data).count(7) == 36
    assert reader.pop() == bytes_frame(40, 7)
    assert not any(bytes(arena.data))
