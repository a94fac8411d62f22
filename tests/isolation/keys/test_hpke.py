"""HPKE and a member's keys: what opens, what must not, and that the bytes are those of RFC 9180."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from isolation.keys.errors import KeysError, SealBrokenError
from isolation.keys.hpke import OVERHEAD_BYTES, draw_key, hpke_key_of, wrap
from isolation.keys.member import MEMBER_FILE_BYTES, MemberKeyError, create_member_keys, read_member_keys

INFO = b"context"


def expand(secret: bytes, label: bytes, context: bytes, suite: bytes, size: int) -> bytes:
    """LabeledExpand of RFC 9180, section 4; one block of HMAC-SHA256 suffices here."""
    info = size.to_bytes(2, "big") + b"HPKE-v1" + suite + label + context
    return hmac.digest(secret, info + b"\x01", hashlib.sha256)[:size]


def extract(salt: bytes, label: bytes, data: bytes, suite: bytes) -> bytes:
    """LabeledExtract of RFC 9180, section 4."""
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + data, hashlib.sha256)


def test_the_bytes_are_those_of_the_rfc() -> None:
    """A receiver written from RFC 9180 alone (sections 4.1 and 5.1, base mode) opens what is wrapped: KEM 0x0020, KDF
    0x0001, AEAD 0x0002."""
    private = X25519PrivateKey.generate()
    public = private.public_key().public_bytes_raw()
    wrapped = wrap(public, b"a key", INFO)
    encapsulated, sealed = wrapped[:32], wrapped[32:]
    kem, suite = b"KEM" + bytes([0, 0x20]), b"HPKE" + bytes([0, 0x20, 0, 1, 0, 2])
    shared = private.exchange(X25519PublicKey.from_public_bytes(encapsulated))
    secret = expand(extract(b"", b"eae_prk", shared, kem), b"shared_secret", encapsulated + public, kem, 32)
    context = b"\0" + extract(b"", b"psk_id_hash", b"", suite) + extract(b"", b"info_hash", INFO, suite)
    schedule = extract(secret, b"secret", b"", suite)
    key, nonce = expand(schedule, b"key", context, suite, 32), expand(schedule, b"base_nonce", context, suite, 12)
    assert AESGCM(key).decrypt(nonce, sealed, b"") == b"a key"


def test_what_is_wrapped_opens_for_one_key_in_one_context() -> None:
    """The round trip; no bit may differ, nor the context, the key or the length."""
    key, data = draw_key(), b"secret" * 8
    wrapped = wrap(key.public, data, INFO)
    assert (key.open(wrapped, INFO), len(wrapped)) == (data, len(data) + OVERHEAD_BYTES)
    assert wrap(key.public, data, INFO) != wrapped
    broken = [wrapped[:at] + bytes([wrapped[at] ^ 1]) + wrapped[at + 1 :] for at in range(len(wrapped))]
    for one, info in [*((one, INFO) for one in (*broken, b"", wrapped[:-1], wrapped + b"\0")), (wrapped, b"other")]:
        with pytest.raises(SealBrokenError):
            key.open(one, info)
    with pytest.raises(SealBrokenError):
        draw_key().open(wrapped, INFO)


def test_a_public_key_of_small_order_is_refused() -> None:
    """To it anybody could open: zero and one as public keys, and one that is too short."""
    for public in (bytes(32), bytes([1]) + bytes(31), bytes(31)):
        with pytest.raises(KeysError):
            wrap(public, b"x", b"")
    with pytest.raises(KeysError, match="32 bytes"):
        hpke_key_of(bytes(31))


def test_a_members_keys_are_made_once_and_read_again(tmp_path: Path) -> None:
    """The file has both keys, is its owner's alone, and is never replaced; open to others, cut or missing it is
    refused, with what to do."""
    path = tmp_path / "member.key"
    made, found = create_member_keys(path), read_member_keys(path)
    assert (found.hpke.public, found.signing.public) == (made.hpke.public, made.signing.public)
    assert made.hpke.public != made.signing.public
    assert (path.stat().st_mode & 0o777, path.stat().st_size) == (0o600, MEMBER_FILE_BYTES)
    assert found.hpke.open(wrap(made.hpke.public, b"x", INFO), INFO) == b"x"
    with pytest.raises(MemberKeyError, match="already"):
        create_member_keys(path)
    path.chmod(0o604)
    with pytest.raises(MemberKeyError, match="open to others"):
        read_member_keys(path)
    path.chmod(0o600)
    path.write_bytes(bytes(63))
    with pytest.raises(MemberKeyError, match="63 bytes"):
        read_member_keys(path)
    with pytest.raises(MemberKeyError, match="no member's keys"):
        read_member_keys(tmp_path / "none")
