"""Bundles of model signing made here, for kinds of keys and forms that the real program does not write."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

TYPE = "application/vnd.in-toto+json"

HASHES: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
    "secp256k1": hashes.SHA256(),
}


def pem(key: PrivateKey) -> str:
    """The public key as a PEM text."""
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def statement(digests: Mapping[str, str], **changes: Any) -> dict[str, Any]:
    """A statement about files, with values of its predicate or of itself changed."""
    rows = [{"name": name, "algorithm": "sha256", "digest": digest} for name, digest in sorted(digests.items())]
    root = hashlib.sha256(b"".join(bytes.fromhex(row["digest"]) for row in rows)).hexdigest()
    predicate = {"serialization": {"method": "files", "hash_type": "sha256"}, "resources": rows}
    whole = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "m", "digest": {"sha256": root}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": predicate,
    }
    return {name: changes.get(name, value) for name, value in whole.items()}


def bundle(said: dict[str, Any], key: PrivateKey, **changes: Any) -> dict[str, Any]:
    """A bundle with a statement, signed by a key; with values of its envelope or of itself changed."""
    payload = json.dumps(said).encode()
    message = b"DSSEv1 %d %s %d %s" % (len(TYPE), TYPE.encode(), len(payload), payload)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        signature = key.sign(message)
    else:
        signature = key.sign(message, ec.ECDSA(HASHES[key.curve.name]))
    envelope = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": TYPE,
        "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
    }
    whole = {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {"publicKey": {"hint": hashlib.sha256(pem(key).encode()).hexdigest()}},
        "dsseEnvelope": {name: changes.get(name, value) for name, value in envelope.items()},
    }
    return {name: changes.get(name, value) for name, value in whole.items()}


def sign_folder(folder: Path, key: PrivateKey) -> None:
    """Sign a model's files as they are, those in folders of it included."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "model.sig"]
    digests = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    (folder / "model.sig").write_text(json.dumps(bundle(statement(digests), key)))
