"""The signing key: RFC 8032's first vector, its file, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from isolation.keys.signing import SigningKeyError, key_of, load_or_make, verifies

SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")


def test_the_published_vector() -> None:
    """RFC 8032, section 7.1, test 1: public key and signature of the empty message."""
    key = key_of(SEED)
    assert key.public == PUBLIC
    assert key.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155")
    assert verifies(PUBLIC, key.sign(b""), b"")
    assert not verifies(PUBLIC, key.sign(b""), b"x")
    assert not verifies(PUBLIC, b"", b"")
    assert not verifies(b"\xff" * 32, key.sign(b""), b"")
    assert SEED.hex() not in repr(key)


def test_a_key_is_made_once_and_found_again(tmp_path: Path) -> None:
    """The first call makes the file, the second reads it; no draft is left."""
    first, made = load_or_make(tmp_path / "key")
    again, remade = load_or_make(tmp_path / "key")
    assert (made, remade) == (True, False)
    assert first.public == again.public
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_what_is_no_key_is_refused(tmp_path: Path) -> None:
    """A link, a file of another length, one open to others, a folder that is not there."""
    load_or_make(tmp_path / "key")
    (tmp_path / "link").symlink_to(tmp_path / "key")
    with pytest.raises(SigningKeyError, match="cannot use"):
        load_or_make(tmp_path / "link")
    (tmp_path / "long").write_bytes(bytes(33))
    (tmp_path / "long").chmod(0o600)
    with pytest.raises(SigningKeyError, match="not 33"):
        load_or_make(tmp_path / "long")
    (tmp_path / "key").chmod(0o604)
    with pytest.raises(SigningKeyError, match="open to other users"):
        load_or_make(tmp_path / "key")
    with pytest.raises(SigningKeyError, match="No such file"):
        load_or_make(tmp_path / "none" / "key")
