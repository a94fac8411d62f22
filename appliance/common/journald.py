"""systemd's journal, spoken to natively: a log line whose fields an operator can ask for by name.

A datagram to journald's socket is a list of fields ("Native Journal Protocol" of systemd's documentation; names as
systemd.journal-fields(7) has them). The line itself stays ``MESSAGE``; what it is about is beside it, in fields that
begin with ``ATHANOR_``: so ``journalctl ATHANOR_TENANT=acme`` works. Each value goes with its length before it, so
nothing that a value holds can become a field.
"""

from __future__ import annotations

import functools
import json
import re
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

SOCKET = Path("/run/systemd/journal/socket")
"""Socket on which journald listens."""

PREFIX = "ATHANOR_"

SAME = {"request_id": "request", "id": "request"}
"""Fields of a line that say the same as another, which they are filed under."""

MAX_FIELDS = 48
"""Fields of one datagram; our longest line has 16."""

_OURS = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Names that can be fields: journald takes capitals, digits and underscores, at most 64 of them."""

_LENGTH = struct.Struct("<Q")

_STANDARD = ("timestamp", "level", "event")
"""Not repeated as fields: the journal has a time and a priority of its own, and the event is in the message."""


def fields_of(values: Mapping[str, object]) -> dict[str, str]:
    """Names and values beside the message, for a line's values. Texts and numbers alone: what has parts of its own is
    in the message."""
    fields: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, str | int | float) and (field := _field(name)) and len(fields) < MAX_FIELDS:
            fields.setdefault(field, value if isinstance(value, str) else json.dumps(value))
    return fields


@functools.lru_cache(maxsize=256)
def _field(name: str) -> str:
    """The journal's name of a line's field; empty where it has none."""
    if name in _STANDARD or not _OURS.fullmatch(name):
        return ""
    return PREFIX + SAME.get(name, name).upper()


def datagram(fields: Mapping[str, str]) -> bytes:
    """The bytes of one entry."""
    pieces: list[bytes] = []
    for name, value in fields.items():
        data = value.encode("utf-8", "replace")
        pieces += (name.encode("ascii"), b"\n", _LENGTH.pack(len(data)), data, b"\n")
    return b"".join(pieces)


class JournalStream:
    """A stream for lines of JSON with their priority before them (``<6>{...}``), which go to journald; what it does not
    take, because it is gone, full, or the line too long for a datagram, goes to the stream beside it, which the journal
    reads as well. Never waits for journald."""

    def __init__(self, beside: TextIO, address: Path = SOCKET) -> None:
        self._beside = beside
        self._address = str(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def write(self, text: str) -> int:
        """Write one line, its end included."""
        priority, message = text[1], text[3:].removesuffix("\n")
        entry = {"MESSAGE": message, "PRIORITY": priority, "SYSLOG_IDENTIFIER": "athanor"}
        try:
            # By address each time: a journald that was started again has a new socket there.
            self._socket.sendto(datagram(entry | fields_of(json.loads(message))), self._address)
        except OSError:
            self._beside.write(text)
        return len(text)

    def flush(self) -> None:
        """Pass on what lies in the stream beside."""
        self._beside.flush()
