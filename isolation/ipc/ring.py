"""A single-producer, single-consumer ring of frames over a shared arena.

The arena is a control page and the data behind it. Cursors count bytes since the beginning and
never wrap (64 bits last for centuries); a cursor's place in the data is its value modulo the
capacity. The control page holds four words, each alone on its pair of cache lines:

    tail     written by the producer: frames end here
    head     written by the consumer: everything before is free
    asleep   set by the consumer before it blocks, taken by the producer that rings its bell; a consumer that
             naps will look by itself soon, and is rung for what is urgent or when the ring is half full
    waiting  set by the producer that met a full ring, taken by the consumer that made room

    0 <= head <= tail <= head + capacity,   frames fill [head, tail),   all cursors multiples of 8

A frame begins with its own length (``frame.HEADER``), which is the ring's framing too. Frames start
on multiples of 8, so a length never wraps; the rest of a frame may.

The peer is hostile. So this side keeps its own cursor in a local variable and only publishes it.
It reads the peer's cursor once a look and refuses it when it moved backwards, off the grid or out of
range. It reads a frame's length once, checks it, and copies that many bytes out; the codec then
works on the copy and finds a length that was changed in between. Whatever the peer writes, every
access here stays inside the arena: the place is computed from our own cursor and our own capacity.

``memory_order`` explains why plain loads and stores suffice.
"""

from __future__ import annotations

from isolation.ipc.errors import LocalProtocolError, RemoteProtocolError, RingFull
from isolation.ipc.frame import HEADER_BYTES
from isolation.ipc.messages import MAX_FRAME_BYTES
from isolation.ipc.wiping import ZEROS

CONTROL_BYTES = 4096
"""One page, so that the data behind it is page-aligned."""

# Words 128 bytes apart: processors fetch cache lines of 64 bytes in pairs.
_TAIL = 0
_HEAD = 16
_ASLEEP = 32
_WAITING = 48

_UP, _SLEEPS, _NAPS = 0, 1, 2

_GRID = 8
"""Bytes; frames start on multiples of it."""

_FARTHEST = 1 << 62
"""Bytes; 14 years at 10 GB/s. A cursor taken over from the arena starts below it, so that no sum
of ours passes 64 bits."""


def _split(arena: memoryview) -> tuple[memoryview, memoryview]:
    """Control words and data of an arena.

    Raises:
        LocalProtocolError: the arena cannot hold a control page and the largest frame.
    """
    capacity = arena.nbytes - CONTROL_BYTES
    if capacity < MAX_FRAME_BYTES or capacity % _GRID:
        raise LocalProtocolError(
            f"an arena of {arena.nbytes} bytes cannot be a ring: it needs {CONTROL_BYTES} bytes "
            f"and a multiple of {_GRID} that holds a frame of {MAX_FRAME_BYTES}"
        )
    return arena[:CONTROL_BYTES].cast("Q"), arena[CONTROL_BYTES:]


def _resumed(cursor: int) -> int:
    """This side's own cursor as it stands in the arena, where the peer could have changed it.

    Raises:
        RemoteProtocolError: no honest ring can have come to this value.
    """
    if cursor > _FARTHEST or cursor % _GRID:
        raise RemoteProtocolError(f"the ring's cursor stands at {cursor}")
    return cursor


