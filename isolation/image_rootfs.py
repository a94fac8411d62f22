"""The root of a sandbox made from a *built* image: a directory tree with the paths of ``isolation.python_rootfs``.

``images/build.py`` makes one for each role. A tree is known by its digest, which covers every path, kind, mode and
content, and nothing else: not owners, not times.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from isolation.errors import RootfsError
from isolation.python_rootfs import OURS_DIR, PACKAGES_DIR, PYTHON_DIR
from isolation.spec import Mount, Rootfs

_TOP_LEVEL = ("lib", "lib64", "opt", "usr")
"""All that an image has; each is one mount, so a boot costs three or four instead of thirty."""

_FORMAT = b"athanor image tree 1\n"


def image_rootfs(tree: Path) -> Rootfs:
    """The root of a sandbox from the image of its role.

    Args:
        tree: the role's directory in the image.

    Raises:
        RootfsError: it is no such tree.
    """
    tree = tree.absolute()
    pythons = sorted((tree / PYTHON_DIR[1:] / "bin").glob("python3.*"))
    if len(pythons) != 1:
        raise RootfsError(f"{tree} is no sandbox image", hint="build one with `athanor image build`")
    tops = [name for name in _TOP_LEVEL if (tree / name).is_dir()]
    return Rootfs(
        python=f"{PYTHON_DIR}/bin/{pythons[0].name}",
        python_path=(OURS_DIR, PACKAGES_DIR),
        mounts=tuple(Mount(tree / name, f"/{name}") for name in tops),
        host_paths=tuple((f"/{name}", os.fspath(tree / name)) for name in tops),
    )


def tree_digest(tree: Path) -> str:
    """SHA-256 of a tree's paths, kinds, modes and contents, in hex.

    Raises:
        RootfsError: it holds something that an image may not: a device, a pipe, a socket, a set-id file, or a name
            with a line break.
    """
    digest = hashlib.sha256(_FORMAT)
    for line in _entries(tree, ""):
        digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


def _entries(directory: Path, prefix: str) -> Iterator[str]:
    with os.scandir(directory) as listing:
        entries = sorted(listing, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        name = f"{prefix}{entry.name}"
        mode = entry.stat(follow_symlinks=False).st_mode
        if "\n" in name or mode & (stat.S_ISUID | stat.S_ISGID):
            raise RootfsError(f"{entry.path} may not be in an image: set-id, or a line break in its name")
        permissions = f"{stat.S_IMODE(mode):04o}"
        if stat.S_ISDIR(mode):
            yield f"d {permissions} {name}"
            yield from _entries(Path(entry.path), f"{name}/")
        elif stat.S_ISLNK(mode):
            yield f"l {name} -> {os.readlink(entry.path)}"
        elif stat.S_ISREG(mode):
            with open(entry.path, "rb") as file:
                yield f"f {permissions} {hashlib.file_digest(file, 'sha256').hexdigest()} {name}"
        else:
            raise RootfsError(f"{entry.path} may not be in an image: neither file, directory nor link")
