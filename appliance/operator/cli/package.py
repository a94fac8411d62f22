"""``athanor package deb``: a Debian package of what runs here."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from appliance.operator.cli.terminal import errors, output

DEB_EXAMPLES = """
athanor package deb dist | with everything that it needs; minutes
athanor package deb dist --slim | athanor, runsc and the embedded model only
"""


def deb(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the package goes.")] = Path("dist"),
    slim: Annotated[bool, typer.Option("--slim", help="Without the Python packages that it needs.")] = False,
) -> None:
    """Build a Debian package of this installation.

    Needs dpkg-deb. The package holds the same units as `athanor install --systemd` writes, our code
    with what it needs, runsc and the embedded model, for the Python and processor of this machine.
    """
    from appliance.common.figures import size
    from appliance.operator.install.deb import build

    console = errors()
    with ExitStack() as stack:
        status = stack.enter_context(console.status("beginning")) if console.is_terminal else None
        say = status.update if status is not None else lambda _: None
        built = build(folder, context.obj, slim=slim, say=say)
    output().print(f"{built.path} ({size(built.size)})", soft_wrap=True, markup=False)
