"""Objects that are kept over restarts: what opens, and everything that must not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from isolation.keys.errors import SealBrokenError
from isolation.keys.kept import KEPT_OVERHEAD_BYTES, KeptName, KeptSealer
from isolation.keys.keyring import Keyring

NAME = KeptName("alpha", "file", "file-1", 3)


@pytest.fixture
def keyring(tmp_path: Path) -> Iterator[Keyring]:
    """A keyring of its own."""
    ring = Keyring(tmp_path / "keys", bytes(32))
    yield ring
    ring.close()


def test_what_was_sealed_opens_after_a_restart(keyring: Keyring, tmp_path: Path) -> None:
    """Sealed by one keyring, opened by the next on the same folder; no two sealings of one content are alike."""
    sealed = KeptSealer(keyring).seal(NAME, b"content" * 100)
    assert len(sealed) == 700 + KEPT_OVERHEAD_BYTES
    assert b"content" not in sealed
    assert KeptSealer(keyring).seal(NAME, b"content" * 100) != sealed
    keyring.close()
    ring = Keyring(tmp_path / "keys", bytes(32))
    assert KeptSealer(ring).open(NAME, sealed) == b"content" * 100
    ring.close()


def test_every_flip_cut_and_other_name_is_refused(keyring: Keyring) -> None:
    """One bit of each byte, every shorter length, and any field of the name changed."""
    sealer = KeptSealer(keyring)
    sealed = sealer.seal(NAME, b"forty bytes of content, exactly as long.")
    sealer.seal(replace(NAME, tenant="beta"), b"")
    broken = [sealed[:at] + bytes([sealed[at] ^ 1 << at % 8]) + sealed[at + 1 :] for at in range(len(sealed))]
    broken += [sealed[:length] for length in range(len(sealed))] + [sealed + b"\0"]
    for one in broken:
        with pytest.raises(SealBrokenError):
            sealer.open(NAME, one)
    others = [
        replace(NAME, tenant="beta"),
        replace(NAME, kind="result"),
        replace(NAME, owner="f"),
        replace(NAME, part=4),
    ]
    for other in others:
        with pytest.raises(SealBrokenError):
            sealer.open(other, sealed)
    assert sealer.open(NAME, sealed)


def test_nothing_opens_after_a_shred(keyring: Keyring) -> None:
    """A destroyed key leaves ciphertext, before and after another is drawn; asking for the id draws none."""
    sealer = KeptSealer(keyring)
    sealed = sealer.seal(NAME, b"x")
    first = keyring.key_id("alpha")
    keyring.shred("alpha")
    assert keyring.key_id("alpha") is None
    with pytest.raises(SealBrokenError, match="gone"):
        sealer.open(NAME, sealed)
    newer = sealer.seal(NAME, b"y")
    assert keyring.key_id("alpha") not in (None, first)
    with pytest.raises(SealBrokenError, match="gone"):
        sealer.open(NAME, sealed)
    assert sealer.open(NAME, newer) == b"y"
