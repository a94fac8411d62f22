"""Sealed objects: what opens, and everything that must not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from isolation.keys.errors import SealBrokenError
from isolation.keys.keyring import Keyring
from isolation.keys.seal import OVERHEAD_BYTES, Binding, Sealer

BINDING = Binding("alpha", "ab" * 32, b"block-id-0123456", b"epoch", "", "all", "bfloat16")


@pytest.fixture
def keyring(tmp_path: Path) -> Iterator[Keyring]:
    """A keyring of its own."""
    ring = Keyring(tmp_path / "keys", bytes(32))
    yield ring
    ring.close()


def test_what_was_sealed_opens_under_its_name(keyring: Keyring) -> None:
    """The round trip, of nothing and of a MiB; the ciphertext does not hold the content, and no two are alike."""
    sealer = Sealer(keyring)
    for data in (b"", b"secret KV" * 116_509):
        sealed, object_id = sealer.seal(BINDING, data)
        assert sealer.open(BINDING, sealed, object_id) == data
        assert len(sealed) == len(data) + OVERHEAD_BYTES
        assert not data or b"secret KV" not in sealed
        assert sealer.seal(BINDING, data)[0] != sealed


def test_every_flip_cut_and_growth_is_refused(keyring: Keyring) -> None:
    """One bit of each byte, every shorter length and a longer one: all rejected."""
    sealer = Sealer(keyring)
    sealed, object_id = sealer.seal(BINDING, b"forty bytes of keys and values, exactly.")
    broken = [sealed[:at] + bytes([sealed[at] ^ 1 << at % 8]) + sealed[at + 1 :] for at in range(len(sealed))]
    broken += [sealed[:length] for length in range(len(sealed))] + [sealed + b"\0"]
    for one in broken:
        with pytest.raises(SealBrokenError):
            sealer.open(BINDING, one, object_id)
    assert sealer.open(BINDING, sealed, object_id)


def test_an_object_opens_under_no_other_name(keyring: Keyring) -> None:
    """Any field of the binding changed, fields that run together, or the id of another object: rejected."""
    sealer = Sealer(keyring)
    sealed, object_id = sealer.seal(BINDING, b"content")
    others = [
        replace(BINDING, **{one.name: "beta" if isinstance(getattr(BINDING, one.name), str) else b"other"})
        for one in fields(Binding)
    ]
    others.append(replace(BINDING, adapter="all", layers=""))
    assert len({one.framed() for one in others} | {BINDING.framed()}) == len(others) + 1
    for other in others:
        with pytest.raises(SealBrokenError):
            sealer.open(other, sealed, object_id)
    newer, newer_id = sealer.seal(BINDING, b"newer")
    with pytest.raises(SealBrokenError, match="another object"):
        sealer.open(BINDING, sealed, newer_id)  # A replay of what this name held before.
    assert sealer.open(BINDING, newer, newer_id) == b"newer"


def test_nothing_opens_after_a_shred_a_rotation_or_the_run(keyring: Keyring) -> None:
    """A destroyed or rotated KEK, and another run with the same KEK, leave ciphertext; another tenant's still opens."""
    sealer = Sealer(keyring)
    objects = [sealer.seal(BINDING, bytes([number])) for number in range(20)]
    other = replace(BINDING, tenant="beta")
    kept = sealer.seal(other, b"kept")
    later = Sealer(keyring)
    for sealed, object_id in objects:
        with pytest.raises(SealBrokenError):
            later.open(BINDING, sealed, object_id)
    keyring.shred("alpha")
    for sealed, object_id in objects:
        with pytest.raises(SealBrokenError, match="gone"):
            sealer.open(BINDING, sealed, object_id)
    fresh = sealer.seal(BINDING, b"fresh")
    keyring.rotate("alpha")
    with pytest.raises(SealBrokenError, match="gone"):
        sealer.open(BINDING, *fresh)
    assert sealer.open(other, *kept) == b"kept"
