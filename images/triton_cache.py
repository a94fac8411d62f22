"""The place of compiled Triton kernels in an engine's tree: ``/opt/triton/ARCH-TRITON-CONFIGURATION/``, read-only.

A cache is for one kind of GPU, one Triton and one configuration of the kernels; its key has all three, so an engine
finds its own or none, and compiles nothing (there is no compiler in an image)::

    sm_90-3.7.1-5f2c9a01d3e4b687/...
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from pathlib import Path

from isolation.errors import IsolationError
from isolation.python_rootfs import PACKAGES_DIR

CACHE_DIR = "/opt/triton"

_KEY = re.compile(r"sm_[0-9]{2,3}[af]?-([0-9]+(?:\.[0-9]+)+)-[0-9a-f]{16}")


def cache_key(architecture: str, triton: str, configuration: bytes) -> str:
    """The name of a cache's folder.

    Args:
        architecture: as ``sm_90``.
        triton: version of the compiler.
        configuration: everything else that decides what is compiled, in one agreed form.
    """
    key = f"{architecture}-{triton}-{hashlib.sha256(configuration).hexdigest()[:16]}"
    assert _KEY.fullmatch(key), "an architecture and a version"
    return key


def add_cache(tree: Path, source: Path) -> tuple[str, ...]:
    """Copy a folder of caches into an engine's tree; gives their keys.

    Raises:
        IsolationError: the tree has no Triton, or not the one that a cache was compiled by; or what is in the folder
            is no cache.
    """
    installed = _triton_version(tree)
    if installed is None:
        raise IsolationError("this image has no triton: kernels for GPUs go into the cuda variant only")
    keys = sorted(path.name for path in source.iterdir() if path.is_dir())
    for key in keys:
        match = _KEY.fullmatch(key)
        if match is None:
            raise IsolationError(f"{source / key} is no cache: its name is not ARCHITECTURE-TRITON-CONFIGURATION")
        if match[1] != installed:
            raise IsolationError(f"{source / key} was compiled by triton {match[1]}, the image has {installed}")
        _copy(source / key, tree / CACHE_DIR[1:] / key)
    return tuple(keys)


def _copy(source: Path, target: Path) -> None:
    for top, directories, files in os.walk(source):
        directories.sort()
        place = target / Path(top).relative_to(source)
        place.mkdir(parents=True)
        for name in files:
            path = Path(top, name)
            if path.is_symlink() or not path.is_file():
                raise IsolationError(f"{path} is no file: a cache holds files only")
            shutil.copyfile(path, place / name)


def _triton_version(tree: Path) -> str | None:
    place = tree / PACKAGES_DIR[1:] / "triton/__init__.py"
    if not place.is_file():
        return None
    match = re.search(r"^__version__ = ['\"]([0-9.]+)", place.read_text(), re.MULTILINE)
    return match[1] if match is not None else None
