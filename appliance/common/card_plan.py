"""Memory, rows, budgets and recorded steps of a model's engine on a GPU, by the card's memory and the model's shape.

Pure. ``athanor.yaml`` need say nothing of them: what a model with a GPU leaves out is chosen here
(``appliance.common.gpu_defaults``), and what it gives holds. The engine takes its memory by its own reading of card and
model (``engine.backends.cuda.runtime.budget``); tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from appliance.common.config import ModelConfig
from appliance.common.figures import counted
from appliance.common.model_shape import ITEM_BYTES, ModelShape

MOST_SHARE = 95
"""Percent of a card that engines may hold together; equal to the engine's MOST_SHARE."""

CONTEXT_BYTES = 512 << 20
RESERVE_BYTES = 1 << 30
"""CUDA's context, and the least reserve for activations, recorded steps and workspaces; as the engine has them."""

LIBRARY_BYTES = 512 << 20
MARGIN = 1.25
STREAM_COPIES = 6
TABLE_COPIES = 5
SPLITS = 32
SCORED_ROWS = 64
"""What the reserve follows from; as ``engine.backends.cuda.runtime.budget`` has them."""

RESERVE_PART = 16
"""A sixteenth of a card at most is for the reserve, unless that is less than ``RESERVE_BYTES``."""

PALETTE_GROUP = 128
PALETTE_ITEM = 2
"""Inputs of a matrix that has a palette are a multiple of the first, and its numbers have as many bytes as the second;
as ``engine.backends.cuda.kernels.palette`` has them."""

MOST_ROWS = 256
"""Sequences of one step at the most, unless max_num_seqs says so: beyond, a step gets slower for all."""

LEAST_ROW_TOKENS = 512
"""Tokens of KV that each row gets on average: with fewer, rows would preempt each other."""

MOST_TOKENS = 2_048
LEAST_TOKENS = 512
"""Bounds of a step's tokens: beyond, tokens of other rows come late; below, weights are read too often."""

