"""A model's own layers as a device computes them: its blocks' maps between the device's operations.

A layer tells its parts (``engine.model.layers.blocks.Sublayer``). Where the operations can do more at once than the
block itself (grouped-query attention, gated MLPs, experts), something of that takes the block's place; any other block
computes itself, and only its attention is the device's. So there is no second description of a family here, and what a
block computes is said in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.runtime.operations import Attend, ExpertMaps, KvLayer, Operations, RopeInputs
from engine.errors import ConfigurationError
from engine.model.layers.blocks import Block, GatedMlp, GroupedAttention, StepContext
from engine.model.layers.decoder import Decoder
from engine.model.layers.experts import MixtureOfExperts
from engine.model.layers.layers import Linear, RmsNorm
from engine.model.layers.routing import Rule


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """What the blocks of one step share."""

    run: Operations
    attend: Attend
    slots: tuple[Tensor, ...]
    """By each of the layout's tables."""
    context: StepContext
    """Inputs of blocks that compute themselves."""
    still: tuple[Tensor, Tensor] | None
    """Cosines and sines of layers without positions; None in a model that has no such layer."""


DeviceBlock = Callable[[Tensor, DeviceStep], Tensor]
"""Normalised rows in, rows out, both ``(N, hidden)``."""


class JoiningBlock(Protocol):
    """A block whose norm and whose addition to the residual stream can be computed with its products."""

    def join(self, stream: Tensor, norm: RmsNorm | None, step: DeviceStep, /) -> None:
        """Add to the stream what the block makes of it behind the norm."""
        ...


@dataclass(frozen=True, slots=True)
class DevicePart:
    """One step of the residual stream, as in ``Sublayer``."""

    before: RmsNorm | None
    block: DeviceBlock
    after: RmsNorm | None
    share: float

    @property
    def joins(self) -> JoiningBlock | None:
        """The block, where it can take the stream itself and add to it, and nothing stands between."""
        if isinstance(self.block, _Attention | _Mlp) and self.after is None and self.share == 1.0:
            return self.block
        return None


@dataclass(frozen=True, slots=True)
class DeviceAttention:
    """Attention of one step for blocks that compute themselves; see ``engine.backends.attention.Attention``."""

    fixed_shapes: ClassVar[bool] = True
    layers: list[KvLayer]
    attend: Attend
    slots: tuple[Tensor, ...]

    def __call__(self, place: int, qkv: tuple[Tensor, Tensor, Tensor | None], rule: AttentionRule, /) -> Tensor:
        """Write, then attend in one layer."""
        q, k, v = qkv
        layer = self.layers[place]
        layer.write(self.slots[layer.table], k, v)
        return self.attend(q.contiguous(), layer, rule)


@dataclass(frozen=True, slots=True)
class _Attention:
    """Grouped-query attention: heads are normalised, rotated and written in one operation."""

    block: GroupedAttention
    layer: KvLayer

    def __call__(self, x: Tensor, step: DeviceStep) -> Tensor:
        return step.run.project(self._attended(x, None, step), self.block.out.linear, None)

    def join(self, stream: Tensor, norm: RmsNorm | None, step: DeviceStep) -> None:
        """Add to the stream what attention makes of it."""
        step.run.project_onto(self._attended(stream, norm, step), self.block.out.linear, stream)

    @property
    def turns(self) -> bool:
        """Whether heads are rotated."""
        return self.block.form.table is not None

    def _attended(self, x: Tensor, norm: RmsNorm | None, step: DeviceStep) -> Tensor:
        form = self.block.form
        qkv = step.run.project(x, self.block.qkv, norm).view(len(x), -1, self.layer.keys.shape[3])
        rotation = step.still if form.table is None else step.context.tables[form.table]
        assert rotation is not None, "a step of layers without positions has tables for them"
        turn = RopeInputs(*rotation, self.block.head_norms)
        q = step.run.turn_and_write(qkv, self.layer, step.slots[self.layer.table], turn)
        return step.attend(q, self.layer, self.block.rule)


