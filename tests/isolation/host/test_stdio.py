"""What a sandbox prints is hostile, and there may be too much of it."""

from __future__ import annotations

import os
import threading
import time

import pytest

from isolation.host.stdio import MAX_LINE_BYTES, ByteRate, LineSplitter, LogPipe, printable


def test_lines_do_not_depend_on_how_bytes_arrive():
    """Split at every byte, the same lines come out."""
    data = "first\nsecond\r\n\nthird \u00e9\nlast".encode()
    expected = ["first", "second", "third \u00e9", "last"]
    for cut in range(len(data) + 1):
        splitter = LineSplitter()
        assert [*splitter.feed(data[:cut]), *splitter.feed(data[cut:]), *splitter.flush()] == expected
    one = LineSplitter()
    fed = [line for index in range(len(data)) for line in one.feed(data[index : index + 1])]
    assert [*fed, *one.flush()] == expected


def test_long_line_is_cut_and_memory_is_bounded():
    """A line without an end holds no more than the limit; the next line is whole again."""
    splitter = LineSplitter()
    for _ in range(100):
        assert splitter.feed(b"x" * 1000) == []
        assert len(splitter._held) <= MAX_LINE_BYTES
    assert splitter.feed(b"\nnext\n") == ["x" * MAX_LINE_BYTES, "next"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x1b[2Jgone\x07", "[2Jgone"),
        (b"a\tb\x00c", "a    bc"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        ("\u202etxt\u2028x".encode(), "txtx"),
    ],
)
def test_control_characters_do_not_reach_a_terminal(data, text):
    """No escape sequence, no NUL, no text direction trick survives."""
    assert printable(data) == text


def test_rate_is_kept():
    """After the burst, reading waits as long as the rate says; the clock is an argument."""
    rate = ByteRate(bytes_per_s=100, burst_bytes=50)
    assert rate.wait_s(0.0) == 0
    rate.spend(150)
    assert rate.wait_s(0.0) == pytest.approx(1.01)
    assert rate.wait_s(0.5) == pytest.approx(0.51)
    assert rate.wait_s(1.1) == 0
    assert rate.wait_s(100.0) == 0
    rate.spend(51)
    assert rate.wait_s(100.0) > 0, "the level does not pass the burst"


def test_pipe_gives_lines_and_a_bounded_tail():
    """Each line reaches the callback; the tail keeps the last ones."""
    lines: list[str] = []
    pipe = LogPipe("t", lines.append, keep=3)
    os.write(pipe.write_fd, b"".join(b"line %d\n" % number for number in range(10)))
    pipe.close()
    pipe.close()
    assert lines == [f"line {number}" for number in range(10)]
    assert pipe.tail() == ("line 7", "line 8", "line 9")


def test_last_words_are_waited_for():
    """What an ended sandbox left in the pipe is in its tail, however late the reader comes to it; a reader that asks
    for the tail itself does not wait for itself. The control: without the word that it has ended nobody waits."""
    may_read, own_tails = threading.Event(), []

    def late(_: str) -> None:
        may_read.wait(20)
        own_tails.append(pipe.tail(ended=True))

    pipe = LogPipe("late", late)
    os.write(pipe.write_fd, b"first\n")
    while not pipe.tail():
        time.sleep(0.001)
    os.write(pipe.write_fd, b"last words\n")
    pipe.close_write()
    assert pipe.tail() == ("first",)
    threading.Timer(0.05, may_read.set).start()
    assert pipe.tail(ended=True) == ("first", "last words")
    pipe.close()
    assert own_tails == [("first",), ("first", "last words")]


def test_flood_blocks_the_writer_not_the_reader():
    """A writer that floods is held up in its own ``write``; closing still takes no time and loses no thread."""
    pipe = LogPipe("flood")
    flood_fd = os.dup(pipe.write_fd)
    os.set_blocking(flood_fd, False)
    pipe.close_write()
    written, refused = 0, threading.Event()
    while not refused.is_set() and written < 8 << 20:
        try:
            written += os.write(flood_fd, b"y" * 4095 + b"\n")
        except BlockingIOError:
            if written > LogPipe.BURST_BYTES:
                refused.set()
    pipe.close()
    os.close(flood_fd)
    assert refused.is_set()
    assert not pipe._thread.is_alive()
