"""What the formats of packed weights have in common: which tensors stand for a matrix, and how a part of it is read.

A published matrix ``X.weight`` of shape ``(outputs, inputs)`` may lie in a file as several tensors beside each other:
numbers of few bits, scales, zero points. A format looks at what there is (``Present``), checks names, dtypes and shapes
and gives a ``Codec``; nothing is read for that. The codec then decodes any slab of the matrix into float32, reading no
more than it needs: a slab is some outputs with all their inputs (``axis`` 0) or some inputs of all outputs
(``axis`` 1), whichever way the packed numbers lie. ``decode_into`` walks the slabs, so what is held in float32 at
once is bounded.

Contents are untrusted like everything else in a checkpoint: a scale that is not finite, a group that does not exist or
a number that the engine's dtype cannot hold is an error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.safetensors import show_name

STAGING_NUMBERS = 1 << 20
"""Numbers of a slab in float32: 4 MiB, near a processor's cache (measured: 1.2 to 2.2 times as fast as 16 MiB)."""

FLOATS = ("F32", "BF16", "F16")
"""Dtypes that scales may have."""


class Stored(NamedTuple):
    """What a file says about a tensor."""

    dtype: str
    shape: tuple[int, ...]


class Present:
    """The tensors that a checkpoint holds for one module, by what follows the module's name.

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
        """The full name as a message shows it."""
        return show_name(f"{self.module}.{suffix}")

    def require(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> Stored:
        """The tensor of that name, which must have one of the dtypes and one of the shapes.

        Raises:
            ModelLoadError: it is missing or another; the message says what is asked for.
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
        """Rows ``begin .. end``, as they are stored; all of them by default. A row is what one index into the first
        ``lead`` dimensions, taken as one, leaves."""
        ...

    def name(self, suffix: str) -> str:
        """The full name as a message shows it."""
        ...


class Codec(Protocol):
    """Decodes one matrix."""

    @property
    def axis(self) -> int:
        """Along which dimension of the matrix slabs are cut."""
        ...

    @property
    def multiple(self) -> int:
        """Slabs begin at multiples of this, and end there or at the end of the matrix."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The tensors it reads."""
        ...

    def decode(self, source: Source, begin: int, end: int) -> Tensor:
        """The slab ``begin .. end`` in float32, always as ``(outputs, inputs)``.

        Raises:
            ModelLoadError: a stored number has no meaning; the message names the tensor.
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
        codec: of the matrix.
        source: of its tensors.
        target: shape of the rectangle, any dtype and device.
        region: which rectangle.
        staging: numbers that a slab may have, at least one step of the format.

    Raises:
        ModelLoadError: a stored number has no meaning, or the target's dtype cannot hold it.
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
    """Scales in float32.

    Raises:
        ModelLoadError: one is NaN or infinite.
    """
    values = values.float()
    if not bool(values.isfinite().all()):
        raise ModelLoadError(f"tensor {name} holds a scale that is not finite: the checkpoint is damaged")
    return values


def group_ids(values: Tensor, groups: int, name: str) -> Tensor:
    """The group of each input as indices.

    Raises:
        ModelLoadError: one is not from 0 to ``groups - 1``.
    """
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= groups):
        raise ModelLoadError(f"tensor {name} names a group that does not exist; there are {groups}")
    return values.long()


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of 2, 4 or 8 bits out of int32 words along the last dimension, the lowest bits first.

    Shape ``(..., W)`` to ``(..., W * 32 / bits)``, uint8. Words are taken apart as bytes, a quarter of the memory that
    whole words would touch; the lowest byte comes first on every machine that is served.
    """
    # Flat on the way: one word a row may have any stride, and then has no bytes to be seen.
    data = words.contiguous().reshape(-1).view(torch.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 8:
        return data
    mask = (1 << bits) - 1
    return torch.stack([(data >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def _check_range(values: Tensor, dtype: torch.dtype, name: str) -> None:
    # The largest of numbers among which one is NaN is NaN, and no comparison with it is true.
    if values.numel() and not bool(values.abs().amax() <= torch.finfo(dtype).max):
        kind = str(dtype).removeprefix("torch.")
        raise ModelLoadError(f"tensor {name} holds a number that is not finite or too large for {kind}")
