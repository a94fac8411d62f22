"""``athanor image list | add | use | rollback | remove``: the images of an installed appliance, and which one runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.cli import exits
from appliance.cli.image import facts, refuse
from appliance.cli.options import Output
from appliance.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from appliance.config import SandboxConfig
    from appliance.image.pin import Pin
    from appliance.image.store import Stored

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

DEFAULT_CONFIG = Path("/etc/athanor/athanor.yaml")

Config = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", help="The appliance's athanor.yaml; names store and pin.")
]
Digest = Annotated[str, typer.Argument(metavar="DIGEST", help="Its digest, or the first digits of it.")]
Restart = Annotated[bool, typer.Option("--restart", help="Start the service again, once running requests have ended.")]


def list_images(config: Config = DEFAULT_CONFIG, output_format: Output = Format.TABLE) -> None:
    """Show the images of the store. Reads what they say of themselves; athanor image verify reads their files."""
    from appliance.errors import ApplianceError
    from appliance.image import store

    sandbox, pin = _open(config)
    assert sandbox.image_store is not None, "it was looked at"
    try:
        found = store.list_images(sandbox.image_store)
    except ApplianceError as error:
        fail(exits.REFUSED, error.message)
    if output_format is Format.TABLE:
        _show(found, pin, sandbox.image_keys)
        return
    rows = [
        (facts(one.manifest) if one.manifest is not None else {"digest": one.digest})
        | {"state": _state(one, pin), "signed_by": list(one.signed_by), "problem": one.problem}
        for one in found
    ]
    print_data({"store": str(sandbox.image_store), "images": rows}, output_format)


def add(
    image: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an image that was built elsewhere.")],
    config: Config = DEFAULT_CONFIG,
) -> None:
    """Copy an image into the store and print its digest.

    Every file is compared with the image's lists. Where the configuration has sandbox.image_keys,
    one of them must have signed it. Nothing runs from it before `athanor image use`.
    """
    from appliance.errors import ApplianceError
    from appliance.image import store
    from isolation.errors import IsolationError

    sandbox, _ = _open(config)
    assert sandbox.image_store is not None, "it was looked at"
    try:
        manifest = store.add(sandbox.image_store, image, sandbox.image_keys)
    except ApplianceError as error:
        fail(exits.REFUSED, error.message)
    except IsolationError as error:
        refuse(error)
    output().print(manifest.digest, soft_wrap=True)


def use(digest: Digest, restart: Restart = False, config: Config = DEFAULT_CONFIG) -> None:
    """Pin an image of the store: from the next start on every sandbox is made from it, and from no other.

    The image is read whole first. `athanor image rollback` pins the one before again.
    """
    from appliance.errors import ApplianceError
    from appliance.image import store
    from appliance.image.pin import Pin

    sandbox, pin = _open(config)
    assert sandbox.image_store is not None, "it was looked at"
    try:
        chosen = store.find(sandbox.image_store, digest)
        _put(sandbox, chosen, Pin(chosen.digest) if pin is None else pin.moved_to(chosen.digest))
    except ApplianceError as error:
        fail(exits.REFUSED, error.message)
    _pinned(chosen, restart=restart)


def rollback(restart: Restart = False, config: Config = DEFAULT_CONFIG) -> None:
    """Pin the image that was pinned before; up to eight are remembered."""
    from appliance.errors import ApplianceError
    from appliance.image import store

    sandbox, pin = _open(config)
    assert sandbox.image_store is not None, "it was looked at"
    before = pin.moved_back() if pin is not None else None
    if before is None:
        fail(exits.REFUSED, "no image was pinned before", "athanor image list; then athanor image use DIGEST")
    try:
        chosen = store.find(sandbox.image_store, before.pinned)
        _put(sandbox, chosen, before)
    except ApplianceError as error:
        fail(exits.REFUSED, error.message)
    _pinned(chosen, restart=restart)


def remove(digest: Digest, config: Config = DEFAULT_CONFIG) -> None:
    """Remove an image from the store; the pinned one stays."""
    from appliance.errors import ApplianceError
    from appliance.image import store

    sandbox, pin = _open(config)
    assert sandbox.image_store is not None, "it was looked at"
    try:
        chosen = store.find(sandbox.image_store, digest)
        if pin is not None and chosen.digest == pin.pinned:
            fail(exits.REFUSED, f"image {chosen.digest[:16]} is pinned", "pin another one first: athanor image use")
        store.remove(sandbox.image_store, chosen.digest)
    except ApplianceError as error:
        fail(exits.REFUSED, error.message)
    output().print(f"removed {chosen.digest}", soft_wrap=True)


def _open(config: Path) -> tuple[SandboxConfig, Pin | None]:
    """The configuration's words about images, and what is pinned."""
    from appliance.config import load_config
    from appliance.errors import ApplianceError
    from appliance.image.pin import read_pin

    try:
        sandbox = load_config(config).sandbox
        pin = None if sandbox.image_pin is None else read_pin(sandbox.image_pin)
    except ApplianceError as error:
        fail(exits.REFUSED, error.message, "--config FILE names another athanor.yaml")
    if sandbox.image_store is None:
        fail(
            exits.REFUSED, f"{config} names no store of images",
            "sandbox: {image_store: /var/lib/athanor/images, image_pin: /etc/athanor/image.json}",
        )  # fmt: skip
    return sandbox, pin


