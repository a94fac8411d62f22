"""Memory, rows, budgets and recorded steps of a model's engine on a GPU, by the card's memory and the model's shape.

Pure. ``athanor.yaml`` need say nothing of them: what a model with a GPU leaves out is chosen here
(``appliance.common.gpu_defaults``), and what it gives holds. The engine takes its memory by its own reading of card and
model (``engine.backends.cuda.runtime.budget``); tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from appliance.common.config import ModelConfig
from appliance.common.figures import counted
from appliance.common.model_shape import ITEM_BYTES, ModelShape

MOST_SHARE = 95
"""Percent of a card that engines may hold together; equal to the engine's MOST_SHARE."""

CONTEXT_BYTES = 512 << 20
RESERVE_BYTES = 1 << 30
"""CUDA's context, and the reserve for activations, recorded steps and workspaces; equal to the engine's constants."""

MOST_ROWS = 256
"""Sequences of one step at the most, unless max_num_seqs says so: beyond, a step gets slower for all."""

LEAST_ROW_TOKENS = 512
"""Tokens of KV that each row gets on average: with fewer, rows would preempt each other."""

ROW_SCORE_BYTES = 16
"""Bytes of a row for each word of the vocabulary: counts, scores, logits of recorded steps, alternatives."""

MOST_TOKENS = 2_048
LEAST_TOKENS = 512
"""Bounds of a step's tokens: beyond, tokens of other rows come late; below, weights are read too often."""

MOST_CONTEXT = 1 << 20
"""Tokens; the bound of max_context."""

LEAST_BLOCKS = 4
"""Fewest blocks that the scheduler gives out; equal to the engine's MIN_BLOCKS."""

FINE_BUCKET = 8
"""From here on there is a bucket between two powers of two; equal to the engine's FINE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """Plan of one engine on one card; bytes unless it says otherwise. ``parts`` adds up to ``allowed``."""

    total: int
    """Memory of the card."""
    share: int
    """Percent of it that the engine may hold; 0: kv_bytes decides."""
    allowed: int
    """Bytes that it takes in all."""
    weights: int
    context: int
    reserve: int
    spare: int
    """Spare blocks of rows that the device runs ahead with, the padding block and the null block."""
    kv: int
    """Blocks that the scheduler gives out."""
    rest: int
    """What is less than a block."""
    block: int
    """Bytes of one block."""
    tokens: int
    """Tokens that the KV holds."""
    rows: int
    """Sequences in one step."""
    batched_tokens: int
    """Tokens in one step."""
    max_context: int
    """Tokens of prompt and answer together."""

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """What the memory is for."""
        return (
            ("weights", self.weights),
            ("context", self.context),
            ("reserve", self.reserve),
            ("spare blocks", self.spare),
            ("KV", self.kv),
            ("rest", self.rest),
        )

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows for which a step is recorded as a graph."""
        return buckets_of(self.rows)

    @property
    def lacking(self) -> int:
        """Bytes that are missing for the least KV; 0 where there are enough."""
        return max(0, LEAST_BLOCKS * self.block - self.kv)

    def words(self) -> str:
        """The plan in one line, for people; its parts add up."""
        share = f"{self.share} % of {_mib(self.total)}" if self.share else f"of {_mib(self.total)}"
        # In whole MiB, so that what is printed adds up as well.
        parts = [(name, part >> 20) for name, part in self.parts if name != "rest"]
        unused = (self.allowed >> 20) - sum(part for _, part in parts)
        graphs = f"{counted(len(self.buckets), 'graph')} (rows: {', '.join(map(str, self.buckets))})"
        return (
            f"{_mib(self.allowed)} ({share}) = {' + '.join(f'{name} {part:,}' for name, part in parts)} + unused "
            f"{unused:,}; {counted(self.tokens, 'token')} of KV, {counted(self.rows, 'row')}, "
            f"{counted(self.batched_tokens, 'token')} in a step, context {self.max_context:,}; {graphs}"
        )

    def settings(self) -> dict[str, int]:
        """What the engine is told, by the keys of a model's configuration."""
        return {
            "gpu_share": self.share,
            "max_num_seqs": self.rows,
            "max_num_batched_tokens": self.batched_tokens,
            "max_context": self.max_context,
        }


