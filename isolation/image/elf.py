"""Shared libraries needed by a program or extension module: a small reader of ELF's dynamic section.

Follows the ELF-64 specification (gABI chapters 4 and 5) and ld.so(8)'s search order as far as a root file system
needs it. Reading replaces ``ldd``, which would take 10 ms a file and start the program's own loader.
"""

from __future__ import annotations

import glob
import mmap
import os
import platform
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from isolation.errors import RootfsError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_DYNAMIC = struct.Struct("<qQ")
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 15, 29
_MACHINES = {"x86_64": 62, "aarch64": 183}
_MAX_NAME = 4_096


@dataclass(frozen=True, slots=True)
class ElfFile:
    """The fields of one file that the dynamic loader uses."""

    path: Path
    interpreter: str
    """Path of the dynamic loader; empty for a library."""
    needed: tuple[str, ...]
    search: tuple[str, ...]
    """RUNPATH, or RPATH when there is none, with ``$ORIGIN`` expanded."""


def read_elf(path: Path) -> ElfFile | None:
    """Read a file's dynamic section; None when it is no 64-bit little-endian ELF file for this machine.

    Raises:
        RootfsError: it is one, but is damaged.
    """
    with path.open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            return None
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with data:
        try:
            return _parse(path, data)
        except (struct.error, ValueError, IndexError) as error:
            raise RootfsError(f"{path} is a damaged ELF file: {error}") from error


def _parse(path: Path, data: mmap.mmap) -> ElfFile | None:
    header = _HEADER.unpack_from(data, 0)
    if header[2] != _MACHINES.get(platform.machine(), header[2]):
        return None
    offset, entry_size, count = header[5], header[9], header[10]
    programs = [_PROGRAM.unpack_from(data, offset + entry_size * i) for i in range(count)]
    loads = [entry for entry in programs if entry[0] == _PT_LOAD]
    interpreter, pairs = "", []
    for kind, _, start, _, _, size, _, _ in programs:
        if kind == _PT_INTERP:
            interpreter = _string(data, start)
        elif kind == _PT_DYNAMIC:
            pairs = list(_DYNAMIC.iter_unpack(data[start : start + size]))
    pairs = pairs[: next((i for i, (tag, _) in enumerate(pairs) if tag == _DT_NULL), len(pairs))]
    tables = [value for tag, value in pairs if tag == _DT_STRTAB]
    if not tables:
        return ElfFile(path, interpreter, (), ())
    strings = _file_offset(tables[0], loads)
    needed = tuple(_string(data, strings + value) for tag, value in pairs if tag == _DT_NEEDED)
    paths = {tag: _string(data, strings + value) for tag, value in pairs if tag in (_DT_RPATH, _DT_RUNPATH)}
    search = paths.get(_DT_RUNPATH) or paths.get(_DT_RPATH) or ""
    origin = os.fspath(path.resolve().parent)
    places = (part.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for part in search.split(":"))
    return ElfFile(path, interpreter, needed, tuple(os.path.normpath(part) for part in places if part))


def _file_offset(address: int, loads: list[tuple[int, ...]]) -> int:
    for _, _, offset, start, _, size, _, _ in loads:
        if start <= address < start + size:
            return offset + address - start
    raise ValueError("its string table is not in the file")


def _string(data: mmap.mmap, start: int) -> str:
    end = data.find(b"\0", start, start + _MAX_NAME)
    if start >= len(data) or end < 0:
        raise ValueError("a name does not end")
    return os.fsdecode(data[start:end])


@dataclass(frozen=True, slots=True)
class Closure:
    """Everything that a set of files loads in addition to each other."""

    loader: str
    """Path of the dynamic loader as named in the programs; empty when there was no program."""
    libraries: tuple[tuple[str, Path], ...]
    """Pairs of (name by which it is requested, real file), sorted by name."""
    system_dir: str
    """Directory where the machine's own loader finds libc, and so one of its built-in defaults."""
    missing: tuple[str, ...]
    """Names of libraries that were not found."""


def closure(files: Iterable[Path], *, inside: Iterable[Path] = ()) -> Closure:
    """Collect the shared libraries that ``files`` need, transitively.

    Args:
        files: programs, libraries, extension modules; other files are skipped.
        inside: directories mounted whole: libraries found there are followed but not listed.
    """
    defaults = system_library_dirs()
    kept = tuple(os.path.realpath(path) + "/" for path in inside)
    seen: set[str] = set()
    known: dict[str, ElfFile | None] = {}
    """Files that were read: each library is met when it is looked for, and once more when its turn comes."""

    def read(path: str) -> ElfFile | None:
        if path not in known:
            known[path] = read_elf(Path(path))
        return known[path]

    found: dict[str, Path] = {}
    missing: set[str] = set()
    loader = system_dir = ""
    # Keep each file with the RUNPATHs of the files that requested it: RPATH is inherited, and wheels rely on it.
    front: list[tuple[Path, tuple[str, ...]]] = [(path, ()) for path in sorted(files)]
    while front:
        path, inherited = front.pop()
        real = os.path.realpath(path)
        if real in seen or (elf := read(real)) is None:
            continue
        seen.add(real)
        loader = loader or elf.interpreter
        search = tuple(dict.fromkeys((*elf.search, *inherited)))
        for name in elf.needed:
            place = _find(name, (*search, *defaults), read)
            if place is None:
                missing.add(name)
                continue
            if name == "libc.so.6":
                system_dir = next((d for d in defaults if os.path.exists(f"{d}/{name}")), "")
            front.append((place, search))
            if not os.path.realpath(place).startswith(kept):
                found.setdefault(name, place.resolve())
    # The loader is mounted under its own name, not as a library.
    libraries = {name: path for name, path in found.items() if name != os.path.basename(loader)}
    return Closure(loader, tuple(sorted(libraries.items())), system_dir, tuple(sorted(missing)))


def _find(name: str, directories: Iterable[str], read: Callable[[str], ElfFile | None]) -> Path | None:
    if "/" in name:
        return Path(name) if os.path.isfile(name) else None
    for directory in directories:
        candidate = os.path.join(directory, name)
        if os.path.isfile(candidate) and read(os.path.realpath(candidate)) is not None:
            return Path(candidate)
    return None


def system_library_dirs() -> tuple[str, ...]:
    """Return the machine's existing library directories: the loader's defaults, then those of /etc/ld.so.conf."""
    multiarch = f"{platform.machine()}-linux-gnu"
    defaults = [f"/lib/{multiarch}", f"/usr/lib/{multiarch}", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
    names = [*defaults, *_configured_dirs("/etc/ld.so.conf", depth=0)]
    return tuple(dict.fromkeys(name for name in names if os.path.isdir(name)))


_MAX_INCLUDES = 4


def _configured_dirs(path: str, depth: int) -> list[str]:
    if depth > _MAX_INCLUDES:
        return []
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return []
    found: list[str] = []
    for line in (raw.partition("#")[0].strip() for raw in lines):
        if line.startswith("include "):
            pattern = os.path.join(os.path.dirname(path), line.split(None, 1)[1])
            for name in sorted(glob.glob(pattern)):
                found.extend(_configured_dirs(name, depth + 1))
        elif line.startswith("/"):
            found.append(line)
    return found
