"""A rank's place among those that run one model together.

Tensor parallel: each rank holds some heads, some of an MLP's inner width, some experts and some of the vocabulary, and
sums or gathers what the others hold. Expert parallel: each rank holds some experts and all of the rest. Pipeline
parallel: each rank holds some layers, and passes the residual stream to the next stage. A ``Group`` and a ``Pipe`` move
the numbers; one rank alone has none and calls nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.core.kv.layout import LayerLayout
from engine.errors import ConfigurationError

Span = tuple[int, int]
"""A half-open range."""


class Group(Protocol):
    """Moves tensors between the ranks of one model; every rank makes the same calls in the same order."""

    def all_reduce(self, x: Tensor) -> None:
        """Put the sum over all ranks in the place of ``x``."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ``x`` of every rank, in their order; all have one shape."""


class Pipe(Protocol):
    """Moves the residual stream from one stage of a pipeline to the next."""

    def send(self, x: Tensor) -> None:
        """Pass ``x`` on to the next stage; returns when it is copied, not when it is read."""

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Take what the stage before passes on, waiting for it; a fresh tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Which part of the model this rank holds."""

    rank: int = 0
    size: int = 1
    """Ranks that share each layer."""
    group: Group | None = None
    layers: Span | None = None
    """Layers of this rank's stage of the pipeline; None for all."""
    experts: Parallel | None = None
    """This rank among those that deal experts and nothing else of a layer; None: the ranks that share each layer deal
    experts too."""
    stages: tuple[Span, ...] = ()
    """Layers of every stage of the pipeline; none: there is one stage."""
    pipe: Pipe | None = None
    """To the stages before and behind; None: there is one stage."""

    @property
    def of_experts(self) -> Parallel:
        """This rank among those that deal experts."""
        return self if self.experts is None else self.experts

    @property
    def width(self) -> int:
        """Ranks of one stage."""
        return max(self.size, self.of_experts.size)

    @property
    def ranks(self) -> int:
        """Ranks of the whole model."""
        return self.width * max(1, len(self.stages))

    def share(self, total: int) -> Span:
        """This rank's part of ``total`` things that may be dealt unevenly: experts, inner width."""
        return total * self.rank // self.size, total * (self.rank + 1) // self.size

    def rows(self, total: int) -> Span:
        """This rank's part in pieces of one size, the last one shorter: vocabulary."""
        piece = -(-total // self.size)
        return min(piece * self.rank, total), min(piece * (self.rank + 1), total)

    def kv_heads(self, kv_heads: int) -> Span:
        """This rank's key-value heads; where there are fewer than ranks, several ranks hold the same one.

        Raises:
            ConfigurationError: they cannot be dealt evenly.
        """
        if kv_heads % self.size and self.size % kv_heads:
            raise ConfigurationError(f"{kv_heads} key-value heads cannot be dealt evenly to {self.size} ranks")
        return self.rank * kv_heads // self.size, max(
            (self.rank + 1) * kv_heads // self.size, self.rank * kv_heads // self.size + 1
        )

    def heads(self, heads: int) -> Span:
        """This rank's query heads.

        Raises:
            ConfigurationError: they cannot be dealt evenly.
        """
        if heads % self.size:
            raise ConfigurationError(f"{heads} attention heads cannot be dealt evenly to {self.size} ranks")
        return self.share(heads)

    def stage(self, num_layers: int) -> range:
        """The layers that this rank runs.

        Raises:
            ConfigurationError: the stage is empty or does not lie in the model.
        """
        start, stop = (0, num_layers) if self.layers is None else self.layers
        if not 0 <= start < stop <= num_layers:
            raise ConfigurationError(f"a stage of layers {start} to {stop} does not fit a model of {num_layers}")
        return range(start, stop)

    def kv_layers(self, layers: tuple[LayerLayout, ...]) -> tuple[LayerLayout, ...]:
        """What this rank stores of a model's KV."""
        held = []
        for index in self.stage(len(layers)):
            start, stop = self.kv_heads(layers[index].heads)
            held.append(replace(layers[index], heads=stop - start))
        return tuple(held)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, in its place."""
        if self.group is not None:
            self.group.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x`` side by side in the last axis."""
        return x if self.group is None else torch.cat(self.group.all_gather(x), -1)


ALONE = Parallel()
"""One rank that holds the whole model."""
