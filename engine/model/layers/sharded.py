"""Layers of which each rank holds a part; with one rank they are the whole layers, and nothing is exchanged.

Column parallel: a rank has some outputs of a map, which need nobody else. Row parallel: a rank has some inputs, and the
results are summed. Vocabulary parallel: a rank has some ids; embeddings are summed, logits gathered. Expert parallel
needs no layer of its own: a block holds the experts of ``of_experts.share(num_experts)`` and sums its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.checkpoint.checklist import Checklist, Site
from engine.model.layers.layers import Delta, Linear, OffsetRmsNorm, RmsNorm
from engine.model.layers.parallel import Span

NormMaker = Callable[[Checklist, str, int, float], RmsNorm]
"""Makes a norm from: the checklist, its name, its size, and its epsilon."""


class Columns(NamedTuple):
    """A published map whose outputs lie in rows of a shared matrix."""

    name: str
    """Name of the map: its tensors are ``name.weight`` and ``name.bias``."""
    outputs: int
    """As published, whole."""
    part: Span
    """The outputs that this rank holds."""
    first: int = 0
    """Row of the published tensor at which these outputs begin, where one tensor holds several maps."""
    rows: int | None = None
    """Rows of the published tensor; None: ``outputs``."""


def column_linear(
    checklist: Checklist,
    columns: list[Columns],
    inputs: int,
    *,
    bias: bool = False,
    room: Tensor | None = None,
    whole: bool = False,
) -> Linear:
    """One matrix of several published maps of the same input, this rank's outputs of each; ``room``: where its weight
    goes, if not into memory of its own; ``whole``: it has the model's dtype, even where maps are held in 8 bits."""
    held = sum(one.part[1] - one.part[0] for one in columns)
    assert room is None or (tuple(room.shape) == (held, inputs) and not bias), "the room is for another map"
    make = Linear.empty if whole else Linear.scaled
    linear = make(inputs, held, bias=bias, memory=checklist.memory) if room is None else Linear(room)
    place = 0
    for one in columns:
        start, stop = one.part
        end = place + stop - start
        rows = one.outputs if one.rows is None else one.rows
        part = {0: (one.first + start, one.first + stop)}
        scale = None if linear.scale is None else linear.scale[place:end]
        checklist.want(f"{one.name}.weight", (rows, inputs), linear.loaded[place:end], part=part, scale=scale)
        if linear.bias is not None:
            checklist.want(f"{one.name}.bias", (rows,), linear.bias[place:end], part=part)
        place = end
    return checklist.pack(linear)


def adaptable(checklist: Checklist, columns: list[Columns], inputs: int, linear: Linear) -> Linear:
    """Let adapters change a matrix of several published maps, which is applied to every row of a step; returns it."""
    place = 0
    for one in columns:
        count = one.part[1] - one.part[0]
        rows = one.outputs if one.rows is None else one.rows
        checklist.adapt(one.name, Site(linear, inputs, rows, one.first + one.part[0], place, count))
        place += count
    return linear


class RowLinear:
    """A map of which each rank has some inputs; rank 0 has the bias."""

    def __init__(
        self, checklist: Checklist, name: str, *, inputs: int, outputs: int, part: Span, bias: bool = False
    ) -> None:
        self._parallel = checklist.parallel
        own_bias = bias and self._parallel.rank == 0
        self.linear = Linear.scaled(part[1] - part[0], outputs, bias=own_bias, memory=checklist.memory)
        weight, scale = self.linear.loaded, self.linear.scale
        checklist.want(f"{name}.weight", (outputs, inputs), weight, part={1: part}, scale=scale)
        if self.linear.bias is not None:
            checklist.want(f"{name}.bias", (outputs,), self.linear.bias)
        elif bias:
            checklist.ignore(f"{name}.bias")
        checklist.pack(self.linear)
        checklist.adapt(name, Site(self.linear, inputs, outputs, 0, 0, outputs))

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to this rank's inputs ``(N, part)``; gives all outputs on every rank."""
        return self._parallel.all_reduce(self.linear(x))


