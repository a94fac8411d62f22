"""compressed-tensors' integers: ``int-quantized`` (plain int8) and ``pack-quantized`` (4 or 8 bits in int32).

Each input belongs to a group; a group of an output has a scale and, in asymmetric schemes, a zero point: ``(stored -
zero) * scale``. One group for all inputs is "channel", one for everything "tensor". Packed numbers are offset by half
their range, so that they are not negative; the first lies in the lowest bits of a word, with inputs along a row. Packed
zero points use this layout along the outputs. ``weight_g_idx``, if present, names the group of each input (activation
order); all entries -1 mean that nothing was reordered.

Source: the compressors ``pack_quantized`` and ``naive_quantized`` of the compressed-tensors library, 0.20.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.quantised.codec import FLOATS, Present, Source, finite, group_ids, unpack_words

PACKED_BITS = (4, 8)
"""Supported numbers of bits of packed numbers."""


@dataclass(frozen=True, slots=True)
class ScaleGrouping:
    """Grouping of scales in a checkpoint's scheme."""

    bits: int
    group: int
    """Number of inputs that share a scale; 0 for a single group."""
    symmetric: bool


@dataclass(frozen=True, slots=True)
class GroupedNumbers:
    """Integers with a scale for each output and group."""

    shape: tuple[int, int]
    grouping: ScaleGrouping
    packed: bool
    whole: bool
    """Whether there is one scale for the whole matrix."""
    reordered: bool
    axis: int = 0

    @property
    def multiple(self) -> int:
        """Return the slab granularity: packed zero points of several outputs share a word."""
        return 32 // self.grouping.bits if self.packed and not self.grouping.symmetric else 1

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of numbers, scales, and the optional tensors present."""
        names = ("weight_packed", "weight_shape", "weight_scale") if self.packed else ("weight", "weight_scale")
        zero = () if self.grouping.symmetric else ("weight_zero_point",)
        return (*names, *zero, *(("weight_g_idx",) if self.reordered else ()))

    def decode(self, source: Source, begin: int, end: int) -> Tensor:
        """See ``Codec.decode``."""
        end = min(end, self.shape[0])
        numbers = self._numbers(source, begin, end)
        cut = (0, 1) if self.whole else (begin, end)
        scale = finite(source.read("weight_scale", *cut).reshape(cut[1] - cut[0], -1), source.name("weight_scale"))
        groups = self._groups(source, scale.shape[1])
        if not self.grouping.symmetric:
            numbers -= self._spread(self._zeros(source, cut), groups)
        return numbers.mul_(self._spread(scale, groups))

    def _numbers(self, source: Source, begin: int, end: int) -> Tensor:
        if not self.packed:
            return source.read("weight", begin, end).float()
        if source.read("weight_shape").tolist() != list(self.shape):
            raise ModelLoadError(f"tensor {source.name('weight_shape')} does not hold the shape {list(self.shape)}")
        words = source.read("weight_packed", begin, end)
        bits = self.grouping.bits
        return unpack_words(words, bits)[:, : self.shape[1]].float().sub_(1 << (bits - 1))

    def _zeros(self, source: Source, cut: tuple[int, int]) -> Tensor:
        if not self.packed:
            return source.read("weight_zero_point", *cut).reshape(cut[1] - cut[0], -1).float()
        bits = self.grouping.bits
        share = 32 // bits
        words = source.read("weight_zero_point", cut[0] // share, -(-cut[1] // share))
        zeros = unpack_words(words.t(), bits).t()[: cut[1] - cut[0]]
        return zeros.float().sub_(1 << (bits - 1))

    def _groups(self, source: Source, count: int) -> Tensor | None:
        """Return the group of each input when inputs are not in order."""
        if not self.reordered:
            return None
        given = source.read("weight_g_idx")
        return None if bool((given == -1).all()) else group_ids(given, count, source.name("weight_g_idx"))

    def _spread(self, values: Tensor, groups: Tensor | None) -> Tensor:
        """Expand to a value for each input, or a single value that broadcasts."""
        if values.shape[1] == 1:
            return values
        if groups is not None:
            return values[:, groups]
        return values.repeat_interleave(self.grouping.group, 1)[:, : self.shape[1]]


def packed_numbers(present: Present, shape: tuple[int, int], grouping: ScaleGrouping) -> GroupedNumbers:
    """Build the codec of a ``pack-quantized`` matrix.

    Raises:
        ModelLoadError: a tensor is missing or of another dtype or shape.
    """
    share = 32 // grouping.bits
    groups = -(-shape[1] // grouping.group) if grouping.group else 1
    present.require("weight_packed", ("I32",), (shape[0], -(-shape[1] // share)))
    present.require("weight_shape", ("I64", "I32"), (2,))
    present.require("weight_scale", FLOATS, (shape[0], groups))
    if not grouping.symmetric:
        present.require("weight_zero_point", ("I32",), (-(-shape[0] // share), groups))
    return GroupedNumbers(shape, grouping, packed=True, whole=False, reordered=_reordered(present, shape, groups))


def plain_numbers(present: Present, shape: tuple[int, int], grouping: ScaleGrouping) -> GroupedNumbers:
    """Build the codec of an ``int-quantized`` matrix.

    Raises:
        ModelLoadError: a tensor is missing or of another dtype or shape.
    """
    groups = -(-shape[1] // grouping.group) if grouping.group else 1
    present.require("weight", ("I8",), shape)
    found = present.require("weight_scale", FLOATS, (shape[0], groups), *_single(shape, groups))
    if not grouping.symmetric:
        present.require("weight_zero_point", ("I8",), found.shape)
    whole = found.shape in ((), (1,), (1, 1)) and shape[0] != 1
    reordered = _reordered(present, shape, groups)
    return GroupedNumbers(shape, grouping, packed=False, whole=whole, reordered=reordered)


def _single(shape: tuple[int, int], groups: int) -> tuple[tuple[int, ...], ...]:
    return ((shape[0],), (1,), (1, 1)) if groups == 1 else ()


def _reordered(present: Present, shape: tuple[int, int], groups: int) -> bool:
    if "weight_g_idx" not in present or groups == 1:
        return False
    present.require("weight_g_idx", ("I32",), (shape[1],))
    return True