def card_share(model: ModelConfig) -> int:
    """Percent of a card that each engine of a model may hold; 0: kv_bytes decides, or it has no GPU."""
    return 0 if model.gpu == "off" else model.gpu_share


def card_weights(model: ModelConfig, shape: ModelShape | None, stored: int) -> int:
    """Bytes of the weights on a card, of so many in files: a type that is given may be wider than the stored one."""
    if shape is None or model.dtype == "auto":
        return stored
    return stored * ITEM_BYTES[model.dtype] // ITEM_BYTES[shape.dtype]


def least_bytes(model: ModelConfig, weights: int) -> int:
    """Bytes of a card without which an engine cannot start."""
    return weights + CONTEXT_BYTES + RESERVE_BYTES + (0 if card_share(model) else model.kv_bytes)


def plan_card(model: ModelConfig, shape: ModelShape, stored: int, total: int, free: int) -> CardPlan:
    """Plan an engine on a card.

    Args:
        model: its configuration; what that gives holds.
        shape: of the model.
        stored: bytes of its weight files.
        total: bytes of the card.
        free: bytes of it that no other program holds.
    """
    share, weights = card_share(model), card_weights(model, shape, stored)
    block = shape.token_bytes(model.dtype) * model.block_size
    base = weights + CONTEXT_BYTES + RESERVE_BYTES
    allowed = min(total * share // 100, free) if share else base + model.kv_bytes
    blocks = max(0, (allowed - base) // block)
    rows = model.max_num_seqs or _rows(shape, blocks, model.block_size)
    batched = model.max_num_batched_tokens or _batched_tokens(shape, rows)
    rows = min(rows, batched)
    spare = min(blocks, rows + 2)
    tokens = (blocks - spare) * model.block_size
    context = model.max_context or max(16, min(shape.positions, tokens, MOST_CONTEXT))
    return CardPlan(
        total=total,
        share=share,
        allowed=allowed,
        weights=weights,
        context=CONTEXT_BYTES,
        reserve=RESERVE_BYTES,
        spare=spare * block,
        kv=(blocks - spare) * block,
        rest=allowed - base - blocks * block,
        block=block,
        tokens=tokens,
        rows=rows,
        batched_tokens=batched,
        max_context=context,
    )


def buckets_of(rows: int) -> tuple[int, ...]:
    """Numbers of rows for which an engine records steps: 1, 2, 4, 8, 12, 16, 24, 32, 48 ... and all of them."""
    found, number = list[int](), 1
    while number < rows:
        found.append(number)
        if number >= FINE_BUCKET and number + number // 2 < rows:
            found.append(number + number // 2)
        number *= 2
    return (*found, rows)


def _mib(number: int) -> str:
    return f"{number >> 20:,} MiB"


def _rows(shape: ModelShape, blocks: int, block_size: int) -> int:
    """The largest power of two of rows whose scores take at most half of the reserve, and which find KV enough."""
    rows = MOST_ROWS
    while rows > 1:
        tokens = (blocks - rows - 2) * block_size
        if rows * shape.vocabulary * ROW_SCORE_BYTES <= RESERVE_BYTES // 2 and tokens >= rows * LEAST_ROW_TOKENS:
            break
        rows //= 2
    return rows


def _batched_tokens(shape: ModelShape, rows: int) -> int:
    """The largest power of two of tokens whose activations fit into what scores leave of the reserve: of each token
    both halves of the MLP's gate and their product, and some eight widths of the residual stream."""
    width = ITEM_BYTES[shape.dtype] * (3 * shape.intermediate + 8 * shape.hidden)
    left = RESERVE_BYTES - rows * shape.vocabulary * ROW_SCORE_BYTES
    tokens = MOST_TOKENS
    while tokens > LEAST_TOKENS and tokens * width > left:
        tokens //= 2
    return tokens
