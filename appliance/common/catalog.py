"""Models on disk: which files go to which sandbox, and their digest. The host hashes files and never interprets
them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.common.adapter_files import AdapterFiles, check_adapter
from appliance.common.errors import ConfigError, ModelDigestError, ModelSignatureError, os_errors_as
from appliance.common.model_digests import DigestCache, HashedFile, identity_of

EMBEDDED_MODEL = "athanor-mini"
"""Name and folder of the model that comes with the project."""

SAFETENSORS = ".safetensors"
"""Ending of weight files."""

GGUF = ".gguf"
CONVERTED = "is GGUF, which is converted once and not served as it is; athanor model convert"
"""Message for a llama.cpp file; the command comes behind the semicolon."""

ENGINE_FILES = ("config.json", "generation_config.json", "model.safetensors.index.json", "modules.json")
"""Files for the engine sandbox, besides every ``*.safetensors``."""

POOLING_FILE = ("1_Pooling/config.json", "pooling.json")
"""File that says how an embedding model pools: its path in the model's folder, and its name in the sandbox, which has
no folders."""

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""Files for the text sandbox."""

SIGNATURE = "model.sig"
"""File with a model's signature (``appliance.common.model_signature``): the default of the program that makes it. No
sandbox gets it, and the digest does not cover it."""

MAX_SIGNATURE_BYTES = 4 << 20
"""Most bytes of it: 16,384 entries of 180 bytes, in base64."""

MAX_MODEL_FILES = 1_024
"""Most weight files of one model; the largest published checkpoints have a few hundred."""


NamedFiles = tuple[tuple[str, Path], ...]
"""(name inside /model, real path) pairs."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model: names, real paths, digest."""

    name: str
    engine: NamedFiles
    text: NamedFiles
    digest: str
    """Hex SHA-256 over the framed names and digests of all files."""
    folder: Path = Path()
    hashed: tuple[HashedFile, ...] = ()
    """State of the files when they were hashed."""
    adapters: tuple[AdapterFiles, ...] = ()
    """Adapters of the model that its engines get."""
    signer: str = ""
    """Id of the key that has signed the files; empty where no signature is asked for."""
    unsigned: str = ""
    """Why the files are not signed as the configuration asks; such a model is not started."""


def embedded_model() -> Path:
    """The folder of ``athanor-mini``: in the source tree, or where the distribution installed it.

    Raises:
        ConfigError: it is in neither place.
    """
    source = Path(__file__).resolve().parents[2] / "images" / "mini" / EMBEDDED_MODEL
    installed = Path(sys.prefix) / "share" / "athanor" / "models" / EMBEDDED_MODEL
    for path in (source, installed):
        if (path / "config.json").is_file():
            return path
    raise ConfigError(f"the embedded model is missing: looked in {source} and {installed}")


def read_model(name: str, folder: Path, cache: DigestCache | None = None, *, external: bool = False) -> ModelFiles:
    """Find a model's files and hash those that ``cache`` does not know; an ``external`` model has no weights here.

    Raises:
        ConfigError: a needed file is missing, unreadable, or not readable by the sandbox's user.
    """
    engine, text = find_files(name, folder, external=external)
    digest, hashed = _digest(name, engine + text, cache or DigestCache())
    return ModelFiles(name, engine, text, digest, folder, hashed)


def find_files(name: str, folder: Path, *, external: bool = False) -> tuple[NamedFiles, NamedFiles]:
    """The engine's and the text sandbox's files, found and checked but not read: quick. An ``external`` model has the
    latter alone.

    Raises:
        ConfigError: as ``read_model``.
    """
    if folder.suffix.lower() == GGUF and folder.is_file():
        raise ConfigError(f"model {name}: {folder} {CONVERTED} {folder} DIR")
    if not folder.is_dir():
        raise ConfigError(f"model {name}: {folder} is not a directory")
    if external:
        _check_present(name, folder, ("tokenizer.json",))
        return (), _real_files(name, folder, TEXT_FILES)
    weights = sorted(path.name for path in folder.glob(f"*{SAFETENSORS}"))
    if not weights and (packed := sorted(folder.glob(f"*{GGUF}"))):
        raise ConfigError(f"model {name}: {packed[0]} {CONVERTED} {packed[0]} DIR")
    if not weights:
        raise ConfigError(
            f"model {name}: no *.safetensors in {folder}; a directory in the Hugging Face layout is needed"
        )
    if len(weights) > MAX_MODEL_FILES:
        raise ConfigError(f"model {name}: more than {MAX_MODEL_FILES} weight files in {folder}")
    _check_present(name, folder, ("config.json", "tokenizer.json"))
    engine = _real_files(name, folder, (*ENGINE_FILES, *weights, POOLING_FILE[0]))
    renamed = tuple((inside(place), path) for place, path in engine)
    return renamed, _real_files(name, folder, TEXT_FILES)


