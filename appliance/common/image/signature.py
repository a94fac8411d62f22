"""Signatures of an image: Ed25519 (RFC 8032) over its manifest, in the file ``signatures`` beside it.

A line each: ``ed25519``, the public key in hex, the signature in hex. They are no part of the image's digest, so a
digest that is pinned stays pinned when somebody else signs as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from isolation.errors import ImageError
from isolation.host.atomic_file import write_whole
from isolation.image.manifest import SIGNATURES, Manifest, read_bounded, read_manifest
from isolation.keys.signing import SigningKey, verifies

DOMAIN = b"athanor image signature 1\n"
"""Before what is signed: no signature of an audit log's checkpoint is one of an image."""

MAX_SIGNATURES = 32
MAX_BYTES = 16 << 10

MODE = 0o644

_LINE = re.compile(r"ed25519 ([0-9a-f]{64}) ([0-9a-f]{128})")


def sign(image: Path, key: SigningKey) -> None:
    """Add a signature to an image, in place of an older one of the same key.

    Raises:
        ImageError: it is no image, or its signatures are malformed or too many.
        OSError: the file cannot be written.
    """
    _, data = read_manifest(image)
    lines = {public: signature for public, signature in _read(image) if public != key.public.hex()}
    if len(lines) >= MAX_SIGNATURES:
        raise ImageError(f"{image} has {len(lines)} signatures already", image / SIGNATURES)
    lines[key.public.hex()] = key.sign(DOMAIN + data).hex()
    text = "".join(f"ed25519 {public} {signature}\n" for public, signature in sorted(lines.items()))
    write_whole(image / SIGNATURES, text.encode(), MODE)


def signers(image: Path) -> tuple[str, ...]:
    """The public keys, in hex, whose signatures over the image's manifest hold.

    Raises:
        ImageError: it is no image, or its signatures are malformed.
    """
    _, data = read_manifest(image)
    return tuple(
        public
        for public, signature in _read(image)
        if verifies(bytes.fromhex(public), bytes.fromhex(signature), DOMAIN + data)
    )


def check_signed(image: Path, manifest: Manifest, keys: Iterable[str]) -> None:
    """Demand a signature by one of the keys.

    Raises:
        ImageError: there is none.
    """
    wanted, found = set(keys), signers(image)
    if wanted & set(found):
        return
    said = f"signed by {', '.join(one[:16] for one in found)}" if found else "not signed"
    raise ImageError(
        f"image {manifest.digest[:16]} is {said}, and not by any key of sandbox.image_keys",
        image / SIGNATURES,
        hint="sign it with `athanor image sign` if you trust it, or name the key that it is signed with",
    )


def _read(image: Path) -> list[tuple[str, str]]:
    place = image / SIGNATURES
    if not place.exists():
        return []
    lines = read_bounded(place, MAX_BYTES).decode("ascii", "replace").splitlines()
    matches = [_LINE.fullmatch(line) for line in lines]
    if len(lines) > MAX_SIGNATURES or not all(matches):
        raise ImageError(f"{place} is malformed", place, hint="remove it and sign the image again")
    return [(match[1], match[2]) for match in matches if match is not None]
