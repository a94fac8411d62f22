"""The C library's heap: it keeps what was freed, so that a step meets no page fault; after loading it shall not."""

from __future__ import annotations

import ctypes


def release_free_memory() -> None:
    """Give back to the system what the heap holds and nobody uses, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
