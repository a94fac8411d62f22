"""The image of the sandboxes that a package brings: what an installation makes of it.

    /usr/lib/athanor/share/athanor/images/DIGEST    the image
    /usr/lib/athanor/share/athanor/images/keys      public keys of those who signed it, a line each
    /var/lib/athanor/images/DIGEST                  a link to it, among the images that the operator adds
    /etc/athanor/image.json                         the pin

The first configuration names store, pin and keys, so that sandboxes run this image and no other. An upgrade moves the
pin from the image of the package before to its own, and leaves a pin that the operator has set. Where the supervisor
could not start after that, because there is no image or another key has signed it, pin and links stay as they are, and
the plan says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from appliance.common.config_loader import load_config
from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.image.pin import Pin, read_pin, write_pin
from isolation.host.atomic_file import sync_folder
from isolation.image.manifest import DIGEST

PLACE = Path("/usr/lib/athanor/share/athanor/images")
"""Folder of the package's image, on the machine that it is installed on."""

KEYS = "keys"
"""File beside the image, with the public keys."""

STORE, PIN = Path("var/lib/athanor/images"), Path("etc/athanor/image.json")
"""Folder of images and file of the pin, below a root, as the first configuration names them."""

CONFIG = Path("etc/athanor/athanor.yaml")
"""The configuration, below a root."""

OFF = """\
  # Sandboxes from a built, signed image in place of the Python that runs the supervisor: see docs/images.md.
  # image_store: /var/lib/athanor/images
  # image_pin: /etc/athanor/image.json
  # image_keys: []
"""
"""Lines of the first configuration about images, as they are without a packaged one."""

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class PackagedImage:
    """An image that a package brought."""

    digest: str
    keys: tuple[str, ...]
    """Public keys, in hex, of those who have signed it."""

    @property
    def path(self) -> Path:
        """Its folder on the machine that it is installed on."""
        return PLACE / self.digest


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What an installation does about the packaged image."""

    image: PackagedImage | None = None
    link: bool = False
    """Whether it is not among the machine's images yet."""
    stale: tuple[Path, ...] = ()
    """Links to images of earlier packages, which are gone."""
    pin: Pin | None = None
    """Pin to write; None: the one that is there stays."""
    problem: str = ""
    """Why the supervisor will not start from what is pinned; empty: it can."""
    hint: str = ""
    """What to do about the problem."""
    chosen: bool = False
    """Whether the configuration that is there names an image, wherever it comes from."""

    @property
    def idle(self) -> bool:
        """Nothing would change; there may be a problem."""
        return not self.link and not self.stale and self.pin is None


def find_packaged(root: Path = Path("/")) -> PackagedImage | None:
    """Return the image that a package has put below a root; None where none has.

    Raises:
        ConfigError: it cannot be read, or is not as packages are made.
    """
    folder = root / PLACE.relative_to("/")
    with os_errors_as(f"cannot read {folder}"):
        if not folder.is_dir():
            return None
        found = [path.name for path in folder.iterdir() if DIGEST.fullmatch(path.name)]
        keys = tuple((folder / KEYS).read_text(encoding="ascii", errors="replace").split())
    if len(found) != 1 or not keys or not all(map(_KEY.fullmatch, keys)):
        raise ConfigError(f"{folder} does not have one image and the keys that signed it; install the package again")
    return PackagedImage(found[0], keys)


@dataclass(frozen=True, slots=True)
class Named:
    """What the configuration that is there names."""

    image: bool = False
    """An image, wherever it lies."""
    places: bool = False
    """Store and pin of the first configuration, so that what is pinned there is what runs."""
    keys: tuple[str, ...] = ()
    """Public keys one of which must have signed it."""


def read_named(root: Path) -> Named:
    """Return what the configuration names about images; of one that cannot be read, that what is pinned runs."""
    try:
        if not (root / CONFIG).is_file():
            return Named()
        sandbox = load_config(root / CONFIG, (), {}).sandbox
    except (ConfigError, OSError):
        return Named(image=True, places=True)
    places = sandbox.image_store == Path("/", STORE) and sandbox.image_pin == Path("/", PIN)
    return Named(sandbox.image is not None or sandbox.image_store is not None, places, sandbox.image_keys)


