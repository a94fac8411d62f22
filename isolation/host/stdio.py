"""Output of a sandbox: a drained pipe, a rate limit, the last lines.

The output goes to a pipe, never a file: the sentry keeps its own file offset and overwrites other writers' data. The
text is hostile: it is truncated, decoded with replacement and stripped of control characters before use.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

LineCallback = Callable[[str], None]
"""Receives each line, without its newline, in the pipe's own thread; must neither block for long nor raise."""

MAX_LINE_BYTES = 2_048
"""Longest line in bytes; the rest of a longer one is discarded."""
_READ_BYTES = 65_536
LAST_WORDS_S = 1.0
"""Longest time in seconds that a rate-limited reader may sleep."""
_FINAL_BYTES = 1 << 20
"""Bytes read at most after the sandbox's end: a pipe holds 64 KiB, a last traceback less."""


class LineSplitter:
    """Splits bytes into printable lines; buffers at most one line. Pure."""

    def __init__(self) -> None:
        self._held = b""
        self._cutting = False

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; return the lines completed by them."""
        lines: list[str] = []
        for piece in data.splitlines(keepends=True):
            ends = piece[-1:] in b"\r\n"
            if not self._cutting:
                self._held += piece
            if len(self._held) > MAX_LINE_BYTES:
                self._cutting = True
                self._held = self._held[:MAX_LINE_BYTES]
            if ends:
                lines.extend(self.flush())
        return lines

    def flush(self) -> list[str]:
        """Return the buffered bytes as a line, unless it is blank."""
        text = printable(self._held)
        self._held, self._cutting = b"", False
        return [text] if text else []


def printable(data: bytes) -> str:
    """Decode hostile bytes for a log or terminal; removes all control characters and escape sequences."""
    text = data.decode(errors="replace").replace("\t", "    ")
    return "".join(char for char in text if char.isprintable()).rstrip()


class ByteRate:
    """Token bucket in bytes. Pure: the clock is an argument."""

    def __init__(self, bytes_per_s: float, burst_bytes: float) -> None:
        self._rate, self._burst = bytes_per_s, burst_bytes
        self._level = burst_bytes
        self._then: float | None = None

    def wait_s(self, now: float) -> float:
        """Return the seconds until reading may continue; 0 for now."""
        if self._then is not None:
            self._level = min(self._burst, self._level + (now - self._then) * self._rate)
        self._then = now
        return 0.0 if self._level > 0 else -self._level / self._rate + 0.01

    def spend(self, count: int) -> None:
        """Charge bytes that were read; the level may go below zero once."""
        self._level -= count


class LogPipe:
    """Pipe behind a sandbox's standard output and error.

    A thread reads it. Above 64 KiB/s (after a burst of 256 KiB) it reads more slowly, so that a sandbox that floods its
    output blocks in its own ``write`` instead of costing the host a core.

    Args:
        name: the sandbox's name, for the thread.
        on_line: called with each line.
        keep: how many of the last lines ``tail`` returns.
    """

    BYTES_PER_S = 65_536.0
    BURST_BYTES = 262_144.0

    def __init__(self, name: str, on_line: LineCallback | None = None, keep: int = 200) -> None:
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=keep)
        self._lines_lock = threading.Lock()
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self._closed = False
        self._thread = threading.Thread(target=self._drain, name=f"log-{name}", daemon=True)
        self._thread.start()

    @property
    def log_fd(self) -> int:
        """Return the read end; for tests that check open descriptors, not for reading."""
        return self._read_fd

    def tail(self, *, ended: bool = False) -> tuple[str, ...]:
        """Return the last lines, oldest first. For a sandbox that has ended, waits at most ``LAST_WORDS_S`` for the
        reader thread, because the final lines may still be in the pipe."""
        if ended and threading.current_thread() is not self._thread:
            self._thread.join(LAST_WORDS_S)
        with self._lines_lock:
            return tuple(self._lines)

    def close_write(self) -> None:
        """Close this process's copy of the write end once the sandbox has its own; otherwise end of file is never
        seen."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        """Read the remaining output, stop the thread, close everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.close_write()
        os.close(self._stop_write)
        self._thread.join()
        os.close(self._stop_read)
        os.close(self._read_fd)

    def _drain(self) -> None:
        splitter = LineSplitter()
        rate = ByteRate(self.BYTES_PER_S, self.BURST_BYTES)
        poller, stop = select.poll(), select.poll()
        poller.register(self._read_fd, select.POLLIN)
        poller.register(self._stop_read, select.POLLIN)
        stop.register(self._stop_read, select.POLLIN)
        while True:
            wait_s = rate.wait_s(time.monotonic())
            if wait_s > 0 and stop.poll(wait_s * 1_000):
                break
            ready = {fd for fd, _ in poller.poll()}
            if self._stop_read in ready:
                break
            data = self._read()
            if data == b"":
                break
            rate.spend(len(data or b""))
            self._tell(splitter.feed(data or b""))
        left = _FINAL_BYTES
        while left > 0 and (data := self._read()):
            left -= len(data)
            self._tell(splitter.feed(data))
        self._tell(splitter.flush())

    def _read(self) -> bytes | None:
        try:
            return os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return None

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            with self._lines_lock:
                self._lines.append(line)
            if self._on_line is not None:
                self._on_line(line)
