"""A decoder's forward pass on a device: the model's own maps between the operations of
``engine.backends.cuda.runtime.operations``.

The specification is ``Decoder.forward``; the residual stream has the model's dtype here as there. What a block gives is
added to it together with the norm that comes next, in one operation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends.cuda.runtime.blocks import DeviceAttention, DeviceStep, device_parts, has_still_layers
from engine.backends.cuda.runtime.operations import Attend, Beside, Chunks, Operations
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.config import EngineConfig
from engine.model.layers.blocks import GatedMlp, GroupedAttention, StepContext
from engine.model.layers.decoder import Decoder
from engine.model.layers.layers import RmsNorm

DTYPES = (torch.float32, torch.bfloat16)
"""What the operations compute in."""


class ChunkTokens(NamedTuple):
    """All tokens of a step, int64."""

    token_ids: Tensor
    positions: Tensor
    slots: tuple[Tensor, ...]
    """By each of the layout's tables; negative: nowhere."""


class DeviceModel:
    """Computes decoding rows and prompt chunks. Whatever is needed is there when it is made."""

    def __init__(self, model: Decoder, storage: DeviceStorage, operations: Operations) -> None:
        """Take a model that is loaded and not packed yet, or is still to be filled where it lies: maps of experts are
        taken over from it.

        Raises:
            ConfigurationError: no operation computes one of its layers.
        """
        self._model = model
        self._layers = storage.layers
        self._operations = operations
        self._parts = device_parts(model, storage.layers)
        self._still = has_still_layers(self._parts)

    def decode(
        self, tokens: Tensor, positions: Tensor, slots: tuple[Tensor, ...], tables: tuple[Tensor, ...], lengths: Tensor
    ) -> Tensor:
        """Logits of one token a row; see ``engine.backends.cuda.runtime.loop.StepModel``."""
        attend = self._operations.decoding(lengths, tables)
        return self._logits(*self._stream(ChunkTokens(tokens, positions, slots), attend))

    def prefill(self, tokens: ChunkTokens, chunks: Chunks, wanted: Tensor, beside: Beside | None = None) -> Tensor:
        """Logits of some tokens (int64, ``(M,)``) of prompt chunks and of decoding rows in front of them, ``(M,
        vocab)``."""
        x, residual = self._stream(tokens, self._operations.prefilling(chunks, beside))
        return self._logits(None if x is None else x.index_select(0, wanted), residual.index_select(0, wanted))

    def _stream(self, tokens: ChunkTokens, attend: Attend) -> tuple[Tensor | None, Tensor]:
        """What the last block gave, if it is still to be added, and the residual stream."""
        run = self._operations
        step = self._step(tokens, attend)
        residual, x = self._model.embed(tokens.token_ids), None
        # Rows are rounded to 8 bits behind their norm, in one pass.
        joins = run.fuses(residual) or self._model.scaled
        for part in self._parts:
            if joins and part.joins is not None:
                part.joins.join(residual if x is None else residual.add_(x), part.before, step)
                x = None
                continue
            if part.before is not None:
                inner = self._normed(x, residual, part.before)
            else:
                inner = residual if x is None else residual.add_(x)
            x = part.block(inner, step)
            if part.after is not None:
                x = run.norm(x, None, part.after)
            if part.share != 1.0:
                # At once, as the model does: a share that is rounded by itself would be another number.
                residual.add_(x, alpha=part.share)
                x = None
        return x, residual

    def _step(self, tokens: ChunkTokens, attend: Attend) -> DeviceStep:
        run, positions = self._operations, tokens.positions
        tables = tuple(run.rotations(rotary, positions, self._model.dtype) for rotary in self._model.rotaries)
        own = DeviceAttention(self._layers, attend, tokens.slots)
        context = StepContext(tokens.positions, tables, own)
        still = None
        if self._still:
            cosines, sines = tables[0]
            still = torch.ones_like(cosines), torch.zeros_like(sines)
        return DeviceStep(self._operations, attend, tokens.slots, context, still)

    def _normed(self, x: Tensor | None, residual: Tensor, norm: RmsNorm) -> Tensor:
        if x is None:
            return self._operations.norm(residual, None, norm)
        return self._operations.norm(x, residual, norm)

    def _logits(self, x: Tensor | None, residual: Tensor) -> Tensor:
        """The last norm and the vocabulary's projection."""
        if not self._operations.fuses(residual):
            return self._model.project(self._normed(x, residual, self._model.norm))
        stream = residual if x is None else residual.add_(x)
        logits = self._operations.project(stream, self._model.head.linear, self._model.norm)
        return self._model.bound_logits(logits)


def obstacle(config: EngineConfig, model: Decoder) -> str:
    """Why this backend does not compute a model; empty when it does."""
    if config.quantization == "int8":
        return "it multiplies no int8"
    if model.dtype not in DTYPES:
        return f"it computes float32 and bfloat16, not {str(model.dtype).removeprefix('torch.')}"
    if model.scaled and model.dtype != torch.bfloat16:
        given = str(model.dtype).removeprefix("torch.")
        return f"its weights in fp8 go with bfloat16, not {given}: set dtype: bfloat16"
    blocks = [sublayer.block for layer in model.layers for sublayer in layer.sublayers]
    if model.scaled and not all(isinstance(block, GroupedAttention | GatedMlp) for block in blocks):
        return "it holds weights in fp8 of grouped attention and gated MLPs alone, not of experts or latent attention"
    if model.parallel.ranks > 1 or len(model.layers) != model.config.num_layers:
        return "it runs a whole model on one rank"
    return ""