class VocabEmbedding:
    """A vector an id; each rank has some ids."""

    def __init__(self, checklist: Checklist, name: str, *, vocab_size: int, width: int) -> None:
        self._parallel = checklist.parallel
        self._start, self._stop = self._parallel.rows(vocab_size)
        self.weight = checklist.memory.empty(self._stop - self._start, width)
        checklist.want(f"{name}.weight", (vocab_size, width), self.weight, part={0: (self._start, self._stop)})
        self.delta: Delta | None = None
        """As of ``Linear``; rows go in as ids."""
        checklist.adapt(name, Site(self, vocab_size, width, 0, 0, width, by_id=True))

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Vectors of ids (int64, ``(N,)``), a fresh tensor of shape ``(N, width)``."""
        if self._parallel.size == 1:
            x = F.embedding(token_ids, self.weight)
            if self.delta is not None:
                self.delta.add(token_ids, x)
            return x
        foreign = (token_ids < self._start) | (token_ids >= self._stop)
        x = self.weight.new_zeros(len(token_ids), self.weight.shape[1])
        x[~foreign] = self.weight[token_ids[~foreign] - self._start]
        return self._parallel.all_reduce(x)


class VocabHead:
    """Logits of all ids on every rank; each rank computes some."""

    def __init__(
        self,
        checklist: Checklist,
        name: str,
        *,
        vocab_size: int,
        width: int,
        tied: VocabEmbedding | None = None,
        bias: bool = False,
    ) -> None:
        self._parallel = checklist.parallel
        self._vocab_size = vocab_size
        part = self._parallel.rows(vocab_size)
        self._piece = -(-vocab_size // self._parallel.size)
        if tied is None:
            columns = [Columns(name, vocab_size, part)]
            linear = column_linear(checklist, columns, width, bias=bias, whole=True)
            self.linear = adaptable(checklist, columns, width, linear)
        else:
            checklist.ignore(f"{name}.weight")
            columns = [Columns(name, vocab_size, part)]
            self.linear = adaptable(checklist, columns, width, checklist.pack(Linear(tied.weight)))

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of shape ``(M, vocab_size)`` of rows ``x`` of shape ``(M, width)``."""
        logits = self.linear(x)
        if self._parallel.size == 1:
            return logits
        logits = F.pad(logits, (0, self._piece - logits.shape[1]))
        return self._parallel.all_gather(logits)[:, : self._vocab_size]


def rms_norm(checklist: Checklist, name: str, size: int, eps: float, kind: type[RmsNorm] = RmsNorm) -> RmsNorm:
    """A norm whose gain every rank has whole."""
    norm = kind(size, eps, checklist.memory)
    checklist.want(f"{name}.weight", (size,), norm.weight)
    return norm


def offset_norm(checklist: Checklist, name: str, size: int, eps: float) -> RmsNorm:
    """A norm whose gain is published less one, and which every rank has whole."""
    return rms_norm(checklist, name, size, eps, OffsetRmsNorm)


class SplitRmsNorm:
    """A norm over numbers of which each rank holds a part; the mean of their squares is taken over all ranks."""

    def __init__(self, checklist: Checklist, name: str, size: int, eps: float, part: Span) -> None:
        self._parallel = checklist.parallel
        self._eps = eps
        self._held = part[1] - part[0]
        self._counted = self._held * self._parallel.size
        """Numbers that the ranks sum up together: more than ``size`` where several ranks hold the same ones."""
        self.weight = checklist.vector(f"{name}.weight", size, part=part)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise this rank's part of rows, ``(N, part)``."""
        if self._parallel.size == 1:
            return F.rms_norm(x, (self._held,), self.weight, self._eps)
        wide = x.float()
        squares = self._parallel.all_reduce(wide.square().sum(-1, keepdim=True))
        scale = torch.rsqrt(squares / self._counted + self._eps)
        return (wide * scale * self.weight.float()).to(x.dtype)
