"""Signatures of models: bundles of OpenSSF model signing, in the file ``model.sig`` of a model's folder.

A bundle is JSON with an envelope (DSSE), which has a statement (in-toto) of name and SHA-256 of each file of the model,
and a signature over it. The file comes from strangers, as the model does: it is read bounded, and the statement is
parsed once a key has signed it. It is held against the digests by which the model's files are known already: those that
were hashed, and are compared before each start of a sandbox, so no file is read for it.

Certificates and identities are not taken: to verify them, logs of the public would have to be asked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from appliance.common.catalog import MAX_SIGNATURE_BYTES, SIGNATURE, ModelFiles, inside, own_file, served_names
from appliance.common.errors import ModelSignatureError, os_errors_as
from appliance.common.strict_json import JsonError, parse_json
from isolation.keys.public_key import PublicKey, PublicKeyError, public_key_of

MAX_SIGNED_FILES = 16_384
"""Most files of a statement; a published folder has a few hundred."""

BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"
"""Media type of the bundle, type of its payload, and types of the statement and of what it says."""

SIGN = "model_signing sign key DIR --private_key KEY.pem --signature DIR/model.sig"
"""Command that signs a model."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SignedFiles:
    """What a bundle says, once a key of those that are trusted has signed it."""

    signer: str
    """Id of that key."""
    digests: Mapping[str, str]
    """SHA-256 in hex of each file by its path in the model's folder."""

    def difference(self, there: Mapping[str, str]) -> str:
        """Return how files that are there, by the names that sandboxes see, differ from those that were signed; empty
        where they do not."""
        signed = {inside(name): self.digests[name] for name in served_names(self.digests.keys())}
        for name, digest in there.items():
            if name not in signed:
                return f"{name} is not among the files that were signed"
            if signed[name] != digest:
                return f"{name} is not the file that was signed: its SHA-256 is {digest}, and was {signed[name]}"
        gone = next((name for name in signed if name not in there), "")
        return f"{gone} was signed, and is not there" if gone else ""


def read_bundle(data: bytes, keys: Sequence[PublicKey]) -> SignedFiles:
    """Read a bundle that one of the keys has signed. Pure.

    Raises:
        ModelSignatureError: none has, or it is no bundle whose statement is about whole files by SHA-256.
    """
    if len(data) > MAX_SIGNATURE_BYTES:
        raise ModelSignatureError(f"it has more than {MAX_SIGNATURE_BYTES} bytes")
    payload, signature, claimed = _envelope(_parsed(data))
    message = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)
    signer = next((key for key in keys if key.verifies(signature, message)), None)
    if signer is None:
        wanted = ", ".join(key.id[:16] for key in keys)
        said = f", and says that it is by {claimed[:16]}" if _SHA256.fullmatch(claimed) else ""
        raise ModelSignatureError(f"it is not signed by any of the keys that must sign the model ({wanted}){said}")
    return SignedFiles(signer.id, _statement(_parsed(payload)))


def check_signature(name: str, folder: Path, there: Mapping[str, str], keys: Sequence[str]) -> str:
    """Demand that one of the keys has signed a model's files; return the id of that key.

    Args:
        name: of the model, for messages.
        folder: of the model, with the bundle.
        there: SHA-256 in hex of each file by the name that sandboxes see.
        keys: those that may sign, as the configuration has them.

    Raises:
        ModelSignatureError: none has, or the signature is about other files.
        ConfigError: the bundle cannot be read.
    """
    place = folder / SIGNATURE
    path = own_file(name, folder, SIGNATURE)
    if path is None:
        raise ModelSignatureError(f"model {name}: it is not signed, there is no {place}; sign it with: {SIGN}")
    with os_errors_as(f"model {name}: cannot read {path}"), path.open("rb") as file:
        data = file.read(MAX_SIGNATURE_BYTES + 1)
    try:
        signed = read_bundle(data, _read_keys(keys))
        if different := signed.difference(there):
            raise ModelSignatureError(different)
    except ModelSignatureError as error:
        mend = "put the signed files back, or have them signed as they are, by a key of signed_by or model_keys"
        raise ModelSignatureError(f"model {name}: {place} does not hold: {error.message}; {mend}") from None
    return signed.signer


def _read_keys(keys: Sequence[str]) -> list[PublicKey]:
    try:
        return [public_key_of(key) for key in keys]
    except PublicKeyError as error:
        raise ModelSignatureError(f"a key that must sign is none: {error}") from None


def hashed_files(files: ModelFiles) -> dict[str, str]:
    """Return the digests of a model's files, as they were hashed, by the names that sandboxes see."""
    names = (name for name, _ in files.engine + files.text)
    return {name: one.digest.hex() for name, one in zip(names, files.hashed, strict=True)}


def with_signer(files: ModelFiles, keys: Sequence[str]) -> ModelFiles:
    """Add to a model's files which of the keys has signed them, or why none has; nothing where there are no keys.

    Raises:
        ConfigError: the bundle cannot be read.
    """
    if not keys:
        return files
    try:
        return replace(files, signer=check_signature(files.name, files.folder, hashed_files(files), keys))
    except ModelSignatureError as error:
        return replace(files, unsigned=error.message)


def _parsed(data: bytes) -> Any:
    try:
        return parse_json(data)
    except JsonError as error:
        raise ModelSignatureError(f"it is no bundle of model signing: {error}") from None


def _envelope(bundle: Any) -> tuple[bytes, bytes, str]:
    """Return payload, signature and claimed key of a bundle."""
    match bundle:
        case {
            "mediaType": str(media),
            "verificationMaterial": {"publicKey": {**key}},
            "dsseEnvelope": {
                "payload": str(payload),
                "payloadType": str(kind),
                "signatures": [{"sig": str(signature)}],
            },
        } if (media, kind) == (BUNDLE, PAYLOAD):
            hint = key.get("hint")
            return _bytes(payload), _bytes(signature), hint if isinstance(hint, str) else ""
        case {"verificationMaterial": {"certificate": _} | {"x509CertificateChain": _}}:
            raise ModelSignatureError("it is signed with a certificate or an identity, and only keys are verified here")
    raise ModelSignatureError("it is no bundle of model signing, version 1.0, with one signature by a key")


def _bytes(text: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if not data or base64.b64encode(data).decode() != text:
        raise ModelSignatureError("it is no bundle of model signing: payload or signature is not base64")
    return data


def _statement(statement: Any) -> dict[str, str]:
    """Return the digests of a signed statement."""
    match statement:
        case {
            "_type": str(kind),
            "predicateType": str(predicate),
            "subject": [{"digest": {"sha256": str(root)}}],
            "predicate": {"serialization": {"method": "files"}, "resources": list(resources)},
        } if (kind, predicate) == (STATEMENT, PREDICATE) and len(resources) <= MAX_SIGNED_FILES:
            rows = tuple(_rows(resources))
        case _:
            raise ModelSignatureError("it is not about whole files of a model; sign without --use_shard and the like")
    found = dict(rows)
    if len(found) != len(rows):
        raise ModelSignatureError("it names a file twice")
    if hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in rows)).hexdigest() != root:
        raise ModelSignatureError("its files do not have the digest that it says")
    return found


def _rows(resources: list[Any]) -> Iterator[tuple[str, str]]:
    for resource in resources:
        match resource:
            case {"name": str(name), "algorithm": "sha256", "digest": str(digest)} if _SHA256.fullmatch(digest):
                yield name, digest
            case _:
                raise ModelSignatureError("it has a file without a SHA-256 digest; sign with the default hash")
