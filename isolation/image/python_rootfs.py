"""Root of a sandbox made from the *running* Python: read-only binds, no image to build.

The sandbox sees only what is listed: the interpreter, its standard library, the role's packages, our own two packages
and the shared libraries that those files load (found by ``isolation.image.elf``). Everything is mounted under neutral
paths, so an interpreter below a private home directory works and its path is not disclosed to the sandbox::

    /opt/python/bin/python3.11      /opt/python/lib/python3.11/   (site-packages hidden)
    /opt/packages/<package>         /opt/athanor/engine, /opt/athanor/isolation/ipc
    /lib/x86_64-linux-gnu/*.so      /lib64/ld-linux-x86-64.so.2
"""

from __future__ import annotations

import os
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path

from isolation.errors import RootfsError
from isolation.gvisor.spec import Mount, Rootfs
from isolation.image.elf import Closure, closure

PYTHON_DIR = "/opt/python"
PACKAGES_DIR = "/opt/packages"
OURS_DIR = "/opt/athanor"

ROLE_PACKAGES: dict[str, tuple[str, ...]] = {
    # torch imports torchgen when it starts; sympy, networkx and the rest are imported by its compiler only.
    "engine": ("torch", "torchgen", "numpy", "typing_extensions"),
    "text": ("tokenizers", "jinja2", "markupsafe", "llguidance"),
}
"""Minimal set of packages that each role imports; a test verifies it inside a real sandbox."""

ASK_THEIR_VERSION = ("llguidance",)
"""Packages that read their own installation record on import, so that record is mounted too."""

OPTIONAL_PACKAGES = ("triton", "nvidia", "functorch")
"""Packages mounted for the engine where they are installed and needed."""

GPU_PACKAGES = ("triton", "nvidia")
"""Packages needed only beside a torch build for GPUs, which installs them; elsewhere they serve tests. ``nvidia`` holds
the CUDA libraries that torch is linked with; the driver's own come from the machine
(``isolation.gpu.bundle_additions``)."""

GPU_LIBRARY = "lib/libtorch_cuda.so"
"""File that only a torch build for GPUs has."""

TOOLS = ("backends/*/bin", "*/bin", "*/nvvm/bin", "FileCheck")
"""Assemblers, compilers and other programs in GPU packages; hidden, because no sandbox has a compiler."""

UNUSED_EXTENSIONS = ("_tkinter", "_curses", "_curses_panel", "readline", "_gdbm", "_dbm", "nis", "_sqlite3")
"""Extension modules of the standard library whose libraries a sandbox does not need."""

_HIDDEN = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class PythonInstall:
    """Files of one Python interpreter."""

    executable: Path
    """Real file, not the link in a virtual environment."""
    stdlib: Path
    dynload: Path
    version: str
    """Name of the program and of the library directory, such as ``python3.11``."""
    path: tuple[str, ...]
    """Search path for packages, in order."""


def running_python() -> PythonInstall:
    """Describe the running interpreter; the base one when it runs in a virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = sysconfig.get_paths(vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})
    stdlib = Path(base["stdlib"])
    executable = Path(os.path.realpath(sys.executable))
    named = Path(sys.base_exec_prefix, "bin", version)
    return PythonInstall(
        executable=Path(os.path.realpath(named)) if named.exists() else executable,
        stdlib=stdlib,
        dynload=stdlib / "lib-dynload",
        version=version,
        path=tuple(entry for entry in sys.path if entry and os.path.isdir(entry)),
    )


def python_rootfs(role: str, python: PythonInstall | None = None) -> Rootfs:
    """Build the root of a sandbox of ``role``, ``engine`` or ``text``.

    It reads the file system and changes nothing. The result is valid while the interpreter and its packages are
    unchanged.

    Raises:
        RootfsError: a file is missing, or unreadable for the sandbox's user.
    """
    install = running_python() if python is None else python
    packages = locate_packages(role, install)
    ours = locate_ours(install)
    entries = [
        Mount(install.executable, f"{PYTHON_DIR}/bin/{install.version}"),
        Mount(install.stdlib, f"{PYTHON_DIR}/lib/{install.version}"),
        *(Mount(path, f"{PACKAGES_DIR}/{path.name}") for path in packages),
        *ours,
    ]
    libraries = closure(loadable_files(install, packages), inside=[install.stdlib, *packages])
    mounts = (*entries, *library_mounts(libraries))
    check_readable(mounts)
    hidden = tuple(f"{PYTHON_DIR}/lib/{install.version}/{name}" for name in _HIDDEN if (install.stdlib / name).is_dir())
    hidden += tools_of(packages)
    return Rootfs(
        python=f"{PYTHON_DIR}/bin/{install.version}",
        python_path=(OURS_DIR, PACKAGES_DIR),
        mounts=mounts,
        masks=hidden,
        host_paths=_host_paths(install, packages, ours),
    )


def _host_paths(install: PythonInstall, packages: Sequence[Path], ours: Sequence[Mount]) -> tuple[tuple[str, str], ...]:
    """Return the host directories that hold the modules, for running them without a sandbox."""
    holders = dict.fromkeys(os.fspath(path.parent) for path in packages)
    return (
        (f"{PYTHON_DIR}/bin/{install.version}", os.fspath(install.executable)),
        (OURS_DIR, os.fspath(ours[0].source.parent)),
        (PACKAGES_DIR, ":".join(holders)),
    )


def locate_packages(role: str, install: PythonInstall) -> tuple[Path, ...]:
    """Find the files and directories of a role's packages, with the ``NAME.libs`` directories that wheels add.

    Raises:
        RootfsError: a package is not installed.
    """
    found: list[Path] = []
    optional = OPTIONAL_PACKAGES if role == "engine" else ()
    for name in (*ROLE_PACKAGES[role], *optional):
        path = find_package(name, install.path)
        if name in GPU_PACKAGES and not any((one / GPU_LIBRARY).exists() for one in found):
            continue
        if path is None:
            if name in optional:
                continue
            raise RootfsError(
                f"package {name}, which a {role} sandbox imports, is not installed", hint="run `make install`"
            )
        found.append(path)
        libs = path.parent / f"{name}.libs"
        if libs.is_dir():
            found.append(libs)
        if name in ASK_THEIR_VERSION:
            found += sorted(path.parent.glob(f"{name}-*.dist-info"))
    return tuple(found)


def tools_of(packages: Iterable[Path]) -> tuple[str, ...]:
    """Return the paths inside a sandbox where the packages' assemblers and compilers would be."""
    return tuple(
        f"{PACKAGES_DIR}/{tools.relative_to(package.parent)}"
        for package in packages
        if package.name in GPU_PACKAGES
        for pattern in TOOLS
        for tools in sorted(package.glob(pattern))
        # A masked path becomes an empty directory.
        if tools.is_dir()
    )


