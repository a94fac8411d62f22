"""The image that a configuration asks for, found and held against what is pinned and who must have signed it."""

from __future__ import annotations

import platform
from pathlib import Path

from appliance.common.config import ApplianceConfig
from appliance.common.errors import StartError
from appliance.common.image import stamp
from appliance.common.image.pin import read_pin
from appliance.common.image.signature import check_signed
from appliance.common.version import VERSION
from isolation.errors import ImageError
from isolation.image.manifest import Manifest, read_manifest
from isolation.image.rootfs import verify_image
from isolation.ipc.messages import PROTOCOL_VERSION


def resolve(config: ApplianceConfig) -> ApplianceConfig:
    """Configuration with the image named that the pin file pins.

    Raises:
        StartError: the configuration has a store of images, and none is pinned.
        ConfigError: the pin cannot be read.
    """
    sandbox = config.sandbox
    if sandbox.image_store is None or sandbox.image_pin is None:
        return config
    pin = read_pin(sandbox.image_pin)
    if pin is None:
        raise StartError(
            f"no image is pinned: there is no {sandbox.image_pin}; `athanor image list` shows what is in the store, "
            "`athanor image use DIGEST` pins one"
        )
    found = sandbox.model_copy(update={"image": sandbox.image_store / pin.pinned, "image_digest": pin.pinned})
    return config.model_copy(update={"sandbox": found})


def check(config: ApplianceConfig, run_dir: Path | None = None) -> Manifest | None:
    """Refuse an image that is not the pinned one, not whole, or not signed as the configuration asks; None where it
    names no image. Reading all of it takes a second or two, unless ``run_dir`` has the stamp of an earlier reading.

    Raises:
        ImageError: it is another, a file was changed (the message names it), nobody who may has signed it, or its
            programs do not speak this version's wire.
    """
    image, pinned, keys = config.sandbox.image, config.sandbox.image_digest, config.sandbox.image_keys
    if image is None:
        return None
    manifest, _ = read_manifest(image)
    if manifest.digest != pinned:
        raise ImageError(
            f"the image {image} has the digest {manifest.digest}, the configuration pins {pinned}",
            image,
            hint="run the image you pinned, or pin this one if you built it",
        )
    if keys:
        check_signed(image, manifest, keys)
    check_fits(image, manifest)
    before = stamp.fingerprint(image, pinned) if run_dir is not None else None
    if run_dir is not None and stamp.is_stamped(run_dir, before):
        return manifest
    if verify_image(image).digest != pinned:
        raise ImageError(f"the image {image} changed while it was read", image, hint="do not run it")
    if run_dir is not None and before == stamp.fingerprint(image, pinned):
        stamp.leave(run_dir, before)
    return manifest


def check_fits(image: Path, manifest: Manifest) -> None:
    """Refuse an image whose programs this version cannot talk to.

    Raises:
        ImageError: it was built from a version with another protocol, or for another processor.
    """
    if manifest.protocol != PROTOCOL_VERSION:
        raise ImageError(
            f"the image {image} is of athanor {manifest.version} and speaks version {manifest.protocol} of the wire, "
            f"athanor {VERSION} speaks {PROTOCOL_VERSION}",
            image,
            hint=f"choose one that was built from athanor {VERSION}: `athanor image use DIGEST`",
        )
    if manifest.machine != platform.machine():
        raise ImageError(
            f"the image {image} is for {manifest.machine}, this machine is {platform.machine()}",
            image,
            hint="choose another one: `athanor image use DIGEST`",
        )
