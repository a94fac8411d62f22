"""The image that a package brings: sandboxes of a fresh installation run it, and an upgrade moves to the new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from appliance.common.config import ApplianceConfig
from appliance.common.config_loader import load_config
from appliance.common.errors import ConfigError, StartError
from appliance.common.image.check import check, resolve
from appliance.common.image.pin import Pin, read_pin, write_pin
from appliance.common.image.signature import sign
from appliance.common.image.store import remove
from appliance.operator.install.deb import add_image, normalise
from appliance.operator.install.packaged_image import CONFIG, KEYS, PIN, PLACE, STORE, find_packaged
from appliance.operator.install.rendering import PACKAGE_PLACE, render
from appliance.operator.install.sources import read_sources, source_folder
from isolation.errors import ImageError
from isolation.image.rootfs import verify_image
from isolation.keys.signing import SigningKey, key_of, load
from tests.appliance.common.image.samples import make_image
from tests.appliance.operator.cli.conftest import Run, run
from tests.appliance.operator.install.test_install import COMMAND

__all__ = ["run"]

KEY = key_of(bytes(range(32)))


def bring(root: Path, content: str, key: SigningKey = KEY) -> str:
    """Put units and an image below a root as a package does, in place of those of an earlier one; gives its digest."""
    for file in render(read_sources(source_folder()), COMMAND, PACKAGE_PLACE):
        (root / file.path).parent.mkdir(parents=True, exist_ok=True)
        (root / file.path).write_text(file.content)
    made = root.with_name(f"made-{content}")
    shutil.rmtree(made, ignore_errors=True)
    digest = make_image(made, content).digest
    sign(made, key)
    shutil.rmtree(root / PLACE.relative_to("/"), ignore_errors=True)
    add_image(root, made)
    return digest


def moved(root: Path) -> ApplianceConfig:
    """The first configuration with its paths below the root, and links of the store leading there."""
    config = load_config(root / "etc/athanor/athanor.yaml")
    store = root / STORE
    for link in [path for path in store.iterdir() if path.is_symlink()]:
        target = root / link.readlink().relative_to("/")
        link.unlink()
        link.symlink_to(target)
    sandbox = config.sandbox.model_copy(update={"image_store": store, "image_pin": root / PIN})
    return config.model_copy(update={"sandbox": sandbox})


@pytest.fixture(autouse=True)
def _below(tmp_path: Path) -> None:
    """Have a folder that is the root of a machine."""
    (tmp_path / "root").mkdir()


def put(run: Run, root: Path) -> str:
    """Install below a root; gives what was shown."""
    done = run("install", "--systemd", "--prefix", str(root), "--command", COMMAND, columns=200)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_fresh_installation_runs_the_packages_image(run: Run, tmp_path: Path) -> None:
    """Store, pin and key are in the first configuration, and the check of the supervisor passes. A changed byte of it,
    another image under its name, and one that another key has signed are each refused by name."""
    root = tmp_path / "root"
    digest = bring(root, "one")
    assert f"the image of the package, {digest[:16]}" in put(run, root)
    assert "nothing to do" in put(run, root)
    config = resolve(moved(root))
    assert config.sandbox.image_keys == (KEY.public.hex(),)
    found = check(config)
    assert (found is not None and found.digest, read_pin(root / PIN)) == (digest, Pin(digest))
    image = root / PLACE.relative_to("/") / digest
    (image / "engine/opt/f").write_text("content of enginE")
    with pytest.raises(ImageError, match="engine/opt/f"):
        check(config)
    shutil.rmtree(image)
    make_image(image, "other")
    with pytest.raises(ImageError, match=rf"the configuration pins {digest}"):
        check(config)
    shutil.rmtree(image)
    make_image(image, "one")
    sign(image, key_of(bytes(32)))
    with pytest.raises(ImageError, match=r"not by any key of sandbox\.image_keys"):
        check(config)


def test_an_upgrade_moves_the_pin_and_leaves_the_operators(run: Run, tmp_path: Path) -> None:
    """From the image of the package before to that of the new one, whose link is gone; a pin of the operator stays,
    and so does the configuration."""
    root = tmp_path / "root"
    first = bring(root, "one")
    put(run, root)
    second = bring(root, "two")
    assert "nothing to do" not in put(run, root)
    assert read_pin(root / PIN) == Pin(second)
    assert [path.name for path in (root / STORE).iterdir()] == [second]
    write_pin(root / PIN, Pin("ab" * 32, (second,)))
    (root / "etc/athanor/athanor.yaml").write_text("# mine\n")
    third = bring(root, "three")
    assert "without images of earlier packages" in put(run, root)
    assert read_pin(root / PIN) == Pin("ab" * 32), "the second is gone, and no rollback leads to it"
    assert {path.name for path in (root / STORE).iterdir()} == {third}
    assert (root / "etc/athanor/athanor.yaml").read_text() == "# mine\n"
    assert len({first, second, third}) == 3


def test_an_upgrade_without_an_image_says_that_the_supervisor_will_not_start(run: Run, tmp_path: Path) -> None:
    """It says so with what to do, and not that sandboxes see this machine's Python; pin and link stay, so that the
    package before can come back. Without a store in the configuration it is no problem."""
    root = tmp_path / "root"
    first = bring(root, "one")
    put(run, root)
    shutil.rmtree(root / PLACE.relative_to("/"))
    said = put(run, root)
    assert f"problem this package brings no image, and /etc/athanor/image.json pins {first[:16]}" in said
    assert "the supervisor will not start" in said and "athanor image use" in said
    assert "sandboxes see the Python of this machine, read-only" not in said and "nothing to do" not in said
    assert (read_pin(root / PIN), (root / STORE / first).is_symlink()) == (Pin(first), True)
    with pytest.raises((StartError, ImageError)):
        check(resolve(moved(root)))
    config = root / CONFIG
    lines = [one for one in config.read_text().splitlines(keepends=True) if not one.lstrip().startswith("image_")]
    config.write_text("".join(lines))
    said = put(run, root)
    assert "problem" not in said and "sandboxes see the Python of this machine, read-only" in said


def test_an_upgrade_by_another_key_leaves_the_pin(run: Run, tmp_path: Path) -> None:
    """The problem names the key; pin and link stay until the configuration names it. The package before can come back,
    and a pin of the operator's own is no problem."""
    root, other = tmp_path / "root", key_of(bytes(32))
    first = bring(root, "one")
    put(run, root)
    second = bring(root, "two", other)
    said = put(run, root)
    assert f"is signed by {other.public.hex()}, and sandbox.image_keys" in said and "nothing to do" not in said
    assert read_pin(root / PIN) == Pin(first)
    assert [path.name for path in (root / STORE).iterdir()] == [first]
    bring(root, "one")
    assert "nothing to do" in put(run, root)
    bring(root, "one", other)
    assert "is signed by" in put(run, root), "the same image, signed by another"
    bring(root, "two", other)
    write_pin(root / PIN, Pin("ab" * 32))
    assert "problem" not in put(run, root)
    assert {path.name for path in (root / STORE).iterdir()} == {second}
    (root / PIN).unlink()
    assert "is signed by" in put(run, root), "nothing is pinned, and this image would be refused"
    config = root / CONFIG
    config.write_text(config.read_text().replace(KEY.public.hex(), other.public.hex()))
    put(run, root)
    assert read_pin(root / PIN) == Pin(second)
    found = check(resolve(moved(root)))
    assert found is not None and found.digest == second


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb on this machine")
def test_a_new_key_of_a_package_is_told(run: Run, tmp_path: Path) -> None:
    """Before anything is packed, with the key; where it was there already, nothing is said of it."""
    key = tmp_path / "image.key"
    argv = ("package", "deb", str(tmp_path / "out"), "--image", str(tmp_path / "none"), "--sign", str(key))
    said = run(*argv, columns=400)
    assert "NEW KEY" in said.output and load(key).public.hex() in said.output
    again = run(*argv, columns=400)
    assert "NEW KEY" not in again.output
    assert again.exit_code == said.exit_code == 1, "there is no such image"


