"""Manifest of a model: names, sizes and SHA-256 digests of its files. Pure; what is read here comes from strangers.

    {"version": 1, "files": [{"name": "config.json", "size": 712, "sha256": "9f86..."}]}

A source has it beside the files, under ``MANIFEST``. The model's digest follows from it, and is the one that
`athanor model digest` prints: it covers the files that sandboxes get. A manifest may list others, which are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.common.catalog import MAX_MODEL_FILES, SAFETENSORS, digest_of, served_names
from appliance.common.errors import ModelSourceError
from appliance.common.strict_json import JsonError, parse_json

MANIFEST = "athanor-model.json"
"""Name of the manifest in a model's folder, at the source as in the cache."""

VERSION = 1

MAX_MANIFEST_BYTES = 1 << 20
"""Most bytes of a manifest: 2,048 files with names of 400 characters."""

MAX_LISTED_FILES = 2 * MAX_MODEL_FILES
"""Most files that a manifest or a listing has; a published folder has as many others as weight files at most."""

MAX_FILE_BYTES = 1 << 40
"""Most bytes of one file, 1 TiB; published weight files have some 10 GB."""

MAX_MODEL_BYTES = 4 << 40
"""Most bytes of a model, 4 TiB; the largest published ones have 1.5 TB."""

MAX_NAME = 255
"""Most characters of a name with its folder: file systems take no more in one part."""

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+=@,-]*")
"""One part of a name. It cannot begin with a dot, so neither ``..`` nor a hidden file is one."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """One file of a model."""

    name: str
    """Path below the model's folder."""
    size: int
    """Bytes."""
    sha256: str = ""
    """Digest in hex; empty where the source says none."""
    tag: str = ""
    """What the source knows this content by (ETag); empty where it says none."""


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """The files of a model that sandboxes get, in the digest's order."""

    files: tuple[ManifestFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """The model's digest in hex; empty where the digest of a file is not known."""
        if not all(file.sha256 for file in self.files):
            return ""
        return digest_of((file.name, bytes.fromhex(file.sha256)) for file in self.files)

    def text(self) -> bytes:
        """The manifest as a file; ``read_manifest`` reads it."""
        rows = [{"name": file.name, "size": file.size, "sha256": file.sha256} for file in self.files]
        return json.dumps({"version": VERSION, "files": rows}, indent=1).encode() + b"\n"


def read_manifest(data: bytes, where: str) -> ModelManifest:
    """Read a manifest from its source.

    Args:
        data: bytes of the file.
        where: the source, for messages.

    Raises:
        ModelSourceError: it is no manifest of this version, names what no model has, or lacks what every model has.
    """
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise JsonError(f"more than {MAX_MANIFEST_BYTES} bytes")
        values = parse_json(data)
    except JsonError as error:
        raise ModelSourceError(f"{where}: {MANIFEST} is not JSON that is taken: {error}") from error
    rows = values.get("files") if isinstance(values, dict) and values.get("version") == VERSION else None
    if not isinstance(rows, list):
        raise ModelSourceError(
            f"{where}: {MANIFEST} is no manifest of version {VERSION}; write it with: athanor model manifest DIR"
        )
    return choose_files((_file(row, where) for row in rows), where)


def choose_files(listed: Iterable[ManifestFile], where: str) -> ModelManifest:
    """Manifest of what sandboxes get among the files of a source.

    Raises:
        ModelSourceError: a name leads out of the folder or is there twice, a file or all of them are too large, there
            are too many, or a file that every model has is missing.
    """
    found: dict[str, ManifestFile] = {}
    for file in listed:
        check_name(file.name, where)
        if file.name in found:
            raise ModelSourceError(f"{where}: {file.name} is listed twice; make the manifest again")
        if len(found) == MAX_LISTED_FILES:
            raise ModelSourceError(f"{where}: more than {MAX_LISTED_FILES} files; name the folder of one model")
        if not 0 <= file.size <= MAX_FILE_BYTES:
            raise ModelSourceError(f"{where}: {file.name} has {file.size} bytes, {MAX_FILE_BYTES} are the most")
        found[file.name] = file
    names = served_names(found.keys())
    weights = sum(name.endswith(SAFETENSORS) for name in names)
    missing = [name for name in ("config.json", "tokenizer.json") if name not in found]
    if missing or not weights:
        lacking = ", ".join([*missing, *([] if weights else [f"*{SAFETENSORS}"])])
        raise ModelSourceError(f"{where}: no {lacking} there; name the folder of one model in the Hugging Face layout")
    if weights > MAX_MODEL_FILES:
        raise ModelSourceError(f"{where}: more than {MAX_MODEL_FILES} weight files; name the folder of one model")
    manifest = ModelManifest(tuple(found[name] for name in names))
    if manifest.size > MAX_MODEL_BYTES:
        raise ModelSourceError(f"{where}: the model has {manifest.size} bytes, {MAX_MODEL_BYTES} are the most")
    return manifest


def check_name(name: str, where: str) -> None:
    """Check that a name stays below the model's folder.

    Raises:
        ModelSourceError: it is absolute, has a part ``..`` or one that begins with a dot, or odd characters.
    """
    if not is_name(name):
        shown = ascii(name[:80])
        raise ModelSourceError(f"{where}: {shown} is no name of a model's file; do not use this source")


def is_name(name: str) -> bool:
    """Whether a name can be that of a model's file: no part is ``..``, empty or hidden."""
    return len(name) <= MAX_NAME and all(_PART.fullmatch(part) for part in name.split("/"))


def _file(row: object, where: str) -> ManifestFile:
    match row:
        case {"name": str(name), "size": int(size), "sha256": str(sha256)} if _SHA256.fullmatch(sha256):
            if type(size) is int:
                return ManifestFile(name, size, sha256)
    raise ModelSourceError(
        f"{where}: an entry of {MANIFEST} is not name, size and sha256; write it with: athanor model manifest DIR"
    )