def is_tool(package: Path, path: str) -> bool:
    """Return whether a path relative to a package is an assembler or compiler, or a folder of such programs."""
    return package.name in GPU_PACKAGES and any(fnmatchcase(path, pattern) for pattern in TOOLS)


def find_package(name: str, path: Sequence[str]) -> Path | None:
    """Find the directory or file of a top-level module without importing it."""
    spec = PathFinder.find_spec(name, list(path))
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return None if spec.origin is None else Path(spec.origin).resolve()


def locate_ours(install: PythonInstall) -> tuple[Mount, ...]:
    """Locate ``engine``, and of ``isolation`` only what both sides of the wire share.

    Raises:
        RootfsError: ``engine`` is not installed.
    """
    here = Path(__file__).resolve().parents[1]
    engine = find_package("engine", (os.fspath(here.parent), *install.path))
    if engine is None:
        raise RootfsError("our own package engine is not installed", hint="run `make install`")
    return (
        Mount(engine, f"{OURS_DIR}/engine"),
        Mount(here / "__init__.py", f"{OURS_DIR}/isolation/__init__.py"),
        Mount(here / "ipc", f"{OURS_DIR}/isolation/ipc"),
    )


def loadable_files(install: PythonInstall, packages: Iterable[Path]) -> Iterator[Path]:
    """Yield the interpreter, the standard library's extension modules and every shared object of the packages."""
    yield install.executable
    for path in install.dynload.glob("*.so"):
        if path.name.partition(".")[0] not in UNUSED_EXTENSIONS:
            yield path
    for package in packages:
        if package.is_dir():
            yield from (path for path in package.rglob("*.so*") if path.is_file())


def library_mounts(libraries: Closure) -> tuple[Mount, ...]:
    """Mount the loader and each library in a directory that the loader searches by default.

    Raises:
        RootfsError: the interpreter is not dynamically linked with glibc.
    """
    if not libraries.loader or not libraries.system_dir:
        raise RootfsError(
            "the running Python is not linked with glibc's loader", hint="use a distribution's Python or pyenv's"
        )
    loader = Mount(Path(libraries.loader).resolve(), os.path.normpath(libraries.loader))
    files = (Mount(path, f"{libraries.system_dir}/{name}") for name, path in libraries.libraries)
    return (loader, *files)


def check_readable(mounts: Iterable[Mount]) -> None:
    """Refuse files that the sandbox's user cannot read: gVisor checks the host's mode bits for "others".

    Checks each source and, in a directory, its ``__init__.py``: files installed under one umask have equal modes.

    Raises:
        RootfsError: one is missing or unreadable.
    """
    for mount in mounts:
        for path in (mount.source, mount.source / "__init__.py"):
            try:
                mode = path.stat().st_mode
            except FileNotFoundError as error:
                if path == mount.source:
                    raise RootfsError(f"{path} does not exist") from error
                continue
            except NotADirectoryError:
                continue
            wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
            if mode & wanted != wanted:
                raise RootfsError(
                    f"{path} is not readable for others, so not for the sandbox's user",
                    hint=f"chmod -R o+rX {mount.source}",
                )