class RingWriter:
    """The producer's end. One thread of one process uses it.

    Cursors are taken from the arena, so a process may go on where another stopped.
    """

    def __init__(self, arena: memoryview) -> None:
        self._words, self._data = _split(arena)
        self._capacity = self._data.nbytes
        self._tail = _resumed(self._words[_TAIL])
        self._head = 0
        self._look()

    def push(self, frame: bytes) -> None:
        """Copy the frame in and publish it.

        Raises:
            RingFull: it does not fit now; nothing was written.
            LocalProtocolError: these bytes are no frame.
            RemoteProtocolError: the consumer's cursor is not where it can be.
        """
        size = len(frame)
        if not HEADER_BYTES <= size <= MAX_FRAME_BYTES or size != int.from_bytes(frame[:4], "little"):
            raise LocalProtocolError(f"{size} bytes that do not begin with their length")
        tail = self._tail
        end = tail + (size + _GRID - 1 & -_GRID)
        if end - self._head > self._capacity:
            self._look()
            if end - self._head > self._capacity:
                raise RingFull
        start = tail % self._capacity
        before_wrap = self._capacity - start
        if size <= before_wrap:
            self._data[start : start + size] = frame
        else:
            self._data[start:] = frame[:before_wrap]
            self._data[: size - before_wrap] = frame[before_wrap:]
        self._tail = end
        self._words[_TAIL] = end

    def take_sleeper(self, *, urgent: bool = True) -> bool:
        """Whether the consumer is to be woken; if so its flag is now down and its bell is ours to ring.

        Raises:
            RemoteProtocolError: the consumer's cursor is not where it can be.
        """
        sleep = self._words[_ASLEEP]
        if sleep == _UP or (sleep == _NAPS and not urgent and not self._half_full()):
            return False
        self._words[_ASLEEP] = 0
        return True

    def unread(self) -> bool:
        """Whether the consumer has yet to take a frame.

        Raises:
            RemoteProtocolError: the consumer's cursor is not where it can be.
        """
        if self._head != self._tail:
            self._look()
        return self._head != self._tail

    def set_waiting(self, *, waiting: bool) -> None:
        """Ask the consumer for a bell once it has made room, or withdraw that."""
        self._words[_WAITING] = waiting

    def release(self) -> None:
        """Release the views of the arena."""
        self._words.release()
        self._data.release()

    def _half_full(self) -> bool:
        half = self._capacity // 2
        if self._tail - self._head > half:
            self._look()
        return self._tail - self._head > half

    def _look(self) -> None:
        """Read the consumer's cursor once and check it."""
        head = self._words[_HEAD]
        if not self._head <= head <= self._tail <= head + self._capacity or head % _GRID:
            raise RemoteProtocolError(
                f"the reader's cursor went from {self._head} to {head} while the writer's is {self._tail}"
            )
        self._head = head


class RingReader:
    """The consumer's end. One thread of one process uses it.

    Cursors are taken from the arena, so a process may go on where another stopped.
    """

    def __init__(self, arena: memoryview) -> None:
        self._words, self._data = _split(arena)
        self._lengths = self._data.cast("I")
        self._capacity = self._data.nbytes
        self._head = _resumed(self._words[_HEAD])
        self._tail = self._head
        self._look()

    def pop(self) -> bytearray | None:
        """The next frame as our own copy, or None when there is none; its content is unchecked.

        Raises:
            RemoteProtocolError: the producer's cursor or the frame's length is not possible.
        """
        head = self._head
        if head == self._tail and not self._look():
            return None
        start = head % self._capacity
        # The one and only read of this length: what follows uses the local copy.
        size = self._lengths[start // 4]
        if not HEADER_BYTES <= size <= min(self._tail - head, MAX_FRAME_BYTES):
            raise RemoteProtocolError(f"a frame of {size} bytes where the writer has published {self._tail - head}")
        end = start + size
        if end <= self._capacity:
            frame = bytearray(self._data[start:end])
            self._data[start:end] = ZEROS[:size]
        else:
            wrapped = end - self._capacity
            frame = bytearray(size)
            frame[: self._capacity - start] = self._data[start:]
            frame[self._capacity - start :] = self._data[:wrapped]
            self._data[start:] = ZEROS[: self._capacity - start]
            self._data[:wrapped] = ZEROS[:wrapped]
        self._head = head + (size + _GRID - 1 & -_GRID)
        self._words[_HEAD] = self._head
        return frame

    def pending(self) -> bool:
        """Whether a frame is there.

        Raises:
            RemoteProtocolError: the producer's cursor is not where it can be.
        """
        return self._head != self._tail or self._look()

    def set_asleep(self, *, asleep: bool, napping: bool = False) -> None:
        """Ask the producer for a bell with its next frame (``napping``: its next urgent one), or withdraw that."""
        self._words[_ASLEEP] = (_NAPS if napping else _SLEEPS) if asleep else _UP

    def take_waiter(self) -> bool:
        """Whether the producer waits for room; if so its flag is now down and its bell is ours."""
        if not self._words[_WAITING]:
            return False
        self._words[_WAITING] = 0
        return True

    def release(self) -> None:
        """Release the views of the arena."""
        self._lengths.release()
        self._words.release()
        self._data.release()

    def _look(self) -> bool:
        """Read the producer's cursor once, check it, and say whether anything is there."""
        tail = self._words[_TAIL]
        if not self._tail <= tail <= self._head + self._capacity or tail % _GRID:
            raise RemoteProtocolError(
                f"the writer's cursor went from {self._tail} to {tail} while the reader's is {self._head}"
            )
        self._tail = tail
        return tail != self._head
