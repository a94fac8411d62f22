"""The root of a sandbox made from the *running* Python: read-only binds, no image to build.

Nothing of the host is visible but what is listed: the interpreter, its standard library, the role's packages, our own
two packages and the shared libraries that those files load (found by ``isolation.elf``). Everything goes to neutral
paths, so an interpreter below a private home directory works and its path is not told to the sandbox::

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

from isolation.elf import Closure, closure
from isolation.errors import RootfsError
from isolation.spec import Mount, Rootfs

PYTHON_DIR = "/opt/python"
PACKAGES_DIR = "/opt/packages"
OURS_DIR = "/opt/athanor"

ROLE_PACKAGES: dict[str, tuple[str, ...]] = {
    # torch imports torchgen when it starts; sympy, networkx and the rest are imported by its compiler only.
    "engine": ("torch", "torchgen", "numpy", "typing_extensions"),
    "text": ("tokenizers", "jinja2", "markupsafe", "llguidance"),
}
"""Least set of packages that each role imports; a test holds the list to the truth inside a real sandbox."""

ASK_THEIR_VERSION = ("llguidance",)
"""Packages that look themselves up among the installed ones when they are imported, and so bring that record along."""

OPTIONAL_PACKAGES = ("triton", "nvidia", "functorch")
"""Mounted for the engine where they are installed and of use."""

GPU_PACKAGES = ("triton", "nvidia")
"""Of use beside a torch for GPUs only, which brings them; elsewhere they are there for tests. ``nvidia`` holds the
libraries of CUDA that torch is linked with; the driver's own come from the machine (``isolation.gpu``)."""

GPU_LIBRARY = "lib/libtorch_cuda.so"
"""What a torch for GPUs has."""

TOOLS = ("backends/*/bin", "*/bin", "*/nvvm/bin", "FileCheck")
"""Assemblers, compilers and other programs that packages for GPUs bring along; no sandbox has a compiler."""

UNUSED_EXTENSIONS = ("_tkinter", "_curses", "_curses_panel", "readline", "_gdbm", "_dbm", "nis", "_sqlite3")
"""Extension modules of the standard library whose libraries a sandbox has no use for."""

_HIDDEN = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class PythonInstall:
    """The files of one interpreter."""

    executable: Path
    """Real file, not a virtual environment's link."""
    stdlib: Path
    dynload: Path
    version: str
    """``python3.11``: name of the program and of the library directory."""
    path: tuple[str, ...]
    """Where packages are looked for, in order."""


def running_python() -> PythonInstall:
    """The interpreter that runs this; the base one when it runs in a virtual environment."""
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
    """The root of a sandbox of ``role``, ``engine`` or ``text``.

    Reads the file system, changes nothing. The result holds as long as the interpreter and its packages do.

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
    """Where the same modules are found without a sandbox: the directories that hold them."""
    holders = dict.fromkeys(os.fspath(path.parent) for path in packages)
    return (
        (f"{PYTHON_DIR}/bin/{install.version}", os.fspath(install.executable)),
        (OURS_DIR, os.fspath(ours[0].source.parent)),
        (PACKAGES_DIR, ":".join(holders)),
    )


def locate_packages(role: str, install: PythonInstall) -> tuple[Path, ...]:
    """Files and directories of a role's packages, with the ``NAME.libs`` directories that wheels put beside them.

    Raises:
        RootfsError: one is not installed.
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
    """Where in a sandbox the packages' assemblers and compilers would be."""
    return tuple(
        f"{PACKAGES_DIR}/{tools.relative_to(package.parent)}"
        for package in packages
        if package.name in GPU_PACKAGES
        for pattern in TOOLS
        for tools in sorted(package.glob(pattern))
        # What is masked becomes an empty directory.
        if tools.is_dir()
    )


def is_tool(package: Path, path: str) -> bool:
    """Whether what lies at a path relative to a package is an assembler or compiler of it, or a folder of such."""
    return package.name in GPU_PACKAGES and any(fnmatchcase(path, pattern) for pattern in TOOLS)


def find_package(name: str, path: Sequence[str]) -> Path | None:
    """Directory or file of a top-level module, found without importing it."""
    spec = PathFinder.find_spec(name, list(path))
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return None if spec.origin is None else Path(spec.origin).resolve()


def locate_ours(install: PythonInstall) -> tuple[Mount, ...]:
    """``engine``, and of ``isolation`` only what both sides of the wire share.

    Raises:
        RootfsError: ``engine`` is not installed.
    """
    here = Path(__file__).resolve().parent
    engine = find_package("engine", (os.fspath(here.parent), *install.path))
    if engine is None:
        raise RootfsError("our own package engine is not installed", hint="run `make install`")
    return (
        Mount(engine, f"{OURS_DIR}/engine"),
        Mount(here / "__init__.py", f"{OURS_DIR}/isolation/__init__.py"),
        Mount(here / "ipc", f"{OURS_DIR}/isolation/ipc"),
    )


def loadable_files(install: PythonInstall, packages: Iterable[Path]) -> Iterator[Path]:
    """The interpreter, the standard library's extension modules and every shared object of the packages."""
    yield install.executable
    for path in install.dynload.glob("*.so"):
        if path.name.partition(".")[0] not in UNUSED_EXTENSIONS:
            yield path
    for package in packages:
        if package.is_dir():
            yield from (path for path in package.rglob("*.so*") if path.is_file())


def library_mounts(libraries: Closure) -> tuple[Mount, ...]:
    """Mounts of the loader and of each library, in a directory that the loader searches by itself.

    Raises:
        RootfsError: the interpreter is not dynamically linked with a glibc.
    """
    if not libraries.loader or not libraries.system_dir:
        raise RootfsError(
            "the running Python is not linked with glibc's loader", hint="use a distribution's Python or pyenv's"
        )
    loader = Mount(Path(libraries.loader).resolve(), os.path.normpath(libraries.loader))
    files = (Mount(path, f"{libraries.system_dir}/{name}") for name, path in libraries.libraries)
    return (loader, *files)


def check_readable(mounts: Iterable[Mount]) -> None:
    """Refuse files that the sandbox's user could not read: gVisor checks the host's mode bits for "others".

    Looks at each source and, in a directory, at its ``__init__.py``: installed under one umask, they are alike.

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
