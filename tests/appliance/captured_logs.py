"""Log lines as values, for tests."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from appliance.common.log import LogStyle, configure


class _Collector(io.StringIO):
    """A stream that parses the lines it is given."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        super().__init__()
        self._lines = lines

    def write(self, text: str) -> int:
        self._lines += [json.loads(line) for line in text.splitlines() if line]
        return len(text)


@contextmanager
def capture_logs() -> Iterator[list[dict[str, Any]]]:
    """Collect every line, as it would be written, as parsed JSON.

    The list is filled while the block runs; the configuration before it comes back at the end.
    """
    lines: list[dict[str, Any]] = []
    root = logging.getLogger()
    before = (structlog.get_config(), list(root.handlers), root.level)
    try:
        configure(_Collector(lines), LogStyle.JSON, logging.DEBUG)
        yield lines
    finally:
        structlog.configure(**before[0])
        root.handlers[:] = before[1]
        root.setLevel(before[2])
