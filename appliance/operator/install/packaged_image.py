"""The image of the sandboxes that a package brings: what an installation makes of it.

    /usr/lib/athanor/share/athanor/images/DIGEST    the image
    /usr/lib/athanor/share/athanor/images/keys      public keys of those who signed it, a line each
    /var/lib/athanor/images/DIGEST                  a link to it, among the images that the operator adds
    /etc/athanor/image.json                         the pin

The first configuration names store, pin and keys, so that sandboxes run this image and no other. An upgrade moves the
pin from the image of the package before to its own, and leaves a pin that the operator has set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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

    @property
    def idle(self) -> bool:
        """Nothing would change."""
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


def plan_image(root: Path) -> ImagePlan:
    """Compare what is there with what shall be.

    Raises:
        ConfigError: package, store or pin cannot be read.
    """
    image, store = find_packaged(root), root / STORE
    if image is None:
        return ImagePlan()
    with os_errors_as(f"cannot read {store}"):
        there = sorted(store.iterdir()) if store.is_dir() else []
        ours = [path for path in there if path.is_symlink() and path.readlink().parent == PLACE]
    stale = tuple(path for path in ours if path.name != image.digest)
    pin, gone = read_pin(root / PIN), {path.name for path in stale}
    if pin is None or pin.pinned in gone:
        before = () if pin is None else tuple(one for one in pin.before if one not in {*gone, image.digest})
        return ImagePlan(image, not (store / image.digest).exists(), stale, Pin(image.digest, before))
    return ImagePlan(image, image.digest not in {path.name for path in there}, stale)


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
