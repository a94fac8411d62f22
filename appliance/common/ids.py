"""Identifiers made by the server: random, never derived from anything a client sent."""

from __future__ import annotations

import secrets

REQUEST_ID_BYTES = 12
"""96 random bits: unguessable, and no collision in the life of a log."""


def new_request_id() -> str:
    """A fresh request id, ``req_`` and 24 hex digits."""
    return "req_" + secrets.token_hex(REQUEST_ID_BYTES)