MOST_CONTEXT = 262_144
"""Tokens of a context, unless max_context says so: block tables of every row are as long."""

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
    """Tokens of prompt and answer together; the engine cuts it to what the KV reaches."""

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

    @property
    def limited(self) -> bool:
        """Whether others hold so much of the card that the engine gets less than its share."""
        return self.share > 0 and self.allowed < self.total * self.share // 100

    def words(self) -> str:
        """The plan in one line, for people; its parts add up."""
        most = self.total * self.share // 100
        share = f"{self.share} % of {_mib(self.total)}" if self.share else f"of {_mib(self.total)}"
        if self.limited:
            share = f"all that is free of {_mib(self.total)}; gpu_share {self.share} % are {_mib(most)}"
        # In whole MiB, so that what is printed adds up as well.
        parts = [(name, part >> 20) for name, part in self.parts if name != "rest"]
        unused = (self.allowed >> 20) - sum(part for _, part in parts)
        graphs = f"{counted(len(self.buckets), 'graph')} (rows: {', '.join(map(str, self.buckets))})"
        step = f"{counted(self.rows, 'row')}, {counted(self.batched_tokens, 'token')} in a step"
        return (
            f"{_mib(self.allowed)} ({share}) = {' + '.join(f'{name} {part:,}' for name, part in parts)} + unused "
            f"{unused:,}; {counted(self.tokens, 'token')} of KV, {step}, context "
            f"{min(self.max_context, self.tokens):,}; {graphs}"
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
    """Bytes of the weights on a card, of so many in files: a type that is given may be wider than the stored one, maps
    of layers may be in 8 bits, and palettes lie beside them."""
    if shape is None:
        return stored
    if model.weights == "fp8":
        return scaled_bytes(shape)
    held = stored if model.dtype == "auto" else stored * ITEM_BYTES[model.dtype] // ITEM_BYTES[shape.dtype]
    return held + (palette_bytes(model, shape) if model.gpu_palette else 0)


def palette_bytes(model: ModelConfig, shape: ModelShape) -> int:
    """Bytes of the palettes of all gated MLPs: three of a matrix's four, and where each line's escapes begin. Escapes
    are not counted: a trained matrix has few. An engine may find that some pay for no number of rows, and give them
    back."""
    if shape.experts or shape.item(model.dtype) != PALETTE_ITEM:
        return 0
    maps = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    found = (lines * inputs * 3 // 2 + 4 * (lines + 1) + 2 for lines, inputs in maps if inputs % PALETTE_GROUP == 0)
    return shape.layers * sum(found)


def scaled_bytes(shape: ModelShape) -> int:
    """Bytes of weights whose maps of layers are in 8 bits: one a number and four for the scale of each output; two a
    number of embedding, head and norms. Biases, and norms of heads, are not counted."""
    queries, keys = shape.heads * shape.width, shape.kv_heads * shape.width
    numbers = shape.hidden * (2 * queries + 2 * keys + 3 * shape.intermediate)
    outputs = queries + 2 * keys + 2 * shape.hidden + 2 * shape.intermediate
    tables = (1 if shape.tied else 2) * shape.vocabulary
    norms = 2 * shape.layers + 1
    return shape.layers * (numbers + 4 * outputs) + 2 * shape.hidden * (tables + norms)


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
    context = model.max_context or min(shape.positions, MOST_CONTEXT)
    most = max(RESERVE_BYTES, total // RESERVE_PART)
    for rows, batched in _choices(model):
        rows, last = min(rows, batched), rows <= 1 or model.max_num_seqs > 0
        reserve = reserve_bytes(model, shape, rows, batched, context)
        base = weights + CONTEXT_BYTES + reserve
        allowed = min(total * share // 100, free) if share else base + model.kv_bytes
        blocks, needed = max(0, (allowed - base) // block), rows * shape.reaches + 2
        spare = min(blocks, needed)
        tokens = (blocks - spare) * model.block_size
        # By what the engine may hold, not by what happens to be free: kernels are compiled for one number of rows.
        whole = max(0, ((total * share // 100 if share else allowed) - base) // block - needed) * model.block_size
        enough = model.max_num_seqs > 0 or whole >= rows * LEAST_ROW_TOKENS
        if (reserve <= most and enough) or (last and batched <= (model.max_num_batched_tokens or LEAST_TOKENS)):
            break
    return CardPlan(
        total=total,
        share=share,
        allowed=allowed,
        weights=weights,
        context=CONTEXT_BYTES,
        reserve=reserve,
        spare=spare * block,
        kv=(blocks - spare) * block,
        rest=allowed - base - blocks * block,
        block=block,
        tokens=tokens,
        rows=rows,
        batched_tokens=batched,
        max_context=context,
    )


def reserve_bytes(model: ModelConfig, shape: ModelShape, rows: int, tokens: int, context: int) -> int:
    """Bytes of a card that come after KV; as the engine computes them from its own reading of the model.

    Args:
        model: its configuration.
        shape: of the model.
        rows: sequences in one step.
        tokens: tokens in one step.
        context: tokens of the longest context.
    """
    item, vocabulary = shape.item(model.dtype), shape.vocabulary
    attention = (3 * shape.heads + 2 * shape.kv_heads) * shape.width * item
    experts = shape.experts * (3 * shape.expert_width * item + 4 * shape.hidden)
    inner = shape.intermediate * (3 * item + (model.weights == "fp8"))
    token = STREAM_COPIES * shape.hidden * item + max(attention, inner, experts)
    table = 8 * shape.reaches * (min(context, shape.positions) // model.block_size + 1)
    partial = 4 * SPLITS * shape.heads * (shape.value_width + 1)
    tables, scores, lines = TABLE_COPIES * table, 4 * vocabulary, min(rows + SCORED_ROWS, tokens)
    prompts = tokens * token + lines * vocabulary * item + rows * (scores + tables + partial)
    recorded = rows * (token + vocabulary * item + scores + partial + tables)
    choices = (rows + 1) * (scores + vocabulary // 8 + 2 * table)
    return max(RESERVE_BYTES, int(MARGIN * prompts) + recorded + choices + LIBRARY_BYTES)


def _choices(model: ModelConfig) -> Iterator[tuple[int, int]]:
    """Rows and tokens of a step that are tried, the largest first; what the configuration gives is not varied."""
    given, budget = model.max_num_seqs, model.max_num_batched_tokens
    for rows in (given,) if given else _halves(MOST_ROWS, 1):
        for tokens in (budget,) if budget else _halves(MOST_TOKENS, LEAST_TOKENS):
            yield rows, tokens


def _halves(most: int, least: int) -> Iterator[int]:
    while most >= least:
        yield most
        most //= 2


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
