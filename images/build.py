"""Build and verify the sandboxes' root file systems: one tree for each role, identified by one digest.

    python -m images.build build images/out
    python -m images.build verify images/out

A tree holds the running Python, the standard library without its tests and tools, the role's packages, our own two
packages and the shared libraries that all of these load. It holds no shell, no other program, no package manager and no
set-id file. Builds from equal files are bit-identical: names are sorted, times and modes are fixed, and the compiled
modules ignore times (PEP 552, unchecked hashes).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from appliance.common.version import VERSION
from images.sbom import bill_of, encode_bill
from images.triton_cache import add_cache
from isolation.errors import IsolationError
from isolation.host.process import run
from isolation.image.elf import closure, read_elf
from isolation.image.manifest import MANIFEST, SBOM, ImageRole, Manifest, encode_manifest, list_place, read_manifest
from isolation.image.python_rootfs import (
    GPU_LIBRARY,
    OURS_DIR,
    PACKAGES_DIR,
    PYTHON_DIR,
    ROLE_PACKAGES,
    UNUSED_EXTENSIONS,
    PythonInstall,
    is_tool,
    library_mounts,
    loadable_files,
    locate_ours,
    locate_packages,
    running_python,
)
from isolation.image.rootfs import encode_list, tree_lines, verify_image
from isolation.ipc.messages import PROTOCOL_VERSION

LOCKS = Path(__file__).resolve().parents[1] / "requirements"

Reached = Callable[[float, str], None]
"""Told how far a build is: the share of all work that is done, 0 to 1, and what is done next."""

PARTS = {
    "engine files": (0.0, "copying files of the engine sandbox"),
    "engine modules": (0.1, "compiling modules of the engine sandbox"),
    "text files": (0.85, "copying files of the text sandbox"),
    "text modules": (0.88, "compiling modules of the text sandbox"),
    "digests": (0.95, "digests"),
}
"""Parts of a build in their order, each with the share of the time that has gone before it, on two cores."""

EPOCH_S = 315_532_800
"""Modification time of every file: 1980-01-01, the earliest that all archive formats can hold."""

COMPILE_TIMEOUT_S = 900

STDLIB_UNUSED = frozenset(
    {
        "__phello__",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "test",
        "tkinter",
        "turtledemo",
        "turtle.py",
        "venv",
        "site-packages",
        "dist-packages",
    }
)
"""Unused parts of the standard library: tests, tools, foreign packages; ``config-*`` holds a static library."""

TEST_EXTENSIONS = ("_test", "_ctypes_test", "_xxtestfuzz", "xxlimited", "_xxsubinterpreters", "_xxinterpchannels")

PACKAGE_UNUSED = frozenset(
    {
        "torch/bin",
        "torch/include",
        "torch/share",
        "torch/test",
        "torch/testing/_internal/py312_intrinsics.py",
        "torch/lib/libaoti_custom_ops.so",
        "torch/lib/libbackend_with_compiler.so",
        "torch/lib/libjitbackend_test.so",
        "torch/lib/libtorchbind_test.so",
    }
)
"""Unused parts of torch, relative to the packages' directory: headers, programs, test libraries, and a module in newer
syntax."""

ELF_MAGIC = b"\x7fELF"

PLACEHOLDERS = ("torch/bin/torch_shm_manager",)
"""Programs whose presence torch checks on import and that are never run: replaced by empty files."""

NEEDED = ("triton/backends/nvidia/driver.c",)
"""Source files that are read but never compiled: Triton looks up the compiled module by this file's content."""

UNUSED_SUFFIXES = (".a", ".c", ".h", ".hpp", ".cpp", ".cu", ".cuh", ".pxd", ".pyi", ".pyx", ".pyc", ".lib")


