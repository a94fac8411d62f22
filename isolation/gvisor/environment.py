"""The environment of a program in a sandbox: allocator, thread pools, Python.

The values were measured under gVisor's systrap platform. Page faults cost twice as much there, so freed memory is kept:
one 64 MiB allocation falls from 48 to 2.6 ms. OpenMP barriers at full width collapse, so every pool has an explicit
size.
"""

from __future__ import annotations

from isolation.ipc.sweeping import CACHED_PIECES

_MMAP_THRESHOLD_BYTES = 4 << 30
"""Allocation size below which memory comes from the heap and is reused; larger ones use mmap and are returned."""
_TRIM_THRESHOLD_BYTES = 16 << 30
"""Free memory at the top of the heap that is kept before any is returned to the system."""
_TOP_PAD_BYTES = 256 << 20
"""Step by which the heap grows."""


_PERTURB = "glibc.malloc.perturb=165"
"""glibc tunable that overwrites freed memory (mallopt(3), M_PERTURB), except the per-thread caches."""

WIPING: tuple[tuple[str, str], ...] = (
    ("GLIBC_TUNABLES", f"{_PERTURB}:glibc.malloc.tcache_count=0"),
    ("PYTHONMALLOC", "malloc"),
)
"""Environment that overwrites freed memory at once: no per-thread cache, and Python returns every object to the C
library instead of keeping pools. Slow, so only for the supervisor, which is on no token's path. Like the two below, it
takes effect only at program start."""

WIPING_LATER: tuple[tuple[str, str], ...] = (
    ("GLIBC_TUNABLES", f"{_PERTURB}:glibc.malloc.tcache_count={CACHED_PIECES}"),
    ("PYTHONMALLOC", "malloc"),
)
"""Environment that overwrites freed memory at once except in the per-thread caches, which the program overwrites
periodically (``isolation.ipc.sweeping.overwrite_cached``): for the gateway, which has several threads."""

SWEPT: tuple[tuple[str, str], ...] = (
    ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"),
    ("PYTHONMALLOC", "malloc"),
)
"""Environment without overwriting on free; the program overwrites free memory periodically (``Sweeper`` of
``isolation.ipc.sweeping``): for text sandboxes, whose tokenizers free large pieces all the time, in one thread. There
is no per-thread cache: a cached piece is never merged again, and each sweep takes some from the top of the heap. With
the library's default of 7 a text sandbox grew by 136 kB at each sweep, up to 32 MiB."""


def guest_environment(*, threads: int, extra: tuple[tuple[str, str], ...] = ()) -> tuple[tuple[str, str], ...]:
    """Build the environment for an engine or text process.

    Args:
        threads: size of every compute pool; one fewer than the cores the sandbox has, at least one.
        extra: further variables; they override the ones here.
    """
    if threads < 1:
        raise ValueError("threads must be at least 1")
    count = str(threads)
    values = {
        "CUDA_MODULE_LOADING": "LAZY",
        "HOME": "/tmp",  # noqa: S108 - the sandbox's own tmpfs
        "LANG": "C.UTF-8",
        "MALLOC_MMAP_THRESHOLD_": str(_MMAP_THRESHOLD_BYTES),
        "MALLOC_TOP_PAD_": str(_TOP_PAD_BYTES),
        "MALLOC_TRIM_THRESHOLD_": str(_TRIM_THRESHOLD_BYTES),
        "MKL_NUM_THREADS": count,
        "OMP_NUM_THREADS": count,
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": count,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "RAYON_NUM_THREADS": count,
        "TOKENIZERS_PARALLELISM": "false",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    values.update(extra)
    return tuple(sorted(values.items()))
