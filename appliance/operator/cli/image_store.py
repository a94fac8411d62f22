"""``athanor image list | add | use | rollback | remove``: the images of an installed appliance, and which one runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.operator.cli import exits
from appliance.operator.cli.image import facts
from appliance.operator.cli.options import DEFAULT_CONFIG, Config, Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.config import SandboxConfig
    from appliance.common.image.pin import Pin
    from appliance.common.image.store import Stored

LIST_EXAMPLES = """
athanor image list | what is in the store, and which one runs
"""

ADD_EXAMPLES = """
athanor image add /mnt/images/2026-11 | copied file by file, each compared with the image's own list
"""

USE_EXAMPLES = """
athanor image use 9f86d081 | from the next start on; the first digits are enough
athanor image use 9f86d081 --restart | and start again now
"""

ROLLBACK_EXAMPLES = """
athanor image rollback --restart | the image that ran before
"""

REMOVE_EXAMPLES = """
athanor image remove 1b4f0e98 | one that is not pinned
"""

Digest = Annotated[str, typer.Argument(metavar="DIGEST", help="Its digest, or the first digits of it.")]
Restart = Annotated[bool, typer.Option("--restart", help="Start the service again, once running requests have ended.")]


def list_images(config: Config = DEFAULT_CONFIG, output_format: Output = Format.TABLE) -> None:
    """Show the images of the store. Reads what they say of themselves; athanor image verify reads their files."""
    from appliance.common.image import store

    sandbox, place, pin = _open(config)
    found = store.list_images(place)
    rows = [
        (facts(one.manifest) if one.manifest is not None else {"digest": one.digest})
        | {"state": _state(one, pin), "signed_by": list(one.signed_by), "problem": one.problem}
        for one in found
    ]
    if not print_data({"store": str(place), "images": rows}, output_format):
        _show(found, pin, sandbox.image_keys)


def add(
    image: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an image that was built elsewhere.")],
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Copy an image into the store and print its digest.

    Every file is compared with the image's lists. Where the configuration has sandbox.image_keys,
    one of them must have signed it. Nothing runs from it before `athanor image use`.
    """
    from appliance.common.image import store

    sandbox, place, _ = _open(config)
    manifest = store.add(place, image, sandbox.image_keys)
    output().print(manifest.digest, soft_wrap=True)


def use(digest: Digest, restart: Restart = False, config: Config = DEFAULT_CONFIG) -> None:
    """Pin an image of the store: from the next start on every sandbox is made from it, and from no other.

    The image is read whole first. `athanor image rollback` pins the one before again.
    """
    from appliance.common.image import store
    from appliance.common.image.pin import Pin

    sandbox, place, pin = _open(config)
    chosen = store.find(place, digest)
    _put(sandbox, chosen, Pin(chosen.digest) if pin is None else pin.moved_to(chosen.digest))
    _pinned(chosen, restart=restart)


def rollback(restart: Restart = False, config: Config = DEFAULT_CONFIG) -> None:
    """Pin the image that was pinned before; up to eight are remembered."""
    from appliance.common.image import store

    sandbox, place, pin = _open(config)
    before = pin.moved_back() if pin is not None else None
    if before is None:
        fail(exits.REFUSED, "no image was pinned before", "athanor image list; then athanor image use DIGEST")
    chosen = store.find(place, before.pinned)
    _put(sandbox, chosen, before)
    _pinned(chosen, restart=restart)


def remove(digest: Digest, config: Config = DEFAULT_CONFIG) -> None:
    """Remove an image from the store; the pinned one stays."""
    from appliance.common.image import store

    _, place, pin = _open(config)
    chosen = store.find(place, digest)
    if pin is not None and chosen.digest == pin.pinned:
        fail(exits.REFUSED, f"image {chosen.digest[:16]} is pinned", "pin another one first: athanor image use")
    store.remove(place, chosen.digest)
    output().print(f"removed {chosen.digest}", soft_wrap=True)


def _open(config: Path) -> tuple[SandboxConfig, Path, Pin | None]:
    """The section about sandboxes, the folder of images that it names, and what is pinned."""
    from appliance.common.config_loader import load_config
    from appliance.common.errors import ApplianceError
    from appliance.common.image.pin import read_pin

    try:
        sandbox = load_config(config).sandbox
        pin = None if sandbox.image_pin is None else read_pin(sandbox.image_pin)
    except ApplianceError as error:
        fail(exits.REFUSED, error.message, "--config FILE names another athanor.yaml")
    if sandbox.image_store is None:
        fail(
            exits.REFUSED,
            f"{config} names no store of images",
            "sandbox: {image_store: /var/lib/athanor/images, image_pin: /etc/athanor/image.json}",
        )
    return sandbox, sandbox.image_store, pin


def _put(sandbox: SandboxConfig, chosen: Stored, pin: Pin) -> None:
    """Pin an image that is whole and signed as asked."""
    from appliance.common.image.pin import write_pin
    from appliance.common.image.signature import check_signed
    from isolation.image.rootfs import verify_image

    assert sandbox.image_pin is not None, "it goes with the store"
    manifest = verify_image(chosen.path)
    if sandbox.image_keys:
        check_signed(chosen.path, manifest, sandbox.image_keys)
    if manifest.digest != chosen.digest:
        fail(exits.REFUSED, f"{chosen.path} has the digest {manifest.digest}", "remove it and add the image again")
    write_pin(sandbox.image_pin, pin)


def _pinned(chosen: Stored, *, restart: bool) -> None:
    from appliance.common.errors import ConfigError
    from appliance.operator.install import system

    output().print(f"pinned {chosen.digest}", soft_wrap=True)
    if not restart:
        output().print("from the next start on: systemctl restart athanor.target", soft_wrap=True)
        return
    try:
        system.restart()
    except ConfigError as error:
        fail(
            exits.REFUSED,
            f"it is pinned, and the service was not started again: {error.message}",
            "journalctl -u athanor-supervisor; athanor image rollback --restart",
        )
    output().print("the service runs from it")


def _state(image: Stored, pin: Pin | None) -> str:
    if pin is None or image.digest not in (pin.pinned, *pin.before):
        return ""
    return "pinned" if image.digest == pin.pinned else "before"


def _show(found: tuple[Stored, ...], pin: Pin | None, keys: tuple[str, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    from appliance.common.figures import printable, size

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("digest", "state", "version", "variant", "size", "signed by"):
        table.add_column(name, no_wrap=True)
    for one in found:
        if one.manifest is None:
            table.add_row(one.digest[:16], Text("broken", "red"), Text(printable(one.problem)))
            continue
        trusted = [key for key in one.signed_by if key in keys] or list(one.signed_by)
        table.add_row(
            one.digest[:16],
            Text(_state(one, pin), "green"),
            one.manifest.version,
            one.manifest.variant,
            size(one.manifest.size),
            ", ".join(key[:16] for key in trusted) or "nobody",
        )
    output().print(table if found else "there is no image in the store: athanor image add DIR")
    missing = pin is not None and pin.pinned not in {one.digest for one in found}
    if pin is not None and missing:
        output().print(Text(f"the pinned image {pin.pinned[:16]} is not in the store", "red"))
