"""Which image a supervisor takes: the pinned one, whole, signed by whom the operator named; and no other."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.config import ApplianceConfig
from appliance.common.config_loader import load_config
from appliance.common.errors import ConfigError, StartError
from appliance.common.image import stamp, store
from appliance.common.image.check import check, resolve
from appliance.common.image.pin import MAX_BEFORE, Pin, read_pin, write_pin
from appliance.common.image.signature import sign, signers
from isolation.errors import ImageError
from isolation.image.manifest import MANIFEST, SIGNATURES, Manifest, encode_manifest, read_manifest
from isolation.image.rootfs import verify_image
from isolation.keys.signing import key_of
from tests.appliance.common.image.samples import make_image, write_list

KEY, OTHER = key_of(bytes(range(32))), key_of(bytes(range(1, 33)))


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A whole image, unsigned."""
    make_image(tmp_path / "image")
    return tmp_path / "image"


def config_of(folder: Path, **sandbox: object) -> ApplianceConfig:
    """A configuration with these words about images."""
    values = {
        "models": [{"name": "m", "path": "m"}],
        "policy": "p",
        "credentials": "c",
        "pepper": "p",
        "run_dir": "run",
        "sandbox": sandbox,
    }
    path = folder / "athanor.yaml"
    path.write_text(json.dumps(values))
    return load_config(path)


def pinned(image: Path, *keys: str) -> ApplianceConfig:
    """A configuration that pins this image, as it is."""
    digest = read_manifest(image)[0].digest
    return config_of(image.parent, image=str(image), image_digest=digest, image_keys=list(keys))


def flip(path: Path) -> None:
    """Change the last byte of a file, its size and times kept."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("name", ["engine/opt/f", "text/opt/d/program", "engine.files", "sbom.json"])
def test_a_changed_byte_is_refused_by_name(image: Path, name: str) -> None:
    """Of whichever file; unchanged it is taken."""
    config = pinned(image)
    assert check(config) is not None
    flip(image / name)
    if name == "engine.files":
        # The list is looked at only to name a file: the tree itself is what the manifest says.
        flip(image / "engine/opt/f")
    with pytest.raises(ImageError) as caught:
        check(config)
    assert caught.value.path == image / name


def test_a_changed_manifest_is_another_image(image: Path) -> None:
    """Whatever is changed in it, its digest is not the pinned one any more."""
    config = pinned(image)
    text = (image / MANIFEST).read_text()
    (image / MANIFEST).write_text(text.replace('"1.0"', '"1.1"'))
    with pytest.raises(ImageError, match="the configuration pins"):
        check(config)
    (image / MANIFEST).write_text(text)
    assert check(config) is not None


def test_modes_and_additions_are_changes(image: Path) -> None:
    """A file that became a program, one too many, one too few, a tree too many, a link in place of a folder."""
    for change, undo in (
        (lambda: (image / "text/opt/f").chmod(0o755), lambda: (image / "text/opt/f").chmod(0o644)),
        (lambda: (image / "text/opt/new").touch(), lambda: (image / "text/opt/new").unlink()),
        (lambda: (image / "text/opt/f").rename(image / "f"), lambda: (image / "f").rename(image / "text/opt/f")),
        (lambda: (image / "more").mkdir(), lambda: (image / "more").rmdir()),
        (lambda: (image / "text/opt/l").symlink_to("/etc"), lambda: (image / "text/opt/l").unlink()),
    ):
        change()
        with pytest.raises(ImageError):
            verify_image(image)
        undo()
        verify_image(image)


def test_signatures_are_demanded_where_keys_are_named(image: Path) -> None:
    """Unsigned, signed by another, with a damaged signature, and with the signature of another image: refused. Signed
    by one of the keys, beside others: taken. Without keys nobody asks."""
    config = pinned(image, KEY.public.hex())
    with pytest.raises(ImageError, match="not signed"):
        check(config)
    sign(image, OTHER)
    with pytest.raises(ImageError, match="not by any key"):
        check(config)
    sign(image, KEY)
    sign(image, KEY)
    assert sorted(signers(image)) == sorted((KEY.public.hex(), OTHER.public.hex()))
    assert check(config) is not None
    good = (image / SIGNATURES).read_text()
    make_image(image.parent / "second", content="another")
    (image.parent / "second" / SIGNATURES).write_text(good)
    assert signers(image.parent / "second") == ()
    with pytest.raises(ImageError, match="not signed"):
        check(pinned(image.parent / "second", KEY.public.hex()))
    (image / SIGNATURES).write_text(good.replace(good[-9:-1], "00000000"))
    assert len(signers(image)) == 1
    (image / SIGNATURES).write_text("ed25519 short\n")
    with pytest.raises(ImageError, match="malformed"):
        signers(image)
    assert check(pinned(image)) is not None


def test_an_audit_checkpoint_is_no_signature_of_an_image(image: Path) -> None:
    """The same key signs both, and neither says what the other says."""
    _, data = read_manifest(image)
    (image / SIGNATURES).write_text(f"ed25519 {KEY.public.hex()} {KEY.sign(data).hex()}\n")
    assert signers(image) == ()


def test_an_image_of_another_wire_is_refused(image: Path) -> None:
    """Whole, pinned, and of a version whose programs this one cannot talk to: told at start, not by a timeout."""
    assert check(pinned(image)) is not None
    make_image(image.parent / "older", protocol=1)
    with pytest.raises(ImageError, match="speaks version 1 of the wire"):
        check(pinned(image.parent / "older"))


def test_a_stamp_spares_the_second_reading_and_no_change(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start that read everything the next one looks at times and sizes only; a byte changed since, with size
    and mtime kept, is found all the same; so is one while the stamp belongs to another boot."""
    run_dir = image.parent / "run"
    run_dir.mkdir()
    config = pinned(image)
    monkeypatch.setattr(stamp, "SETTLED_NS", -(1 << 62))
    assert check(config, run_dir) is not None
    assert (run_dir / stamp.NAME).is_file()
    read: list[Path] = []
    monkeypatch.setattr(
        "appliance.common.image.check.verify_image", lambda path: read.append(path) or verify_image(path)
    )
    assert check(config, run_dir) is not None
    assert read == []
    monkeypatch.setattr(stamp, "_boot_id", lambda: "another")
    assert check(config, run_dir) is not None
    assert read == [image]
    assert check(config, run_dir) is not None
    assert read == [image], "the new stamp counts"
    flip(image / "engine/opt/f")
    with pytest.raises(ImageError):
        check(config, run_dir)