def _check_present(name: str, folder: Path, files: tuple[str, ...]) -> None:
    for needed in files:
        if not (folder / needed).is_file():
            raise ConfigError(f"model {name}: {needed} is missing in {folder}")


def served_names(present: Collection[str]) -> tuple[str, ...]:
    """Those of a folder's names that sandboxes get, in the order in which the digest has them."""
    weights = sorted(name for name in present if name.endswith(SAFETENSORS) and "/" not in name)
    return tuple(name for name in (*ENGINE_FILES, *weights, POOLING_FILE[0], *TEXT_FILES) if name in present)


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """A model's digest in hex, from names inside its folder and SHA-256 digests, in the order of ``served_names``."""
    total = hashlib.sha256(b"athanor model v1\0")
    for place, digest in files:
        name = inside(place).encode()
        total.update(len(name).to_bytes(4, "little") + name + digest)
    return total.hexdigest()


def inside(place: str) -> str:
    """Name in the sandbox of a file of the model's folder."""
    return POOLING_FILE[1] if place == POOLING_FILE[0] else place


def _real_files(model: str, folder: Path, names: tuple[str, ...]) -> NamedFiles:
    """Existing files with links resolved, checked to be readable inside the sandbox.

    A model's folder comes from strangers, links included. What a link names is shown to a sandbox, so it must be the
    model's own: below the folder, or in the store of the hub's cache that the folder is a snapshot of.
    """
    found = []
    for name in names:
        path = own_file(model, folder, name)
        if path is None:
            continue
        if not path.stat().st_mode & 0o004:
            raise ConfigError(
                f"model {model}: {path} is not readable by the sandbox's user; make it so with: chmod o+r '{path}'"
            )
        found.append((name, path))
    return tuple(found)


def own_file(model: str, folder: Path, name: str) -> Path | None:
    """Return the real path of a file of a model's folder; None where there is none.

    Raises:
        ConfigError: it is a link to what is not the model's own.
    """
    home, path = folder.resolve(), (folder / name).resolve()
    if not path.is_file():
        return None
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(path.is_relative_to(own) for own in homes):
        raise ConfigError(
            f"model {model}: {folder / name} is a link out of the model's folder, to {path}; "
            f"put the file itself there if it belongs to the model"
        )
    return path


def check_files(files: ModelFiles, pinned: str) -> None:
    """Check, before each start of a sandbox that gets them, that a model's files, and its adapters', have the pinned
    digest and have not changed. Quick, unless a file was touched; then all are read again.

    Raises:
        ModelDigestError: it is another.
        ModelSignatureError: none of the keys that the configuration names has signed the files.
        ConfigError: a file cannot be read.
    """
    if files.unsigned:
        raise ModelSignatureError(files.unsigned)
    for adapter in files.adapters:
        check_adapter(adapter)
    if pinned and files.digest != pinned:
        raise ModelDigestError(
            f"model {files.name}: its files have the digest {files.digest}, the configuration pins {pinned}; "
            f"put the pinned files back, or pin these with: athanor model digest {files.folder}"
        )
    for one in files.hashed:
        with os_errors_as(f"model {files.name}: cannot read {one.path}"):
            same = identity_of(one.path.stat()) == one.identity
        if not same:
            break
    else:
        return
    digest, _ = _digest(files.name, files.engine + files.text, DigestCache())
    if digest != files.digest:
        raise ModelDigestError(
            f"model {files.name}: {one.path} is not what it was at the start: the digest is now {digest}, and was "
            f"{files.digest}; put the file back, or restart the appliance to serve what is there"
        )


def _digest(model: str, files: NamedFiles, cache: DigestCache) -> tuple[str, tuple[HashedFile, ...]]:
    hashed = []
    for _, path in files:
        with os_errors_as(f"model {model}: cannot read {path}"):
            hashed.append(cache.hash(path))
    names = (name for name, _ in files)
    return digest_of((name, one.digest) for name, one in zip(names, hashed, strict=True)), tuple(hashed)
