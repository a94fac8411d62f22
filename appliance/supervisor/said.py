"""What a sandbox prints: a line of the log each, and the last of it beside its end."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from isolation.runtime import Sandbox

log = structlog.get_logger()

MARK = "; its last words: "
"""In front of them wherever they are told. They are the sandbox's own, and might repeat what it was given: what must
hold no content cuts them off here."""

LINES = 3
"""Of an end while it started: its reason, and what led to it."""


def last_words(sandbox: Sandbox, lines: int = LINES, known: str = "") -> str:
    """The last lines that it printed, behind ``MARK``; empty where there are none, or the last one is ``known``."""
    tail = sandbox.output_tail()
    return MARK + " / ".join(tail[-lines:]) if tail and tail[-1] != known else ""


def line_logger(name: str) -> Callable[[str], None]:
    """Logs what a sandbox prints."""

    def on_line(line: str) -> None:
        log.info("sandbox says", sandbox=name, line=line)

    return on_line
