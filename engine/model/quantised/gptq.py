"""GPTQ: integer weights packed along the inputs.

Source: Frantar et al., arXiv 2210.17323; the layout of AutoGPTQ and GPTQModel. ``qweight`` int32 of shape ``(inputs *
bits / 32, outputs)``, ``qzeros`` of ``(groups, outputs * bits / 32)``, ``scales`` of ``(groups, outputs)``, the lowest
bits first, and ``g_idx`` with the group of each input, which with activation order (``desc_act``) is not ascending:
``(stored - zero) * scale``. The first version of the format (``checkpoint_format`` "gptq", and the default) stores a
zero point minus one, wrapped to its bits; "gptq_v2" stores it unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.quantised.codec import FLOATS, Present, Source, finite, group_ids, unpack_words

BITS = (2, 4, 8)
"""Supported numbers of bits; 3-bit numbers straddle words and are rarely published."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout described by ``quantization_config``."""

    bits: int
    group: int
    """Number of inputs in a group; 0 for all of them."""
    zero_less_one: bool


@dataclass(frozen=True, slots=True)
class Gptq:
    """A matrix packed along its inputs."""

    shape: tuple[int, int]
    layout: Layout
    groups: int
    indexed: bool
    """Whether there is a ``g_idx``."""
    axis: int = 1

    @property
    def multiple(self) -> int:
        """Return the slab granularity: slabs hold whole words."""
        return 32 // self.layout.bits

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of numbers, zero points, scales, and of the group index where there is one."""
        return ("qweight", "qzeros", "scales", *(("g_idx",) if self.indexed else ()))

    def decode(self, source: Source, begin: int, end: int) -> Tensor:
        """See ``Codec.decode``."""
        bits, share = self.layout.bits, 32 // self.layout.bits
        groups = self._groups(source, begin, end)
        scales = finite(source.read("scales"), source.name("scales"))
        zeros = unpack_words(source.read("qzeros"), bits)
        if self.layout.zero_less_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        words = source.read("qweight", begin // share, end // share)
        numbers = unpack_words(words.t(), bits).float()
        return numbers.sub_(zeros[groups].t()).mul_(scales[groups].t())

    def _groups(self, source: Source, begin: int, end: int) -> Tensor:
        if self.indexed:
            return group_ids(source.read("g_idx", begin, end), self.groups, source.name("g_idx"))
        return torch.arange(begin, end) // (self.layout.group or self.shape[1])


def gptq(present: Present, shape: tuple[int, int], layout: Layout) -> Gptq:
    """Build the codec of a matrix.

    Raises:
        ModelLoadError: a tensor is missing or of another dtype or shape.
    """
    outputs, inputs = shape
    share = 32 // layout.bits
    if outputs % share or inputs % share:
        raise ModelLoadError(f"module {present.module} of shape {list(shape)} cannot be GPTQ of {layout.bits} bits")
    groups = -(-inputs // layout.group) if layout.group else 1
    present.require("qweight", ("I32",), (inputs // share, outputs))
    present.require("qzeros", ("I32",), (groups, outputs // share))
    present.require("scales", FLOATS, (groups, outputs))
    if "g_idx" in present:
        present.require("g_idx", ("I32",), (inputs,))
    return Gptq(shape, layout, groups, "g_idx" in present)
