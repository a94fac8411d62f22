"""Attestations: what serves one tenant's requests to a model, under the signature of the audit log. Pure.

::

    athanor.attestation/2
    {"log":"athanor.audit/3f2a...","time":1793491260001,"nonce":"9f...","tenant":"alpha",...}
    - athanor.audit/3f2a9c01 Az3grlgtzPICa5OS8npVmf1Myq...

(where the dash is U+2014). The supervisor makes it from what it knows for itself: the files that it hashed, the image
that it checked, the program and flags that it starts sandboxes with, the policy files that it reads. The gateway, which
tenants talk to, can pass it on or not, and change nothing of it. The nonce is the tenant's: an attestation with it was
made after the nonce was chosen.

It says nothing that changes with what other tenants do: not the root of the log either, which every entry changes.

It is the word of the host's operating system and its root: nothing here is measured by hardware.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from appliance.common.audit.checkpoint import Verifier
from appliance.common.audit.signed_text import SignedTextError, json_line, json_object, read_lines, sign_lines
from isolation.keys.signing import SigningKey

FIRST_LINE = "athanor.attestation/2"

MIN_NONCE, MAX_NONCE = 16, 128
"""Characters of a nonce: 64 bits at least, so that none comes twice by chance, and a SHA-512 at most."""

NONCE = re.compile(rf"[0-9a-f]{{{MIN_NONCE},{MAX_NONCE}}}")
"""A nonce: small hexadecimal digits."""

MAX_ATTESTATION_BYTES = 16_384
"""Most bytes of an attestation; one has some 1,500."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """What an attestation says; texts are empty where there is nothing to say."""

    log: str
    """Name of the audit log whose key signs."""
    time: int
    """When it was made, in milliseconds of the Unix epoch, by the host's clock."""
    nonce: str
    """The caller's."""
    tenant: str
    model: str
    model_digest: str
    """Digest of the model's files, as ``athanor model digest`` prints it."""
    model_signer: str
    """Id of the key that has signed these files, of those that the operator demands; empty: none is demanded."""
    isolation_class: str
    """Degree of isolation that the policy gives the tenant."""
    policy: str
    """Digest of the policy in the files that the supervisor reads."""
    image: str
    """Digest of the image that the sandboxes see; empty: the host's own Python."""
    runtime: str
    """What isolates sandboxes: ``gvisor/systrap`` or ``unsafe/none``."""
    program: str
    """Name and release of the program that runs sandboxes."""
    program_digest: str
    """SHA-256 of that program's file, in hex."""
    flags: tuple[str, ...]
    """Flags that the program is started with."""
    limits: str
    """Limits of memory, processors and processes that are enforced, in one sentence."""
    version: str
    """Version of the appliance."""
    selftest: str
    """What the last recorded self-test came to, when, and of which version, in one line."""


def sign_attestation(one: Attestation, key: SigningKey) -> str:
    """Make the text of an attestation."""
    return sign_lines(FIRST_LINE, [json_line(asdict(one))], one.log, key)


def read_attestation(data: bytes, verifier: Verifier) -> Attestation:
    """Read a signed attestation.

    Raises:
        SignedTextError: it is none of this version, of another log, or was changed since it was signed.
    """
    lines = read_lines(data, FIRST_LINE, verifier)
    values: dict[str, Any] = json_object(lines[0]) if len(lines) == 1 else {}
    if values.keys() != {field.name for field in fields(Attestation)}:
        raise SignedTextError("it has other fields than an attestation of this version")
    flags = values.pop("flags")
    if not isinstance(flags, list) or not all(isinstance(one, str) for one in flags):
        raise SignedTextError("a value of it has another type")
    if not all(type(value) is (int if name == "time" else str) for name, value in values.items()):
        raise SignedTextError("a value of it has another type")
    return Attestation(flags=tuple(flags), **values)


def mismatches(one: Attestation, expected: dict[str, str]) -> list[str]:
    """Return what differs from expected values, by field, as sentences; none where all are as expected."""
    found = asdict(one)
    return [
        f"{name} is {found[name]!r}, not {wanted!r}" for name, wanted in expected.items() if str(found[name]) != wanted
    ]