@dataclass(frozen=True, slots=True)
class _Mlp:
    """A gated MLP."""

    block: GatedMlp

    def __call__(self, x: Tensor, step: DeviceStep) -> Tensor:
        return step.run.project(self._inner(x, None, step), self.block.down.linear, None)

    def join(self, stream: Tensor, norm: RmsNorm | None, step: DeviceStep) -> None:
        """Add to the stream what the MLP makes of it."""
        step.run.project_onto(self._inner(stream, norm, step), self.block.down.linear, stream)

    def _inner(self, x: Tensor, norm: RmsNorm | None, step: DeviceStep) -> Tensor:
        return step.run.project_gated(x, self.block.gate_up, norm, self.block.activation)


@dataclass(frozen=True, slots=True)
class _Experts:
    """Experts, and what every row goes through besides."""

    maps: ExpertMaps
    shared: DeviceBlock | None

    def __call__(self, x: Tensor, step: DeviceStep) -> Tensor:
        out = step.run.experts(x, self.maps)
        return out if self.shared is None else out.add_(self.shared(x, step))


@dataclass(frozen=True, slots=True)
class _Itself:
    """A block that the operations have nothing of their own for."""

    block: Block

    def __call__(self, x: Tensor, step: DeviceStep) -> Tensor:
        return self.block(x, step.context)


def device_parts(model: Decoder, layers: list[KvLayer]) -> list[DevicePart]:
    """All of a model's layers. Experts' maps are taken over from the model: call it before the model is packed. A model
    that is still to be filled has to have them in one piece each, or what is filled is not what is computed with.

    Raises:
        ConfigurationError: experts are routed in a way that no operation knows.
    """
    return [
        DevicePart(one.before, _lowered(one.block, layers), one.after, one.share)
        for layer in model.layers
        for one in layer.sublayers
    ]


def has_still_layers(parts: list[DevicePart]) -> bool:
    """Whether some layer rotates no heads."""
    return any(isinstance(part.block, _Attention) and not part.block.turns for part in parts)


def _lowered(block: Block, layers: list[KvLayer]) -> DeviceBlock:
    if isinstance(block, GroupedAttention) and not block.form.flat_norm:
        return _Attention(block, layers[block.place])
    if isinstance(block, GatedMlp):
        return _Mlp(block)
    if isinstance(block, MixtureOfExperts):
        return _Experts(_taken(block), None if block.shared is None else _lowered(block.shared, layers))
    return _Itself(block)


def _taken(mixture: MixtureOfExperts) -> ExpertMaps:
    """The maps of a layer's experts, each kind in one piece; the experts release theirs."""
    router, experts, route = mixture.router, mixture.experts.held, mixture.router.route
    if not isinstance(route, Rule):
        raise ConfigurationError(
            f"the device backend does not compute this model: its operations do not route to experts by "
            f"{type(route).__name__}; set backend to plain, which computes every supported model on the CPU"
        )
    gate_up, gate_up_bias = _together([expert.gate_up for expert in experts])
    down, down_bias = _together([expert.down for expert in experts])
    return ExpertMaps(router, route, gate_up, down, gate_up_bias, down_bias, mixture.activation, mixture.weigh_inputs)


def _together(linears: list[Linear]) -> tuple[Tensor, Tensor | None]:
    weight = _piece([linear.loaded for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    for linear in linears:
        linear.release()
    return weight, _piece(biases) if biases else None


def _piece(parts: list[Tensor]) -> Tensor:
    """Tensors of one shape as one: as they lie where they lie behind each other, so that they may still be filled; else
    in a copy."""
    first, size = parts[0], parts[0].numel()
    memory, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    for place, one in enumerate(parts):
        lies = one.untyped_storage().data_ptr(), one.storage_offset()
        if not one.is_contiguous() or lies != (memory, begin + place * size):
            return torch.stack(parts)
    return first.as_strided((len(parts), *first.shape), (size, *first.stride()), begin)
