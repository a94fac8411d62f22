"""``athanor package deb``: a Debian package of what runs here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.operator.cli.long_work import LongWork, of_bytes
from appliance.operator.cli.terminal import output

DEB_EXAMPLES = """
athanor package deb dist | with everything that it needs; minutes
athanor package deb dist --slim | athanor, runsc and the embedded model only
athanor package deb dist --extra bench | with what athanor bench --plots needs
"""


def deb(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the package goes.")] = Path("dist"),
    slim: Annotated[bool, typer.Option("--slim", help="Without the Python packages that it needs.")] = False,
    extras: Annotated[
        list[str] | None,
        typer.Option("--extra", metavar="NAME", help="Also what an extra needs: bench, for plots; may be repeated."),
    ] = None,
) -> None:
    """Build a Debian package of this installation.

    Needs dpkg-deb. The package holds the same units as `athanor install --systemd` writes, our code
    with what it needs, runsc and the embedded model, for the Python and processor of this machine.
    """
    from appliance.common.figures import size
    from appliance.operator.install.deb import build

    with LongWork("packaging", of_bytes) as work:
        built = build(folder, context.obj, work, slim=slim, extras=tuple(extras or ()))
    output().print(f"{built.path} ({size(built.size)})", soft_wrap=True, markup=False)
