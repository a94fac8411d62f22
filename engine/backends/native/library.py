"""Finds, checks and opens the compiled kernels; anything wrong with them is a reason to do without, never a failure.

A kernel directory holds one library for each kind of processor (``manifest.VARIANTS``) and a manifest with the digests
of their sources and of the files. The directory comes from the operator, read-only; it is opened before the
lock-down. The best library whose features this processor shows is taken. What a sandbox may hide is tried: the library
runs one product with each instruction that it was compiled for, and where one of them does not exist the next library
is taken.

``ctypes`` lets go of the interpreter lock during a call, and a call costs a microsecond.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from engine.backends.native.abi import Program, Step, Verdict, layout
from engine.backends.native.manifest import (
    MANIFEST,
    TILES,
    Variant,
    libraries_of,
    processor_features,
    source_digest,
    variants_of,
)
from engine.errors import ForeignBlockError, UnsupportedError

MAX_MANIFEST_BYTES = 16 << 10
MAX_LIBRARY_BYTES = 16 << 20

HIDDEN_FEATURES = ("amx", "avx512_bf16", "avx512_fp16", "avx512ifma", "avx_vnni")
"""Beginnings of features that a sandbox's kernel may not show although the processor has them; the library's own trial
decides about those that it uses."""

DOT_PRODUCTS = 2
HAS_TILES = 4
"""Bits of what ``athanor_probe`` answers; 0 is unusable, 1 usable."""


class UnusableKernelsError(UnsupportedError):
    """The compiled kernels cannot be used; the message says why, and the plain path computes instead."""


@dataclass(frozen=True, slots=True)
class Library:
    """The opened library with its threads running."""

    handle: ctypes.CDLL
    threads: int
    abilities: int
    variant: str
    """Name of the variant that was opened."""

    @property
    def has_dot_products(self) -> bool:
        """Whether it multiplies bfloat16 and bytes as they are; else operands are float32 and 16 bits wide."""
        return bool(self.abilities & DOT_PRODUCTS)

    @property
    def description(self) -> str:
        """For people: which instructions, how many threads."""
        best = "tiles" if self.abilities & HAS_TILES else "dot products" if self.abilities & DOT_PRODUCTS else "vectors"
        return f"compiled kernels {self.variant} with {best}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def started(self, threads: int) -> Library:
        """Return this library with so many threads.

        Raises:
            UnusableKernelsError: there are more already, or they cannot be had.
        """
        if self.handle.athanor_start(threads) != threads:
            raise UnusableKernelsError(f"{threads} threads cannot be had")
        return replace(self, threads=threads)

    def release(self) -> None:
        """Give back what was opened for a trial; only while it has no threads besides the caller's."""
        self.handle.athanor_release()

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

    def count_exponents(self, weights: int, count: int, counts: int) -> None:
        """Add to 256 counts, at this address, how often each exponent occurs in bfloat16 weights at another."""
        self.handle.athanor_count_exponents(_address(weights), ctypes.c_int64(count), _address(counts))

    def encode_weights(self, codes: int, weights: tuple[int, int], table: int, target: int) -> int:
        """Code weights, given by address and number; with 0 as target only the table is filled. Gives the bytes of the
        chunks (``csrc/coded.c``)."""
        run = self.handle.athanor_encode_weights
        run.restype = ctypes.c_int64
        at, count = weights
        size: int = run(_address(codes), _address(at), ctypes.c_int64(count), _address(table), _address(target))
        return size

    def decode_weights(
        self, palette: list[int], entries: int, table: int, data: tuple[int, int], target: tuple[int, int]
    ) -> int:
        """Decode chunks: addresses of exponents and lengths, of the table, of the data with its bytes, of the target
        with its weights. Gives 0, or what is wrong (``csrc/coded.c``)."""
        run = self.handle.athanor_decode_weights
        run.restype = ctypes.c_int64
        numbers = [ctypes.c_int64(one) for one in (entries, data[1], target[1])]
        exponents, lengths = map(_address, palette)
        answer: int = run(
            exponents,
            lengths,
            numbers[0],
            _address(table),
            _address(data[0]),
            numbers[1],
            _address(target[0]),
            numbers[2],
        )
        return answer


def open_library(directory: str, threads: int, only: str = "") -> Library:
    """Open the best kernels of a directory for this processor, with so many threads, the caller's own among them.

    Args:
        directory: where ``athanor kernels build`` has put them.
        threads: a process never has fewer of a library than before.
        only: name of the variant to open; empty: the best that there is.

    Raises:
        UnusableKernelsError: missing, of other sources, damaged, or for other processors; the message says which.
    """
    return next(open_libraries(directory, only)).started(threads)


def open_libraries(directory: str, only: str = "") -> Iterator[Library]:
    """Open all kernels of a directory that this processor runs, the best first, with the caller's thread alone.

    Raises:
        UnusableKernelsError: there are none; as ``open_library``.
    """
    folder = Path(directory)
    manifest = _read(folder / MANIFEST, MAX_MANIFEST_BYTES).decode("utf-8", "replace").splitlines()
    if f"sources {source_digest()}" not in manifest:
        raise UnusableKernelsError("they were compiled from other sources than this engine's; compile them again")
    digests, reasons, opened = libraries_of(manifest), [], False
    for variant in variants_of(platform.machine()):
        if variant.name not in digests or only not in ("", variant.name):
            continue
        try:
            library = _open(folder, variant, digests[variant.name])
        except UnusableKernelsError as error:
            reasons.append(f"{variant.name}: {error}")
            continue
        opened = True
        yield library
    if not opened:
        wanted = f"named {only}" if only else f"for {platform.machine()}"
        raise UnusableKernelsError("; ".join(reasons) or f"there are none {wanted}; compile them again")


def _open(folder: Path, variant: Variant, digest: str) -> Library:
    lacking = sorted(set(variant.features) - processor_features())
    lacking = [name for name in lacking if not name.startswith(HIDDEN_FEATURES)]
    if lacking:
        raise UnusableKernelsError(f"they need {', '.join(lacking[:4])}, which this processor lacks")
    path = folder / variant.library
    if hashlib.sha256(_read(path, MAX_LIBRARY_BYTES)).hexdigest() != digest:
        raise UnusableKernelsError(f"{path.name} is not the file that {MANIFEST} describes; compile them again")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnusableKernelsError(f"{path.name} cannot be loaded: {error}") from error
    handle.athanor_layout.restype = ctypes.c_int64
    if handle.athanor_layout() != layout():
        raise UnusableKernelsError(f"{path.name} has another interface than this engine's; compile them again")
    abilities = handle.athanor_probe()
    if not abilities:
        raise UnusableKernelsError("this processor does not know their instructions")
    if variant.name == TILES and not abilities & HAS_TILES:
        raise UnusableKernelsError("this machine, or its sandbox, refuses tiles")
    return Library(handle, handle.athanor_start(1), abilities, variant.name)


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UnusableKernelsError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise UnusableKernelsError(f"{path.name} is larger than {most} bytes")
    return data


def _address(number: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(number)
