"""Reads an unpacked tensor into a model's memory: any part, of any dtype, to any device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.checkpoint.checklist import Home
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.layers.parallel import Span

STAGING_BYTES = 1 << 26
"""Size of the buffer for data that cannot be read in place: columns, other dtypes, other devices."""

READERS = 4
"""Threads that read a stretch together: one copies out of the kernel's memory at a few GB/s, and a GPU takes more."""

LEAST_SHARED = 1 << 23
"""Bytes of a stretch from which on they do."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of unpacked weights."""


def check_finite(name: str, target: Tensor) -> None:
    """Refuse NaN and infinity, whether published or caused by a dtype that is too narrow; they would spread to every
    output.

    Raises:
        ModelLoadError: the tensor has one; the message names the tensor.
    """
    if target.numel() and target.is_floating_point():
        # Minimum and maximum are NaN when any element is NaN.
        least, largest = torch.aminmax(target)
        if not bool(least.isfinite() & largest.isfinite()):
            kind = str(target.dtype).removeprefix("torch.")
            raise ModelLoadError(f"tensor {name} holds a number that is not finite or too large for {kind}")


class Staging:
    """The buffer that data goes through, and threads that read into it.

    One buffer serves a whole model: memory that is taken anew for each piece costs a fault for each of its pages, which
    is as much as reading it.
    """

    def __init__(self, pool: ThreadPoolExecutor | None = None) -> None:
        """``pool``: of ``READERS`` threads; None: the caller's own reads."""
        self._memory: Tensor | None = None
        self._pool = pool

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the buffer, valid until the next one."""
        size = math.prod(shape) * dtype.itemsize
        if self._memory is None or len(self._memory) < size:
            self._memory = torch.empty(max(size, STAGING_BYTES if self._pool is not None else size), dtype=torch.uint8)
        return self._memory[:size].view(dtype).view(shape)

    def read(self, file: SafetensorsFile, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the tensor's bytes from ``offset`` on.

        Raises:
            ModelLoadError: the file ends early.
        """
        pool = self._pool
        if pool is None or target.nbytes < LEAST_SHARED or file.tensors[name].coded is not None:
            file.read_stretch(name, offset, target)
            return
        share = -(-target.nbytes // READERS)
        begins = range(0, target.nbytes, share)
        parts = [pool.submit(file.read_stretch, name, offset + at, target[at : at + share]) for at in begins]
        for part in parts:
            part.result()


@contextmanager
def staging_for(device: torch.device) -> Iterator[Staging]:
    """The buffer of a model's tensors; with threads where they go to another device, whose ends this waits for."""
    if device.type in ("cpu", "meta"):
        yield Staging()
        return
    with ThreadPoolExecutor(READERS, thread_name_prefix="weights-read") as pool:
        yield Staging(pool)


def read_part(file: SafetensorsFile, name: str, home: Home, staging: Staging | None = None) -> None:
    """Read a part of one tensor into its memory, converted to its dtype and device.

    Whole rows of the right dtype are read straight into host memory; everything else goes through a buffer of at most
    ``STAGING_BYTES``, a new one where none is given. Rows outside every part are not read.

    Raises:
        ModelLoadError: the file ends early.
    """
    entry = file.tensors[name]
    source, shape = DTYPES[entry.dtype], entry.shape
    target = home.target
    if not target.numel():
        return
    whole_rows = all(span == (0, size) for span, size in zip(home.part[1:], shape[1:], strict=True))
    in_place = target.device.type == "cpu" and target.is_contiguous() and target.stride(-1) == 1
    if whole_rows and in_place and source == target.dtype:
        row_bytes = math.prod(shape[1:]) * source.itemsize
        file.read_stretch(name, home.part[0][0] * row_bytes, _bytes_of(target))
        return

    stage = staging or Staging()

    def read(offset: int, shape: tuple[int, ...], part: tuple[Span, ...], target: Tensor) -> None:
        row = math.prod(shape[1:])
        (start, stop), inner = part[0], part[1:]
        if row * source.itemsize > STAGING_BYTES and inner:
            for index in range(start, stop):
                read(offset + index * row, shape[1:], inner, target[index - start])
            return
        count = max(1, STAGING_BYTES // max(1, row * source.itemsize))
        for first in range(start, stop, count):
            last = min(first + count, stop)
            piece = stage.room((last - first, *shape[1:]), source)
            stage.read(file, name, (offset + first * row) * source.itemsize, _bytes_of(piece))
            kept = piece[(slice(None), *(slice(*span) for span in inner))]
            # Waits for the copy's end: the buffer is used again.
            target[first - start : last - start].copy_(kept)

    read(0, shape, home.part, target)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as bytes."""
    return tensor.view(torch.uint8).numpy().reshape(-1).data
