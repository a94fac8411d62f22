"""``athanor package deb``: a Debian package of what runs here."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import exits
from appliance.cli.terminal import errors, fail, output

DEB_EXAMPLES = """
athanor package deb dist | with everything that it needs; minutes
athanor package deb dist --slim | athanor, runsc and the embedded model only
"""


def deb(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the package goes.")] = Path("dist"),
    slim: Annotated[bool, typer.Option("--slim", help="Without the Python packages that it needs.")] = False,
) -> None:
    """Build a Debian package of this installation.

    Needs dpkg-deb. The package holds the same units as `athanor install --systemd` writes, our code
    with what it needs, runsc and the embedded model, for the Python and processor of this machine.
    """
    from appliance.errors import ConfigError
    from appliance.install.deb import build
    from appliance.telemetry.figures import size

    console = errors()
    try:
        with ExitStack() as stack:
            status = stack.enter_context(console.status("beginning")) if console.is_terminal else None
            built = build(folder, slim=slim, say=_silent if status is None else status.update)
    except ConfigError as error:
        fail(exits.REFUSED, error.message)
    output().print(f"{built.path} ({size(built.size)})", soft_wrap=True, markup=False)


def _silent(_: str) -> None:
    """Nobody watches."""