def test_without_a_packaged_image_it_is_said_what_sandboxes_see(run: Run, tmp_path: Path) -> None:
    """The note names the document; nothing is pinned, and the configuration has no store."""
    root = tmp_path / "root"
    assert "sandboxes see the Python of this machine" in put(run, root)
    config = load_config(root / "etc/athanor/athanor.yaml")
    assert (config.sandbox.image_store, (root / PIN).exists()) == (None, False)


def test_a_package_has_a_whole_signed_image(tmp_path: Path) -> None:
    """Its modes outlive packing; one that nobody signed is not packed, and half of a packaged one is not taken."""
    root = tmp_path / "root"
    digest = bring(root, "one")
    normalise(root)
    assert verify_image(root / PLACE.relative_to("/") / digest).digest == digest
    (root / PLACE.relative_to("/") / KEYS).write_text("x\n")
    with pytest.raises(ConfigError, match="install the package again"):
        find_packaged(root)
    make_image(tmp_path / "unsigned")
    with pytest.raises(ImageError, match="nobody has signed"):
        add_image(tmp_path / "other", tmp_path / "unsigned")


def test_large_files_are_packed_once(tmp_path: Path) -> None:
    """One that the package has as well is there once under two names, with the mode that the image has it with; a small
    one is there twice."""
    root = tmp_path / "root"
    packed = root / "usr/lib/athanor/lib/big.so"
    packed.parent.mkdir(parents=True)
    digest = make_image(tmp_path / "second", "\0" * (2 << 20)).digest
    packed.write_text("\0" * (2 << 20) + " of engine")
    packed.chmod(0o600)
    sign(tmp_path / "second", KEY)
    add_image(root, tmp_path / "second")
    normalise(root)
    image = root / PLACE.relative_to("/") / digest
    assert (image / "engine/opt/f").stat().st_ino == packed.stat().st_ino
    assert (image / "engine/opt/d/program").stat().st_nlink == 1
    assert verify_image(image).digest == digest


def test_a_removed_link_leaves_the_packages_image(run: Run, tmp_path: Path) -> None:
    """``athanor image remove`` takes it out of the store; the package's files stay, and the store can be used."""
    root = tmp_path / "root"
    digest = bring(root, "one")
    put(run, root)
    store = moved(root).sandbox.image_store
    assert store is not None
    remove(store, digest)
    assert [path.name for path in store.iterdir() if path.name != ".lock"] == []
    assert verify_image(root / PLACE.relative_to("/") / digest).digest == digest
    with pytest.raises((StartError, ImageError)):
        check(resolve(moved(root)))
