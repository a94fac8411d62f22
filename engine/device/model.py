"""A decoder's forward pass on a device: the model's own maps between the operations of ``engine.device.operations``.

The form is that of ``engine.kernels.plain_form``: Llama's, with biases, norms of heads and layers without positions.
The specification is ``Decoder.forward``; the residual stream has the model's dtype here as there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.device.operations import Attend, Chunks, Operations, Turn
from engine.device.storage import DeviceStorage
from engine.errors import ConfigurationError
from engine.kernels.library import UnusableKernelsError
from engine.kernels.plain_form import PlainLayer, check_supported
from engine.model.attention import AttentionRule
from engine.model.decoder import Decoder
from engine.model.rotary import Rotary


class ChunkTokens(NamedTuple):
    """All tokens of a step's prompt chunks, int64."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    """Negative: nowhere."""


class DeviceModel:
    """Computes decoding rows and prompt chunks. Whatever is needed is there when it is made."""

    def __init__(
        self, model: Decoder, layers: list[PlainLayer], storage: DeviceStorage, operations: Operations
    ) -> None:
        self._model = model
        self._operations = operations
        self._eps = model.config.rms_norm_eps
        self._rotary = Rotary(model.config.rope, model.config.head_dim, model.device)
        self._dim = model.config.head_dim
        self._layers = [
            (layer, storage.layers[layer.place], AttentionRule(layer.scale), _gains(layer, self._dim))
            for layer in layers
        ]

    def decode(self, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        """Logits of one token a row; see ``engine.device.loop.StepModel``."""
        attend = self._operations.decoding(lengths, tables)
        return self._logits(*self._stream(ChunkTokens(tokens, positions, slots), attend))

    def prefill(self, tokens: ChunkTokens, chunks: Chunks, wanted: Tensor) -> Tensor:
        """Logits of some tokens (int64, ``(M,)``) of prompt chunks, ``(M, vocab)``."""
        x, residual = self._stream(tokens, self._operations.prefilling(chunks))
        return self._logits(x.index_select(0, wanted), residual.index_select(0, wanted))

    def _stream(self, tokens: ChunkTokens, attend: Attend) -> tuple[Tensor, Tensor]:
        """What the last layer gave, and the residual stream that it is still to be added to."""
        run = self._operations
        residual, x = self._model.embed(tokens.token_ids), None
        cosines, sines = self._rotary.tables(tokens.positions, self._model.dtype)
        for layer, kv, rule, gains in self._layers:
            if x is None:
                normed = run.norm(residual, None, layer.attention_norm.weight, self._eps)
            else:
                normed = run.norm(x, residual, layer.attention_norm.weight, self._eps)
            turn = Turn(cosines, sines, gains, self._eps)
            if not layer.rotated:
                turn = Turn(torch.ones_like(cosines), torch.zeros_like(sines), gains, self._eps)
            qkv = layer.qkv(normed).view(len(normed), -1, self._dim)
            q = run.turn_and_write(qkv, kv, tokens.slots, turn)
            x = layer.out(attend(q, kv, rule))
            normed = run.norm(x, residual, layer.mlp_norm.weight, self._eps)
            x = layer.down(run.gate(layer.gate_up(normed)))
        assert x is not None, "a model has layers"
        return x, residual

    def _logits(self, x: Tensor, residual: Tensor) -> Tensor:
        """The last norm and the vocabulary's projection."""
        return self._model.head(self._operations.norm(x, residual, self._model.norm.weight, self._eps))


def supported_layers(model: Decoder, max_context: int, *, int8: bool) -> list[PlainLayer]:
    """The layers of a model that this backend computes.

    Raises:
        ConfigurationError: it does not compute this one yet.
    """
    reason = "it multiplies no int8" if int8 else ""
    if not reason:
        try:
            return check_supported(model, max_context)
        except UnusableKernelsError as error:
            reason = f"of its operations, {error}"
    raise ConfigurationError(
        f"the device backend does not compute this model yet: {reason}; "
        "set backend to plain, which computes every supported model on the CPU"
    )


def _gains(layer: PlainLayer, dim: int) -> tuple[Tensor, Tensor] | None:
    """Gains of query and of key heads."""
    if layer.head_gains is None:
        return None
    return layer.head_gains[:dim].contiguous(), layer.head_gains[dim:].contiguous()
