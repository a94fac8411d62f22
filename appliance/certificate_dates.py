"""When a PEM certificate begins and ends, read with the standard library alone.

``ssl`` tells no dates of a certificate that it has not verified; here they are read from the DER encoding (RFC 5280,
section 4.1; X.690). The file is the operator's own, yet every length is checked.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

MAX_BYTES = 1 << 20
"""Bytes of a file with a chain; usual ones have some thousand."""

DAY_S = 86_400

RENEW_DAYS = 14
"""Days before its end at which a certificate is complained about: time for whoever issues it."""

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18
_BEFORE_VALIDITY = 3
"""Fields of the body before the validity: serial number, algorithm, issuer; the version may stand before them."""


def read_validity(path: Path) -> tuple[float, float]:
    """Unix times between which the first certificate of a file is valid.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no certificate, or a malformed one.
    """
    with path.open("rb") as file:
        return validity(file.read(MAX_BYTES).decode("ascii", "replace"))


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


def whole_days(seconds: float) -> str:
    """Whole days, hours below one."""
    days, hours = divmod(int(seconds) // 3_600, 24)
    number, unit = (days, "day") if days else (hours, "hour")
    return f"{number} {unit}" + ("" if number == 1 else "s")


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
