"""Output of a sandbox: a log line for each of its lines, and the last lines beside its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from isolation.gvisor.runtime import Sandbox

log = structlog.get_logger()

MARK = "; its last words: "
"""Text in front of a sandbox's last lines. They are the sandbox's own and might repeat its input: whatever must hold no
content cuts them off here."""

LINES = 3
"""Lines shown of an end during the start: its reason, and what led to it."""

COMPUTES = "engine computes with "
"""Beginning of the line in which an engine says so (``engine.startup.load``)."""

MAX_CLAIM_CHARS = 600
"""Characters kept of it: a form with the figures of eight has some 400."""


def claimed(lines: Sequence[str]) -> str:
    """What an engine's output says that it computes with, cut to ``MAX_CLAIM_CHARS``; empty where it says nothing."""
    found = [line.removeprefix(COMPUTES) for line in lines if line.startswith(COMPUTES)]
    return found[-1][:MAX_CLAIM_CHARS] if found else ""


def last_words(sandbox: Sandbox, lines: int = LINES, known: str = "") -> str:
    """Last lines of a sandbox's output, behind ``MARK``; empty where there are none, or the last one is ``known``."""
    tail = sandbox.output_tail()
    return MARK + " / ".join(tail[-lines:]) if tail and tail[-1] != known else ""


def line_logger(name: str) -> Callable[[str], None]:
    """Logs what a sandbox prints."""

    def on_line(line: str) -> None:
        log.info("sandbox says", sandbox=name, line=line)

    return on_line
