"""The appliance's own log: from systemd's journal or a file, and lines of it to values.

The host processes write one JSON object a line (``telemetry.log``); what else comes, from systemd or a crash, is kept
as text. Nothing of it is trusted: a line may hold what a tenant chose.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from appliance.common.errors import ConfigError, os_errors_as
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, spawn

UNITS = ("athanor-supervisor.service", "athanor-gateway.service", "athanor-fetch.service", "athanor-carrier.service")

LEVELS = ("debug", "info", "warning", "error", "critical")
"""From the quietest to the loudest."""

PRIORITIES = {"warning": "warning", "error": "err"}
"""How journalctl(1) names the levels that leave lines out: what was said long ago is found behind a thousand quiet
lines. A line that is no line of ours has the journal's own priority, info."""

MAX_LINE_BYTES = 64 << 10
"""Bytes of a line; the rest of a longer one is a line of its own."""

_FIRST = ("timestamp", "level", "event", "logger")
REQUEST_KEYS = ("request", "request_id", "id")
"""Fields that hold a request's id."""


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line. ``fields`` are what is left beside the named ones."""

    time: str
    level: str
    event: str
    fields: tuple[tuple[str, str], ...] = ()

    def is_at_least(self, level: str) -> bool:
        """Whether it is as loud as a level, or louder; what has no level of ours counts as ``info``."""
        own = LEVELS.index(self.level) if self.level in LEVELS else LEVELS.index("info")
        return own >= LEVELS.index(level)

    def concerns(self, request: str) -> bool:
        """Whether a field names this request, by its id or the beginning of it."""
        return any(value.startswith(request) for name, value in self.fields if name in REQUEST_KEYS)


def parse_line(text: str) -> LogLine | None:
    """A line of the journal or of a file; None when it is empty."""
    text = text.strip()
    if text.startswith("<") and text[2:3] == ">":  # sd-daemon(3)'s priority
        text = text[3:]
    if not text:
        return None
    try:
        values = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or "event" not in values:
        return LogLine("", "", text)
    rest = ((str(name), _plain(value)) for name, value in values.items() if name not in _FIRST)
    return LogLine(
        _plain(values.get("timestamp", "")), _plain(values.get("level", "")), _plain(values["event"]), tuple(rest)
    )


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_file(path: Path, last: int) -> Iterator[str]:
    """The last lines of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    with os_errors_as(f"cannot read {path}"), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - last * MAX_LINE_BYTES))
        yield from file.read(last * MAX_LINE_BYTES).decode("utf-8", "replace").splitlines()[-last:]


@contextmanager
def open_journal(
    last: int, *, follow: bool, level: str = "debug", units: tuple[str, ...] = UNITS
) -> Iterator[Iterator[str]]:
    """The last lines of our units out of systemd's journal that are at least as loud; with ``follow`` until the block
    ends.

    Raises:
        ConfigError: there is no journal, or it is not ours to read.
    """
    program = shutil.which("journalctl", path=MINIMAL_ENVIRONMENT["PATH"])
    if program is None:
        raise ConfigError("there is no journal on this machine; name the file that standard error goes to with --file")
    argv = [program, "--no-pager", "--quiet", "--output=cat", f"--lines={last}", *(f"--unit={unit}" for unit in units)]
    if level in PRIORITIES:
        argv.append(f"--priority={PRIORITIES[level]}")
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        with spawn([*argv, *(["--follow"] if follow else [])], stdio=writing), os.fdopen(reading, "rb") as stream:
            os.close(writing)
            writing = -1
            yield _lines(stream)
    except ProcessError as error:
        raise ConfigError(f"the journal cannot be read: {error}") from error
    finally:
        if writing >= 0:
            os.close(writing)


def _lines(stream: BinaryIO) -> Iterator[str]:
    while line := stream.readline(MAX_LINE_BYTES):
        yield line.decode("utf-8", "replace")
