"""Compiled GPU kernels in an engine's tree: ``/opt/triton/NAME/``, read-only, made by ``athanor kernels gpu``.

A folder is for one kind of GPU, one Triton, one state of our kernels and one model configuration; its name encodes all
four (``engine.backends.cuda.kernels.folder``), so an engine finds its own or none, and compiles nothing. Only folders
that this image's engine would accept are added: built by the image's own Triton from the image's own sources, with
every file as sealed.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from engine.backends.cuda.kernels.folder import DIGEST_CHARS, check_folder, read_name, sources_digest
from engine.errors import ConfigurationError
from isolation.errors import IsolationError
from isolation.image.manifest import KERNELS_DIR
from isolation.image.python_rootfs import OURS_DIR, PACKAGES_DIR

SOURCES = "engine/backends/cuda/kernels"
"""Folder of the kernel sources in the engine's tree."""


def add_cache(tree: Path, source: Path) -> tuple[str, ...]:
    """Copy all folders of compiled kernels into an engine's tree; return their names.

    Raises:
        IsolationError: the tree has no Triton; or a folder holds no compiled kernels, was compiled by another Triton or
            from other sources, or differs from its seal.
    """
    installed = _triton_version(tree)
    if installed is None:
        raise IsolationError("this image has no triton: kernels for GPUs go into the cuda variant only")
    names = sorted(path.name for path in source.iterdir() if path.is_dir())
    if not names:
        raise IsolationError(f"no compiled kernels are in {source}", hint="`athanor kernels gpu` compiles them")
    ours = sources_digest(tree / OURS_DIR[1:] / SOURCES)[:DIGEST_CHARS]
    for name in names:
        try:
            made = read_name(name)
            if made.triton != installed:
                raise ConfigurationError(f"{name} was compiled by triton {made.triton}, the image has {installed}")
            if made.kernels != ours:
                raise ConfigurationError(f"{name} was compiled from other sources than the image has")
            check_folder(source / name)
        except ConfigurationError as error:
            raise IsolationError(str(error), hint="compile them again with `athanor kernels gpu`") from error
        _copy(source / name, tree / KERNELS_DIR[1:] / name)
    return tuple(names)


def _copy(source: Path, target: Path) -> None:
    """Copy files and folders; ``check_folder`` has excluded anything else."""
    for top, directories, files in os.walk(source):
        directories.sort()
        place = target / Path(top).relative_to(source)
        place.mkdir(parents=True)
        for name in files:
            shutil.copyfile(Path(top, name), place / name)


def _triton_version(tree: Path) -> str | None:
    place = tree / PACKAGES_DIR[1:] / "triton/__init__.py"
    if not place.is_file():
        return None
    match = re.search(r"^__version__ = ['\"]([0-9.]+)", place.read_text(), re.MULTILINE)
    return match[1] if match is not None else None
