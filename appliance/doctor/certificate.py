"""Validity of a PEM certificate and whether a key belongs to it, with the standard library alone.

``ssl`` judges the key, but tells no dates of a certificate that it has not verified; those are read here from the
DER encoding (RFC 5280, section 4.1; X.690). The file is the operator's own, yet every length is checked.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

from appliance.doctor.facts import Certificate

MAX_BYTES = 1 << 20
"""Bytes of a file with a chain; usual ones have some thousand."""

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_BEFORE_VALIDITY = 3
"""Fields of the body before the validity: serial number, algorithm, issuer; the version may stand before them."""


def read_certificate(path: Path, key: Path, authority: Path | None) -> Certificate:
    """Everything that is to be told of the TLS files; what is wrong is in the result's problems."""
    try:
        text = path.read_bytes()[:MAX_BYTES].decode("ascii", "replace")
        begins, ends = validity(text)
    except OSError as error:
        return Certificate(path=str(path), problem=f"cannot read {path}: {error.strerror}")
    except ValueError as error:
        return Certificate(path=str(path), problem=f"{path}: {error}")
    return Certificate(
        path=str(path), not_before=begins, not_after=ends, key_problem=_key_problem(path, key),
        authority_problem="" if authority is None else _authority_problem(authority),
    )  # fmt: skip


def validity(text: str) -> tuple[float, float]:
    """Unix times between which the first certificate of a PEM text is valid.

    Raises:
        ValueError: there is none, or it is malformed.
    """
    match = _PEM.search(text)
    if match is None:
        raise ValueError("no certificate in PEM form")
    body = _content(_content(ssl.PEM_cert_to_DER_cert(match[0]), _SEQUENCE), _SEQUENCE)
    if body[:1] == bytes([_VERSION]):
        body = _element(body)[2]
    for _ in range(_BEFORE_VALIDITY):
        body = _element(body)[2]
    kind, first, rest = _element(_content(body, _SEQUENCE))
    begins = _time(kind, first)
    kind, second, _ = _element(rest)
    return begins, _time(kind, second)


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag, content and what follows of the first element."""
    if len(data) < 2:
        raise ValueError("the certificate is cut off")
    length, start = data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if start > 6 or start + length > len(data):
        raise ValueError("the certificate is cut off")
    return data[0], data[start : start + length], data[start + length :]


def _content(data: bytes, tag: int) -> bytes:
    found, content, _ = _element(data)
    if found != tag:
        raise ValueError("not an X.509 certificate")
    return content


def _time(kind: int, content: bytes) -> float:
    """UTCTime has two digits of the year, which begin at 1950 (RFC 5280, section 4.1.2.5)."""
    digits = content.decode("ascii", "replace").removesuffix("Z")
    if kind == _UTC_TIME:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    elif kind != _GENERALIZED_TIME:
        raise ValueError("not an X.509 certificate")
    return datetime.strptime(digits, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


def _key_problem(path: Path, key: Path) -> str:
    try:
        # A key with a password would ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(path, key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"{key} is not the key of {path}"
        return f"{key} cannot be used with {path}: {(error.reason or 'unreadable').lower().replace('_', ' ')}"
    except OSError as error:
        return f"cannot read {key}: {error.strerror}"
    return ""


def _authority_problem(path: Path) -> str:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except ssl.SSLError:
        return f"{path} holds no certificate of an authority"
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    return ""
