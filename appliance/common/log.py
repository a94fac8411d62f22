"""Structured logs to standard error: JSON for files, the same with fields for journald, a calm console for a terminal.

A log line holds ids, names and numbers. Prompts, answers and keys have no field; as a second
fence, anything that looks like a credential is blotted out of every text, exceptions included,
and tracebacks never show local variables. The standard library's loggers (uvicorn, grpc,
OpenTelemetry) end in the same place.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import traceback
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from appliance.common.journald import SOCKET, JournalStream
from appliance.common.lines import RefusedLines

MAX_TEXT_CHARS = 4_096
"""Characters of one text in a log line; a traceback of a deep stack fits."""

REDACTED = "[redacted]"

_to_json = structlog.processors.JSONRenderer()

_CREDENTIAL = re.compile(
    r"\b(?P<known>ath_[A-Za-z0-9._-]{1,63}_)[0-9a-f]{8,}"  # ours: the key id may stay
    r"|\bsk[-_][A-Za-z0-9_.-]{16,}"  # one of another service, pasted by mistake
    r"|(?i:\bbearer\s+)\S+"
)

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""syslog(3) priorities, as sd-daemon(3) reads them from ``<N>`` before a line."""

_NOISY = ("opentelemetry", "urllib3", "uvicorn.access", "asyncio")
"""Loggers that repeat what we report once ourselves (a dead collector) or would log content."""


class LogStyle(Enum):
    """How lines look."""

    AUTO = "auto"
    """``CONSOLE`` when the stream is a terminal, else ``JSON``."""
    JSON = "json"
    JOURNAL = "journal"
    """``JSON`` with its priority and fields, for a unit whose standard error is the journal (``journald``)."""
    CONSOLE = "console"


def configure(
    stream: TextIO | None = None, style: LogStyle = LogStyle.AUTO, level: int = logging.INFO, journal: Path = SOCKET
) -> None:
    """Set up structlog and the standard library's root logger; the last call wins. ``journal``: where journald listens,
    for ``JOURNAL``."""
    stream = sys.stderr if stream is None else stream
    if style is LogStyle.AUTO:
        style = LogStyle.CONSOLE if stream.isatty() else LogStyle.JSON
    shared = _shared()
    structlog.configure(
        processors=[*shared, ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = _Handler(JournalStream(stream, journal) if style is LogStyle.JOURNAL else stream)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=shared, processors=[ProcessorFormatter.remove_processors_meta, *_render(style)]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.CRITICAL)


def report_callbacks(loop: asyncio.AbstractEventLoop) -> None:
    """Log what a callback or a forgotten task of the event loop ended with: the error's type and its place. asyncio's
    own report would show arguments, and with them what tenants wrote; it is silenced. What ends again and again, as
    asyncio's accept without a free descriptor does a hundred times a second, has few lines."""
    log, lines = structlog.get_logger(__name__), RefusedLines(loop.time())

    def report(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        frames = traceback.extract_tb(error.__traceback__)[-1:] if isinstance(error, BaseException) else []
        places = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames]
        kind = type(error).__name__ if error is not None else "none"
        where = ", ".join(places)
        unsaid = lines.take(where, loop.time())  # a bucket for each place: there are no more than lines of code
        if unsaid is not None:
            more = {"unsaid": unsaid} if unsaid else {}
            log.error("a callback of the event loop failed", error=kind, at=where, **more)

    loop.set_exception_handler(report)


class _Handler(logging.StreamHandler[TextIO | JournalStream]):
    """Drop a line that cannot be written (a full disk, a closed pipe). The base class would print a traceback for each,
    into the same full disk, with the line's unredacted arguments."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Pass over what the medium refuses; a line that cannot be made is a defect and is told as ever."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.format_exc_info,
        _redact,
    ]


def _render(style: LogStyle) -> list[Processor]:
    if style is LogStyle.CONSOLE:
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(exception_formatter=plain, sort_keys=False)]
    return [_journal_line if style is LogStyle.JOURNAL else _json_line]


def _json_line(logger: WrappedLogger, name: str, event: EventDict) -> str:
    first = {key: event[key] for key in ("timestamp", "level", "event") if key in event}
    return str(_to_json(logger, name, {**first, **event}))


def _journal_line(logger: WrappedLogger, name: str, event: EventDict) -> str:
    priority = _PRIORITIES.get(event.get("level", ""), _PRIORITIES["info"])
    return f"<{priority}>{_json_line(logger, name, event)}"


def _redact(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = redact(value[:MAX_TEXT_CHARS])
    return event


def redact(text: str) -> str:
    """The text with everything that looks like a credential blotted out."""
    return _CREDENTIAL.sub(_blot, text)


def _blot(found: re.Match[str]) -> str:
    return (found["known"] or "") + REDACTED
