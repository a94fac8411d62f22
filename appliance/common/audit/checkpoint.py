"""Checkpoints: size and root of the log under a signature, as text (C2SP tlog-checkpoint and signed-note).

::

    athanor.audit/3f2a9c01
    1841
    qINS1GRFhWHwdkUeqLEoP4yEMkTBBzxBkGwGQlVlVcs=

    - athanor.audit/3f2a9c01 Az3grlgtzPICa5OS8npVmf1Myq...

(where the dash is U+2014). The name ends in digits of the log's own random number, so that checkpoints of two logs are
never taken for one another's. What follows the name is four bytes that tell the key and then the signature, in base64.
A *verifier key* is one line too: ``name+digits+base64``, where the last part is the byte 1 (Ed25519) and the public
key. Tools for signed notes read both.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from hashlib import sha256

from appliance.common.audit.merkle import HASH_BYTES
from isolation.keys.signing import PUBLIC_BYTES, SIGNATURE_BYTES, SigningKey, verifies

ED25519 = b"\x01"
"""Kind of key, as signed notes number them."""

KEY_HASH_BYTES = 4
MAX_CHECKPOINT_BYTES = 1_024

_BODY = r"([!-~]{1,64})\n(0|[1-9][0-9]{0,17})\n([A-Za-z0-9+/=]{44})\n"
_TEXT = re.compile(_BODY + r"\n\u2014 ([!-~]{1,64}) ([A-Za-z0-9+/=]{8,128})\n")


class CheckpointError(ValueError):
    """The text is no checkpoint, or not one of this log; the message says which."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """Name and public key with which the checkpoints of one log are verified."""

    name: str
    public: bytes

    @property
    def mark(self) -> bytes:
        """Four bytes that identify the key."""
        return sha256(self.name.encode() + b"\n" + ED25519 + self.public).digest()[:KEY_HASH_BYTES]

    def line(self) -> str:
        """Verifier key as a line without its end."""
        return f"{self.name}+{self.mark.hex()}+{base64.b64encode(ED25519 + self.public).decode()}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Size and root of a log at the time of signing."""

    size: int
    root: bytes


def parse_verifier(line: str) -> Verifier:
    """Read a verifier key.

    Raises:
        CheckpointError: it is none.
    """
    parts = line.strip().split("+", 2)
    data = strict_base64(parts[2]) if len(parts) == 3 else b""
    verifier = Verifier(parts[0], data[1:])
    if len(data) != 1 + PUBLIC_BYTES or data[:1] != ED25519 or verifier.line() != line.strip():
        raise CheckpointError("that is not the verifier key of an audit log: name+digits+base64, on one line")
    return verifier


def sign_checkpoint(checkpoint: Checkpoint, name: str, key: SigningKey) -> str:
    """Sign a checkpoint; gives the text."""
    body = f"{name}\n{checkpoint.size}\n{base64.b64encode(checkpoint.root).decode()}\n"
    mark = Verifier(name, key.public).mark
    return f"{body}\n\u2014 {name} {base64.b64encode(mark + key.sign(body.encode())).decode()}\n"


def read_checkpoint(text: str, verifier: Verifier) -> Checkpoint:
    """Read a signed text.

    Raises:
        CheckpointError: malformed, of another log, or the signature does not hold.
    """
    match = _TEXT.fullmatch(text) if len(text) <= MAX_CHECKPOINT_BYTES else None
    if match is None:
        raise CheckpointError("a checkpoint is malformed")
    name, size, root, signer, signature = match.groups()
    if name != verifier.name or signer != name:
        raise CheckpointError(f"a checkpoint is of the log {name}, not of {verifier.name}")
    hashed, signed = strict_base64(root), strict_base64(signature)
    body = text[: text.index("\n\n") + 1].encode()
    if len(hashed) != HASH_BYTES or len(signed) != KEY_HASH_BYTES + SIGNATURE_BYTES:
        raise CheckpointError("a checkpoint is malformed")
    if signed[:KEY_HASH_BYTES] != verifier.mark or not verifies(verifier.public, signed[KEY_HASH_BYTES:], body):
        raise CheckpointError("the signature of a checkpoint does not hold")
    return Checkpoint(int(size), hashed)


def strict_base64(text: str) -> bytes:
    """Bytes of strict base64; empty for any other text. A decoder would pass over bits behind the last byte, which were
    not written either."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""
    return data if base64.b64encode(data).decode() == text else b""
