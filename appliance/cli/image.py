"""``athanor image build | verify``: the sandboxes' root file system.

The work is done by ``images/build.py`` of a source checkout: ``build(target: Path) -> str`` and
``verify(image: Path) -> str`` both give the image's digest. An installed appliance has images
built elsewhere and needs no builder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, cast

import typer

from appliance.cli import exits
from appliance.cli.console import fail, output

BUILD_EXAMPLES = """
athanor image build | then name it under `sandbox: image:` in athanor.yaml
"""

VERIFY_EXAMPLES = """
athanor image verify images/out --digest 9f86... | exit code 1 when it is another
"""

BUILDER = "images.build"
"""Module with the functions named above."""

DEFAULT_IMAGE = Path("images/out")
"""Where a source checkout keeps what it built; not under version control."""

Work = Callable[[Path], str]


def build(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the image.")] = DEFAULT_IMAGE,
) -> None:
    """Build the image and print its digest."""
    _print_digest(_run("build", target))


def verify(
    image: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the image.")] = DEFAULT_IMAGE,
    digest: Annotated[str | None, typer.Option("--digest", metavar="HEX", help="What its digest must be.")] = None,
) -> None:
    """Check an image against its manifest and print its digest."""
    found = _run("verify", image)
    if digest is not None and found != digest:
        fail(
            exits.REFUSED,
            f"{image} has the digest {found}, not {digest}",
            "build it again with `athanor image build`; do not run an image that you did not pin",
        )
    _print_digest(found)


def _run(name: str, path: Path) -> str:
    try:
        work = cast("Work", getattr(importlib.import_module(BUILDER), name))
    except (ImportError, AttributeError) as error:
        fail(
            exits.REFUSED,
            f"there is no image builder here: {error}",
            "run this in a source checkout; an installed appliance comes with its image",
        )
    from isolation.errors import IsolationError

    try:
        return work(path)
    except IsolationError as error:
        fail(exits.REFUSED, error.args[0], error.hint or None)
    except OSError as error:
        fail(exits.REFUSED, f"cannot {name} {path}: {(error.strerror or str(error)).lower()}")


def _print_digest(digest: str) -> None:
    output().print(digest, soft_wrap=True)
