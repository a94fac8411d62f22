"""Kernels compiled ahead: what they are known by, and how an engine without compiler and assembler finds them.

Triton's cache is a folder a kernel, named by a digest over its source, its types, the compiler and the version that the
assembler tells when it is started. Some things in it do not survive the way into a sandbox: groups of files name the
folder in which they were made, as metadata names the compiler's; and without an assembler nobody tells its version. So
``seal`` writes that version down and takes such names out, which also makes two builds the same bytes; and
``ReadOnlyCache`` looks for a group's files beside the group.

A folder is for one architecture, one Triton, one state of our sources, and one configuration of launches
(``engine.backends.cuda.runtime.launch_digest``); all four are in its name. ``engine.backends.cuda.kernels.ahead`` fills
it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime.cache import FileCacheManager

from engine.backends.cuda.kernels import folder
from engine.backends.cuda.kernels.folder import sources_digest
from engine.errors import ConfigurationError

_KEPT = re.compile(r".+\.(cubin|json|so)")
"""Files of Triton that are kept: machine code, its metadata and groups, and the module that launches. The steps between
source
and machine code are left out: nothing reads them, and they name places of the machine that compiled."""

_ARCHITECTURE = re.compile(r"sm_[0-9]{2,3}")


def kernels_digest() -> str:
    """Hex SHA-256 over our sources, the table of configurations among them."""
    return sources_digest(Path(__file__).parent)


def folder_name(architecture: str, configuration: str) -> str:
    """The folder below the root of an architecture (``sm_90``) and a configuration of launches (a hex digest), for this
    Triton and these sources."""
    return str(folder.folder_name(architecture, triton.__version__, kernels_digest(), configuration))


def architecture_number(architecture: str) -> int:
    """90 for ``sm_90``.

    Raises:
        ConfigurationError: it is no name of an architecture.
    """
    if not _ARCHITECTURE.fullmatch(architecture):
        raise ConfigurationError(f"{architecture!r} is no architecture of a GPU; name one as sm_80 or sm_90")
    return int(architecture.removeprefix("sm_"))


def mark_launches() -> None:
    """Have kernels named as those that are compiled ahead: without lines of the source in their machine code, which
    would name the folder of the sources. To be called before anything is compiled or looked for."""
    triton.knobs.compilation.disable_line_info = True


def seal(place: Path, architecture: str, configuration: str, asked: folder.Asked | None = None) -> str:
    """Finish a folder that Triton has filled: only what is read, readable for all, without names of the machine, and
    what it is known by, and what was asked for, beside it. Gives the digest of its files.

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
    files = folder.files_digest(place)
    known: dict[str, object] = {
        **folder.known(architecture, triton.__version__, kernels_digest(), configuration),
        "assembler": get_ptxas_version(architecture_number(architecture)),
        "files": files,
    }
    if asked is not None:
        known["asked"] = asdict(asked)
    manifest = place / folder.MANIFEST
    manifest.write_text(json.dumps(known, indent=1) + "\n")
    manifest.chmod(0o644)
    return files


def open_cache(root: Path, architecture: str, configuration: str) -> Path:
    """Let Triton take kernels from a sealed folder, and from nowhere else: what is not in it is an error.

    Raises:
        ConfigurationError: no folder fits this architecture, Triton, these sources and this configuration, or it is not
            as it was sealed.
    """
    name = folder_name(architecture, configuration)
    place = root / name
    if not (place / folder.MANIFEST).is_file():
        there = ", ".join(sorted(path.name for path in root.glob("sm_*"))) or "none"
        raise ConfigurationError(
            f"no compiled kernels for this GPU, version and model: {name} is needed, there is {there}; compile them "
            "with `athanor kernels gpu`, or set gpu to off"
        )
    known = folder.check_folder(place)
    mark_launches()
    triton.knobs.cache.dir = str(place)
    triton.knobs.cache.manager_class = ReadOnlyCache
    triton.knobs.nvidia.mock_ptx_version = str(known["assembler"])
    # Where the module that launches would be linked; Triton would start a program to find out.
    triton.knobs.nvidia.libcuda_path = triton.knobs.nvidia.libcuda_path or str(place)
    get_ptxas_version.cache_clear()
    return place


class ReadOnlyCache(FileCacheManager):  # type: ignore[misc] # Triton has no types
    """Triton's cache without a way to grow: what is not there is an error, before anything begins to compile."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        """The folder of one kernel; not made when it is missing."""
        self.key = key
        self.lock_path = None
        self.cache_dir = os.path.join(triton.knobs.cache.dir, key)

    def get_group(self, filename: str) -> dict[str, str]:
        """A kernel's files, which lie beside the list of them.

        Raises:
            ConfigurationError: nobody has compiled it in this form.
        """
        try:
            with open(self._make_path(f"__grp__{filename}"), "rb") as file:
                names = json.loads(file.read())["child_paths"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _missing(filename) from error
        return {name: self._make_path(name) for name in names}

    def get_file(self, filename: str) -> str:
        """The module by which Triton reaches the driver, which lies above the kernels: its own key would depend on a
        program that the machine has or has not (``platform.architecture`` starts ``file``).

        Raises:
            ConfigurationError: it is not there.
        """
        path = os.path.join(triton.knobs.cache.dir, filename)
        if not os.path.isfile(path):
            raise _missing(filename)
        return path

    def put(self, data: object, filename: str, binary: bool = True) -> str:
        """Somebody has begun to compile.

        Raises:
            ConfigurationError: always.
        """
        raise _missing(filename)


def _missing(filename: str) -> ConfigurationError:
    return ConfigurationError(
        f"the kernel {filename.partition('.')[0]} is not among the compiled ones in this form, or does not load; "
        "compile them with the model and the limits that are served"
    )


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