def plan_image(root: Path) -> ImagePlan:
    """Compare what is there with what shall be.

    Raises:
        ConfigError: package, store or pin cannot be read.
    """
    image, store, named = find_packaged(root), root / STORE, read_named(root)
    with os_errors_as(f"cannot read {store}"):
        there = sorted(store.iterdir()) if store.is_dir() else []
        ours = [path for path in there if path.is_symlink() and path.readlink().parent == PLACE]
    gone = {path.name for path in ours} - ({image.digest} if image is not None else set())
    if image is None:
        pin = read_pin(root / PIN) if gone and named.places else None
        return _without(pin, gone, named)
    pin = read_pin(root / PIN)
    moves = pin is None or pin.pinned in gone
    foreign = named.places and bool(named.keys) and not set(named.keys) & set(image.keys)
    if foreign and (moves or (pin is not None and pin.pinned == image.digest)):
        return _foreign(image, named)
    before = () if pin is None else tuple(one for one in pin.before if one not in gone)
    if pin is None or moves:
        put: Pin | None = Pin(image.digest, tuple(one for one in before if one != image.digest))
        link = not (store / image.digest).exists()
    else:
        put = Pin(pin.pinned, before) if before != pin.before else None
        link = image.digest not in {path.name for path in there}
    stale = tuple(path for path in ours if path.name in gone)
    return ImagePlan(image, link, stale, put, chosen=named.image)


def _without(pin: Pin | None, gone: set[str], named: Named) -> ImagePlan:
    """Plan for a package without an image."""
    if pin is None or pin.pinned not in gone:
        return ImagePlan(chosen=named.image)
    return ImagePlan(
        problem=f"this package brings no image, and /{PIN} pins {pin.pinned[:16]} of the package before, which is "
        "gone: the supervisor will not start",
        hint="install a package with an image; or pin another: athanor image add, then athanor image use; or take "
        f"image_store, image_pin and image_keys out of /{CONFIG}, and sandboxes see the Python of this machine",
        chosen=True,
    )


def _foreign(image: PackagedImage, named: Named) -> ImagePlan:
    """Plan for an image that the configuration's keys do not let run."""
    return ImagePlan(
        image,
        problem=f"the package's image {image.digest[:16]} is signed by {', '.join(image.keys)}, and sandbox.image_keys "
        f"of /{CONFIG} do not name that key: /{PIN} stays, and the supervisor will not start",
        hint="install a package that one of them has signed; or name this key if you trust it, run `athanor install "
        "--systemd` again and start the services",
        chosen=named.image,
    )


def put_image(root: Path, plan: ImagePlan) -> None:
    """Make a plan true; run again after an error, it goes on where it was.

    Raises:
        ConfigError: something cannot be written.
    """
    if plan.image is None or plan.idle:
        return
    store = root / STORE
    with os_errors_as(f"cannot change {store}"):
        store.mkdir(parents=True, exist_ok=True, mode=0o755)
        link = store / plan.image.digest
        if plan.link and not link.is_symlink():
            link.symlink_to(plan.image.path)
        # The pin last but for what it might still name.
        if plan.pin is not None:
            write_pin(root / PIN, plan.pin)
        for path in plan.stale:
            path.unlink(missing_ok=True)
        sync_folder(store)


def named_in(text: str, image: PackagedImage | None) -> str:
    """Return the first configuration with its lines about images as they are with a packaged one."""
    if image is None:
        return text
    assert OFF in text, "the first configuration has these lines"
    on = f"""\
  # Sandboxes run the image of the package, signed by this key, and not the Python of this machine: docs/images.md.
  image_store: /{STORE}
  image_pin: /{PIN}
  image_keys: [{", ".join(image.keys)}]
"""
    return text.replace(OFF, on)
