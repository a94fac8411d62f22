"""Common parts of the packed weight formats: the tensors that represent a matrix, and how a part of it is decoded.

A published matrix ``X.weight`` of shape ``(outputs, inputs)`` may be stored as several tensors: numbers of few bits,
scales, zero points. A format inspects the available tensors (``Present``), checks names, dtypes and shapes and returns
a ``Codec``; nothing is read for that. The codec then decodes any slab of the matrix into float32, reading no more than
it needs: a slab is some outputs with all their inputs (``axis`` 0) or some inputs of all outputs (``axis`` 1),
depending on the direction of packing. ``decode_into`` iterates over the slabs, so the memory held in float32 is
bounded.

Contents are untrusted like the rest of a checkpoint: an infinite scale, an invalid group or a number that the engine's
dtype cannot represent is an error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.checkpoint.safetensors import show_name

STAGING_NUMBERS = 1 << 20
"""Size of a slab in float32 numbers: 4 MiB, near a processor's cache (measured: 1.2 to 2.2 times as fast as 16 MiB)."""

FLOATS = ("F32", "BF16", "F16")
"""Permitted dtypes of scales."""


class Stored(NamedTuple):
    """Dtype and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


class Present:
    """Tensors that a checkpoint holds for one module, by name suffix.

    Args:
        module: name of the module, for messages: ``model.layers.0.mlp.up_proj``.
        tensors: dtype and shape by suffix: ``weight``, ``weight_scale`` and so on.
    """

    def __init__(self, module: str, tensors: Mapping[str, Stored]) -> None:
        self.module = module
        self._tensors = tensors

    def __contains__(self, suffix: str) -> bool:
        return suffix in self._tensors

    def __getitem__(self, suffix: str) -> Stored:
        return self._tensors[suffix]

    def name(self, suffix: str) -> str:
        """Return the full tensor name for messages."""
        return show_name(f"{self.module}.{suffix}")

    def require(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> Stored:
        """Return the tensor with this suffix, which must have one of the dtypes and one of the shapes.

        Raises:
            ModelLoadError: it is missing or differs; the message says what is required.
        """
        if suffix not in self._tensors:
            raise ModelLoadError(f"the checkpoint lacks {self.name(suffix)}, which its quantization_config asks for")
        found = self._tensors[suffix]
        if found.dtype not in dtypes:
            raise ModelLoadError(f"tensor {self.name(suffix)} is {found.dtype}; it must be {' or '.join(dtypes)}")
        if found.shape not in shapes:
            asked = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelLoadError(f"tensor {self.name(suffix)} has shape {list(found.shape)}; its format needs {asked}")
        return found


class Source(Protocol):
    """Reads the tensors of one module."""

    def read(self, suffix: str, begin: int = 0, end: int | None = None, *, lead: int = 1) -> Tensor:
        """Read rows ``begin .. end`` as stored; all of them by default. A row is addressed by one index into the first
        ``lead`` dimensions, flattened."""
        ...

    def name(self, suffix: str) -> str:
        """Return the full tensor name for messages."""
        ...


class Codec(Protocol):
    """Decodes one matrix."""

    @property
    def axis(self) -> int:
        """Return the dimension of the matrix along which slabs are cut."""
        ...

    @property
    def multiple(self) -> int:
        """Return the slab granularity: slabs begin at multiples of it, and end there or at the end of the matrix."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of the tensors that it reads."""
        ...

    def decode(self, source: Source, begin: int, end: int) -> Tensor:
        """Decode the slab ``begin .. end`` to float32, always as ``(outputs, inputs)``.

        Raises:
            ModelLoadError: a stored number is invalid; the message names the tensor.
        """
        ...


class Region(NamedTuple):
    """A rectangle of a matrix, half-open."""

    rows: tuple[int, int]
    columns: tuple[int, int]


def decode_into(
    codec: Codec, source: Source, target: Tensor, region: Region, *, staging: int = STAGING_NUMBERS
) -> None:
    """Fill ``target`` with a rectangle of the matrix, converted to its dtype, slab by slab.

    Args:
        codec: codec of the matrix.
        source: reader of its tensors.
        target: memory of the rectangle's shape, any dtype and device.
        region: rectangle to decode.
        staging: numbers in a slab at most, at least one step of the format.

    Raises:
        ModelLoadError: a stored number is invalid, or the target's dtype cannot represent it.
    """
    (top, bottom), (left, right) = region
    assert tuple(target.shape) == (bottom - top, right - left), "the target is not of the region's shape"
    along, across = ((top, bottom), (left, right)) if codec.axis == 0 else ((left, right), (top, bottom))
    step = max(staging // max(across[1], 1) // codec.multiple, 1) * codec.multiple
    begin = along[0] - along[0] % codec.multiple
    while begin < along[1]:
        end = min(begin + step, -(-along[1] // codec.multiple) * codec.multiple)
        slab = codec.decode(source, begin, end)
        if codec.axis == 0:
            used = slab[max(along[0] - begin, 0) : along[1] - begin, left:right]
            place = target[max(begin - along[0], 0) : end - along[0]]
        else:
            used = slab[top:bottom, max(along[0] - begin, 0) : along[1] - begin]
            place = target[:, max(begin - along[0], 0) : end - along[0]]
        _check_range(used, target.dtype, source.name("weight"))
        place.copy_(used)
        begin = end


def finite(values: Tensor, name: str) -> Tensor:
    """Convert scales to float32.

    Raises:
        ModelLoadError: one is NaN or infinite.
    """
    values = values.float()
    if not bool(values.isfinite().all()):
        raise ModelLoadError(f"tensor {name} holds a scale that is not finite: the checkpoint is damaged")
    return values


def group_ids(values: Tensor, groups: int, name: str) -> Tensor:
    """Return the group of each input as indices.

    Raises:
        ModelLoadError: an index is not in 0 .. ``groups - 1``.
    """
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= groups):
        raise ModelLoadError(f"tensor {name} names a group that does not exist; there are {groups}")
    return values.long()


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned numbers of 2, 4 or 8 bits from int32 words along the last dimension, lowest bits first.

    Shape ``(..., W)`` to ``(..., W * 32 / bits)``, uint8. Words are processed as bytes, with a quarter of the memory
    traffic of whole words; every supported machine is little-endian.
    """
    # Flattened in between: with one word a row, any stride is possible, and a byte view is not.
    data = words.contiguous().reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 8:
        return data
    mask = (1 << bits) - 1
    return torch.stack([(data >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def _check_range(values: Tensor, dtype: torch.dtype, name: str) -> None:
    # The maximum is NaN when any element is NaN, and no comparison with NaN is true.
    if values.numel() and not bool(values.abs().amax() <= torch.finfo(dtype).max):
        kind = str(dtype).removeprefix("torch.")
        raise ModelLoadError(f"tensor {name} holds a number that is not finite or too large for {kind}")
