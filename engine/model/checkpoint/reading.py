"""Reads an unpacked tensor into a model's memory: any part, of any dtype, to any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.checkpoint.checklist import Home
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.checkpoint.staging import Staging, Stretch, bytes_of
from engine.model.layers.parallel import Span

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes of unpacked weights."""


def read_part(file: SafetensorsFile, name: str, home: Home, staging: Staging | None = None) -> None:
    """Read a part of one tensor into its memory, converted to its dtype and device.

    Whole rows of the right dtype are read straight into host memory; everything else goes through a buffer, a new one
    where none is given, in stretches that fit it. Rows outside every part are not read. With a buffer of several places
    the last stretches may still be under way when this returns (``Staging.finish``).

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
        file.read_stretch(name, home.part[0][0] * row_bytes, bytes_of(target))
        return

    stage = staging or Staging()

    def read(offset: int, shape: tuple[int, ...], part: tuple[Span, ...], target: Tensor) -> None:
        row = math.prod(shape[1:])
        (start, stop), inner = part[0], part[1:]
        if row * source.itemsize > stage.stretch and inner:
            for index in range(start, stop):
                read(offset + index * row, shape[1:], inner, target[index - start])
            return
        count = max(1, stage.stretch // max(1, row * source.itemsize))
        for first in range(start, stop, count):
            last = min(first + count, stop)
            begin, size = (offset + first * row) * source.itemsize, (last - first, *shape[1:])
            stage.carry(file, name, Stretch(begin, size, source, inner), target[first - start : last - start])

    read(0, shape, home.part, target)
