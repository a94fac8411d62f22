"""Tenants' keys on the medium: wrapped, private, rotated, destroyed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from isolation.host.atomic_file import write_whole
from isolation.keys.errors import KeyringError, RootKeyError, ShreddedError
from isolation.keys.keyring import Keyring
from isolation.keys.root import create_root, read_root

ROOT = bytes(range(32))
SALT = bytes(32)


def key_of(keyring: Keyring, tenant: str = "alpha") -> bytes:
    """A key derived with fixed salt and purpose: the same as long as the KEK is."""
    return keyring.derive(tenant, SALT, b"test")[1]


def opened(folder: Path, root: bytes = ROOT) -> Keyring:
    """The keyring in a folder."""
    return Keyring(folder, root)


def test_a_kek_outlives_the_process_and_is_the_tenants_own(tmp_path: Path) -> None:
    """Opened again, a keyring derives the same keys; another tenant, salt or purpose gives others."""
    first = opened(tmp_path / "keys")
    key = key_of(first)
    others = {key_of(first, "beta"), first.derive("alpha", b"x" * 32, b"test")[1], first.derive("alpha", SALT, b"y")[1]}
    first.close()
    assert len(others | {key}) == 4
    again = opened(tmp_path / "keys")
    assert key_of(again) == key
    assert again.tenants() == ["alpha", "beta"]
    assert (tmp_path / "keys" / "alpha.kek").stat().st_mode & 0o777 == 0o600


def test_nothing_on_the_medium_is_a_key_in_clear(tmp_path: Path) -> None:
    """No file of the keyring holds the KEK, which the test takes out of memory (control: the wrapped file is there)."""
    keyring = opened(tmp_path / "keys")
    key_of(keyring)
    kek = bytes(keyring._keks["alpha"].key)
    contents = [path.read_bytes() for path in (tmp_path / "keys").iterdir()]
    assert contents and len(kek) == 32
    assert all(kek not in content for content in contents)


def test_a_shredded_key_does_not_come_back(tmp_path: Path) -> None:
    """After a shred the key is another; its file put back from a copy is refused, also by a later process; the bytes of
    the KEK in memory are zero."""
    folder = tmp_path / "keys"
    keyring = opened(folder)
    key = key_of(keyring)
    held = keyring._keks["alpha"].key
    backup = (folder / "alpha.kek").read_bytes()
    assert keyring.shred("alpha")
    assert not any(held)
    assert not (folder / "alpha.kek").exists()
    keyring.close()
    (folder / "alpha.kek").write_bytes(backup)
    (folder / "alpha.kek").chmod(0o600)
    again = opened(folder)
    with pytest.raises(ShreddedError, match="destroyed"):
        key_of(again)
    assert again.shred("alpha")
    assert key_of(again) != key
    assert not again.shred("nobody")


def test_shred_overwrites_before_it_unlinks(tmp_path: Path) -> None:
    """The bytes of a destroyed file are gone for whoever still has it open."""
    keyring = opened(tmp_path / "keys")
    key_of(keyring)
    with (tmp_path / "keys" / "alpha.kek").open("rb") as held:
        before = held.read()
        keyring.rotate("alpha")
        held.seek(0)
        after = held.read()
    assert len(after) == len(before)
    assert after != before
    assert keyring.tenants() == ["alpha"]


def test_every_changed_byte_of_a_wrapped_key_is_noticed(tmp_path: Path) -> None:
    """Any flipped byte, a cut, a growth, another tenant's file and another root key: all refused."""
    folder = tmp_path / "keys"
    keyring = opened(folder)
    key = key_of(keyring)
    key_of(keyring, "beta")
    keyring.close()
    path = folder / "alpha.kek"
    whole = path.read_bytes()
    changed = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    changed += [whole[:-1], whole + b"x", b"", (folder / "beta.kek").read_bytes()]
    for content in changed:
        path.write_bytes(content)
        keyring = opened(folder)
        with pytest.raises(KeyringError):
            key_of(keyring)
        keyring.close()
    path.write_bytes(whole)
    foreign = opened(folder, bytes(32))
    with pytest.raises(KeyringError, match="another root key"):
        key_of(foreign)
    foreign.close()
    assert key_of(opened(folder)) == key


