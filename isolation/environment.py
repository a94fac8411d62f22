"""The environment of a program in a sandbox: allocator, thread pools, Python.

The values were measured under gVisor's systrap platform. Page faults cost twice there, so freed memory is kept: one
64 MiB allocation falls from 48 to 2.6 ms. OpenMP barriers at full width collapse, so every pool has a stated size.
"""

from __future__ import annotations

from isolation.ipc.sweeping import CACHED_PIECES

_MMAP_THRESHOLD_BYTES = 4 << 30
"""Allocations below this come from the heap and are used again; above it from mmap and are given back."""
_TRIM_THRESHOLD_BYTES = 16 << 30
"""Free memory at the top of the heap stays ours up to this."""
_TOP_PAD_BYTES = 256 << 20
"""The heap grows by this much at a time."""


_PERTURB = "glibc.malloc.perturb=165"
"""Have the C library overwrite what is freed (mallopt(3), M_PERTURB), except what it keeps for each thread."""

WIPING: tuple[tuple[str, str], ...] = (
    ("GLIBC_TUNABLES", f"{_PERTURB}:glibc.malloc.tcache_count=0"),
    ("PYTHONMALLOC", "malloc"),
)
"""Freed memory is overwritten at once: nothing is kept for threads, and Python gives every object back to the C library
instead of keeping pools of its own. Dear: for the supervisor, which serves nobody's tokens. Like the two below it is
read at the start of a program only."""

WIPING_LATER: tuple[tuple[str, str], ...] = (
    ("GLIBC_TUNABLES", f"{_PERTURB}:glibc.malloc.tcache_count={CACHED_PIECES}"),
    ("PYTHONMALLOC", "malloc"),
)
"""The same, except for the few pieces that are kept for each thread, which the program overwrites itself now and then
(``isolation.ipc.sweeping.overwrite_cached``): for the gateway, which has several threads."""

SWEPT: tuple[tuple[str, str], ...] = (
    ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7:glibc.malloc.arena_max=1"),
    ("PYTHONMALLOC", "malloc"),
)
"""Nothing is overwritten when it is freed; the program does that itself now and then (``Sweeper`` of
``isolation.ipc.sweeping``): for text sandboxes, whose tokenizers free large pieces all the time, in one thread. Few
pieces of a size are kept for the thread, the library's own number: kept ones never grow together again, and each sweep
cuts some (with 1,024 a text sandbox grew by 10 MiB in ten seconds)."""


def guest_environment(*, threads: int, extra: tuple[tuple[str, str], ...] = ()) -> tuple[tuple[str, str], ...]:
    """The environment for an engine or text process.

    Args:
        threads: size of every compute pool; one fewer than the cores the sandbox has, at least one.
        extra: further variables; they win over the ones here.
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
