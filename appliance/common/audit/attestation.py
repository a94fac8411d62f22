"""Attestations: what serves one tenant's requests, under the signature of the audit log. Pure.

::

    athanor.attestation/3
    {"log":"athanor.audit/3f2a...","time":1793491260001,"nonce":"9f...","tenant":"alpha",...}
    - athanor.audit/3f2a9c01 Az3grlgtzPICa5OS8npVmf1Myq...

(where the dash is U+2014). The number in the first line is the form. The text names every model that the tenant may
use and every adapter that it has, and none of others. The supervisor makes it from what it knows for itself: the files
that it hashed, the image that it checked, the program and flags that it starts sandboxes with, the policy files that it
reads. The gateway, which tenants talk to, can pass it on or not, and change nothing of it. The nonce is the tenant's:
an attestation with it was made after the nonce was chosen.

It says nothing that changes with what other tenants do: not the root of the log either, which every entry changes.

It is the word of the host's operating system and its root: nothing here is measured by hardware.

Attestations of the form 2 name one model, and no adapters. They are read, and verified, as what they say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from appliance.common.audit.checkpoint import Verifier
from appliance.common.audit.signed_text import SignedTextError, json_line, json_object, read_lines, sign_lines
from isolation.keys.signing import SigningKey

FORM, EARLIER_FORM = 3, 2
"""Form of what is made, and of what is read beside it."""

FIRST_LINE = f"athanor.attestation/{FORM}"
EARLIER_LINE = f"athanor.attestation/{EARLIER_FORM}"

MIN_NONCE, MAX_NONCE = 16, 128
"""Characters of a nonce: 64 bits at least, so that none comes twice by chance, and a SHA-512 at most."""

NONCE = re.compile(rf"[0-9a-f]{{{MIN_NONCE},{MAX_NONCE}}}")
"""A nonce: small hexadecimal digits."""

MAX_ATTESTATION_BYTES = 65_000
"""Most bytes of an attestation. One has some 1,700, and 150 to 400 more for each further model and adapter: 64 models
and 128 adapters with the longest names fit, and such a text fits a control message with every character escaped."""

OUTSIDE = "outside"
"""In place of the sandbox of a model whose tokens a cluster outside of the appliance computes."""

MODELS, ADAPTERS = "models.", "adapters."
"""Before the name of a model or adapter whose digest is expected (``expectable``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedModel:
    """What an attestation says of one model that the tenant may use."""

    name: str
    digest: str
    """Digest of the model's files, as ``athanor model digest`` prints it."""
    signer: str
    """Id of the key that has signed these files, of those that the operator demands; empty: none is demanded."""
    sandbox: str
    """What isolates the engine: the attestation's ``runtime``, or ``OUTSIDE``; empty in the form 2, which has none."""
    flags: tuple[str, ...]
    """Flags of the engine's sandbox beyond those of all sandboxes: of a model on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestedAdapter:
    """What an attestation says of one adapter that the tenant has."""

    name: str
    """Whole name, ``MODEL:ADAPTER``."""
    digest: str
    """Digest of its files, as ``athanor model digest`` prints it."""


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
    """Model that was asked about, one of ``models``."""
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
    """Flags that the program is started with, for every sandbox."""
    limits: str
    """Limits of memory, processors and processes that are enforced, in one sentence."""
    version: str
    """Version of the appliance."""
    selftest: str
    """What the last recorded self-test came to, when, and of which version, in one line."""
    models: tuple[AttestedModel, ...]
    """Models that the tenant may use, by name; in the form 2 the one that was asked about."""
    adapters: tuple[AttestedAdapter, ...]
    """Adapters that the tenant has, by name; none in the form 2, which tells of none."""
    form: int = FORM
    """The number in the first line."""

    def __post_init__(self) -> None:
        """Check what a text of the right fields can still contradict.

        Raises:
            ValueError: the model that was asked about is missing, or a name stands there twice.
        """
        for names in ([one.name for one in self.models], [one.name for one in self.adapters]):
            if len(set(names)) != len(names):
                raise ValueError("an attestation names something twice")
        if self.model not in [one.name for one in self.models]:
            raise ValueError("an attestation does not name the model that was asked about among the others")

    @property
    def asked(self) -> AttestedModel:
        """The model that was asked about."""
        return next(one for one in self.models if one.name == self.model)


def sign_attestation(one: Attestation, key: SigningKey) -> str:
    """Make the text of an attestation, in the form ``FORM`` whatever form it was read in."""
    return sign_lines(FIRST_LINE, [json_line(_fields(one))], one.log, key)


def read_attestation(data: bytes, verifier: Verifier) -> Attestation:
    """Read a signed attestation, of the form 3 or 2.

    Raises:
        SignedTextError: it is of neither form, of another log, was changed since it was signed, or contradicts itself.
    """
    earlier = data.startswith(f"{EARLIER_LINE}\n".encode())
    lines = read_lines(data, EARLIER_LINE if earlier else FIRST_LINE, verifier)
    values: dict[str, Any] = json_object(lines[0]) if len(lines) == 1 else {}
    if values.keys() != (_EARLIER_FIELDS if earlier else _FIELDS):
        raise SignedTextError("it has other fields than an attestation of this form")
    if earlier:
        digest, signer = values.pop("model_digest"), values.pop("model_signer")
        one_model = {"name": values["model"], "digest": digest, "signer": signer, "sandbox": "", "flags": []}
        values |= {"models": [one_model], "adapters": []}
    values["models"] = tuple(_part(AttestedModel, part) for part in _listed(values["models"]))
    values["adapters"] = tuple(_part(AttestedAdapter, part) for part in _listed(values["adapters"]))
    values["flags"] = _texts(values["flags"])
    for name in values.keys() - {"models", "adapters", "flags"}:
        _check_type(values[name], int if name == "time" else str)
    try:
        return Attestation(form=EARLIER_FORM if earlier else FORM, **values)
    except ValueError as error:
        raise SignedTextError(f"it contradicts itself: {error}") from error


def facts(one: Attestation) -> dict[str, Any]:
    """Return everything that an attestation says, for programs: its fields, its form, and digest and signer of the
    model that was asked about by the names that the form 2 has for them."""
    asked = {"model_digest": one.asked.digest, "model_signer": one.asked.signer}
    return {"form": one.form} | _fields(one) | asked


def expectable(one: Attestation) -> dict[str, str]:
    """Return what can be compared with an expected value, by name: each field that is a single value, ``models.NAME``
    and ``adapters.NAME``, which are digests."""
    single = {name: str(value) for name, value in facts(one).items() if not isinstance(value, list | tuple)}
    digests = {f"{MODELS}{model.name}": model.digest for model in one.models}
    return single | digests | {f"{ADAPTERS}{adapter.name}": adapter.digest for adapter in one.adapters}


def mismatches(one: Attestation, expected: Mapping[str, str]) -> list[str]:
    """Return what differs from expected values, by name, as sentences; none where all are as expected."""
    found = expectable(one)
    return [
        f"{name} is {found[name]!r}, not {wanted!r}" if name in found else f"{name} is not stated"
        for name, wanted in expected.items()
        if found.get(name) != wanted
    ]


_FIELDS = frozenset(field.name for field in fields(Attestation)) - {"form"}
_EARLIER_FIELDS = (_FIELDS - {"models", "adapters"}) | {"model_digest", "model_signer"}

Part = TypeVar("Part", AttestedModel, AttestedAdapter)


def _fields(one: Attestation) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "form"}


def _part(kind: type[Part], value: object) -> Part:
    """Read a model or an adapter.

    Raises:
        SignedTextError: it is none.
    """
    if not isinstance(value, dict) or value.keys() != {field.name for field in fields(kind)}:
        raise SignedTextError("a model or adapter of it has other fields")
    values: dict[str, Any] = {
        name: _texts(part) if name == "flags" else _check_type(part, str) for name, part in value.items()
    }
    return kind(**values)


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_check_type(one, str) for one in _listed(value))


def _listed(value: object) -> list[Any]:
    return _check_type(value, list)  # type: ignore[no-any-return]


def _check_type(value: object, kind: type) -> Any:
    """Return a value of that very type: a truth value is no number.

    Raises:
        SignedTextError: it has another type.
    """
    if type(value) is not kind:
        raise SignedTextError("a value of it has another type")
    return value
