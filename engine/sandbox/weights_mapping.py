"""Weights of a template move from memory into a file mapping, at the same addresses.

What points to them, compiled programs included, stays valid. The mapping is private: what is written there by mistake
is seen by this process alone. Addresses and places in the file agree within ``HUGE_BYTES``: where the host's page cache
has huge pages, the kernel then maps one with one page fault.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from engine.errors import ConfigurationError
from engine.sandbox.attach import send_weights
from isolation.ipc.weights_names import HUGE_BYTES, SOCKET_NAME, TARGET

LEAST_BYTES = 1 << 20
"""Bytes of a tensor from which it moves: small ones would give many mappings and save nothing."""

_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def move_weights(tensors: Iterable[Tensor], host_socket: str) -> int:
    """Move the whole pages of tensors that are never written again into the file of the template; gives bytes, 0 where
    the host has none or did not write it.

    Raises:
        ConfigurationError: the file cannot be mapped.
    """
    places = file_places(whole_pages(tensors))
    if not places or not send_weights(str(Path(host_socket).with_name(SOCKET_NAME)), _pieces(places)):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    file = os.open(TARGET, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for start, end, at in places:
            rights, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED
            if libc.mmap(start, end - start, rights, flags, file, at) == _FAILED:
                raise ConfigurationError(f"weights cannot be mapped from their file: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(file)
    return sum(end - start for start, end, _at in places)


def _pieces(places: list[tuple[int, int, int]]) -> list[memoryview]:
    """Content of the file from its begin: the pages at their places, zeros between them."""
    found, until, zeros = list[memoryview](), 0, memoryview(bytes(HUGE_BYTES))
    for start, end, at in places:
        pages = memoryview((ctypes.c_char * (end - start)).from_address(start)).cast("B")
        found += [zeros[: at - until], pages]
        until = at + end - start
    return found


def file_places(spans: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Begin, end and place in the file of spans of addresses, in order: one that holds a whole huge page stands where
    its address says, behind less than ``HUGE_BYTES`` of nothing; others follow what is before them."""
    found, until = list[tuple[int, int, int]](), 0
    for start, end in spans:
        if -(-start // HUGE_BYTES) < end // HUGE_BYTES:
            until += (start - until) % HUGE_BYTES
        found.append((start, end, until))
        until += end - start
    return found


def whole_pages(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Addresses of begin and end of the whole pages that large tensors cover, each page once, in order."""
    size = mmap.PAGESIZE
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors if one.nbytes >= LEAST_BYTES)
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        start = max(-(-begin // size) * size, found[-1][1] if found else 0)
        if start < (stop := end // size * size):
            found.append((start, stop))
    return found