def _put(sandbox: SandboxConfig, chosen: Stored, pin: Pin) -> None:
    """Pin an image that is whole and signed as asked."""
    from appliance.image.pin import write_pin
    from appliance.image.signature import check_signed
    from isolation.errors import IsolationError
    from isolation.image_rootfs import verify_image

    assert sandbox.image_pin is not None, "it goes with the store"
    try:
        manifest = verify_image(chosen.path)
        if sandbox.image_keys:
            check_signed(chosen.path, manifest, sandbox.image_keys)
    except IsolationError as error:
        refuse(error)
    if manifest.digest != chosen.digest:
        fail(exits.REFUSED, f"{chosen.path} has the digest {manifest.digest}", "remove it and add the image again")
    write_pin(sandbox.image_pin, pin)


def _pinned(chosen: Stored, *, restart: bool) -> None:
    from appliance.errors import ConfigError
    from appliance.install import system

    output().print(f"pinned {chosen.digest}", soft_wrap=True)
    if not restart:
        output().print("from the next start on: systemctl restart athanor.target", soft_wrap=True)
        return
    try:
        system.restart()
    except ConfigError as error:
        fail(exits.REFUSED, f"it is pinned, and the service was not started again: {error.message}",
            "journalctl -u athanor-supervisor; athanor image rollback --restart")
    output().print("the service runs from it")


def _state(image: Stored, pin: Pin | None) -> str:
    if pin is None or image.digest not in (pin.pinned, *pin.before):
        return ""
    return "pinned" if image.digest == pin.pinned else "before"


def _show(found: tuple[Stored, ...], pin: Pin | None, keys: tuple[str, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    from appliance.telemetry.figures import printable, size

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("digest", "state", "version", "variant", "size", "signed by"):
        table.add_column(name, no_wrap=True)
    for one in found:
        if one.manifest is None:
            table.add_row(one.digest[:16], Text("broken", "red"), Text(printable(one.problem)))
            continue
        trusted = [key for key in one.signed_by if key in keys] or list(one.signed_by)
        table.add_row(
            one.digest[:16], Text(_state(one, pin), "green"), one.manifest.version, one.manifest.variant,
            size(one.manifest.size), ", ".join(key[:16] for key in trusted) or "nobody",
        )  # fmt: skip
    output().print(table if found else "there is no image in the store: athanor image add DIR")
    missing = pin is not None and pin.pinned not in {one.digest for one in found}
    if pin is not None and missing:
        output().print(Text(f"the pinned image {pin.pinned[:16]} is not in the store", "red"))
