"""The root of a sandbox made from a *built* image: a directory tree with the paths of ``isolation.python_rootfs``.

``images/build.py`` makes one for each role. A tree is known by its digest, which covers every path, kind, mode and
content, and nothing else: not owners, not times.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from isolation.errors import RootfsError
from isolation.python_rootfs import OURS_DIR, PACKAGES_DIR, PYTHON_DIR
from isolation.spec import Mount, Rootfs

_TOP_LEVEL = ("lib", "lib64", "opt", "usr")
"""All that an image has; each is one mount, so a boot costs three or four instead of thirty."""

MANIFEST = "manifest.json"
"""Beside the trees: the digest of each, the digest of all, and what was built from what."""

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


def verify_image(image: Path) -> str:
    """Compute an image's digest from its files and compare it with its own manifest.

    The supervisor compares the result with the digest that the operator pinned; an image whose files agree with its
    manifest is only whole, not yet trusted.

    Raises:
        RootfsError: it is no image, or its files are not those it was built with.
    """
    try:
        manifest = json.loads((image / MANIFEST).read_text())
        roles = {str(role): str(digest) for role, digest in manifest["roles"].items()}
        whole = manifest["digest"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise RootfsError(f"{image} is no image: {error}", hint="build one with `athanor image build`") from error
    trees = sorted(entry.name for entry in image.iterdir() if entry.is_dir())
    found = {name: tree_digest(image / name) for name in trees}
    wrong = sorted(role for role in roles.keys() | found.keys() if roles.get(role) != found.get(role))
    if wrong or whole != image_digest(found):
        raise RootfsError(
            f"the files of {image} are not those it was built with: {', '.join(wrong) or MANIFEST}",
            hint="do not run it; build it again",
        )
    return image_digest(found)


def image_digest(roles: dict[str, str]) -> str:
    """One digest for all trees of an image: SHA-256 of their sorted ``role digest`` lines, in hex. Pure."""
    lines = "".join(f"{role} {digest}\n" for role, digest in sorted(roles.items()))
    return hashlib.sha256(b"athanor image 1\n" + lines.encode()).hexdigest()


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
