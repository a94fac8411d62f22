"""Finds, checks and opens the compiled kernels; anything wrong with them is a reason to do without, never a failure.

A kernel directory holds a library and its manifest (``manifest.py``): the digests of the sources that it was compiled
from and of the library itself, and the processor features that the compiler was allowed to use. The directory comes
from the operator, read-only; it is opened before the lock-down. What the features do not tell is tried: the library
runs one product with each instruction that it was compiled for, and says whether they exist here.

``ctypes`` lets go of the interpreter lock during a call, and a call costs a microsecond.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from pathlib import Path

from engine.backends.native.abi import Program, Step, Verdict, layout
from engine.backends.native.manifest import LIBRARY, MANIFEST, processor_features, source_digest
from engine.errors import ForeignBlockError, UnsupportedError

MAX_MANIFEST_BYTES = 16 << 10
MAX_LIBRARY_BYTES = 16 << 20

HIDDEN_FEATURES = ("amx", "avx512_bf16", "avx512_fp16", "avx512ifma", "avx_vnni")
"""Beginnings of features that a sandbox's kernel may not show although the processor has them; the library's own trial
decides about those that it uses."""

DOT_PRODUCTS = 2
TILES = 4
"""Bits of what ``athanor_probe`` answers; 0 is unusable, 1 usable."""


class UnusableKernelsError(UnsupportedError):
    """The compiled kernels cannot be used; the message says why, and the plain path computes instead."""


@dataclass(frozen=True, slots=True)
class Library:
    """The opened library with its threads running."""

    handle: ctypes.CDLL
    threads: int
    abilities: int

    @property
    def description(self) -> str:
        """For people: which instructions, how many threads."""
        best = "tiles" if self.abilities & TILES else "dot products" if self.abilities & DOT_PRODUCTS else "vectors"
        return f"compiled kernels with {best}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def run(self, program: Program, step: Step) -> None:
        """Run one step; the interpreter lock is free meanwhile.

        Raises:
            ForeignBlockError: a row would use a block that is not its own; nothing was read or written.
        """
        verdict = self.handle.athanor_run(ctypes.byref(program), ctypes.byref(step))
        if verdict == Verdict.FOREIGN:
            raise ForeignBlockError
        assert verdict == Verdict.RUN, "a step names a token, row or slot that does not exist"

    def compress(self, weights: int, chunks: int, parts: list[int], most: int) -> int:
        """Compress packed bfloat16 weights; addresses of palette, numbers, starts and patches say where to. Gives the
        number of patches, or -1 when more than ``most`` would be needed or this processor does not compress."""
        run = self.handle.athanor_compress
        run.restype = ctypes.c_int64
        count: int = run(
            ctypes.c_void_p(weights), ctypes.c_int64(chunks), *map(ctypes.c_void_p, parts), ctypes.c_int64(most)
        )
        return count


def open_library(directory: str, threads: int) -> Library:
    """Open the kernels of a directory. At most one library a process: its threads stay.

    Raises:
        UnusableKernelsError: missing, of other sources, damaged, or for another processor; the message says which.
    """
    folder = Path(directory)
    manifest = _read_manifest(folder / MANIFEST)
    if manifest.get("sources") != source_digest():
        raise UnusableKernelsError("they were compiled from other sources than this engine's; compile them again")
    data = _read(folder / LIBRARY, MAX_LIBRARY_BYTES)
    if hashlib.sha256(data).hexdigest() != manifest.get("library"):
        raise UnusableKernelsError(f"{LIBRARY} is not the file that {MANIFEST} describes; compile them again")
    lacking = sorted(set(manifest.get("features", "").split()) - processor_features())
    lacking = [name for name in lacking if not name.startswith(HIDDEN_FEATURES)]
    if lacking:
        raise UnusableKernelsError(f"they need {', '.join(lacking[:4])}, which this processor lacks")
    try:
        handle = ctypes.CDLL(str(folder / LIBRARY))
    except OSError as error:
        raise UnusableKernelsError(f"{LIBRARY} cannot be loaded: {error}") from error
    handle.athanor_layout.restype = ctypes.c_int64
    if handle.athanor_layout() != layout():
        raise UnusableKernelsError(f"{LIBRARY} has another interface than this engine's; compile them again")
    abilities = handle.athanor_probe()
    if not abilities:
        raise UnusableKernelsError("this processor does not know their instructions")
    if handle.athanor_start(threads) != threads:
        raise UnusableKernelsError(f"{threads} threads cannot be had")
    return Library(handle, threads, abilities)


def _read_manifest(path: Path) -> dict[str, str]:
    lines = _read(path, MAX_MANIFEST_BYTES).decode("utf-8", "replace").splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UnusableKernelsError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise UnusableKernelsError(f"{path.name} is larger than {most} bytes")
    return data
