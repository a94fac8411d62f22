"""How fast this machine reads memory: the roofline of a decode step.

A gigabyte of weights lies on many pages, and how fast a buffer is read depends on where its pages lie (by a fifth on a
virtual machine). So there are two figures: the best of several buffers, and the very memory that holds the weights.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from appliance.operator import kernels

BUFFER_BYTES = 512 << 20
"""Far beyond any cache level that one core gets for itself."""

BUFFERS = 3
BYTES_AHEAD = (0, 1024, 2048)
"""Bytes that the probe prefetches ahead."""

TRIES = 2


class Stretch(ctypes.Structure):
    """A piece of memory; as in read_probe.c."""

    _fields_ = (("address", ctypes.c_void_p), ("bytes", ctypes.c_int64))


class Probe:
    """Reads memory as fast as this machine lets a program do it. ``cpu_time``: of one thread, by its processor time."""

    def __init__(self, folder: Path, cores: int, *, cpu_time: bool) -> None:
        clock = "CLOCK_THREAD_CPUTIME_ID" if cpu_time else "CLOCK_MONOTONIC"
        source = (Path(__file__).parent / "read_probe.c").read_text().replace("CLOCK_MONOTONIC", clock)
        (folder / "probe.c").write_text(source)
        compiler = kernels.find_compiler()
        if compiler is None:
            sys.exit("the probe needs a C compiler on PATH")
        library = folder / "probe.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-Wno-psabi"]
        subprocess.run([compiler, *flags, str(folder / "probe.c"), "-o", str(library), "-lpthread"], check=True)
        self._read = ctypes.CDLL(str(library)).read_seconds
        self._read.restype = ctypes.c_double
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
        self._cores = 1 if cpu_time else cores

    def best(self, cores: int = 0) -> float:
        """Bytes a second, the best of several buffers over so many cores (all: 0)."""
        buffers = [torch.ones(BUFFER_BYTES, dtype=torch.uint8) for _ in range(BUFFERS)]
        return max(self.of([Stretch(one.data_ptr(), BUFFER_BYTES)], cores, tries=1) for one in buffers)

    def of(self, stretches: Sequence[Stretch], cores: int = 0, *, tries: int = TRIES) -> float:
        """Bytes a second of this memory, one stretch after the other: the best of all ways to read it."""
        listed = (Stretch * len(stretches))(*stretches)
        taken = [
            self._read(ctypes.addressof(listed), len(listed), cores or self._cores, ahead)
            for ahead in BYTES_AHEAD
            for _ in range(tries)
        ]
        return sum(one.bytes for one in stretches) / min(taken)
