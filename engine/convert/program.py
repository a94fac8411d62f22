"""What conversion programs have in common: exit statuses, limits, and the lines that they print."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_FILES = 4

MEMORY_BYTES = 6 << 30
"""Address-space limit: Python's and numpy's mappings, the header's bounds, and row slabs."""

CPU_SECONDS = 6 * 3_600
"""Processor-time limit, enough for some terabytes of weights."""

PROGRESS_BYTES = 1 << 26
"""Bytes between two progress lines."""


def limit_resources() -> None:
    """Limit memory and processor time of this process, and forbid core dumps."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    limit_processor(CPU_SECONDS)


def limit_processor(seconds: int) -> None:
    """Limit processor time of this process, and forbid core dumps."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def progress_of(total: int) -> Callable[[int], None]:
    """Return what prints a progress line now and then, given the bytes done so far, and one at the end."""
    told = 0

    def progress(done: int) -> None:
        nonlocal told
        if done >= told + PROGRESS_BYTES or done == total:
            told = done
            say(f"progress {done} {total}")

    return progress


def end(status: int, sentence: str) -> int:
    """Print an error; return the exit status."""
    say(f"error {sentence}")
    return status


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
