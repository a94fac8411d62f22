"""Channels: order, flow control, sleeping and waking, ends, and hostile peers, in one process."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from isolation.ipc import channel as channel_module
from isolation.ipc import messages as m
from isolation.ipc import text as t
from isolation.ipc.channel import Channel
from isolation.ipc.codec import encode
from isolation.ipc.doorbell import ThreadBell
from isolation.ipc.engine import Abort, Drain, StepOutput, Submit
from isolation.ipc.errors import LocalProtocolError, PeerGoneError, RemoteProtocolError, RingFull
from isolation.ipc.memory_order import LOOK_AGAIN_AT_MOST_S, LOOK_AGAIN_GROWTH, LOOK_AGAIN_S
from isolation.ipc.ring import CONTROL_BYTES
from isolation.ipc.segment import GUEST_TO_HOST, HOST_TO_GUEST, RING_BYTES
from isolation.ipc.state import State
from isolation.ipc.text import Decoded, Encode
from tests.isolation.ipc.strategies import SAMPLES
from tests.isolation.ipc.wire import connect

STEP = next(sample for sample in SAMPLES if isinstance(sample, StepOutput))
LARGE = Decoded(1, b"x" * (RING_BYTES // 3))
TAIL, HEAD, ASLEEP = 0, 16, 32
MOST_CALLS = 60
"""Of functions, to send a step or to receive it."""


def words_of(wire, ring):
    """The control words of a ring, as they stand now."""
    with wire.raw.arena(ring) as arena, arena.cast("Q") as words:
        return list(words)


@pytest.fixture
def wire():
    """An engine's wire after the handshake."""
    wire = connect()
    yield wire
    wire.close()


@pytest.fixture
def text():
    """A text sandbox's wire after the handshake."""
    wire = connect(m.Role.TEXT)
    yield wire
    wire.close()


def test_handshake_and_conversation(wire):
    """Both sides come to READY and messages pass both ways in order."""
    assert wire.host.state is wire.guest.state is State.READY
    submit = next(sample for sample in SAMPLES if isinstance(sample, Submit))
    wire.host.send(submit)
    wire.host.send(Abort(7))
    assert wire.guest.receive() == [submit, Abort(7)]
    wire.guest.send(STEP)
    assert wire.host.receive() == [STEP]
    assert wire.host.receive() == []
    wire.host.send(Drain())
    wire.guest.receive()
    assert wire.host.state is wire.guest.state is State.DRAINING


def test_limit_bounds_one_receive(wire):
    """One call gives at most the limit and the next goes on there."""
    for number in range(5):
        wire.host.send(Abort(number))
    assert [message.request for message in wire.guest.receive(limit=3)] == [0, 1, 2]
    assert [message.request for message in wire.guest.receive(limit=3)] == [3, 4]


def test_out_of_order_is_our_fault_or_the_peers(wire):
    """We may not send out of order; a peer that does so breaks the channel for good."""
    with pytest.raises(LocalProtocolError, match="Encode"):
        wire.host.send(Encode(1, t.SourceKind.TEXT, b"", 1))
    assert wire.host.state is State.READY
    wire.guest._writer.push(encode(m.Hello(m.PROTOCOL_VERSION, m.Role.ENGINE)))
    with pytest.raises(RemoteProtocolError, match="Hello"):
        wire.host.receive()
    assert wire.host.state is State.BROKEN
    with pytest.raises(LocalProtocolError, match="broken"):
        wire.host.send(Abort(1))
    wire.guest._writer.push(encode(STEP))
    with pytest.raises(RemoteProtocolError):
        wire.host.receive()


def test_a_message_that_does_not_fit_changes_nothing(text):
    """RingFull leaves the order where it was, and the frame goes once there is room."""
    text.guest.send(LARGE)
    text.guest.send(LARGE)
    with pytest.raises(RingFull):
        text.guest.send(LARGE)
    assert text.host.receive(limit=1) == [LARGE]
    text.guest.send(LARGE)
    assert text.host.receive() == [LARGE, LARGE]


def test_room_rings_the_bell_of_whoever_met_a_full_ring(text):
    """A writer that met a full ring is woken by the reader that makes room, and only then."""
    text.guest.send(LARGE)
    assert text.host.receive() == [LARGE]
    assert not text.guest.wait(0)
    for _ in range(2):
        text.guest.send(LARGE)
    with pytest.raises(RingFull):
        text.guest.send(LARGE)
    text.host.receive(limit=1)
    assert text.guest._bell_in.wait(0)
    assert text.guest.wait(5)
    assert text.guest.receive() == []
    text.guest.send(LARGE)
    text.host.receive()
    assert not text.guest.wait(0)


