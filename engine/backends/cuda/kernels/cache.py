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

import hashlib
import importlib
import json
import os
import re
from pathlib import Path

import triton
from triton.backends.nvidia.compiler import get_ptxas_version
from triton.runtime import build
from triton.runtime.cache import FileCacheManager, _base32
from triton.runtime.jit import JITFunction

from engine.backends.cuda.kernels import folder
from engine.backends.cuda.kernels.folder import sources_digest
from engine.errors import ConfigurationError

LAUNCHER = "__triton_launcher"
"""As Triton before 3.7 calls the module that starts kernels of one signature; later ones have one for all."""

PLATFORM = "athanor"
"""In place of what Triton adds to the source of such a module to name it: it starts a program (``file``) to find that
out, and the answer depends on whether the machine has it."""

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


def name_kernels() -> None:
    """Have Triton name all kernels and device functions in one order: a name depends on which were named before it, and
    an engine launches them in another order than what compiled them."""
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        if path.stem not in ("ahead", "cache", "folder"):
            module = importlib.import_module(f"{__package__}.{path.stem}")
            for _, function in sorted(vars(module).items(), key=lambda one: one[0]):
                if isinstance(function, JITFunction):
                    assert function.cache_key, "it is asked for its name, which it keeps"


def module_key(source: str) -> str:
    """The folder of a C module of Triton, by its source."""
    return str(_base32(hashlib.sha256((source + PLATFORM).encode()).hexdigest()))


def known_here(architecture: str, configuration: str) -> dict[str, object]:
    """What a folder that is filled here is for, and the version of the assembler that fills it."""
    return {
        **folder.known(architecture, triton.__version__, kernels_digest(), configuration),
        "assembler": get_ptxas_version(architecture_number(architecture)),
    }


def seal(place: Path, architecture: str, configuration: str) -> str:
    """Finish a folder that Triton has filled; see ``folder.seal``.

    Raises:
        ConfigurationError: there is none, or nothing is in it.
    """
    return folder.seal(place, known_here(architecture, configuration))


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
    triton.knobs.build.impl = _refuse
    build.platform_key = lambda: PLATFORM
    get_ptxas_version.cache_clear()
    name_kernels()
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
        """A module in C: the one by which Triton reaches the driver lies above the kernels, those that start kernels of
        one signature (before Triton 3.7) in folders of their own.

        Raises:
            ConfigurationError: it is not there.
        """
        above = triton.knobs.cache.dir
        path = self._make_path(filename) if filename.startswith(LAUNCHER) else os.path.join(above, filename)
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


def _refuse(name: str, *_: object) -> str:
    """Stands for the C compiler: a module does not load that is there.

    Raises:
        ConfigurationError: always.
    """
    raise _missing(name)
