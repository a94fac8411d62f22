"""Attacks that exhaust resources: each takes until it is stopped, reports how much it got, and holds it."""

from __future__ import annotations

import os
import sys
import threading
import time

MOST = 100_000
"""Largest number of attempts of one kind: far above every limit of a sandbox."""

HOLD_S = 0.5
"""Seconds for which the resources are held."""


def forks() -> int:
    """Start processes that stay."""
    for number in range(MOST):
        try:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
        except OSError:
            return number
    return MOST


def threads() -> int:
    """Start threads that stay."""
    threading.stack_size(64 << 10)
    for number in range(MOST):
        try:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        except RuntimeError:
            return number
    return MOST


def memory() -> int:
    """Allocate and write memory in pieces of 16 MiB."""
    held = []
    for number in range(MOST):
        try:
            held.append(b"x" * (16 << 20))
        except MemoryError:
            return number
    return len(held)


def descriptors() -> int:
    """Open descriptors."""
    for number in range(MOST):
        try:
            os.open("/dev/null", os.O_RDONLY)
        except OSError:
            return number
    return MOST


def disk() -> int:
    """Write files of 1 MiB to scratch memory."""
    for number in range(MOST):
        try:
            with open(f"/tmp/{number}", "wb") as file:
                file.write(b"x" * (1 << 20))
        except OSError:
            return number
    return MOST


def output() -> int:
    """Print lines without a pause."""
    line = b"x" * 1_000 + b"\n"
    written = 0
    end = time.monotonic() + HOLD_S
    while time.monotonic() < end:
        try:
            os.write(1, line)
            written += 1
        except BlockingIOError:  # the reader is slower, and gVisor passes on that the pipe is non-blocking
            time.sleep(0.01)
    return written


def processor() -> int:
    """Use processor time in as many threads as permitted."""
    end = time.monotonic() + HOLD_S

    def burn() -> None:
        while time.monotonic() < end:
            pass

    for _ in range(16):
        threading.Thread(target=burn, daemon=True).start()
    burn()
    return 16


KINDS = {one.__name__: one for one in (forks, threads, memory, descriptors, disk, output, processor)}

if __name__ == "__main__":
    print(f"took {KINDS[sys.argv[1]]()}", flush=True)
    time.sleep(HOLD_S)
    os._exit(0)
