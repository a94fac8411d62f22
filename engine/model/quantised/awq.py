"""AWQ: 4-bit weights, eight outputs in an int32 word in AWQ's own order.

Source: Lin et al., arXiv 2306.00978; the ``gemm`` layout of AutoAWQ. ``qweight`` of shape ``(inputs, outputs / 8)``,
``qzeros`` of ``(groups, outputs / 8)`` packed the same way, ``scales`` of ``(groups, outputs)``:
``(stored - zero) * scale``. Output ``8 i + j`` of a word lies at its nibble ``ORDER[j]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.quantised.codec import FLOATS, Present, Source, finite, unpack_words

BITS = 4
SHARE = 32 // BITS
"""Number of weights in a word."""

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of each output of a word, counted from the lowest."""


@dataclass(frozen=True, slots=True)
class Awq:
    """A matrix packed along its outputs, with its inputs in order."""

    shape: tuple[int, int]
    group: int
    axis: int = 1

    suffixes: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")

    @property
    def multiple(self) -> int:
        """Return the slab granularity: slabs hold whole groups."""
        return self.group

    def decode(self, source: Source, begin: int, end: int) -> Tensor:
        """See ``Codec.decode``."""
        end = min(end, self.shape[1])
        first, last = begin // self.group, -(-end // self.group)
        scales = finite(source.read("scales", first, last), source.name("scales"))
        numbers = _unpack(source.read("qweight", begin, end))
        zeros = _unpack(source.read("qzeros", first, last))
        spread = [values.repeat_interleave(self.group, 0)[: end - begin] for values in (zeros, scales)]
        return numbers.sub_(spread[0]).mul_(spread[1]).t()


def awq(present: Present, shape: tuple[int, int], group: int) -> Awq:
    """Build the codec of a matrix.

    Args:
        present: tensors that the checkpoint holds.
        shape: outputs and inputs.
        group: number of inputs that share scale and zero point; 0 for all of them.

    Raises:
        ModelLoadError: a tensor is missing or of another dtype or shape.
    """
    outputs, inputs = shape
    group = group or inputs
    if outputs % SHARE or inputs % group:
        raise ModelLoadError(f"module {present.module} of shape {list(shape)} cannot be AWQ with groups of {group}")
    present.require("qweight", ("I32",), (inputs, outputs // SHARE))
    present.require("qzeros", ("I32",), (inputs // group, outputs // SHARE))
    present.require("scales", FLOATS, (inputs // group, outputs))
    return Awq(shape, group)


def _unpack(words: Tensor) -> Tensor:
    nibbles = unpack_words(words, BITS).view(words.shape[0], -1, SHARE)
    return nibbles[:, :, list(ORDER)].flatten(1).float()
