"""Header by which a router names the host that is to compute a request's prompt, as llm-d's endpoint picker does.

Anybody may send it, so it decides nothing but which of the configured hosts is asked (docs/fleet.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PREFILLER = "x-prefiller-host-port"
"""Name of the header, and of gRPC's metadata."""

_HOST_PORT = re.compile(r"[A-Za-z0-9.:\[\]_-]{1,261}")
"""A name of 255 characters with its port, or an address."""


def named_prefiller(values: Sequence[str]) -> str:
    """Return the HOST:PORT of the caller's headers; empty where there is not exactly one that may be one: a bad one is
    no error."""
    return values[0] if len(values) == 1 and _HOST_PORT.fullmatch(values[0]) else ""