def test_a_stamp_of_others_or_over_fresh_files_does_not_count(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were changed a moment ago may change again unseen, so no stamp is left; and one that others could
    have written is not believed."""
    run_dir = image.parent / "run"
    run_dir.mkdir()
    config = pinned(image)
    check(config, run_dir)
    assert not (run_dir / stamp.NAME).exists()
    monkeypatch.setattr(stamp, "SETTLED_NS", -(1 << 62))
    check(config, run_dir)
    mark = stamp.fingerprint(image, config.sandbox.image_digest)
    assert stamp.is_stamped(run_dir, mark)
    (run_dir / stamp.NAME).chmod(0o666)
    assert not stamp.is_stamped(run_dir, mark)
    assert not stamp.is_stamped(run_dir, None)


def test_the_pin_decides_and_can_go_back(image: Path) -> None:
    """A configuration with a store runs what the pin file says; without one nothing runs."""
    folder = image.parent
    config = config_of(folder, image_store="images", image_pin="image.json")
    with pytest.raises(StartError, match="no image is pinned"):
        resolve(config)
    first = store.add(folder / "images", image)
    make_image(folder / "newer", content="newer")
    second = store.add(folder / "images", folder / "newer")
    pin = Pin(first.digest).moved_to(second.digest)
    write_pin(folder / "image.json", pin)
    assert read_pin(folder / "image.json") == pin
    found = resolve(config)
    assert found.sandbox.image == folder / "images" / second.digest
    assert check(found) == second
    back = pin.moved_back()
    assert back == Pin(first.digest)
    assert back.moved_back() is None
    assert back.moved_to(first.digest) is back
    many = back
    for number in range(20):
        many = many.moved_to(f"{number:064x}")
    assert len(many.before) == MAX_BEFORE
    for text in ("", "{", "[]", '{"pinned": "x", "before": []}', '{"pinned": 1, "before": []}', "[" * 5_000):
        (folder / "image.json").write_text(text)
        with pytest.raises(ConfigError):
            read_pin(folder / "image.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"image_store": "s"}, "go together"),
        ({"image_pin": "p"}, "go together"),
        ({"image": "i", "image_digest": "0" * 64, "image_store": "s", "image_pin": "p"}, "one of the two"),
        ({"image_keys": ["0" * 64]}, "there is none"),
        ({"image": "i", "image_digest": "0" * 64, "image_keys": ["0" * 63]}, "pattern"),
    ],
)
def test_contradictions_are_told(tmp_path: Path, words: dict[str, object], said: str) -> None:
    """Words about images that do not go together are a configuration's fault, with line and column."""
    with pytest.raises(ConfigError, match=said):
        config_of(tmp_path, **words)


def test_the_store_takes_what_is_listed_and_nothing_else(image: Path) -> None:
    """Files are copied by the lists, with the lists' modes, under any umask; what lies beside them stays behind."""
    (image / "text/opt/stowaway").write_text("x")
    (image / "notes").write_text("x")
    before = os.umask(0o077)
    try:
        manifest = store.add(image.parent / "images", image)
    finally:
        os.umask(before)
    place = image.parent / "images" / manifest.digest
    assert verify_image(place) == manifest
    assert not (place / "notes").exists() and not (place / "text/opt/stowaway").exists()
    assert (place / "text/opt/d/program").stat().st_mode & 0o777 == 0o755
    assert [one.digest for one in store.list_images(image.parent / "images")] == [manifest.digest]
    sign(image, KEY)
    (image / "text/opt/stowaway").unlink()
    (image / "notes").unlink()
    store.add(image.parent / "images", image)
    (stored,) = store.list_images(image.parent / "images")
    assert stored.signed_by == (KEY.public.hex(),)
    assert store.find(image.parent / "images", manifest.digest[:8]) == stored
    with pytest.raises(ConfigError, match="fewest"):
        store.find(image.parent / "images", manifest.digest[:3])
    store.remove(image.parent / "images", manifest.digest)
    assert [path.name for path in (image.parent / "images").iterdir()] == [store.LOCK]


HOSTILE = {
    "absolute": "f 0644 " + "0" * 64 + " /etc/passwd\n",
    "above": "f 0644 " + "0" * 64 + " ../../x\n",
    "set-id": "f 4755 " + "0" * 64 + " opt/s\n",
    "for others to write": "f 0666 " + "0" * 64 + " opt/s\n",
    "a link": "l opt/l -> /etc/shadow\n",
    "a file twice": "f 0644 " + "0" * 64 + " opt/f\n",
    "a file that is not there": "f 0644 " + "0" * 64 + " opt/missing\n",
    "no end": "f 0644 " + "0" * 64 + " opt/x",
    "no line": "what\n",
}


@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_a_hostile_list_writes_nowhere(image: Path, kind: str) -> None:
    """A manifest and a list that belong together, and ask for what no image may have: refused, and nothing is left."""
    manifest, _ = read_manifest(image)
    roles = {**manifest.roles, "text": write_list(image, "text", HOSTILE[kind])}
    (image / MANIFEST).write_bytes(encode_manifest(replace(manifest, roles=roles)))
    with pytest.raises((ImageError, ConfigError)):
        store.add(image.parent / "images", image)
    assert [path.name for path in (image.parent / "images").iterdir()] == [store.LOCK]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "[" * 100_000, '{"format": 1}', '{"format": 2, "roles": {"../x": {}}}', "\xff"]
)
def test_a_malformed_manifest_is_no_image(image: Path, text: str) -> None:
    """Whatever is in it, the error is the same kind and names it."""
    (image / MANIFEST).write_text(text)
    with pytest.raises(ImageError) as caught:
        verify_image(image)
    assert caught.value.path == image / MANIFEST


def test_special_files_do_not_hold_up_the_store(image: Path) -> None:
    """A pipe in place of a file, or a manifest that never ends, is an error and no wait."""
    (image / "text/opt/f").unlink()
    os.mkfifo(image / "text/opt/f")
    with pytest.raises(ImageError, match="no file"):
        store.add(image.parent / "images", image)
    (image / MANIFEST).unlink()
    (image / MANIFEST).symlink_to("/dev/zero")
    with pytest.raises(ImageError):
        store.add(image.parent / "images", image)


def test_a_file_larger_than_told_is_not_copied_on(image: Path) -> None:
    """The manifest bounds what may be written; a file that grows past it ends the copy."""
    manifest: Manifest = read_manifest(image)[0]
    (image / "text/opt/f").write_bytes(bytes(1 << 20))
    with pytest.raises(ImageError, match="larger"):
        store.add(image.parent / "images", image)
    assert manifest.size < 1 << 20
