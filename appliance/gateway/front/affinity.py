"""Session affinity: a tag for each session of a credential, which a router in front of a fleet hashes to a host.

A client names its session in ``x-session-affinity``, or names none, and every answer has the session's tag in the
header of that name. A tag is made of the credential and the session under a key that all hosts of the fleet have, so
that each host gives the tag that another gave. It says nothing about either, and a client that sends it back gets it
again. A router hashes the header; nothing here decides where a request goes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from appliance.common.errors import InvalidRequestError, StartError, reason_of

HEADER = "x-session-affinity"
"""Name of the header, and of gRPC's metadata."""

MAX_SESSION_CHARS = 128
"""Longest name of a session, in characters: four UUIDs."""

PART_BYTES = 12
"""Bytes of a session's number, and of the proof beside it: 96 bits of each, so that no two sessions share a tag."""

FINGERPRINT_BYTES = 6
"""Bytes by which a key is named to the operator."""

_NAME = re.compile(rf"[!-~]{{1,{MAX_SESSION_CHARS}}}")
_TAG = re.compile(r"as_[A-Za-z0-9_-]{32}")
_KEY = re.compile(rb"[0-9a-f]{64}")


class SessionAffinity:
    """Makes the tags of one fleet."""

    def __init__(self, key: bytes, draw: Callable[[int], bytes] = os.urandom) -> None:
        """``draw`` gives so many random bytes, for sessions without a name."""
        self._key, self._draw = key, draw
        self.fingerprint = self._mac(b"fingerprint", b"")[:FINGERPRINT_BYTES].hex()
        """Names the key, and is equal on hosts that have the same."""

    def tag(self, credential: str, given: Sequence[str]) -> str:
        """Return the tag of a session; ``given`` are the values of the caller's header.

        Raises:
            InvalidRequestError: there are several, or one that is no name.
        """
        name = given[0] if len(given) == 1 else ""
        if given and not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{HEADER} must be one name of 1 to {MAX_SESSION_CHARS} visible ASCII characters", param=HEADER
            )
        if not given:
            return self._of(credential, self._draw(PART_BYTES))
        if _TAG.fullmatch(name):
            number = base64.urlsafe_b64decode(name[3:])[:PART_BYTES]
            if hmac.compare_digest(tag := self._of(credential, number), name):
                return tag
        return self._of(credential, self._mac(b"session", credential.encode(), name.encode())[:PART_BYTES])

    def rows(self, credential: str, given: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return the header of the answer. Raises as ``tag`` does."""
        return ((HEADER, self.tag(credential, given)),)

    def _of(self, credential: str, number: bytes) -> str:
        proof = self._mac(b"tag", credential.encode(), number)[:PART_BYTES]
        return "as_" + base64.urlsafe_b64encode(number + proof).decode()

    def _mac(self, *parts: bytes) -> bytes:
        text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.new(self._key, text, hashlib.sha256).digest()


def open_affinity(path: Path | None) -> SessionAffinity | None:
    """Return what makes the tags of the fleet whose key a file has; None without a file.

    Raises:
        StartError: the file cannot be read, or has no key.
    """
    return None if path is None else SessionAffinity(read_fleet_key(path))


def read_fleet_key(path: Path) -> bytes:
    """Return the key that all hosts of a fleet have, from its file.

    Raises:
        StartError: the file cannot be read, or has no key.
    """
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise StartError(
            f"cannot read the fleet's key, {path}: {reason_of(error)}; the gateway's user must be able to read it, or "
            f"leave listen: fleet_key out"
        ) from None
    if not _KEY.fullmatch(key):
        raise StartError(
            f"{path} has no fleet key of 64 hex digits; make one with: openssl rand -hex 32 > {path}, and copy it to "
            f"every host"
        )
    return bytes.fromhex(key.decode())
