"""Overwrites what held a prompt, before it is freed.

A freed buffer keeps its bytes until its place is used again. The host and the text sandbox have the C library
overwrite everything that is freed; an engine, to which that would cost speed, overwrites what held token ids itself.
"""

from __future__ import annotations

from array import array

from isolation.ipc.messages import MAX_FRAME_BYTES

ZEROS = memoryview(bytes(MAX_FRAME_BYTES))
"""What a frame is overwritten with, in the ring and in the reader's copy. (Pages of it are the kernel's one page of
zeros as long as nobody writes.)"""


def wipe(buffer: bytearray | array[int]) -> None:
    """Make every byte of a buffer zero, in place; its length stays."""
    view = memoryview(buffer).cast("B")
    size = view.nbytes
    for start in range(0, size, MAX_FRAME_BYTES):
        view[start : start + MAX_FRAME_BYTES] = ZEROS[: min(size - start, MAX_FRAME_BYTES)]