def test_room_that_came_while_the_flag_went_up_is_used(text, monkeypatch):
    """The writer looks once more after raising its flag, so no wake-up is needed then."""
    text.guest.send(LARGE)
    text.guest.send(LARGE)
    raise_flag = text.guest._writer.set_waiting

    def race(*, waiting: bool) -> None:
        raise_flag(waiting=waiting)
        if waiting:
            text.host._reader.pop()

    monkeypatch.setattr(text.guest._writer, "set_waiting", race)
    text.guest.send(LARGE)
    assert not text.host._reader.take_waiter()


def test_the_bell_is_rung_only_for_a_sleeper(wire):
    """A busy peer costs no system call; a sleeping one is woken once."""
    wire.host.send(Abort(1))
    assert not wire.guest._bell_in.wait(0)
    assert wire.guest.wait(0), "something is there, so nobody sleeps"
    wire.guest.receive()
    assert not wire.guest.arm()
    wire.host.send(Abort(2))
    wire.host.send(Abort(3))
    assert wire.guest._bell_in.wait(0)
    wire.guest.disarm()
    assert not wire.guest._bell_in.wait(0)
    assert len(wire.guest.receive()) == 2
    assert wire.guest.missed_bells == 0


def test_wait_ends_at_its_time(wire):
    """A wait without anything takes its time, no less and not for ever, and lowers its flag."""
    for timeout_s in (0.0, 0.03, 0.25):
        began = time.monotonic()
        assert not wire.host.wait(timeout_s)
        assert timeout_s <= time.monotonic() - began < timeout_s + 10
    with wire.raw.arena(GUEST_TO_HOST) as arena, arena.cast("Q") as words:
        assert words[ASLEEP] == 0


def test_wait_is_woken(wire):
    """A message from another thread ends a long wait at once."""
    timer = threading.Timer(0.05, wire.guest.send, [STEP])
    timer.start()
    assert wire.host.wait(20)
    assert wire.host.receive() == [STEP]
    timer.join()


def test_a_lost_bell_costs_one_look(wire, monkeypatch):
    """When no bell rings (the control for the stress test) the sleeper finds the message itself,
    soon, and counts it."""
    monkeypatch.setattr(wire.guest._writer, "take_sleeper", lambda *, urgent: False)
    timer = threading.Timer(0.02, wire.guest.send, [STEP])
    timer.start()
    began = time.monotonic()
    assert wire.host.wait(20)
    assert time.monotonic() - began < 50 * LOOK_AGAIN_S
    assert wire.host.receive() == [STEP]
    assert wire.host.missed_bells == 1
    timer.join()


