"""Root of a sandbox made from a *built* image: a directory tree with the paths of ``isolation.image.python_rootfs``.

``images/build.py`` makes one for each role. A tree is identified by its digest, which covers every path, kind, mode and
content, but neither owners nor times.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from isolation.errors import ImageError, RootfsError
from isolation.gvisor.spec import Mount, Rootfs
from isolation.image.manifest import MAX_SBOM_BYTES, SBOM, TREE_HEADER, Manifest, read_bounded, read_list, read_manifest
from isolation.image.python_rootfs import OURS_DIR, PACKAGES_DIR, PYTHON_DIR

_TOP_LEVEL = ("lib", "lib64", "opt", "usr")
"""Top-level folders of an image; each is one mount, so a boot costs three or four mounts instead of thirty."""


def image_rootfs(tree: Path) -> Rootfs:
    """Build the root of a sandbox from the image of its role.

    Args:
        tree: the role's directory in the image.

    Raises:
        RootfsError: the directory is not such a tree.
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


def verify_image(image: Path) -> Manifest:
    """Read every file of an image and compare it with the image's manifest.

    The supervisor compares the result's digest with the one that the operator pinned; an image whose files agree with
    its manifest is intact, but not yet trusted.

    Raises:
        ImageError: it is no image, or its files differ from those it was built with; names the first of them.
    """
    manifest, _ = read_manifest(image)
    _compare_sbom(image, manifest)
    trees = sorted(entry.name for entry in os.scandir(image) if entry.is_dir(follow_symlinks=False))
    if trees != sorted(manifest.roles):
        raise ImageError(f"{image} has not the trees of its manifest", image, hint="do not run it; build it again")
    for name, role in manifest.roles.items():
        lines = tuple(tree_lines(image / name))
        if _digest(lines) != role.digest:
            _name_difference(image, manifest, name, lines)
    return manifest


def _compare_sbom(image: Path, manifest: Manifest) -> None:
    if hashlib.sha256(read_bounded(image / SBOM, MAX_SBOM_BYTES)).hexdigest() != manifest.sbom:
        raise ImageError(f"{image / SBOM} is not what the image was built with", image / SBOM, hint="do not run it")


def _name_difference(image: Path, manifest: Manifest, name: str, lines: tuple[str, ...]) -> None:
    """Raise an error that names the first entry of a tree that differs from its list."""
    wanted = {_line(one.path, one.mode, one.digest) for one in read_list(image, name, manifest.roles[name])}
    odd = min((_path_of(line) for line in wanted.symmetric_difference(lines)), default="")
    place = image / name / odd
    raise ImageError(
        f"{place} is not what the image was built with", place, hint="do not run the image; build it again"
    )


def tree_digest(tree: Path) -> str:
    """Compute the SHA-256 of a tree's paths, kinds, modes and contents, in hex.

    Raises:
        ImageError: it holds a forbidden entry: a device, a pipe, a socket, a set-id file, or a name with a line break.
    """
    return _digest(tuple(tree_lines(tree)))


def encode_list(lines: tuple[str, ...]) -> bytes:
    """Encode the list of a tree's entries as stored beside the tree; its SHA-256 is the tree's digest."""
    return TREE_HEADER + b"".join(line.encode("utf-8", "surrogateescape") + b"\n" for line in lines)


def _digest(lines: tuple[str, ...]) -> str:
    return hashlib.sha256(encode_list(lines)).hexdigest()


def _path_of(line: str) -> str:
    """Return the path in a line of a list."""
    return line.split(" ", {"f": 3, "d": 2}.get(line[0], 1))[-1].partition(" -> " if line[0] == "l" else "\n")[0]


def _line(name: str, mode: int, digest: str) -> str:
    return f"f {mode:04o} {digest} {name}" if digest else f"d {mode:04o} {name}"


def tree_lines(directory: Path, prefix: str = "") -> Iterator[str]:
    """Yield the entries of a tree, sorted by name, a directory before its contents; see ``isolation.image.manifest``.

    Raises:
        ImageError: as for ``tree_digest``, and for an unreadable entry.
    """
    try:
        with os.scandir(directory) as listing:
            entries = sorted(listing, key=lambda entry: os.fsencode(entry.name))
        for entry in entries:
            yield from _entry_lines(entry, f"{prefix}{entry.name}")
    except OSError as error:
        place = Path(error.filename or directory)
        raise ImageError(f"cannot read {place}: {(error.strerror or str(error)).lower()}", place) from error


def _entry_lines(entry: os.DirEntry[str], name: str) -> Iterator[str]:
    mode = entry.stat(follow_symlinks=False).st_mode
    path, permissions = Path(entry.path), stat.S_IMODE(mode)
    if "\n" in name or mode & (stat.S_ISUID | stat.S_ISGID):
        raise ImageError(f"{path} may not be in an image: set-id, or a line break in its name", path)
    if stat.S_ISDIR(mode):
        yield _line(name, permissions, "")
        yield from tree_lines(path, f"{name}/")
    elif stat.S_ISLNK(mode):
        yield f"l {name} -> {os.readlink(entry.path)}"
    elif stat.S_ISREG(mode):
        with open(entry.path, "rb") as file:
            yield _line(name, permissions, hashlib.file_digest(file, "sha256").hexdigest())
    else:
        raise ImageError(f"{path} may not be in an image: neither file, directory nor link", path)
