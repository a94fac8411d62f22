"""``athanor image build | verify | sign``: the sandboxes' root file systems, wherever they lie.

An image is built by ``images/build.py`` of a source checkout. An installed appliance has images that were built
elsewhere, and needs no builder; ``appliance.operator.cli.image_store`` keeps them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.common.errors import os_errors_as
from appliance.operator.cli import exits
from appliance.operator.cli.long_work import LongWork, no_words
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, fail, output, print_data

if TYPE_CHECKING:
    from isolation.image.manifest import Manifest

BUILD_EXAMPLES = """
athanor image build | prints the digest by which it is pinned
athanor image build images/out --sign image.key | signed by a key that is made if it is not there
athanor image build images/out --variant cuda --triton-cache gpu-kernels | with kernels that were compiled ahead
"""

VERIFY_EXAMPLES = """
athanor image verify images/out --digest 9f86... | exit code 1 when it is another
athanor image verify images/out --signed-by 3b6a... | or when that key has not signed it
"""

SIGN_EXAMPLES = """
athanor image sign images/out --key image.key | prints the public key, for sandbox.image_keys
"""

BUILDER = "images.build"
"""Module with ``build(target, triton_cache, variant, reached) -> Manifest``."""

DEFAULT_IMAGE = Path("images/out")
"""Folder of what a source checkout built; not under version control."""

Image = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the image.")]


def build(
    target: Image = DEFAULT_IMAGE,
    key: Annotated[
        Path | None, typer.Option("--sign", metavar="FILE", help="Sign it with this key; made when there is none.")
    ] = None,
    triton_cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Compiled kernels for GPUs, a folder for each kind of GPU.")
    ] = None,
    variant: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="What it must become; the installed torch decides what it can.")
    ] = "",
    output_format: Output = Format.TABLE,
) -> None:
    """Build the image and print its digest.

    The same sources, packages and Python give the same digest, wherever and whenever it is built.
    """
    from appliance.common.image.signature import sign as sign_image
    from isolation.image.manifest import VARIANTS
    from isolation.keys.signing import load_or_make

    signing = None if key is None else load_or_make(key)[0]
    try:
        builder: Any = importlib.import_module(BUILDER)
    except ImportError as error:
        fail(
            exits.REFUSED,
            f"there is no image builder here: {error}",
            "run this in a source checkout; an installed appliance takes images with `athanor image add`",
        )

    def reached(share: float, doing: str) -> None:
        work.reach(share, 1.0, doing)

    if variant not in ("", *VARIANTS):
        fail(exits.USAGE, f"there is no variant {variant}; there are {' and '.join(VARIANTS)}")
    with os_errors_as(f"cannot build {target}"), LongWork("building the image", no_words) as work:
        manifest: Manifest = builder.build(target, triton_cache, variant, reached)
        if signing is not None:
            sign_image(target, signing)
    _show(target, manifest, output_format)


def verify(
    target: Image = DEFAULT_IMAGE,
    digest: Annotated[str | None, typer.Option("--digest", metavar="HEX", help="What its digest must be.")] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--signed-by", metavar="HEX", help="A public key that must have signed it.")
    ] = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Read every file of an image, compare it with its manifest, and print its digest."""
    from appliance.common.image.signature import check_signed
    from isolation.image.rootfs import verify_image

    manifest = verify_image(target)
    for key in keys or ():
        check_signed(target, manifest, (key,))
    if digest is not None and manifest.digest != digest:
        fail(
            exits.REFUSED,
            f"{target} has the digest {manifest.digest}, not {digest}",
            "build it again with `athanor image build`; do not run an image that you did not pin",
        )
    _show(target, manifest, output_format)


def sign(
    target: Image,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="Private key; made when there is none.")],
) -> None:
    """Verify an image, sign it, and print the public key.

    The key is a file of 32 random bytes that only its owner may read, as that of the audit log is.
    Keep it away from the machines that run the image.
    """
    from appliance.common.image.signature import sign as sign_image
    from isolation.image.rootfs import verify_image
    from isolation.keys.signing import load_or_make

    signing, _ = load_or_make(key)
    with os_errors_as(f"cannot sign {target}"):
        verify_image(target)
        sign_image(target, signing)
    output().print(signing.public.hex(), soft_wrap=True)


def _show(image: Path, manifest: Manifest, output_format: Format) -> None:
    """The digest alone on standard output, unless more is asked for."""
    if output_format is Format.TABLE:
        output().print(manifest.digest, soft_wrap=True)
        return
    from appliance.common.image.signature import signers

    print_data(facts(manifest) | {"signed_by": list(signers(image))}, output_format)


def facts(manifest: Manifest) -> dict[str, object]:
    """What an image says of itself, for other programs."""
    return {
        "digest": manifest.digest,
        "version": manifest.version,
        "variant": manifest.variant,
        "machine": manifest.machine,
        "python": manifest.python,
        "bytes": manifest.size,
        "roles": {name: {"files": role.files, "bytes": role.size} for name, role in manifest.roles.items()},
        "triton_caches": list(manifest.triton_caches),
    }
