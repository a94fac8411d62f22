"""A folder of kernels that were compiled ahead: its name, its manifest and its digest. Stdlib only.

``engine.backends.cuda.kernels.cache`` fills and opens such folders; ``images.triton_cache`` puts them into an image.
Both judge by what is here, so an image never holds what its engine would refuse.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.errors import ConfigurationError

MANIFEST = "athanor.json"
FORMAT = 2
MAX_MANIFEST_BYTES = 1 << 16
DIGEST_CHARS = 16
"""Characters of a digest in a folder's name; the manifest has all of it."""

_KEPT = re.compile(r".+\.(cubin|json|so)")
"""Files of Triton that are kept: machine code, its metadata and groups, and the modules that launch. The steps between
source and machine code are left out: nothing reads them, and they name places of the machine that compiled."""

_NAME = re.compile(r"(sm_[0-9]{2,3})-triton-([0-9]+(?:\.[0-9]+)+)-([0-9a-f]{16})-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class FolderName:
    """What a folder of kernels is for."""

    architecture: str
    triton: str
    kernels: str
    """Beginning of the digest of our sources."""
    configuration: str
    """Beginning of the digest of launches (``engine.backends.cuda.runtime.launch_digest``)."""

    def __str__(self) -> str:
        return "-".join((self.architecture, "triton", self.triton, self.kernels, self.configuration))


def folder_name(architecture: str, triton: str, kernels: str, configuration: str) -> FolderName:
    """The name for whole digests."""
    return FolderName(architecture, triton, kernels[:DIGEST_CHARS], configuration[:DIGEST_CHARS])


def read_name(name: str) -> FolderName:
    """Take a folder's name apart.

    Raises:
        ConfigurationError: it is no such name.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigurationError(
            f"{name} holds no compiled kernels: its name is not ARCHITECTURE-triton-VERSION-SOURCES-CONFIGURATION"
        )
    return FolderName(*match.groups())


def sources_digest(folder: Path) -> str:
    """Hex SHA-256 over the kernels' sources, the table of configurations among them."""
    digest = hashlib.sha256(b"athanor gpu kernels 1\0")
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def files_digest(folder: Path) -> str:
    """Hex SHA-256 over the names and contents of all files but the manifest.

    Raises:
        ConfigurationError: something in it is neither a file nor a folder.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ConfigurationError(f"{path} is no file: compiled kernels are files only")
        if path.is_file() and path != folder / MANIFEST:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{content} {path.relative_to(folder).as_posix()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody wanted compiled, as a model's configuration says it: for those who cannot work a configuration's
    digest out. Two that differ may be one configuration."""

    description: str
    """Hex SHA-256 of the model's ``config.json``."""
    dtype: str
    block_size: int
    rows: int
    """Requests of one step at the most."""
    weights: str = "stored"
    """How they are held; ``stored`` in folders of before there was another way on a GPU."""


def description_digest(model_dir: Path) -> str:
    """Return the digest of a model's description.

    Raises:
        OSError: it cannot be read.
    """
    with open(model_dir / "config.json", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_asked(folder: Path) -> Asked | None:
    """What a folder was made for by its manifest's word; None where that does not say so."""
    try:
        with open(folder / MANIFEST, "rb") as file:
            said = json.loads(file.read(MAX_MANIFEST_BYTES))["asked"]
        found = Asked(**said)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    texts, numbers = (found.description, found.dtype, found.weights), (found.block_size, found.rows)
    return found if all(type(one) is str for one in texts) and all(type(one) is int for one in numbers) else None


def known(architecture: str, triton: str, kernels: str, configuration: str) -> dict[str, object]:
    """What a manifest says a folder is for."""
    return {
        "format": FORMAT,
        "architecture": architecture,
        "triton": triton,
        "kernels": kernels,
        "configuration": configuration,
    }


def seal(place: Path, facts: Mapping[str, object], asked: Asked | None = None) -> str:
    """Finish a folder that Triton has filled: only what is read, readable for all, without names of the machine, and
    what it is known by (``facts``), and what was asked for, beside it. Gives the digest of its files.

    Raises:
        ConfigurationError: there is none, or nothing is in it.
    """
    if not place.is_dir() or not any(place.iterdir()):
        raise ConfigurationError(f"no kernels are in {place.name}; `athanor kernels gpu` compiles them")
    for path in sorted(place.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
        elif _KEPT.fullmatch(path.name):
            _without_places(path)
            path.chmod(0o644)
        else:
            path.unlink()
    place.chmod(0o755)
    digest = files_digest(place)
    said = {**facts, "files": digest}
    if asked is not None:
        said["asked"] = asdict(asked)
    manifest = place / MANIFEST
    manifest.write_text(json.dumps(said, indent=1) + "\n")
    manifest.chmod(0o644)
    return digest


def _without_places(path: Path) -> None:
    """Take out of a group or of metadata where it was made."""
    if path.suffix != ".json":
        return
    content = json.loads(path.read_bytes())
    if path.name.startswith("__grp__"):
        content = {"child_paths": {name: name for name in sorted(content["child_paths"]) if _KEPT.fullmatch(name)}}
    else:
        content["extern_libs"] = [[name, Path(place).name] for name, place in content["extern_libs"]]
    path.write_text(json.dumps(content, sort_keys=True))


def check_folder(folder: Path) -> dict[str, object]:
    """Read a folder's manifest, and hold its name and its files against it.

    Raises:
        ConfigurationError: the manifest cannot be read, was made for something else than the name says, or a file is
            not as it was sealed.
    """
    name = folder.name
    try:
        with open(folder / MANIFEST, "rb") as file:
            said = json.loads(file.read(MAX_MANIFEST_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the kernels in {name} have no manifest; compile them again") from error
    words = ("architecture", "triton", "kernels", "configuration", "assembler", "files")
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise ConfigurationError(f"the kernels in {name} were made for something else; compile them again")
    if any(not isinstance(said.get(word), str) for word in words):
        raise ConfigurationError(f"the kernels in {name} have a manifest that lacks something; compile them again")
    if name != str(folder_name(*(said[word] for word in words[:4]))):
        raise ConfigurationError(f"the kernels in {name} were made for something else; compile them again")
    if said["files"] != files_digest(folder):
        raise ConfigurationError(f"the kernels in {name} are not as they were sealed; compile them again")
    return said
