"""What an image says of itself: ``manifest.json``, and beside each tree the list of its files. Hostile until checked.

An image is known by one digest, that of its manifest's bytes. The manifest has the digest of each role's list, a list
the digest of each file, so whoever trusts the one digest trusts all, and a file that was changed can be named::

    manifest.json    format, version, variant, and the digests of the lists and of the bill of materials
    engine.files     the tree's entries, a line each: ``d MODE PATH``, ``f MODE SHA256 PATH``
    engine/          the tree; the same for every other role
    sbom.json        what it is made of (CycloneDX)
    signatures       who vouches for the manifest; no part of the digest
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from isolation.errors import ImageError

FORMAT = 2

MANIFEST, SBOM, SIGNATURES = "manifest.json", "sbom.json", "signatures"

TREE_HEADER = b"athanor image tree 1\n"
"""First line of a list: nothing else that is hashed somewhere begins so."""

VARIANTS = ("cpu", "cuda")
"""By the torch inside: with ``cuda`` the same code runs on NVIDIA's GPUs as well."""

MAX_MANIFEST_BYTES = 256 << 10
MAX_LIST_BYTES = 32 << 20
"""An engine's list has 6,000 lines, 0.7 MB; a CUDA build's twice that."""

MAX_SBOM_BYTES = 16 << 20

FILE_MODES = ("0644", "0755")
"""What files may have: no set-id, nothing for others to write."""

DIRECTORY_MODE = "0755"

KERNELS_DIR = "/opt/triton"
"""In an engine's tree: kernels that were compiled for GPUs (``images.triton_cache``)."""

DIGEST = re.compile(r"[0-9a-f]{64}")
_ROLE = re.compile(r"[a-z]{1,16}")
_LINE = re.compile(r"(?:d ([0-7]{4})|f ([0-7]{4}) ([0-9a-f]{64})) (.+)")


@dataclass(frozen=True, slots=True)
class Role:
    """One tree."""

    digest: str
    """SHA-256 of its list, in hex."""
    files: int
    size: int
    """Bytes of its files."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image's account of itself."""

    digest: str
    """By which it is pinned: SHA-256 of the manifest, in hex."""
    version: str
    """Of the appliance that it was built from."""
    variant: str
    protocol: int
    """Of the wire that its programs speak."""
    machine: str
    python: str
    roles: Mapping[str, Role]
    sbom: str
    """SHA-256 of the bill of materials."""
    built_from: Mapping[str, str]
    """Name to SHA-256 of the lists of pinned packages."""
    triton_caches: tuple[str, ...] = ()
    """Keys of the kernel caches in the engine's tree."""

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(role.size for role in self.roles.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list."""

    path: str
    """Below the tree, normal and relative."""
    mode: int
    digest: str
    """SHA-256 of the content; empty for a directory."""


def manifest_digest(data: bytes) -> str:
    """The digest by which an image is pinned."""
    return hashlib.sha256(b"athanor image 2\n" + data).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """The one text of a manifest; its own digest is not in it."""
    values = {
        "format": FORMAT,
        "version": manifest.version,
        "variant": manifest.variant,
        "protocol": manifest.protocol,
        "machine": manifest.machine,
        "python": manifest.python,
        "roles": {
            name: {"digest": role.digest, "files": role.files, "size": role.size}
            for name, role in manifest.roles.items()
        },
        "sbom": manifest.sbom,
        "built_from": dict(manifest.built_from),
        "triton_caches": list(manifest.triton_caches),
    }
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(image: Path) -> tuple[Manifest, bytes]:
    """An image's manifest, with its bytes.

    Raises:
        ImageError: there is none, or it is malformed.
    """
    data = read_bounded(image / MANIFEST, MAX_MANIFEST_BYTES)
    try:
        return _parse(data), data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ImageError(
            f"{image} is no image: its {MANIFEST} is malformed: {error}", image / MANIFEST,
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
        manifest_digest(data), variant=values["variant"], protocol=values["protocol"], roles=roles,
        sbom=_hex(values["sbom"]), built_from=built_from, triton_caches=caches, **words,
    )


def _role(name: str, values: Mapping[str, object]) -> Role:
    files, size = values["files"], values["size"]
    if not _ROLE.fullmatch(name) or not isinstance(files, int) or not isinstance(size, int) or files < 0 or size < 0:
        raise ValueError("a role is malformed")
    return Role(_hex(values["digest"]), files, size)


def _hex(value: object) -> str:
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise ValueError(f"{str(value)[:80]!r} is no digest")
    return value


def list_place(image: Path, role: str) -> Path:
    """Where the list of a role's files is."""
    return image / f"{role}.files"


def read_list(image: Path, name: str, role: Role) -> tuple[Entry, ...]:
    """The entries of a tree, in the order in which they are made.

    Raises:
        ImageError: the list is not the manifest's, or has an entry that no image may have.
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
    """Whether a path names something below the folder that it is relative to, in the one way there is."""
    pure = PurePosixPath(path)
    return str(pure) == path and not pure.is_absolute() and ".." not in pure.parts and path != "." and "\0" not in path


def read_bounded(path: Path, limit: int) -> bytes:
    """A regular file's bytes.

    Raises:
        ImageError: it cannot be read, is none, or has more than ``limit``.
    """
    try:
        if not path.is_file():
            raise ImageError(f"{path.parent} is no image: it has no {path.name}", path,
                hint="build one with `athanor image build`")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ImageError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", path) from error
    if len(data) > limit:
        raise ImageError(f"{path} has more than {limit} bytes", path, hint="do not run it")
    return data
