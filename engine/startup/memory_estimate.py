"""How much memory an engine will hold, told from the description alone, before any is taken.

Three parts: weights in the form in which they are multiplied, the KV cache, and buffers. What a step needs for a moment
is counted among the buffers, since an engine keeps what it once took: the larger of what layers and sampler take for a
moment. Not counted is what the process holds without a model: the interpreter and its libraries, with what oneDNN sets
up for 16-bit products on the plain path (some 15 MiB) and the copies of operands that MKL keeps from one product to the
next (up to 6 MiB a thread).

Memory of loading is given back (``engine.startup.load.release_free_memory``): packing a matrix takes its copy before
the old form is freed, and the heap would keep as much as the largest matrices of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.backends.common.loading import Form
from engine.backends.common.sliced_sampling import lines_at_once
from engine.backends.common.storage import gather_tokens
from engine.backends.native.abi import PANEL
from engine.backends.native.packing import padded_inputs
from engine.backends.plain.tile_attention import TILE
from engine.config import EngineConfig
from engine.core.backend import Backend
from engine.core.scheduler.limits import SchedulerLimits
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model
from engine.model.layers.layers import Linear, packed_bytes
from engine.model.layers.parallel import ALONE, Parallel

BLOCK_RECORD_BYTES = 144
"""Bytes of a block in the pool's lists, its number and generation as objects included, and of its stamp."""

SCORE_BYTES = 92
"""Bytes a score that the sampler looks at, as measured after a warm-up: 28 are its copies at its largest moment, 64 are
held where a masked copy stands beside them."""

FRESH_SCORE_BYTES = 108
"""Bytes a score where kernels compute: no layer has left the heap anything to use again."""

COMPRESSED = 3 / 4
"""Share of a bfloat16 matrix's bytes that kernels keep where they compress it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes of an engine."""

    weights: int
    kv: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.buffers

    def __str__(self) -> str:
        parts = (self.weights, "weights"), (self.kv, "KV"), (self.buffers, "buffers")
        return ", ".join(f"{size / (1 << 20):,.0f} MiB of {name}" for size, name in parts)


def predict_memory(
    config: EngineConfig, model: ModelConfig, backend: Backend, form: Form, parallel: Parallel = ALONE
) -> MemoryNeed:
    """Bytes that an engine on a processor, or one rank of it, holds once it is warm.

    Args:
        config: of the engine.
        model: its description.
        backend: with its KV layout and its bounds.
        form: how it is computed.
        parallel: which part of the model the rank holds.
    """
    layout, limits = backend.storage.layout, backend.limits
    checklist = build_model(model, form.dtype, torch.device("meta"), parallel)[1]
    item = form.dtype.itemsize
    gathered = gather_tokens(layout, limits.max_context)
    wide = max((layer.heads * layer.key_dim for layer in layout.layers), default=0)
    narrow = max((layer.heads * layer.value_dim for layer in layout.layers if not layer.latent), default=0)
    width = sum(-(-limits.max_context // group.block_size) for group in layout.tables)
    tables = 16 * limits.max_num_seqs * width
    buffers = gathered * (wide + narrow) * item + tables + layout.num_blocks * BLOCK_RECORD_BYTES
    moment = _kernel_rooms if form.operand_bytes else _moments
    return MemoryNeed(
        weights=_weights(checklist, model, form),
        kv=layout.block_bytes * (layout.num_blocks + 1),
        buffers=buffers + moment(model, limits, form),
    )


def parameters(checklist: Checklist) -> int:
    """Numbers in a checkpoint, as published; a head that is the embedding is not counted again."""
    return sum(torch.Size(piece.shape).numel() for piece in checklist.pieces.values())


def _weights(checklist: Checklist, model: ModelConfig, form: Form) -> int:
    targets = [home.target for piece in checklist.pieces.values() for home in piece.homes]
    embedding = targets[0] if model.tie_word_embeddings else None
    total = sum(target.nbytes for target in targets)
    for linear in checklist.linears:
        stored, shared = linear.loaded, linear.loaded is embedding
        kept = _kernel_bytes(linear, form) if form.operand_bytes else packed_bytes(stored, int8=form.int8)
        if kept is None:
            continue
        # A head that is the embedding: the embedding is kept beside it, unless kernels read it from the head.
        replaced = not shared or (form.operand_bytes and not form.int8)
        total += kept - (stored.nbytes if replaced else 0)
    return total


def _kernel_bytes(linear: Linear, form: Form) -> int:
    """Bytes of a matrix in panels, with what belongs to it."""
    outputs, inputs = linear.loaded.shape
    rows = -(-outputs // PANEL) * PANEL
    dtype = torch.int8 if form.int8 else form.dtype
    matrix = rows * padded_inputs(inputs, dtype) * dtype.itemsize
    if form.compresses and dtype == torch.bfloat16:
        matrix = int(matrix * COMPRESSED)
    return matrix + (8 * rows if form.int8 else 0) + (0 if linear.bias is None else 4 * rows)


def _kernel_rooms(model: ModelConfig, limits: SchedulerLimits, form: Form) -> int:
    """Rooms that the kernels' program takes once, and the sampler's moment."""
    hidden, heads = model.hidden_size, model.num_heads * model.head_dim
    inner, qkv = model.intermediate_size, heads + 2 * model.num_kv_heads * model.head_dim
    row = 4 * (hidden + qkv + model.head_dim) + form.operand_bytes * (hidden + heads + inner)
    if form.int8:
        row += 4 * (heads + inner)
    scores = _sampled(model, limits, FRESH_SCORE_BYTES) + 4 * limits.max_logit_lines * model.vocab_size
    return limits.max_num_batched_tokens * row + scores


def _moments(model: ModelConfig, limits: SchedulerLimits, form: Form) -> int:
    """What plain tensor operations hold for a moment: inside an MLP, inside an attention, in the sampler."""
    tokens, item = limits.max_num_batched_tokens, form.dtype.itemsize
    mlp = tokens * (2 * model.hidden_size + 3 * model.intermediate_size) * item
    if form.int8:
        # The wider of its products, and its rows as they are rounded: in float32 and in 8 bits.
        mlp += tokens * model.intermediate_size * (2 * _between(form) + 5)
    # The second half of a prompt against the whole: a mask, and where heads share keys three times their scores.
    scores = (tokens // 2) * min(limits.max_context, tokens) * item
    attention = scores * (1 if model.num_heads == model.num_kv_heads else 1 + 3 * model.num_heads)
    logits = limits.max_num_seqs * model.vocab_size * item
    # What one left is another's to use. Trying the deterministic class computes the head for a whole tile.
    head = TILE * model.vocab_size * (item + _between(form))
    return max(mlp + attention + logits, _sampled(model, limits, SCORE_BYTES) + logits, head)


def _between(form: Form) -> int:
    """Bytes a number that a product holds beside its result: sums in float32 of 16-bit types; of int8 the whole sums
    and, scaled, the same in float32."""
    if form.int8:
        return 8
    return 4 if form.dtype.itemsize == 2 else 0


def _sampled(model: ModelConfig, limits: SchedulerLimits, score_bytes: int) -> int:
    """The sampler's moment."""
    return min(limits.max_num_seqs, lines_at_once(model.vocab_size)) * model.vocab_size * score_bytes
