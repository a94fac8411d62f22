"""Reads an unpacked tensor into a model's memory: any part, of any dtype, to any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.checkpoint.checklist import Home
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.layers.parallel import Span

STAGING_BYTES = 1 << 26
"""Size of the buffer for data that cannot be read in place: columns, other dtypes, other devices."""

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


def read_part(file: SafetensorsFile, name: str, home: Home) -> None:
    """Read a part of one tensor into its memory, converted to its dtype and device.

    Whole rows of the right dtype are read straight into host memory; everything else goes through a buffer of at most
    ``STAGING_BYTES``. Rows outside every part are not read.

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
            staging = torch.empty((last - first, *shape[1:]), dtype=source)
            file.read_stretch(name, (offset + first * row) * source.itemsize, _bytes_of(staging))
            kept = staging[(slice(None), *(slice(*span) for span in inner))]
            target[first - start : last - start].copy_(kept)

    read(0, shape, home.part, target)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor as bytes."""
    return tensor.view(torch.uint8).numpy().reshape(-1).data
