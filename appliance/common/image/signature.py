"""Signatures of an image: Ed25519 (RFC 8032) over its manifest, in the file ``signatures`` beside it.

They are no part of the image's digest, so a digest that is pinned stays pinned when somebody else signs as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from appliance.common.signature_lines import MAX_BYTES, described, holding, read_lines, signed_by, write_lines
from isolation.errors import ImageError
from isolation.host.atomic_file import write_whole
from isolation.image.manifest import SIGNATURES, Manifest, read_bounded, read_manifest
from isolation.keys.signing import SigningKey

DOMAIN = b"athanor image signature 1\n"
"""Before what is signed: no signature of an audit log's checkpoint is one of an image."""

MODE = 0o644


def sign(image: Path, key: SigningKey) -> None:
    """Add a signature to an image, in place of an older one of the same key.

    Raises:
        ImageError: it is no image, or its signatures are malformed or too many.
        OSError: the file cannot be written.
    """
    _, data = read_manifest(image)
    try:
        signatures = signed_by(key, DOMAIN + data, _read(image))
    except ValueError as error:
        raise ImageError(f"{image} cannot be signed: {error}", image / SIGNATURES) from error
    write_whole(image / SIGNATURES, write_lines(signatures), MODE)


def signers(image: Path) -> tuple[str, ...]:
    """The public keys, in hex, whose signatures over the image's manifest hold.

    Raises:
        ImageError: it is no image, or its signatures are malformed.
    """
    _, data = read_manifest(image)
    return holding(_read(image), DOMAIN + data)


def check_signed(image: Path, manifest: Manifest, keys: Iterable[str]) -> None:
    """Demand a signature by one of the keys.

    Raises:
        ImageError: there is none.
    """
    wanted, found = set(keys), signers(image)
    if wanted & set(found):
        return
    raise ImageError(
        f"image {manifest.digest[:16]} is {described(found)}, and not by any key of sandbox.image_keys",
        image / SIGNATURES,
        hint="sign it with `athanor image sign` if you trust it, or name the key that it is signed with",
    )


def _read(image: Path) -> dict[str, str]:
    place = image / SIGNATURES
    if not place.exists():
        return {}
    try:
        return read_lines(read_bounded(place, MAX_BYTES))
    except ValueError as error:
        raise ImageError(f"{place} is malformed", place, hint="remove it and sign the image again") from error
