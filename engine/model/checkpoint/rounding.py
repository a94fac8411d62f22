"""Reads a matrix into memory of 8-bit numbers with a scale a row (``engine.model.layers.scaled``).

Where a checkpoint holds such numbers, with a scale for the matrix or for each output, they are taken as they are. Any
other matrix is read in the model's dtype, some rows at a time, and rounded where it is to lie.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.checkpoint.checklist import Home
from engine.model.checkpoint.reading import read_part
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.checkpoint.staging import Staging
from engine.model.layers.scaled import round_rows
from engine.model.quantised.codec import finite
from engine.model.quantised.fp8 import ScaledBlocks
from engine.model.quantised.stored import PackedMatrix, PackedStack

ROUNDED_BYTES = 1 << 24
"""Bytes of rows that are rounded together; rounding takes six times as much for a moment."""

NO_NUMBER = 0x7F
"""Bits of the one value of E4M3 that is no number, without its sign; it has no infinity."""


def read_rounded(
    found: SafetensorsFile | PackedMatrix | PackedStack, name: str, home: Home, staging: Staging, dtype: torch.dtype
) -> None:
    """Read a part of one matrix.

    Args:
        found: where it is.
        name: its own.
        home: whole rows; the scales of its rows are made here.
        staging: what stretches go through.
        dtype: of the model: what numbers are before they are rounded.

    Raises:
        ModelLoadError: the file ends early, or holds a number that is not finite; some are told by ``Staging.finish``.
    """
    scale = home.scale
    assert scale is not None, "the memory has a scale a row"
    if isinstance(found, PackedMatrix) and _keeps(found, home):
        _take(found, name, home, scale)
        return
    (first, last), columns = home.part[0], home.part[1]
    count = max(1, ROUNDED_BYTES // max(1, home.target.shape[1] * dtype.itemsize))
    for begin in range(first, last, count):
        end = min(begin + count, last)
        rows = torch.empty(end - begin, home.target.shape[1], dtype=dtype, device=home.target.device)
        inner, part = Home(((begin, end), columns), rows), slice(begin - first, end - first)
        if isinstance(found, SafetensorsFile):
            read_part(found, name, inner, staging)
            staging.check(name, rows)
            staging.then(partial(_round, rows, home.target[part], scale[part]))
        else:
            found.read_part(inner)
            _round(rows, home.target[part], scale[part])


def _round(rows: Tensor, target: Tensor, scale: Tensor) -> None:
    numbers, scales = round_rows(rows)
    target.copy_(numbers)
    scale.copy_(scales.squeeze(1))


def _keeps(found: PackedMatrix, home: Home) -> bool:
    """Whether the stored numbers are those that are held: E4M3 with scales of whole outputs, and all of each row."""
    codec = found.codec
    if not isinstance(codec, ScaledBlocks) or codec.block not in ((0, 0), (1, 0)):
        return False
    return found.source.dtype("weight") == home.target.dtype and home.target.shape[1] == home.part[1][1]


def _take(found: PackedMatrix, name: str, home: Home, scale: Tensor) -> None:
    codec, (first, last) = found.codec, home.part[0]
    assert isinstance(codec, ScaledBlocks), "asked before"
    count = max(1, ROUNDED_BYTES // max(1, home.target.shape[1]))
    for begin in range(first, last, count):
        numbers = found.source.read("weight", begin, min(begin + count, last))
        rows = home.target[begin - first : begin - first + len(numbers)]
        rows.copy_(numbers)
        # By their bits, where they lie: a processor takes seconds to widen them.
        if bool((rows.view(torch.uint8) & NO_NUMBER == NO_NUMBER).any()):
            raise ModelLoadError(f"tensor {name} holds a number that is not finite")
    stored = found.source.read(codec.scale, first, last) if codec.block[0] else found.source.read(codec.scale)
    scale.copy_(finite(stored, found.source.name(codec.scale)).float().reshape(-1).expand(last - first))
