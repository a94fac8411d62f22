"""Adapters on disk: the two files of each that an engine's sandbox gets, and their digest. The host hashes them and
never interprets them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from appliance.common.errors import ConfigError, ModelDigestError, os_errors_as
from appliance.common.model_digests import DigestCache, HashedFile, identity_of

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
FILES = (CONFIG_FILE, TENSOR_FILE)
"""Files of an adapter, in the order in which its digest has them."""

PICKLED = "adapter_model.bin"
"""What older releases of PEFT wrote: a pickle, which may run anything where it is read."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Files of one adapter: real paths and digest."""

    name: str
    """Whole name, ``MODEL:ADAPTER``."""
    digest: str
    """Hex SHA-256 over the framed names and digests of both."""
    hashed: tuple[HashedFile, ...]
    """State of both when they were hashed."""

    @property
    def places(self) -> tuple[tuple[str, Path], ...]:
        """Name inside the adapter's folder and real path of each."""
        return tuple((name, one.path) for name, one in zip(FILES, self.hashed, strict=True))


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder is an adapter's and no model's."""
    return (folder / CONFIG_FILE).is_file() and not (folder / "config.json").exists()


def read_adapter(name: str, folder: Path, cache: DigestCache | None = None) -> AdapterFiles:
    """Find an adapter's files and hash those that ``cache`` does not know.

    Raises:
        ConfigError: one is missing, unreadable, a link out of the folder, or not readable by the sandbox's user.
    """
    paths = [_real_file(name, folder, one) for one in FILES]
    cache = cache or DigestCache()
    hashed = []
    for path in paths:
        with os_errors_as(f"adapter {name}: cannot read {path}"):
            hashed.append(cache.hash(path))
    return AdapterFiles(name, _digest(hashed), tuple(hashed))


def check_adapter(files: AdapterFiles) -> None:
    """Check, before each start of an engine that gets them, that an adapter's files have not changed.

    Raises:
        ModelDigestError: they have.
        ConfigError: one cannot be read.
    """
    for one in files.hashed:
        with os_errors_as(f"adapter {files.name}: cannot read {one.path}"):
            same = identity_of(one.path.stat()) == one.identity or DigestCache().hash(one.path).digest == one.digest
        if not same:
            raise ModelDigestError(
                f"adapter {files.name}: {one.path} is not what it was at the start; put the file back, or pin what is "
                "there and restart the appliance"
            )


def _digest(hashed: list[HashedFile]) -> str:
    total = hashlib.sha256(b"athanor adapter v1\0")
    for name, one in zip(FILES, hashed, strict=True):
        total.update(len(name).to_bytes(4, "little") + name.encode() + one.digest)
    return total.hexdigest()


def _real_file(adapter: str, folder: Path, name: str) -> Path:
    path = (folder / name).resolve()
    if not path.is_file():
        pickled = name == TENSOR_FILE and (folder / PICKLED).is_file()
        remedy = f"; {PICKLED} is a pickle and is never read: save it as safetensors" if pickled else ""
        raise ConfigError(f"adapter {adapter}: {name} is missing in {folder}{remedy}")
    if not path.is_relative_to(folder.resolve()):
        raise ConfigError(f"adapter {adapter}: {folder / name} is a link out of the adapter's folder, to {path}")
    if not path.stat().st_mode & 0o004:
        raise ConfigError(
            f"adapter {adapter}: {path} is not readable by the sandbox's user; make it so with: chmod o+r '{path}'"
        )
    return path