def build(
    target: Path, triton_cache: Path | None = None, variant: str = "", reached: Reached = lambda share, doing: None
) -> Manifest:
    """Build the image of all roles at ``target``, replacing an existing one.

    Args:
        triton_cache: a folder of compiled kernels for the engine, see ``images.triton_cache``.
        variant: required variant, ``cpu`` or ``cuda``; empty for the one of the installed torch.
        reached: told the share of the work that is done, and what is done next.

    Raises:
        IsolationError: a part of the running Python is missing, or ``target`` holds something else.
        OSError: the files cannot be read or written.
    """
    target = target.absolute()
    if target.exists() and not (target / MANIFEST).is_file() and any(target.iterdir()):
        raise IsolationError(f"{target} holds something else than an image", hint="name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    new, old = (target.with_name(f".{target.name}.{part}") for part in ("new", "old"))
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        install = running_python()
        for role in sorted(ROLE_PACKAGES):
            build_tree(new / role, role, install, reached)
        if variant and variant_of(new) != variant:
            raise IsolationError(
                f"the torch that is installed here makes the {variant_of(new)} variant, not {variant}",
                hint=f"install requirements/{variant}.lock into an environment of its own and build there",
            )
        caches = () if triton_cache is None else add_cache(new / "engine", triton_cache)
        settle(new / "engine")
        reached(*PARTS["digests"])
        manifest = _describe(new, install, caches)
        if target.exists():
            os.rename(target, old)
        os.rename(new, target)
    finally:
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
    return manifest


def build_tree(tree: Path, role: str, install: PythonInstall, reached: Reached = lambda share, doing: None) -> None:
    """Build the root of one role at ``tree``, which must not exist."""
    reached(*PARTS[f"{role} files"])
    packages = locate_packages(role, install)
    python = tree / PYTHON_DIR[1:]
    copy_file(install.executable, python / "bin" / install.version)
    copy_tree(install.stdlib, python / "lib" / install.version, _skip_stdlib)
    for package in packages:
        copy(package, tree / PACKAGES_DIR[1:] / package.name, _skip_package(package))
    for name in PLACEHOLDERS:
        if any(package.name == name.partition("/")[0] for package in packages):
            place = tree / PACKAGES_DIR[1:] / name
            place.parent.mkdir()
            place.touch()
            place.chmod(0o644)
    for mount in locate_ours(install):
        copy(mount.source, tree / mount.target[1:], _skip_compiled)
    _link_check(tree / OURS_DIR[1:])
    kept = [path for path in loadable_files(install, packages) if _is_kept(path, install, packages)]
    for mount in library_mounts(closure(kept, inside=[install.stdlib, *packages])):
        copy_file(mount.source, tree / mount.target[1:])
    reached(*PARTS[f"{role} modules"])
    compile_modules(tree, install)
    _check_programs(tree, install)
    settle(tree)


def _check_programs(tree: Path, install: PythonInstall) -> None:
    """Refuse a tree that contains a program besides the interpreter: an assembler, a compiler, or a package's tool that
    no rule here covers yet."""
    own = tree / PYTHON_DIR[1:] / "bin" / install.version
    for path in sorted(tree.rglob("*")):
        if path != own and path.is_file() and is_program(path):
            raise IsolationError(
                f"{path.relative_to(tree)} is a program, and an image holds none but Python",
                hint="leave it out by a rule of images/build.py, or remove the package that brings it",
            )


def is_program(path: Path) -> bool:
    """Return whether the kernel would execute a file: a script, or an ELF file with a loader that is not merely a
    library that can also be run, as glibc's are."""
    with path.open("rb") as file:
        begin = file.read(len(ELF_MAGIC))
    if begin.startswith(b"#!"):
        return os.access(path, os.X_OK)
    found = read_elf(path) if begin == ELF_MAGIC else None
    return found is not None and bool(found.interpreter) and ".so" not in path.name


def _is_kept(path: Path, install: PythonInstall, packages: Iterable[Path]) -> bool:
    if path.is_relative_to(install.stdlib):
        return not _skip_stdlib(path.relative_to(install.stdlib).as_posix())
    for package in packages:
        if path.is_relative_to(package):
            inside = path.relative_to(package)
            skip = _skip_package(package)
            return not any(skip(part.as_posix()) for part in (inside, *inside.parents))
    return True


Skip = Callable[[str], bool]
"""Decides whether to leave out a path relative to the copied directory."""


def _skip_common(path: str) -> bool:
    return path.rpartition("/")[2] == "__pycache__" or path.endswith(UNUSED_SUFFIXES)


def _skip_compiled(path: str) -> bool:
    """Skip compiled files; the C sources of our own packages stay, because the engine compares kernels with them."""
    return path.rpartition("/")[2] == "__pycache__" or path.endswith(".pyc")


def _skip_stdlib(path: str) -> bool:
    top, _, name = path.partition("/")
    if top in STDLIB_UNUSED or top.startswith("config-") or path.endswith("/tests"):
        return True
    if top == "lib-dynload" and name.startswith((*TEST_EXTENSIONS, *(f"{part}." for part in UNUSED_EXTENSIONS))):
        return True
    return _skip_common(path)


def _skip_package(package: Path) -> Skip:
    def skip(path: str) -> bool:
        whole = f"{package.name}/{path}"
        if whole in NEEDED:
            return False
        if is_tool(package, path):
            return True
        # torch imports torch.testing itself; directories named "tests" are never imported.
        return whole in PACKAGE_UNUSED or path.rpartition("/")[2] == "tests" or _skip_common(path)

    return skip


def copy(source: Path, target: Path, skip: Skip) -> None:
    """Copy a file or a directory."""
    if source.is_dir():
        copy_tree(source, target, skip)
    else:
        copy_file(source, target)


def copy_tree(source: Path, target: Path, skip: Skip, prefix: str = "") -> None:
    """Copy a directory in the order of its names; links are followed, because their targets may lie outside."""
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(os.listdir(source)):
        path, inside = source / name, f"{prefix}{name}"
        if skip(inside):
            continue
        if path.is_dir():
            copy_tree(path, target / name, skip, f"{inside}/")
        elif path.is_file():
            copy_file(path, target / name)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's contents; its mode becomes 0755 for files executed by the kernel or the loader, else 0644."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    with source.open("rb") as file:
        target.chmod(0o755 if file.read(len(ELF_MAGIC)) == ELF_MAGIC else 0o644)


def _link_check(ours: Path) -> None:
    assert (ours / "engine").is_dir(), "the engine package was copied"
    assert not (ours / "isolation/keys").exists(), "of isolation only the wire goes into an image"


def compile_modules(tree: Path, install: PythonInstall) -> None:
    """Write the compiled modules, with the sandbox's paths in them.

    They are compiled in one fresh process with a fixed hash seed: set constants are written in the order of their
    hashes, and back-references depend on what the process has compiled before.
    """
    argv = [
        os.fspath(install.executable),
        "-s",
        "-S",
        "-P",
        "-m",
        "compileall",
        "-q",
        "-f",
        "--invalidation-mode",
        "unchecked-hash",
        "-s",
        os.fspath(tree),
        "-p",
        "/",
        *(os.fspath(tree / part[1:]) for part in (PYTHON_DIR, PACKAGES_DIR, OURS_DIR)),
    ]
    environment = {"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PATH": "/nonexistent"}
    done = run(argv, timeout_s=COMPILE_TIMEOUT_S, check=False, env=environment)
    if done.returncode != 0:
        raise IsolationError(f"a module cannot be compiled: {' '.join((done.stdout + done.stderr).split())[-500:]}")


def settle(tree: Path) -> None:
    """Set mode and time of everything below, innermost first, independently of the umask."""
    for top, directories, files in os.walk(tree, topdown=False):
        for name in files:
            path = os.path.join(top, name)
            os.chmod(path, 0o755 if os.stat(path).st_mode & 0o100 else 0o644)
            os.utime(path, (EPOCH_S, EPOCH_S))
        for name in directories:
            os.chmod(os.path.join(top, name), 0o755)
        os.utime(top, (EPOCH_S, EPOCH_S))
    tree.chmod(0o755)
    os.utime(tree, (EPOCH_S, EPOCH_S))


def _describe(image: Path, install: PythonInstall, caches: tuple[str, ...]) -> Manifest:
    """Write the lists, the bill of materials and the manifest of the existing trees."""
    roles = {}
    for name in sorted(ROLE_PACKAGES):
        data = encode_list(tuple(tree_lines(image / name)))
        list_place(image, name).write_bytes(data)
        files = [path for path in (image / name).rglob("*") if path.is_file()]
        digest = hashlib.sha256(data).hexdigest()
        roles[name] = ImageRole(digest, len(files), sum(path.stat().st_size for path in files))
    bill = encode_bill(bill_of(image, install))
    (image / SBOM).write_bytes(bill)
    manifest = Manifest(
        "",
        VERSION,
        variant_of(image),
        PROTOCOL_VERSION,
        platform.machine(),
        platform.python_version(),
        roles,
        hashlib.sha256(bill).hexdigest(),
        {path.name: file_digest(path) for path in lock_files()},
        caches,
    )
    (image / MANIFEST).write_bytes(encode_manifest(manifest))
    settle(image)
    return read_manifest(image)[0]


def variant_of(image: Path) -> str:
    """Return ``cuda`` or ``cpu``, depending on the torch of the engine's tree."""
    return "cuda" if (image / "engine" / PACKAGES_DIR[1:] / "torch" / GPU_LIBRARY).exists() else "cpu"


def lock_files() -> tuple[Path, ...]:
    """Return a checkout's lists of pinned packages."""
    return tuple(path for path in (LOCKS / "run.lock", LOCKS / "cpu.lock", LOCKS / "cuda.lock") if path.is_file())


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """``build DIR`` or ``verify DIR``; prints the digest."""
    parser = argparse.ArgumentParser(description="Build or verify the sandboxes' root file systems.")
    parser.add_argument("verb", choices=["build", "verify"])
    parser.add_argument("image", type=Path)
    options = parser.parse_args()
    try:
        print((build if options.verb == "build" else verify_image)(options.image).digest)
    except IsolationError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
