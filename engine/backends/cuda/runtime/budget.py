"""How much of a card's memory an engine takes for KV: what its share leaves once that of the weights is taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.backends.cuda.runtime.device_memory import MARGIN
from engine.config import EngineConfig
from engine.core.scheduler.limits import SCORED_ROWS
from engine.errors import ConfigurationError
from engine.model.layers.decoder import Decoder
from engine.model.layers.experts import MixtureOfExperts
from engine.model.layers.routing import Rule

RESERVE_BYTES = 1 << 30
"""Left at the least for what comes after KV: activations of a step, the pool of recorded steps, workspaces of
libraries."""

LIBRARY_BYTES = 512 << 20
"""What of it libraries and recorded graphs take for themselves, and small tensors. An estimate, which no card has
confirmed."""

STREAM_COPIES = 6
"""Tensors as wide as the residual stream that a layer holds at once: the stream, what is added to it and its norm,
cosines and sines, and one more."""

TABLE_COPIES = 5
"""Block tables of all rows that a step holds at once: entries and stamps as they were looked up, and what the kernels
make of them."""

SPLITS = 32
"""Parts of a row's context that attention computes by itself (``engine.backends.cuda.kernels.tile_sizes``)."""

CONTEXT_BYTES = 512 << 20
"""That CUDA holds for a process beside what torch has asked for: its context and loaded code. An estimate as well."""

MOST_SHARE = 95
"""Percent: the driver keeps some of every card for itself."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Bytes of a card."""

    total: int
    free: int
    """That nobody holds now."""
    held: int
    """That this process holds."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the memory of steps follows from."""

    tokens: int
    rows: int
    lines: int
    """Lines of logits."""
    vocab: int
    item: int
    """Bytes of a number of the model."""
    hidden: int
    inner: int
    """Bytes of a token inside the widest block of a layer."""
    table: int
    """Bytes of a row's block tables."""
    partial: int
    """Bytes of a row's partial results of attention."""


def step_shape(config: EngineConfig, model: Decoder) -> StepShape:
    """That of an engine's steps."""
    about, item = model.config, model.dtype.itemsize
    tokens = config.max_num_batched_tokens
    rows = min(config.max_num_seqs, tokens)
    heads, like = about.num_heads, about.kv_layers[0]
    wide = max(about.head_dim, like.key_dim, like.value_dim)
    attention = (3 * heads + 2 * about.num_kv_heads) * wide * item
    # Rows that are rounded to 8 bits for the second map lie beside those that they are made of.
    inner = [attention, about.intermediate_size * (3 * item + model.scaled)]
    for one in (sublayer.block for layer in model.layers for sublayer in layer.sublayers):
        if isinstance(one, MixtureOfExperts) and isinstance(one.router.route, Rule):
            pair = max(expert.gate_up.loaded.shape[0] for expert in one.experts.held) * 3 // 2 * item
            inner.append(one.router.route.top * (pair + 4 * about.hidden_size))
    reaches = len({layer.reach for layer in about.kv_layers})
    context = min(config.max_context, about.max_positions)
    return StepShape(
        tokens,
        rows,
        min(rows + SCORED_ROWS, tokens),
        about.vocab_size,
        item,
        about.hidden_size,
        max(inner),
        8 * reaches * (context // config.block_size + 1),
        4 * SPLITS * heads * (like.value_dim + 1),
    )


def reserve_bytes(shape: StepShape) -> int:
    """Bytes that come after KV: what the largest prompts need, in one piece that is larger by a margin; the recorded
    step of all rows; what rows ask of the choice of their tokens."""
    token = STREAM_COPIES * shape.hidden * shape.item + shape.inner
    tables, scores = TABLE_COPIES * shape.table, 4 * shape.vocab
    prompts = (
        shape.tokens * token + shape.lines * shape.vocab * shape.item + shape.rows * (scores + tables + shape.partial)
    )
    recorded = shape.rows * (token + shape.vocab * shape.item + scores + shape.partial + tables)
    choices = (shape.rows + 1) * (scores + shape.vocab // 8 + 2 * shape.table)
    return max(RESERVE_BYTES, int(MARGIN * prompts) + recorded + choices + LIBRARY_BYTES)


def kv_bytes_of(card: CardMemory, share: int, reserve: int = RESERVE_BYTES) -> int:
    """Bytes for KV, spare blocks included.

    Args:
        card: as it is once the weights' memory is taken.
        share: percent of all its memory that this engine may hold.
        reserve: bytes that come after KV.

    Raises:
        ConfigurationError: the share is out of range, or weights and reserve leave nothing of it.
    """
    if not 1 <= share <= MOST_SHARE:
        raise ConfigurationError(f"gpu_share is {share}; it must be 1 to {MOST_SHARE} percent")
    allowed = card.total * share // 100 - card.held
    left = min(allowed, card.free) - reserve
    if left <= 0:
        raise ConfigurationError(
            f"nothing is left for KV on the GPU: of {_mib(card.total)} this engine may hold {share} % and holds "
            f"{_mib(card.held)} already, {_mib(card.free)} are free, and {_mib(reserve)} stay in reserve; raise "
            "gpu_share, put fewer models on the card, lower max_num_batched_tokens, or take a smaller model"
        )
    return left


def check_room(card: CardMemory, share: int, weights: int) -> None:
    """Check that a card has room for weights, before any of it is taken.

    Args:
        card: as it is without them.
        share: percent of all its memory that this engine may hold; 0: all that is free.
        weights: their bytes.

    Raises:
        ConfigurationError: it has not.
    """
    left = min(card.free, card.total * share // 100 - card.held) if share else card.free
    if weights > left:
        held = f"of {_mib(card.total)} this engine may hold {share} %, and " if share else ""
        raise ConfigurationError(
            f"the weights take {_mib(weights)} and the GPU has room for {_mib(max(left, 0))}: {held}"
            f"{_mib(card.free)} are free; put fewer models on the card, raise gpu_share, or take a smaller model"
        )


def cap_share(device: torch.device, card: CardMemory, share: int) -> None:
    """Let torch's allocator never hold more of a card than this engine may: what goes beyond is an error of this engine
    alone, and takes nothing from others on the card."""
    allowed = max(card.total * share // 100 - CONTEXT_BYTES, 0)
    # By number: a device without one is refused here, and none is the current one.
    torch.cuda.set_per_process_memory_fraction(allowed / card.total, device.index)


def read_card(device: torch.device) -> CardMemory:
    """The memory of the card that a process computes on."""
    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(total, free, torch.cuda.memory_reserved(device) + CONTEXT_BYTES)


def _mib(size: int) -> str:
    return f"{size >> 20:,} MiB"
