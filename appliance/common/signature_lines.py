"""Signatures as lines of text: ``ed25519``, the public key in hex, the signature in hex (RFC 8032). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from isolation.keys.signing import SigningKey, verifies

MAX_SIGNATURES = 32
"""Lines of one file: more people than share a duty."""

MAX_BYTES = 16 << 10
"""Bytes of one file of signatures."""

_LINE = re.compile(r"ed25519 ([0-9a-f]{64}) ([0-9a-f]{128})")


def read_lines(data: bytes) -> dict[str, str]:
    """Return signatures by public key, both in hex; whether they hold is not looked at.

    Raises:
        ValueError: a line is no signature, or there are too many.
    """
    lines = data[: MAX_BYTES + 1].decode("ascii", "replace").splitlines()
    matches = [_LINE.fullmatch(line) for line in lines]
    if len(data) > MAX_BYTES or len(lines) > MAX_SIGNATURES or not all(matches):
        raise ValueError("not a list of signatures")
    return {match[1]: match[2] for match in matches if match is not None}


def write_lines(signatures: Mapping[str, str]) -> bytes:
    """Return the text of signatures by public key, in the order of the keys."""
    return "".join(f"ed25519 {public} {signature}\n" for public, signature in sorted(signatures.items())).encode()


def signed_by(key: SigningKey, message: bytes, others: Mapping[str, str]) -> dict[str, str]:
    """Return the signatures with one more over the message, in place of an older one of the same key.

    Raises:
        ValueError: there are too many already.
    """
    found = {public: signature for public, signature in others.items() if public != key.public.hex()}
    if len(found) >= MAX_SIGNATURES:
        raise ValueError(f"it has {MAX_SIGNATURES} signatures already, and no more are read")
    return found | {key.public.hex(): key.sign(message).hex()}


def holding(signatures: Mapping[str, str], message: bytes) -> tuple[str, ...]:
    """Return the public keys whose signatures over the message hold."""
    return tuple(
        public
        for public, signature in signatures.items()
        if verifies(bytes.fromhex(public), bytes.fromhex(signature), message)
    )


def described(publics: Iterable[str]) -> str:
    """Return who signed, for a message."""
    found = [one[:16] for one in publics]
    return f"signed by {', '.join(found)}" if found else "not signed"
