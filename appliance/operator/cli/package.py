"""``athanor package deb``: a Debian package of what runs here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.operator.cli.long_work import LongWork, of_bytes
from appliance.operator.cli.terminal import errors, output

DEB_EXAMPLES = """
athanor package deb dist | with everything that it needs; minutes
athanor package deb dist --image out --sign image.key | with an image that is there, or a new one, signed by a key
athanor package deb dist --slim | athanor, runsc and the embedded model only
athanor package deb dist --extra bench | with what athanor bench --plots needs
"""

NONE = "none"
"""Value of ``--image`` with which a package brings no image, and sandboxes see the Python of the package."""


def deb(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the package goes.")] = Path("dist"),
    slim: Annotated[bool, typer.Option("--slim", help="Without the Python packages that it needs.")] = False,
    extras: Annotated[
        list[str] | None,
        typer.Option("--extra", metavar="NAME", help="Also what an extra needs: bench, for plots; may be repeated."),
    ] = None,
    image: Annotated[
        str, typer.Option("--image", metavar="DIR|none", help="Image of the sandboxes that it brings. [a new one]")
    ] = "",
    key: Annotated[
        Path | None, typer.Option("--sign", metavar="FILE", help="Key that signs the image. [image.key beside DIR]")
    ] = None,
) -> None:
    """Build a Debian package of this installation.

    Needs dpkg-deb. The package holds the same units as `athanor install --systemd` writes, our code
    with what it needs, runsc, the embedded model, and a signed image, which is what sandboxes run
    where it is installed; for the Python and processor of this machine.
    """
    from appliance.common.figures import size
    from appliance.operator.install.deb import build, find_packer

    find_packer()
    brought = None if image == NONE or (slim and not image) else Path(image or folder.with_name(f"{folder.name}-image"))
    if brought is not None:
        _sign(brought, folder.with_name("image.key") if key is None else key, new=not image)
    with LongWork("packaging", of_bytes) as work:
        built = build(folder, context.obj, work, slim=slim, extras=tuple(extras or ()), image=brought)
    output().print(f"{built.path} ({size(built.size)})", soft_wrap=True, markup=False)


def _sign(image: Path, key: Path, *, new: bool) -> None:
    """Sign an image, which is built first where there is none to take; the key is made where it is not there."""
    from appliance.common.errors import os_errors_as
    from appliance.common.image.signature import sign
    from appliance.operator.cli.image import build
    from isolation.keys.signing import load_or_make

    signing, made = load_or_make(key)
    if made:
        public = signing.public.hex()
        said = f"NEW KEY: there was no {key}, so one was made: {public}"
        errors().print(said, style="bold red", soft_wrap=True, markup=False)
        errors().print(
            "  Machines whose sandbox.image_keys name another key will not start with this package's image until they "
            "name this one. To upgrade such machines, end this and say --sign FILE with their key. "
            f"Keep {key}, and use it for the next package.",
            soft_wrap=True,
            markup=False,
        )
    if new:
        build(image, key=key)
        return
    with os_errors_as(f"cannot sign {image}"):
        sign(image, signing)
