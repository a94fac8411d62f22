"""Writes a model into open files: weights in the safetensors format, descriptions as JSON.

Weights are converted in slabs of rows of bounded size; the file is written sequentially.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.convert.architecture import Target
from engine.convert.gguf import GgufFile
from engine.errors import ModelLoadError
from engine.model.checkpoint.safetensors import MAX_HEADER_BYTES, show_name

STAGING_NUMBERS = 1 << 20
"""Largest slab in float32 numbers, where a row or a head has fewer: 4 MiB. Small slabs stay in the processor's cache
from one conversion step to the next."""

DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
"""Dtypes of the result: name in the format, and bytes."""

_ALIGNMENT = 8

Progress = Callable[[int], None]
"""Called with the bytes written so far."""


def write_json(fd: int, value: object) -> None:
    """Write one JSON document."""
    write_all(fd, json.dumps(value).encode() + b"\n")


def data_bytes(targets: Sequence[Target], dtype: str) -> int:
    """Return the bytes of all weights."""
    return sum(math.prod(target.shape) for target in targets) * DTYPES[dtype][1]


def write_weights(fd: int, source: GgufFile, targets: Sequence[Target], dtype: str, progress: Progress) -> None:
    """Write all weights.

    Raises:
        ModelLoadError: a number is not finite or too large for the dtype, or the source ends early.
    """
    kind, size = DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for target in targets:
        end = place + math.prod(target.shape) * size
        header[target.name] = {"dtype": kind, "shape": list(target.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    assert len(text) <= MAX_HEADER_BYTES, "the cap on tensors keeps headers small"
    write_all(fd, len(text).to_bytes(8, "little") + text)
    written = 0
    for target in targets:
        for rows in _stretches(source, target):
            written += write_all(fd, _encode(rows, dtype, source.name, target.source))
            progress(written)


def write_all(fd: int, data: bytes | memoryview) -> int:
    """Write all bytes; return their number.

    Raises:
        OSError: the disk is full.
    """
    view, done = memoryview(data), 0
    while done < len(view):
        done += os.write(fd, view[done:])
    return done


def _stretches(source: GgufFile, target: Target) -> Iterator[NDArray[np.float32]]:
    """Yield slabs of a target's rows in order, of bounded size; whole heads where rows must be reordered."""
    if len(target.shape) == 1:
        yield _in_order(source.read_rows(target.source, 0, 1).reshape(-1, 1), target.heads)
        return
    rows, columns = target.shape
    head = rows // target.heads if target.heads else 1
    step = max(STAGING_NUMBERS // (columns * head), 1) * head
    for first in range(0, rows, step):
        last = min(first + step, rows)
        yield _in_order(source.read_rows(target.source, first, last), (last - first) // head if target.heads else 0)


def _in_order(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of whole heads from ggml's order to the published one."""
    if not heads:
        return rows
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _encode(rows: NDArray[np.float32], dtype: str, file: str, name: str) -> memoryview:
    """Encode rows as bytes of the dtype, rounded to nearest even."""
    if dtype == "float32":
        data: NDArray[np.generic] = rows
    elif dtype == "float16":
        with np.errstate(over="ignore"):  # reported below, with the tensor's name
            data = rows.astype(np.float16)
    else:
        # The lower half decides the rounding; carries into the exponent are right, and past the largest is infinity.
        words = rows.view(np.uint32)
        data = ((words + (((words >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    if dtype != "float32" and not all_finite(data):
        raise ModelLoadError(f"{file}: tensor {show_name(name)} holds a number that is too large for {dtype}")
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def all_finite(data: NDArray[np.generic]) -> bool:
    """Return whether all numbers of a float16 array, or of bits of bfloat16, are finite."""
    if data.dtype == np.float16:
        return bool(np.isfinite(data.view(np.float16)).all())
    return bool(((data.view(np.uint16) & np.uint16(0x7F80)) != 0x7F80).all())
