"""Another implementation of trees, tiles, notes and cosignatures, written from the specifications alone.

It imports nothing of the appliance, so that no mistake of ours agrees with it. RFC 6962 (2.1), C2SP signed-note,
tlog-checkpoint, tlog-tiles and tlog-cosignature.
"""

from __future__ import annotations

import base64
import struct
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def mth(leaves: list[bytes]) -> bytes:
    """MTH of RFC 6962 over hashes of leaves."""
    if not leaves:
        return sha256().digest()
    if len(leaves) == 1:
        return leaves[0]
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    return sha256(b"\1" + mth(leaves[:k]) + mth(leaves[k:])).digest()


def path_of(m: int, leaves: list[bytes]) -> list[bytes]:
    """PATH of RFC 6962, 2.1.1."""
    if len(leaves) == 1:
        return []
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    if m < k:
        return [*path_of(m, leaves[:k]), mth(leaves[k:])]
    return [*path_of(m - k, leaves[k:]), mth(leaves[:k])]


def proof_of(m: int, leaves: list[bytes], whole: bool = True) -> list[bytes]:
    """SUBPROOF of RFC 6962, 2.1.2."""
    if m == len(leaves):
        return [] if whole else [mth(leaves)]
    k = 1
    while k * 2 < len(leaves):
        k *= 2
    if m <= k:
        return [*proof_of(m, leaves[:k], whole), mth(leaves[k:])]
    return [*proof_of(m - k, leaves[k:], False), mth(leaves[:k])]


def continues(old: int, new: int, old_root: bytes, new_root: bytes, proof: list[bytes]) -> bool:
    """Whether a consistency proof holds, by taking it apart from its end as SUBPROOF builds it."""
    rest = list(proof)

    def both(m: int, n: int, whole: bool) -> tuple[bytes, bytes]:
        if m == n:
            value = old_root if whole else rest.pop(0)
            return value, value
        k = 1
        while k * 2 < n:
            k *= 2
        if m <= k:
            earlier, later = both(m, k, whole)
            return earlier, sha256(b"\1" + later + rest.pop(0)).digest()
        earlier, later = both(m - k, n - k, False)
        left = rest.pop(0)
        return sha256(b"\1" + left + earlier).digest(), sha256(b"\1" + left + later).digest()

    try:
        found = both(old, new, True)
    except IndexError:
        return False
    return not rest and found == (old_root, new_root)


def name_of(level: str, n: int, width: int = 256) -> str:
    """Path of a tile below the prefix."""
    text = f"{n % 1000:03d}"
    while n >= 1000:
        n //= 1000
        text = f"x{n % 1000:03d}/{text}"
    return f"tile/{level}/{text}" + ("" if width == 256 else f".p/{width}")


def leaves_in(folder: Path, size: int) -> list[bytes]:
    """Hashes of all leaves from the bundles, compared with every tile that a tree of this size has."""
    leaves: list[bytes] = []
    for n in range((size + 255) // 256):
        data = (folder / name_of("entries", n, min(256, size - 256 * n))).read_bytes()
        while data:
            (length,) = struct.unpack(">H", data[:2])
            leaves.append(sha256(b"\0" + data[2 : 2 + length]).digest())
            data = data[2 + length :]
    level, hashes = 0, leaves
    while hashes:
        for n in range((len(hashes) + 255) // 256):
            part = hashes[256 * n : 256 * n + 256]
            assert (folder / name_of(str(level), n, len(part))).read_bytes() == b"".join(part)
        hashes = [mth(hashes[256 * n : 256 * n + 256]) for n in range(len(hashes) // 256)]
        level += 1
    return leaves


def open_note(text: str, vkey: str) -> tuple[str, int, bytes]:
    """Origin, size and root of a checkpoint that the key has signed; of a cosigner's key (kind 4) likewise."""
    name, mark, encoded = vkey.split("+", 2)
    data = base64.b64decode(encoded)
    assert sha256(name.encode() + b"\n" + data).digest()[:4].hex() == mark
    body, _, signatures = text.partition("\n\n")
    body += "\n"
    for line in signatures.splitlines():
        dash, signer, encoded = line.split(" ")
        signed = base64.b64decode(encoded)
        if (dash, signer, signed[:4].hex()) != ("\u2014", name, mark):
            continue
        message = body.encode()
        if data[0] == 4:
            (seconds,) = struct.unpack(">Q", signed[4:12])
            message = f"cosignature/v1\ntime {seconds}\n{body}".encode()
        try:
            Ed25519PublicKey.from_public_bytes(data[1:]).verify(signed[-64:], message)
        except InvalidSignature:
            continue
        origin, size, root = body.splitlines()[:3]
        return origin, int(size), base64.b64decode(root)
    raise AssertionError("no signature of this key holds")