def test_the_root_key_can_be_changed(tmp_path: Path) -> None:
    """Rewrapped under a new root key, all KEKs are the same; the old root key opens none, and a rewrap that was cut off
    goes on where it was."""
    folder, new = tmp_path / "keys", os.urandom(32)
    keyring = opened(folder)
    key_of(keyring, "beta")
    assert keyring.rewrap(new) == 1
    keyring.close()
    later = opened(folder)  # The old root key, as after a crash: one more KEK is drawn under it.
    keys = key_of(later)
    assert later.rewrap(new) == 1
    later.close()
    moved = opened(folder, new)
    assert key_of(moved) == keys
    key_of(moved, "beta")
    moved.close()
    with pytest.raises(KeyringError):
        key_of(opened(folder))


def test_a_disk_that_fills_while_keys_are_rewrapped_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not reached stays readable and new keys are drawn under the root key that is still in force; the next
    attempt goes on."""
    folder, new = tmp_path / "keys", os.urandom(32)
    keyring = opened(folder)
    keys = {tenant: key_of(keyring, tenant) for tenant in ("alpha", "beta", "gamma")}
    keyring.close()
    keyring = opened(folder)  # Nothing is in its memory.
    room = [1]

    def fills(path: Path, data: bytes) -> None:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room.pop()
        write_whole(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("isolation.keys.keyring.write_whole", fills)
        with pytest.raises(KeyringError, match="No space left"):
            keyring.rewrap(new)
    assert [key_of(keyring, tenant) for tenant in ("beta", "gamma")] == [keys["beta"], keys["gamma"]]
    keys["delta"] = key_of(keyring, "delta")
    assert keyring.rewrap(new) == 3
    keyring.close()
    moved = opened(folder, new)
    assert {tenant: key_of(moved, tenant) for tenant in keys} == keys


def test_a_destroyed_key_is_remembered_behind_a_line_that_was_cut(tmp_path: Path) -> None:
    """A full disk may have taken a part of a line: the next destroyed key has a line of its own all the same."""
    folder = tmp_path / "keys"
    keyring = opened(folder)
    key_of(keyring)
    backup = (folder / "alpha.kek").read_bytes()
    (folder / "shredded").write_bytes(b"0123")
    (folder / "shredded").chmod(0o600)
    assert keyring.shred("alpha")
    keyring.close()
    (folder / "alpha.kek").write_bytes(backup)
    (folder / "alpha.kek").chmod(0o600)
    with pytest.raises(ShreddedError):
        key_of(opened(folder))


def test_a_folder_belongs_to_one_process_and_to_nobody_else(tmp_path: Path) -> None:
    """A second opening, a folder or file open to others, and names that are no tenant's are refused."""
    keyring = opened(tmp_path / "keys")
    with pytest.raises(KeyringError, match="running appliance"):
        opened(tmp_path / "keys")
    for name in ("", "../alpha", "Alpha", "a" * 64, "a/b", "-a"):
        with pytest.raises(KeyringError, match="no tenant"):
            key_of(keyring, name)
    key_of(keyring)
    keyring.close()
    with pytest.raises(KeyringError, match="closed"):
        key_of(keyring)
    (tmp_path / "keys" / "alpha.kek").chmod(0o640)
    keyring = opened(tmp_path / "keys")
    with pytest.raises(KeyringError, match="open to others"):
        key_of(keyring)
    keyring.close()
    (tmp_path / "keys").chmod(0o750)
    with pytest.raises(KeyringError, match="open to others"):
        opened(tmp_path / "keys")


def test_root_key_files(tmp_path: Path) -> None:
    """Made once, private, of the right length, never through a link; everything else is refused with what to do."""
    path = tmp_path / "root-key"
    with pytest.raises(RootKeyError, match="athanor tenant root"):
        read_root(path)
    create_root(path)
    assert len(read_root(path)) == 32
    with pytest.raises(RootKeyError, match="already"):
        create_root(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(RootKeyError):
        read_root(link)
    path.chmod(0o644)
    with pytest.raises(RootKeyError, match="chmod"):
        read_root(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(RootKeyError, match="5 bytes"):
        read_root(path)