@pytest.fixture
def slept(wire, monkeypatch):
    """Seconds of each sleep of a side that waits for a minute, in which no bell rings."""

    def wait(side):
        waits, clock = [], [0.0]

        def pause(timeout_s, also=None):
            waits.append(timeout_s)
            clock[0] += timeout_s
            return False

        monkeypatch.setattr(side._bell_in, "wait", pause)
        monkeypatch.setattr(channel_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
        assert not side.wait(60)
        return waits

    return wait


def test_a_host_looks_again_ever_less(wire, slept):
    """Where nothing comes and no bell is lost, a sleep of a minute has two looks in its first second and one each four
    seconds after that."""
    waits = slept(wire.host)
    assert waits[:3] == [LOOK_AGAIN_S, LOOK_AGAIN_GROWTH * LOOK_AGAIN_S, LOOK_AGAIN_AT_MOST_S]
    assert sum(waits) == pytest.approx(60) and len(waits) <= 3 + 60 / LOOK_AGAIN_AT_MOST_S


def test_a_guest_is_woken_by_its_bell_alone(wire, slept):
    """It sleeps for all of its time in one piece: each look would wake its sandbox."""
    assert slept(wire.guest) == [60]


def test_a_guest_whose_bell_was_lost_is_reminded(wire, monkeypatch):
    """The host rings again where the guest sleeps over what it was sent, once; the control is a host that does not.
    Where it has read everything, or is awake, nobody rings, unless the host wants to be sure of the kernel too."""
    take = wire.host._writer.take_sleeper
    monkeypatch.setattr(wire.host._writer, "take_sleeper", lambda *, urgent=True: False)
    assert not wire.guest.arm()
    wire.host.send(Abort(1))
    wire.host.remind()
    assert not wire.guest._bell_in.wait(0), "the control: nothing rang"
    monkeypatch.setattr(wire.host._writer, "take_sleeper", take)
    wire.host.remind()
    wire.host.remind()
    assert wire.guest._bell_in.wait(0)
    wire.guest.disarm()
    wire.host.remind()
    assert not wire.guest._bell_in.wait(0), "it is awake"
    wire.host.remind(sure=True)
    assert wire.guest._bell_in.wait(0)
    wire.guest.disarm()
    assert wire.guest.receive() == [Abort(1)]
    assert not wire.guest.arm()
    wire.host.remind(sure=True)
    assert not wire.guest._bell_in.wait(0), "it has read everything"


def test_a_waiting_host_reminds_the_guest(wire, monkeypatch):
    """A host that waits for the answer to what the guest sleeps over wakes it by its first look."""
    taken = iter([False])
    take = wire.host._writer.take_sleeper
    monkeypatch.setattr(wire.host._writer, "take_sleeper", lambda *, urgent=True: next(taken, None) is None and take())

    def answer():
        assert wire.guest.wait(20)
        assert wire.guest.receive() == [Abort(1)]
        wire.guest.send(STEP)

    sleeper = threading.Thread(target=answer)
    sleeper.start()
    while not words_of(wire, HOST_TO_GUEST)[ASLEEP]:
        time.sleep(0.01)
    wire.host.send(Abort(1))
    assert wire.host.wait(20)
    assert wire.host.receive() == [STEP]
    sleeper.join()


def test_a_cursor_that_cannot_be_is_found_by_the_reminder(wire):
    """A guest that claims to have read what was not sent is at fault there as elsewhere."""
    wire.host.send(Abort(1))
    with wire.raw.arena(HOST_TO_GUEST) as arena, arena.cast("Q") as words:
        words[HEAD] = 1 << 20
    with pytest.raises(RemoteProtocolError):
        wire.host.remind()


def test_another_descriptor_ends_a_wait(wire):
    """A bell of the caller's own, rung by another thread, ends a long wait at once and is left to the caller; without
    it the wait takes its time (control)."""
    bell = ThreadBell()
    assert not wire.guest.wait(0.02, bell.fileno())
    threading.Timer(0.02, bell.ring).start()
    began = time.monotonic()
    assert wire.guest.wait(20, bell.fileno())
    assert time.monotonic() - began < 10
    assert wire.guest.wait(20, bell.fileno()), "it rings until it is drained"
    bell.drain()
    assert not wire.guest.wait(0.02, bell.fileno())
    wire.host.send(Abort(1))
    assert wire.guest.wait(20, bell.fileno())
    bell.close()
    bell.close()
    bell.ring()


def test_arm_withdraws_itself_when_something_is_there(wire):
    """Arming with a message in the ring says so and leaves no flag up."""
    wire.guest.send(STEP)
    assert wire.host.arm()
    wire.guest.send(STEP)
    assert not wire.host._bell_in.wait(0)
    assert wire.host.receive() == [STEP, STEP]


def test_a_nap_is_not_broken_by_what_can_wait(wire):
    """Armed for a nap, a plain frame does not ring; an urgent one does, and both are there."""
    assert not wire.host.arm(napping=True)
    wire.guest.send(STEP, urgent=False)
    assert not wire.host._bell_in.wait(0)
    wire.guest.send(STEP)
    assert wire.host._bell_in.wait(20)
    wire.host.disarm()
    assert wire.host.receive() == [STEP, STEP]
    assert not wire.host.arm()
    wire.guest.send(STEP, urgent=False)
    assert wire.host._bell_in.wait(20)


async def test_in_an_event_loop(wire):
    """With arm, fileno and disarm an event loop gets every message, and sleeps in between."""
    loop = asyncio.get_running_loop()
    got: list[int] = []
    done = asyncio.Event()

    def readable() -> None:
        wire.host.disarm()
        while True:
            for message in wire.host.receive():
                got.append(message.running)
            if not wire.host.arm():
                break
        if len(got) == 500:
            done.set()

    def talk() -> None:
        rng = random.Random(5)
        for number in range(500):
            wire.guest.send(StepOutput(running=number))
            if rng.random() < 0.2:
                threading.Event().wait(0.0005)

    loop.add_reader(wire.host.fileno(), readable)
    readable()
    talker = threading.Thread(target=talk)
    talker.start()
    await asyncio.wait_for(done.wait(), 20)
    loop.remove_reader(wire.host.fileno())
    talker.join()
    assert got == list(range(500))


def test_last_words_are_heard_before_the_end(wire):
    """What a peer sent before it ended is received first; then every way of waiting tells."""
    wire.guest.send(STEP)
    wire.guest.close()
    assert wire.host.wait(5)
    wire.host.disarm()
    assert wire.host.receive() == [STEP]
    with pytest.raises(PeerGoneError):
        wire.host.wait(5)
    assert not wire.host.arm()
    with pytest.raises(PeerGoneError):
        wire.host.disarm()


def test_the_end_wakes_a_sleeper(wire):
    """A peer that ends while we sleep wakes us at once."""
    timer = threading.Timer(0.05, wire.guest.close)
    timer.start()
    with pytest.raises(PeerGoneError):
        wire.host.wait(20)
    timer.join()


def test_sending_to_a_sleeper_that_died(wire):
    """A peer that died asleep is noticed when its bell is rung; one that died with room owed to
    us is noticed at the next wait."""
    wire.guest.arm()
    wire.guest.send(STEP)
    wire.guest.close()
    with pytest.raises(PeerGoneError):
        wire.host.send(Abort(1))
    with wire.raw.arena(GUEST_TO_HOST) as arena, arena.cast("Q") as words:
        words[48] = 1
    assert wire.host.receive() == [STEP]


def test_another_process_of_the_host_goes_on(wire):
    """The gateway takes over in the middle: what lies in both rings stays, the order is READY, and
    the old owner's close disturbs nothing."""
    wire.guest.send(STEP)
    wire.host.send(Abort(1))
    wire.host.disarm()
    copies = [os.dup(fd) for fd in wire.host.fds()]
    gateway = Channel.host(*copies, wire.layout, m.Role.ENGINE, established=True)
    wire.host.close()
    wire.host.close()
    assert gateway.state is State.READY
    gateway.send(Abort(2))
    assert wire.guest.receive() == [Abort(1), Abort(2)]
    wire.guest.send(StepOutput())
    assert gateway.receive() == [STEP, StepOutput()]
    assert not gateway.wait(0)
    gateway.close()
    with pytest.raises(PeerGoneError):
        wire.guest.wait(5)


def test_a_channel_that_cannot_be_made_leaves_the_descriptors(wire):
    """With impossible cursors no channel comes to be, and the caller still owns what it gave."""
    with wire.raw.arena(HOST_TO_GUEST) as arena, arena.cast("Q") as words:
        words[TAIL] = 12
    copies = [os.dup(fd) for fd in wire.host.fds()]
    with pytest.raises(RemoteProtocolError):
        Channel.host(*copies, wire.layout, m.Role.ENGINE, established=True)
    for fd in copies:
        os.close(fd)


def test_a_guest_that_writes_anywhere():
    """Random words in control pages and random bytes in frames end in messages or in
    RemoteProtocolError, in whatever the host does next."""
    rng = random.Random(6)
    outcomes = {"fine": 0, "refused": 0}
    for _ in range(150):
        wire = connect()
        try:
            for _ in range(rng.randrange(4)):
                wire.guest.send(STEP)
            arena = wire.raw.arena(rng.choice([HOST_TO_GUEST, GUEST_TO_HOST]))
            with arena, arena[:CONTROL_BYTES].cast("Q") as words:
                for _ in range(rng.randint(1, 3)):
                    if rng.random() < 0.5:
                        words[rng.choice([0, 16, 32, 48])] = rng.choice(
                            [rng.getrandbits(64), 8 * rng.randrange(200), 1]
                        )
                    else:
                        arena[CONTROL_BYTES + rng.randrange(400)] = rng.randrange(256)
            try:
                wire.host.receive()
                wire.host.send(Abort(1))
                wire.host.wait(0)
                wire.host.disarm()
                wire.host.arm()
                outcomes["fine"] += 1
            except RemoteProtocolError:
                outcomes["refused"] += 1
        finally:
            wire.close()
    assert min(outcomes.values()) > 10, outcomes


def test_both_sides_leave_no_descriptor(wire):
    """Closing gives back every descriptor, mappings included."""
    before = len(os.listdir("/proc/self/fd"))
    other = connect(m.Role.TEXT)
    other.close()
    assert len(os.listdir("/proc/self/fd")) == before


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, are called meanwhile."""
    counts, before = Counter[str](), sys.getprofile()
    sys.setprofile(lambda _frame, event, _argument: counts.update((event,)))
    try:
        work()
    finally:
        sys.setprofile(before)
    return counts["call"] + counts["c_call"]


def test_a_step_costs_few_calls_whatever_its_size(wire):
    """Nothing is done token by token: sending a step of 512 tokens calls as many functions as one of 8, receiving it
    too, and both are few. What they take is measured in bench/ring.py."""

    def step(tokens: int) -> StepOutput:
        return StepOutput(
            requests=array("Q", range(tokens)), token_ids=array("I", range(tokens)), finishes=bytes(tokens)
        )

    found = []
    for tokens in (8, 512):
        message = step(tokens)
        found.append((calls_of(lambda: wire.guest.send(message)), calls_of(wire.host.receive)))
    assert found[0] == found[1]
    assert max(found[0]) <= MOST_CALLS
    assert calls_of(lambda: [abs(number) for number in range(512)]) >= 512, "the control: calls are counted"
