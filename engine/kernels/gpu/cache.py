"""Kernels compiled ahead: what they are known by, and how an engine without compiler and assembler finds them.

Triton's cache is a folder a kernel, named by a digest over its source, its types, the compiler and the version that the
assembler tells when it is started. Two things in it do not survive the way into a sandbox: groups of files name the
folder in which they were made, and without an assembler nobody tells its version. So ``seal`` writes that version down,
and ``ReadOnlyCache`` looks for a group's files beside the group.

``seal`` is run where kernels were compiled, with the folder as Triton's TRITON_CACHE_DIR:
``python -m engine.kernels.gpu.cache ROOT sm_90`` tells the folder's name below ROOT when it is not there yet.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime.cache import FileCacheManager

from engine.errors import ConfigurationError

MANIFEST = "athanor.json"
_FORMAT = 1
_MAX_MANIFEST_BYTES = 1 << 16
_DIGEST_CHARS = 16


def kernels_digest() -> str:
    """Hex SHA-256 over our sources, the table of configurations among them."""
    digest = hashlib.sha256(b"athanor gpu kernels 1\0")
    for path in sorted(Path(__file__).parent.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def folder_name(architecture: str) -> str:
    """The folder of an architecture (``sm_90``) below the root, for this Triton and these sources."""
    return f"{architecture}-triton-{triton.__version__}-{kernels_digest()[:_DIGEST_CHARS]}"


def seal(root: Path, architecture: str) -> Path:
    """Finish a folder that Triton has filled: its files readable, what it is known by beside them. Gives the folder.

    Raises:
        ConfigurationError: there is none, or nothing is in it.
    """
    folder = root / folder_name(architecture)
    if not folder.is_dir() or not any(folder.iterdir()):
        raise ConfigurationError(
            f"no kernels are in {folder}; run what compiles them with TRITON_CACHE_DIR={folder}, then again"
        )
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    known = {
        "format": _FORMAT, "architecture": architecture, "triton": triton.__version__, "kernels": kernels_digest(),
        "assembler": get_ptxas_version(_number(architecture)), "files": _files_digest(folder),
    }  # fmt: skip
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(known, indent=1) + "\n")
    manifest.chmod(0o644)
    return folder


def open_cache(root: Path, architecture: str) -> Path:
    """Let Triton take kernels from a sealed folder, and from nowhere else: what is not in it is an error.

    Raises:
        ConfigurationError: no folder fits this architecture, Triton and these sources, or it is not as it was sealed.
    """
    name = folder_name(architecture)
    folder = root / name
    try:
        with open(folder / MANIFEST, "rb") as file:
            known = json.loads(file.read(_MAX_MANIFEST_BYTES))
    except (OSError, ValueError) as error:
        there = ", ".join(sorted(path.name for path in root.glob("sm_*"))) or "none"
        raise ConfigurationError(
            f"no compiled kernels for this GPU and version: {name} is needed, there is {there}; compile them as "
            "docs/gpu.md says, or set backend to plain"
        ) from error
    wanted = {
        "format": _FORMAT, "architecture": architecture, "triton": triton.__version__, "kernels": kernels_digest(),
    }  # fmt: skip
    if not isinstance(known, dict) or any(known.get(key) != value for key, value in wanted.items()):
        raise ConfigurationError(f"the kernels in {name} were made for something else; compile them again")
    assembler = known.get("assembler")
    if not isinstance(assembler, str) or known.get("files") != _files_digest(folder):
        raise ConfigurationError(f"the kernels in {name} are not as they were sealed; compile them again")
    triton.knobs.cache.dir = str(folder)
    triton.knobs.cache.manager_class = ReadOnlyCache
    triton.knobs.nvidia.mock_ptx_version = assembler
    get_ptxas_version.cache_clear()
    return folder


class ReadOnlyCache(FileCacheManager):  # type: ignore[misc] # Triton has no types
    """Triton's cache without a way to grow."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        """The folder of one kernel; not made when it is missing."""
        self.key = key
        self.lock_path = None
        self.cache_dir = os.path.join(triton.knobs.cache.dir, key)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """A kernel's files, which lie beside the list of them."""
        try:
            with open(self._make_path(f"__grp__{filename}"), "rb") as file:
                names = json.loads(file.read())["child_paths"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return {name: self._make_path(name) for name in names}

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        """Somebody has begun to compile.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            f"the kernel {filename.partition('.')[0]} is not among the compiled ones in this form; compile them with "
            "the model and the limits that are served"
        )


def _files_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{content} {path.relative_to(folder).as_posix()}\n".encode())
    return digest.hexdigest()


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm_"))


if __name__ == "__main__":
    print(seal(Path(sys.argv[1]), sys.argv[2]))
