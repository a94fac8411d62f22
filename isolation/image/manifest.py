"""Image manifest ``manifest.json``, and for each tree the list of its files. Hostile until verified.

An image is identified by the digest of its manifest's bytes. The manifest holds the digest of each role's list, and a
list the digest of each file, so one trusted digest covers everything, and a changed file can be named::

    manifest.json    format, version, variant, and the digests of the lists and of the bill of materials
    engine.files     the tree's entries, one on each line: ``d MODE PATH``, ``f MODE SHA256 PATH``
    engine/          the tree; likewise for every other role
    sbom.json        bill of materials (CycloneDX)
    signatures       signatures over the manifest; not covered by the digest
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from isolation.errors import ImageError

FORMAT = 2

MANIFEST, SBOM, SIGNATURES = "manifest.json", "sbom.json", "signatures"

TREE_HEADER = b"athanor image tree 1\n"
"""First line of a list; no other hashed data begins with it (domain separation)."""

VARIANTS = ("cpu", "cuda")
"""Image variants by their torch build: with ``cuda``, the code also runs on NVIDIA's GPUs."""

MAX_MANIFEST_BYTES = 256 << 10
MAX_LIST_BYTES = 32 << 20
"""Largest list in bytes: an engine's has 6,000 lines, 0.7 MB; a CUDA build's twice that."""

MAX_SBOM_BYTES = 16 << 20

FILE_MODES = ("0644", "0755")
"""Permitted file modes: no set-id, not writable for others."""

DIRECTORY_MODE = "0755"

KERNELS_DIR = "/opt/triton"
"""Folder of an engine's tree that holds kernels compiled for GPUs (``images.triton_cache``)."""

DIGEST = re.compile(r"[0-9a-f]{64}")
_ROLE = re.compile(r"[a-z]{1,16}")
_LINE = re.compile(r"(?:d ([0-7]{4})|f ([0-7]{4}) ([0-9a-f]{64})) (.+)")


@dataclass(frozen=True, slots=True)
class ImageRole:
    """One tree of the image."""

    digest: str
    """SHA-256 of its list, in hex."""
    files: int
    size: int
    """Total bytes of its files."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of an image's ``manifest.json``."""

    digest: str
    """SHA-256 of the manifest in hex, by which the image is pinned."""
    version: str
    """Version of the appliance from which it was built."""
    variant: str
    protocol: int
    """Version of the wire protocol that its programs speak."""
    machine: str
    python: str
    roles: Mapping[str, ImageRole]
    sbom: str
    """SHA-256 of the bill of materials."""
    built_from: Mapping[str, str]
    """Name and SHA-256 of each list of pinned packages."""
    triton_caches: tuple[str, ...] = ()
    """Keys of the kernel caches in the engine's tree."""

    @property
    def size(self) -> int:
        """Total bytes of all its files."""
        return sum(role.size for role in self.roles.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a file list."""

    path: str
    """Normal, relative path below the tree."""
    mode: int
    digest: str
    """SHA-256 of the content; empty for a directory."""


def manifest_digest(data: bytes) -> str:
    """Compute the digest by which an image is pinned."""
    return hashlib.sha256(b"athanor image 2\n" + data).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode a manifest in its only valid form; its own digest is not included."""
    values = {"format": FORMAT, **asdict(manifest)}
    del values["digest"]
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(image: Path) -> tuple[Manifest, bytes]:
    """Read and validate an image's manifest; return it with its bytes.

    Raises:
        ImageError: there is none, or it is malformed.
    """
    data = read_bounded(image / MANIFEST, MAX_MANIFEST_BYTES)
    try:
        return _parse(data), data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ImageError(
            f"{image} is no image: its {MANIFEST} is malformed: {error}",
            image / MANIFEST,
            hint="build one with `athanor image build`",
        ) from error


def _parse(data: bytes) -> Manifest:
    values = json.loads(data)
    if values["format"] != FORMAT:
        raise ValueError(f"its format is {values['format']!r}, this version knows {FORMAT}")
    roles = {name: _role(name, one) for name, one in values["roles"].items()}
    if not roles or values["variant"] not in VARIANTS:
        raise ValueError("no roles, or a variant that is not known")
    words = {name: values[name] for name in ("version", "machine", "python")}
    if not all(isinstance(word, str) and re.fullmatch(r"[\w.+-]{1,64}", word) for word in words.values()):
        raise ValueError("a version is none")
    if type(values["protocol"]) is not int:
        raise ValueError("its protocol is none")
    built_from = {str(name): _hex(one) for name, one in values["built_from"].items()}
    caches = tuple(values["triton_caches"])
    if not all(isinstance(key, str) and is_inside(key) for key in caches):
        raise ValueError("a cache's key is none")
    return Manifest(
        manifest_digest(data),
        variant=values["variant"],
        protocol=values["protocol"],
        roles=roles,
        sbom=_hex(values["sbom"]),
        built_from=built_from,
        triton_caches=caches,
        **words,
    )


def _role(name: str, values: Mapping[str, object]) -> ImageRole:
    files, size = values["files"], values["size"]
    if not _ROLE.fullmatch(name) or not isinstance(files, int) or not isinstance(size, int) or files < 0 or size < 0:
        raise ValueError("a role is malformed")
    return ImageRole(_hex(values["digest"]), files, size)


def _hex(value: object) -> str:
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is no digest")
    return value


def list_place(image: Path, role: str) -> Path:
    """Return the path of the list of a role's files."""
    return image / f"{role}.files"


def read_list(image: Path, name: str, role: ImageRole) -> tuple[Entry, ...]:
    """Read the entries of a tree, in creation order.

    Raises:
        ImageError: the list does not match the manifest, or has a forbidden entry.
    """
    place = list_place(image, name)
    data = read_bounded(place, MAX_LIST_BYTES)
    if hashlib.sha256(data).hexdigest() != role.digest:
        raise ImageError(f"{place} is not the list that the image was built with", place, hint="do not run it")
    try:
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        if not data.startswith(TREE_HEADER) or lines.pop() != "":
            raise ValueError("it does not begin or end as a list does")
        return tuple(_entry(line) for line in lines[1:])
    except ValueError as error:
        raise ImageError(f"{place} is malformed: {error}", place, hint="do not run it") from error


def _entry(line: str) -> Entry:
    match = _LINE.fullmatch(line)
    if match is None or not is_inside(match[4]):
        raise ValueError(f"{line[:120]!r} is neither a file nor a directory of the tree")
    mode = match[1] or match[2]
    if (mode != DIRECTORY_MODE) if match[1] else (mode not in FILE_MODES):
        raise ValueError(f"{match[4][:120]!r} has the mode {mode}")
    return Entry(match[4], int(mode, 8), match[3] or "")


def is_inside(path: str) -> bool:
    """Return whether a path is a normal path strictly below the folder that it is relative to."""
    pure = PurePosixPath(path)
    return str(pure) == path and not pure.is_absolute() and ".." not in pure.parts and path != "." and "\0" not in path


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a regular file's bytes.

    Raises:
        ImageError: it cannot be read, is no regular file, or has more than ``limit`` bytes.
    """
    try:
        if not path.is_file():
            raise ImageError(
                f"{path.parent} is no image: it has no {path.name}", path, hint="build one with `athanor image build`"
            )
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ImageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", path) from error
    if len(data) > limit:
        raise ImageError(f"{path} has more than {limit} bytes", path, hint="do not run it")
    return data
