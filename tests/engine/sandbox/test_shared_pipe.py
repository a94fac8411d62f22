"""The shared pipe: order, overwritten content, a full area, an ended and a hostile peer."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from engine.sandbox.shared_pipe import AREA_BYTES, SharedMemory, SharedPipe, memory_by_descriptor
from isolation.ipc.doorbell import create_pipe
from isolation.ipc.errors import PeerGoneError, RemoteProtocolError

TAIL, HEAD = 0, 16


@pytest.fixture
def ends() -> Iterator[tuple[SharedPipe, SharedPipe]]:
    """Two ends that do not block, of memory by descriptor, closed at last."""
    (from_second, to_first), (from_first, to_second) = create_pipe(), create_pipe()
    memfd = memory_by_descriptor()
    first = SharedPipe.opened(os.dup(memfd), from_second, to_second, first=True)
    second = SharedPipe.opened(memfd, from_first, to_first, first=False)
    yield first, second
    first.close()
    second.close()


def test_what_is_written_is_read_both_ways(ends: tuple[SharedPipe, SharedPipe]) -> None:
    """Pieces of all sizes come out whole and in order, in both directions, while writers meet full memory."""
    draw = random.Random(1)
    for writer, reader in (ends, ends[::-1]):
        told = b"".join(draw.randbytes(draw.choice((1, 7, 300, AREA_BYTES // 3, AREA_BYTES))) for _ in range(60))
        left, read, full = memoryview(told), bytearray(), 0
        while left or len(read) < len(told):
            piece = left[: draw.randrange(1, 2 * AREA_BYTES)]
            written = writer.write(piece) if piece else 0
            full += written < len(piece)
            left = left[written:]
            if draw.random() < 0.7:
                read += reader.read() or b""
        assert bytes(read) == told
        assert full > 10, "the area was never full"


def test_what_was_read_is_overwritten() -> None:
    """The text is in the memory until it is read, and nowhere in it afterwards; a close overwrites the rest."""
    memory = SharedMemory(memfd := memory_by_descriptor())
    (from_second, to_first), (from_first, to_second) = create_pipe(), create_pipe()
    first = SharedPipe.opened(os.dup(memfd), from_second, to_second, first=True)
    second = SharedPipe.opened(memfd, from_first, to_first, first=False)
    for _ in range(9):  # The last ones cross the area's end.
        first.write(b"canary" * 1_500)
        assert b"canary" in bytes(memory.view)
        assert second.read() == b"canary" * 1_500
        assert b"canary" not in bytes(memory.view)
    second.write(b"canary")
    assert b"canary" in bytes(memory.view)
    first.close()
    assert b"canary" not in bytes(memory.view)
    second.close()
    memory.close()


def test_the_bell_tells_of_bytes_and_of_room(ends: tuple[SharedPipe, SharedPipe]) -> None:
    """A reader that sleeps wakes for bytes, and a writer that met full memory for room; between, nothing rings."""
    first, second = ends
    assert first.read() == second.read() == b""
    assert first.write(bytes(AREA_BYTES + 5)) == AREA_BYTES
    assert os.read(second.fileno(), 9) == b"\0"
    with pytest.raises(BlockingIOError):
        os.read(first.fileno(), 9)
    assert len(second.read() or b"") == AREA_BYTES
    assert os.read(first.fileno(), 9) == b"\0"
    first.write(b"small")
    second.read()
    with pytest.raises(BlockingIOError):
        os.read(first.fileno(), 9)


def test_the_peers_end_is_told_after_its_last_bytes() -> None:
    """What an ended side has written is still read, then comes None, and a write fails."""
    (from_second, to_first), (from_first, to_second) = create_pipe(), create_pipe()
    shared = SharedMemory(None)
    pid = os.fork()
    if pid == 0:
        os.close(from_second)
        os.close(to_second)
        SharedPipe(shared, from_first, to_first, first=False).write(b"last words")
        os._exit(0)
    os.close(from_first)
    os.close(to_first)
    os.waitpid(pid, 0)
    pipe = SharedPipe(shared, from_second, to_second, first=True)
    assert (pipe.read(), pipe.read(), pipe.read()) == (b"last words", None, None)
    with pytest.raises(PeerGoneError):
        pipe.write(b"x")
    pipe.close()


@pytest.mark.parametrize("place", [TAIL, HEAD])
@pytest.mark.parametrize("value", [AREA_BYTES + 9, 1 << 40, (1 << 64) - 1])
def test_an_impossible_cursor_is_refused(place: int, value: int) -> None:
    """A peer that moves its cursors anywhere makes neither side read or write outside of the areas."""
    (from_second, to_first), (from_first, to_second) = create_pipe(), create_pipe()
    shared = SharedMemory(None)
    first = SharedPipe(shared, from_second, to_second, first=True)
    # The words of the second direction are those that the second side writes as tail, and of the first as head.
    words = shared.view[:4096].cast("Q")
    words[(64 if place == TAIL else 0) + place] = value
    with pytest.raises(RemoteProtocolError, match="is written up to"):
        first.read() if place == TAIL else first.write(b"x")
    words.release()
    for fd in (from_second, to_second, from_first, to_first):
        os.close(fd)


def test_two_threads_lose_no_bell() -> None:
    """A megabyte passes between a writer that waits for room and a reader that blocks on its bell."""
    (from_second, to_first), (from_first, to_second) = create_pipe(), os.pipe()
    shared = SharedMemory(None)
    writer = SharedPipe(shared, from_second, to_second, first=True)
    reader = SharedPipe(shared, from_first, to_first, first=False)
    told, read = random.Random(2).randbytes(1 << 20), bytearray()

    def give() -> None:
        left = memoryview(told)
        while left := left[writer.write(left) :]:
            pass

    thread = threading.Thread(target=give)
    thread.start()
    while len(read) < len(told):
        read += reader.read() or b""
    thread.join()
    assert bytes(read) == told
    for fd in (from_second, to_second, from_first, to_first):
        os.close(fd)
