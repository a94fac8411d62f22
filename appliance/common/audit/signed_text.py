"""Texts under the signature of the audit log: lines, and below them the last line of a signed note (C2SP).

The signature covers every byte before its line. The first line names the kind of text and its version. A checkpoint
(``checkpoint``) has the log's name there, and a number in its second line; these have JSON in it. So one key may sign
all of them, and none can pass for another.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

from appliance.common.audit.checkpoint import KEY_HASH_BYTES, Verifier, strict_base64
from isolation.keys.signing import SIGNATURE_BYTES, SigningKey, verifies

_SIGNATURE = re.compile("\u2014 ([!-~]{1,64}) ([A-Za-z0-9+/=]{92})")


class SignedTextError(ValueError):
    """The text is of another kind, of another log, was changed, or contradicts itself; the message says which."""


def sign_lines(first: str, lines: Sequence[str], name: str, key: SigningKey) -> str:
    """Sign lines, with ``first`` above them, in the name of a log; gives the text."""
    body = "".join(f"{line}\n" for line in (first, *lines))
    mark = Verifier(name, key.public).mark
    return f"{body}\u2014 {name} {base64.b64encode(mark + key.sign(body.encode())).decode()}\n"


def read_lines(data: bytes, first: str, verifier: Verifier) -> list[str]:
    """Read a signed text; gives its lines without the first and the signature.

    Raises:
        SignedTextError: it does not begin with ``first``, is of another log, or was changed since it was signed.
    """
    body, _, last = data.removesuffix(b"\n").rpartition(b"\n")
    body += b"\n"
    lines = body.decode("utf-8", "replace").split("\n")[:-1]
    if not data.endswith(b"\n") or lines[0] != first:
        raise SignedTextError(f"that is no {first}: its first line is another, or it is cut off")
    found = _SIGNATURE.fullmatch(last.decode("utf-8", "replace"))
    if found is None:
        raise SignedTextError("there is no signature: the text was cut off or changed")
    if found[1] != verifier.name:
        raise SignedTextError(f"it is of the log {found[1]}, not of {verifier.name}")
    signed = strict_base64(found[2])
    if len(signed) != KEY_HASH_BYTES + SIGNATURE_BYTES or signed[:KEY_HASH_BYTES] != verifier.mark:
        raise SignedTextError("it was signed with another key")
    if not verifies(verifier.public, signed[KEY_HASH_BYTES:], body):
        raise SignedTextError("the signature does not hold: the text was changed after it was signed")
    return lines[1:]


def json_object(line: str) -> dict[str, Any]:
    """Read a line that is a JSON object.

    Raises:
        SignedTextError: it is none.
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise SignedTextError("a line is no JSON object")
    return values


json_line = json.JSONEncoder(separators=(",", ":")).encode
"""One JSON value as a line, without spaces."""
