"""Cosignatures: what witnesses sign of a checkpoint, with the time (C2SP tlog-cosignature, ``cosignature/v1``). Pure.

A checkpoint may have further signature lines below the log's own, one for each witness::

    - witness.example.org/w1 jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9...

(where the dash is U+2014), whose base64 has four bytes that tell the key, eight of the time in seconds, and an Ed25519
signature over ``cosignature/v1``, the time and the first three lines of the checkpoint. It says that the witness has
seen no tree of this log that this one does not continue, and none larger, up to that time. A key of a witness is a line
like the log's, of the kind 4.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from appliance.common.audit.checkpoint import KEY_HASH_BYTES, MAX_CHECKPOINT_BYTES, CheckpointError, strict_base64
from isolation.keys.signing import PUBLIC_BYTES, SIGNATURE_BYTES, SigningKey, verifies

COSIGNED = b"\x04"
"""Kind of a key that cosigns with the time, as signed notes number them."""

TIME_BYTES = 8
MAX_COSIGNATURES = 16
"""Signature lines of one checkpoint beside the log's: one for each witness that a configuration may have."""

_LINE = re.compile("\u2014 ([!-~]{1,64}) ([A-Za-z0-9+/=]{8,128})\n")


@dataclass(frozen=True, slots=True)
class Witness:
    """Name and public key of a witness."""

    name: str
    public: bytes

    @property
    def mark(self) -> bytes:
        """Four bytes that identify the key."""
        return sha256(self.name.encode() + b"\n" + COSIGNED + self.public).digest()[:KEY_HASH_BYTES]

    def line(self) -> str:
        """Verifier key as a line without its end."""
        return f"{self.name}+{self.mark.hex()}+{base64.b64encode(COSIGNED + self.public).decode()}"


@dataclass(frozen=True, slots=True)
class Cosignature:
    """A cosignature that holds."""

    witness: str
    time: int
    """Seconds of the Unix epoch, by the witness's clock."""


def parse_witness(line: str) -> Witness:
    """Read a witness's key.

    Raises:
        CheckpointError: it is none.
    """
    parts = line.strip().split("+", 2)
    data = strict_base64(parts[2]) if len(parts) == 3 else b""
    witness = Witness(parts[0], data[1:])
    named = re.fullmatch("[!-*,-~]{1,64}", parts[0]) is not None
    if not named or len(data) != 1 + PUBLIC_BYTES or data[:1] != COSIGNED or witness.line() != line.strip():
        raise CheckpointError(
            "that is not the key of a witness: name+digits+base64, on one line, of an Ed25519 cosigner"
        )
    return witness


def first_note(text: str) -> str:
    """Return a checkpoint without what stands below the log's own signature."""
    body, gap, lines = text.partition("\n\n")
    return body + gap + "".join(lines.splitlines(keepends=True)[:1])


def signature_lines(text: str) -> list[str]:
    """Return the signature lines of a checkpoint below the log's own."""
    return text.partition("\n\n")[2].splitlines(keepends=True)[1:]


def cosign(note: str, witness: Witness, key: SigningKey, time: int) -> str:
    """Return a witness's signature line of a checkpoint."""
    signature = key.sign(_message(note, time))
    data = base64.b64encode(witness.mark + time.to_bytes(TIME_BYTES, "big") + signature).decode()
    return f"\u2014 {witness.name} {data}\n"


def read_cosignature(note: str, line: str, witness: Witness) -> Cosignature:
    """Read a witness's signature line of a checkpoint.

    Raises:
        CheckpointError: it is another's, of another checkpoint, or was changed.
    """
    found = _LINE.fullmatch(line)
    data = strict_base64(found[2]) if found is not None else b""
    if found is None or len(data) != KEY_HASH_BYTES + TIME_BYTES + SIGNATURE_BYTES:
        raise CheckpointError("a cosignature is malformed")
    if found[1] != witness.name or data[:KEY_HASH_BYTES] != witness.mark:
        raise CheckpointError(f"a cosignature is of {found[1]}, or of another key, not of {witness.name}")
    time = int.from_bytes(data[KEY_HASH_BYTES:][:TIME_BYTES], "big")
    if not verifies(witness.public, data[KEY_HASH_BYTES + TIME_BYTES :], _message(note, time)):
        raise CheckpointError(f"the cosignature of {witness.name} does not hold")
    return Cosignature(witness.name, time)


def read_cosignatures(text: str, witnesses: Sequence[Witness], *, every: bool = True) -> list[Cosignature]:
    """Read all cosignatures of a checkpoint, each of which must be of one of these witnesses; with ``every`` each of
    these must have cosigned.

    Raises:
        CheckpointError: one is of no witness of these, does not hold, stands there twice, or is missing; or there are
            too many.
    """
    lines = signature_lines(text)
    if len(lines) > MAX_COSIGNATURES or len(text) > MAX_CHECKPOINT_BYTES * (1 + MAX_COSIGNATURES):
        raise CheckpointError("a checkpoint has too many signatures")
    known = {one.name: one for one in witnesses}
    found = []
    for line in lines:
        name = line.split(" ")[1] if line.count(" ") == 2 else ""
        if name not in known:
            raise CheckpointError(f"a signature is of no witness that is known: {name[:64]!r}")
        found.append(read_cosignature(text, line, known.pop(name)))
    if every and known:
        raise CheckpointError(f"the cosignature of {', '.join(known)} is missing")
    return found


def _message(note: str, time: int) -> bytes:
    body = note.partition("\n\n")[0]
    return f"cosignature/v1\ntime {time}\n{body}\n".encode()
