"""Signatures of policies: they cover every file of a policy and nothing else, under whatever path it lies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from appliance.common.errors import ConfigError
from appliance.common.policy_signature import check_signed, policy_signers, sign_policy, signature_file, signed_bytes
from isolation.keys.signing import SigningKey, load_or_make
from policy.errors import PolicyError
from policy.files import read_sources

TENANT = "version: 1\ntenants: {%s: {credentials: ['key:%s'], models: ['*']}}\n"
MUTATIONS = 2_000


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    """A key to sign with."""
    return load_or_make(tmp_path / "key")[0]


def written(folder: Path, name: str = "policy.yaml") -> Path:
    """A policy with a drop-in and a public prefix."""
    folder.mkdir()
    path = folder / name
    (folder / "public").mkdir()
    drop_ins = path.with_suffix(".d")
    drop_ins.mkdir()
    path.write_text(TENANT % ("a", "a"))
    (drop_ins / "10-b.yaml").write_text(TENANT % ("b", "b"))
    (folder / "public" / "help.txt").write_text("You are a help desk.")
    return path


def check(path: Path, *keys: str) -> None:
    """Check the policy at a path."""
    check_signed(read_sources(path), path, keys)


def test_a_signed_policy_passes_under_any_path(tmp_path: Path, key: SigningKey) -> None:
    """Signed as one name, checked under another, with its signatures beside it; no key asks for none; a file that is no
    part of the policy changes nothing."""
    first = written(tmp_path / "first")
    check(first)
    with pytest.raises(ConfigError, match="not signed"):
        check(first, key.public.hex())
    made = sign_policy(read_sources(first), first, key)
    assert made == signature_file(first) == first.with_name("policy.yaml.sig")
    check(first, "ab" * 32, key.public.hex())
    second = written(tmp_path / "second", "live.yaml")
    signature_file(second).write_bytes(made.read_bytes())
    check(second, key.public.hex())
    (tmp_path / "second" / "live.d" / "notes.txt").write_text("not read")
    check(second, key.public.hex())


def test_a_folder_is_signed_like_a_file_with_drop_ins(tmp_path: Path, key: SigningKey) -> None:
    """The signature of a folder lies beside it and not in it, where it would be told as a file that is not read."""
    folder = written(tmp_path / "first").with_suffix(".d")
    made = sign_policy(read_sources(folder), folder, key)
    assert made.parent == folder.parent
    check(folder, key.public.hex())
    (folder / "20-c.yaml").write_text(TENANT % ("c", "c"))
    with pytest.raises(ConfigError, match="not signed"):
        check(folder, key.public.hex())


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text(path.read_text() + "# a comment\n"),
        lambda path: (path.parent / "policy.d" / "10-b.yaml").unlink(),
        lambda path: (path.parent / "policy.d" / "10-b.yaml").rename(path.parent / "policy.d" / "11-b.yaml"),
        lambda path: (path.parent / "policy.d" / "20-c.yaml").write_text(TENANT % ("c", "c")),
        lambda path: (path.parent / "public" / "help.txt").write_text("You are somebody else."),
        lambda path: (path.parent / "public" / "more.txt").write_text("More."),
        lambda path: signature_file(path).write_text(""),
        lambda path: signature_file(path).unlink(),
    ],
)
def test_any_change_of_a_file_ends_the_signature(tmp_path: Path, key: SigningKey, change) -> None:
    """A comment, a drop-in that goes, comes or has another name, a public prefix, and the signatures themselves."""
    path = written(tmp_path / "p")
    sign_policy(read_sources(path), path, key)
    check(path, key.public.hex())
    change(path)
    with pytest.raises(ConfigError, match="not signed as it is now"):
        check(path, key.public.hex())


def test_signatures_of_several_keys_stand_beside_each_other(tmp_path: Path, key: SigningKey) -> None:
    """Two people sign, either key is enough; one who signs after a change drops what holds no more."""
    other = load_or_make(tmp_path / "other")[0]
    path = written(tmp_path / "p")
    for one in (key, other, key):
        sign_policy(read_sources(path), path, one)
    assert set(policy_signers(read_sources(path), path)) == {key.public.hex(), other.public.hex()}
    path.write_text(TENANT % ("z", "z"))
    sign_policy(read_sources(path), path, other)
    assert signature_file(path).read_text().count("\n") == 1
    check(path, other.public.hex())
    with pytest.raises(ConfigError, match=f"signed by {other.public.hex()[:16]}"):
        check(path, key.public.hex())


@pytest.mark.parametrize("text", [b"ed25519 00 00\n", b"\xff\xfe", b"x" * (17 << 10), b"ed25519 " + b"0" * 64])
def test_a_file_that_is_no_list_of_signatures_is_refused(tmp_path: Path, key: SigningKey, text: bytes) -> None:
    """Truncated, binary, endless: a reason with the mend, and never a signature."""
    path = written(tmp_path / "p")
    signature_file(path).write_bytes(text)
    with pytest.raises(ConfigError, match="no list of signatures"):
        check(path, key.public.hex())


def test_no_mutated_policy_passes(tmp_path: Path, key: SigningKey) -> None:
    """Bytes of policy, drop-in and prefix changed and removed at random: no text but the signed one passes, which does
    (control)."""
    path = written(tmp_path / "p")
    sign_policy(read_sources(path), path, key)
    places = [path, path.parent / "policy.d" / "10-b.yaml", path.parent / "public" / "help.txt"]
    kept = {place: place.read_bytes() for place in places}
    whole, draw, refused = signed_bytes(read_sources(path), path), random.Random(7), 0
    for _ in range(MUTATIONS):
        place = draw.choice(places)
        data = bytearray(kept[place])
        at = draw.randrange(len(data))
        data[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        place.write_bytes(data)
        try:
            sources = read_sources(path)
            if signed_bytes(sources, path) == whole:
                assert {one: one.read_bytes() for one in places} == kept
            else:
                with pytest.raises(ConfigError):
                    check_signed(sources, path, [key.public.hex()])
                refused += 1
        except PolicyError:
            refused += 1
        place.write_bytes(kept[place])
    assert refused > MUTATIONS // 2
    check(path, key.public.hex())
