"""Kernels for a processor that this machine has not, cross-compiled and run under an emulator, one step at a time.

What a step names is copied out of this process, the emulated program computes on the copy, and the bytes that it has
changed are brought back (``emulated.c``). So every test of operations runs on these kernels as on the machine's own.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from appliance.operator.kernels import FLAGS
from engine.backends.native.abi import Op, Program, Step, Verdict
from engine.backends.native.library import DOT_PRODUCTS, Library
from engine.backends.native.manifest import Variant, source_files
from engine.errors import ForeignBlockError

TOOLS = Path(sys.prefix) / "share/emulator"
"""Where ``make emulator`` puts a compiler for aarch64 and the emulator."""

COMPILER = TOOLS / "usr/bin/aarch64-linux-gnu-gcc"
EMULATOR = TOOLS / "usr/bin/qemu-aarch64-static"
HARNESS = Path(__file__).with_name("emulated.c")

WINDOW = 1 << 20
"""Bytes that are copied behind each address: more than any buffer of these tests."""


@dataclass(frozen=True, slots=True)
class EmulatedLibrary:
    """Stands for ``Library`` where a step is run; weights are compressed by the machine's own."""

    program: Path
    variant: str
    abilities: int
    native: Library

    @property
    def has_dot_products(self) -> bool:
        """As of ``Library``."""
        return bool(self.abilities & DOT_PRODUCTS)

    def compress(self, weights: int, chunks: int, parts: list[int], most: int) -> int:
        """As of ``Library``: the compressed form is the same everywhere."""
        return self.native.compress(weights, chunks, parts, most)

    def run(self, program: Program, step: Step) -> None:
        """Run one step."""
        regions = list(_windows(_addresses(program, step)))
        before = [ctypes.string_at(start, size) for start, size in regions]
        header = struct.pack("<3q", ctypes.addressof(program), ctypes.addressof(step), len(regions))
        image = self.program.with_suffix(f".{os.getpid()}")
        image.write_bytes(b"".join([header, *(struct.pack("<2q", *one) for one in regions), *before]))
        ended = subprocess.run(
            [EMULATOR, "-cpu", "max", self.program, image], capture_output=True, text=True, timeout=120
        )
        data = image.read_bytes()[len(header) + 16 * len(regions) :]
        image.unlink()
        if ended.returncode == Verdict.FOREIGN:
            raise ForeignBlockError
        assert ended.returncode in (Verdict.RUN, Verdict.BROKEN), ended.stderr
        assert ended.returncode == Verdict.RUN, "a step names a token, row or slot that does not exist"
        for (start, size), old in zip(regions, before, strict=True):
            new, data = data[:size], data[size:]
            for place in np.flatnonzero(np.frombuffer(old, np.uint8) != np.frombuffer(new, np.uint8)).tolist():
                ctypes.memset(start + place, new[place], 1)


def build(variant: Variant, folder: Path, native: Library) -> EmulatedLibrary:
    """Cross-compile a variant; skips, with the reason, where the tools are missing."""
    if not COMPILER.exists() or not EMULATOR.exists():
        pytest.skip(f"{variant.name} needs an emulator: `make emulator` gets it")
    program = folder / variant.name
    cross = TOOLS / "usr/aarch64-linux-gnu"
    places = [
        f"-isystem{cross}/include",
        f"-B{cross}/lib",
        f"-B{COMPILER.with_name('aarch64-linux-gnu-')}",
        f"-L{cross}/lib",
    ]
    sources = [str(path) for path in source_files() if path.suffix == ".c"]
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    own = [f"-I{source_files()[0].parent}", str(HARNESS), *sources, "-static", "-o", str(program), "-lm", "-lpthread"]
    libraries = {"LD_LIBRARY_PATH": str(TOOLS / "usr/lib/x86_64-linux-gnu"), "PATH": "/usr/bin:/bin"}
    subprocess.run([str(COMPILER), *flags, *variant.flags, *places, *own], check=True, env=libraries, timeout=300)
    said = subprocess.run([EMULATOR, "-cpu", "max", program], check=True, capture_output=True, text=True, timeout=60)
    return EmulatedLibrary(program, variant.name, int(said.stdout), native)


def _addresses(program: Program, step: Step) -> Iterator[int]:
    yield from (ctypes.addressof(program), ctypes.addressof(step), program.ops, program.counters)
    ops = ctypes.cast(program.ops, ctypes.POINTER(Op))
    for structure in (step, *(ops[place] for place in range(program.count))):
        for name, kind in structure._fields_:
            if kind is ctypes.c_void_p and (address := getattr(structure, name)):
                yield address


def _windows(addresses: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Readable stretches of this process's memory, each with its size, that hold these addresses and what follows."""
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        start, end = (int(part, 16) for part in span.split("-"))
        if "r" in permissions:
            maps.append((start, end))
    start = end = 0
    for address in sorted(set(addresses)):
        last = min(next(stop for first, stop in maps if first <= address < stop), address + WINDOW)
        first = address & ~63
        if first > end:
            if end:
                yield start, end - start
            start = first
        end = max(end, last)
    yield start, end - start
