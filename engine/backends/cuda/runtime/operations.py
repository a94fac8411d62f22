"""What a decoder's step does on a device besides plain matrix products: one interface, two ways to compute it.

``engine.backends.cuda.kernels.operations`` launches the Triton kernels; ``engine.backends.cuda.runtime.simulated_ops``
has tensor operations, of fixed shapes and without a look at any number, so that on a CPU the same step can be recorded
and replayed as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.runtime.loop_state import LoopState, StepRows
from engine.backends.cuda.runtime.mixing import Mixing
from engine.backends.cuda.runtime.rows import number_field
from engine.core.kv.layout import FULL, Reach
from engine.model.layers.decoder import Decoder
from engine.model.layers.layers import Linear, RmsNorm
from engine.model.layers.rotary import Rotary
from engine.model.layers.routing import Router, Rule

Activation = Callable[[Tensor], Tensor]
"""What stands between the two maps of a gated MLP: rows ``(N, 2 I)`` to ``(N, I)``; the model's own object, which tells
an operation what to compute."""


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Keys and values of one layer: ``(blocks, block_size, kv_heads, dim)``; blocks may be further apart than that."""

    keys: Tensor
    values: Tensor
    """Values; in a latent layer the first numbers of the keys."""
    table: int = 0
    """Which of a row's block tables it uses."""
    reach: Reach = FULL
    latent: bool = False

    @property
    def heads(self) -> int:
        """Key-value heads."""
        return self.keys.shape[2]

    def write(self, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store tokens ``(N, kv_heads, dim)`` at ``slots`` (int64, counted from the layer's first token; negative:
        nowhere); no values for a latent layer."""
        for memory, part in ((self.keys, k), (self.values, v)):
            if part is not None:
                lines = _lines(memory)
                # What goes nowhere goes to the last line, which is of a block that nobody has.
                lines.index_copy_(0, slots.masked_fill(slots < 0, len(lines) - 1), part.flatten(1))


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """How heads of query and key are made ready in one layer."""

    cosines: Tensor
    """``(N, 1, width)``, as ``engine.model.layers.rotary`` makes them: the first ``width`` numbers of a head are
    rotated."""
    sines: Tensor
    """Sines of that shape, with the sign of the first half."""
    norms: tuple[RmsNorm, RmsNorm] | None = None
    """Norms of query heads and of key heads; None where heads are not normalised."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompt chunks of a step. Tensors have one entry a chunk; one of length 0 is not computed."""

    begins: Tensor
    """Index of the chunk's first token in the step."""
    lengths: Tensor
    starts: Tensor
    """Position of the first token in its sequence."""
    tables: tuple[Tensor, ...]
    """By each of the layout's tables, int64 ``(chunks, width)``."""
    spans: tuple[tuple[int, int], ...]
    """First token in the step, and length, as the host planned them."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Decoding rows that are computed in one pass with prompt chunks: the first tokens of the step, one a row."""

    lengths: Tensor
    """int64 or int32 ``(rows,)``, 0 for none."""
    tables: tuple[Tensor, ...]
    """By each of the layout's tables, int64 ``(rows, width)``."""


@dataclass(frozen=True, slots=True)
class ExpertMaps:
    """The experts of one layer: what ``engine.model.layers.experts`` computes, with all experts' maps of a kind
    together."""

    router: Router
    route: Rule
    """The router's."""
    gate_up: Tensor
    """``(E, 2 I, hidden)``."""
    down: Tensor
    """``(E, hidden, I)``."""
    gate_up_bias: Tensor | None
    """``(E, 2 I)``."""
    down_bias: Tensor | None
    """``(E, hidden)``."""
    activation: Activation
    weigh_inputs: bool
    """A row is multiplied by its weight before an expert, not after."""


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """What all rows ask of the choice of their tokens."""

    words: Tensor
    """int64 ``(NUM_FIELDS, rows)``: the columns of ``engine.backends.cuda.runtime.rows``."""
    counts: Tensor
    """int32 ``(lines, vocab)``: 0 for an id that did not occur, else 1 and its occurrences in the output."""
    masks: Tensor
    """int32 ``(lines, words)``: bit ``i % 32`` of word ``i // 32`` allows token ``i``; further ids are forbidden."""
    bias_ids: Tensor
    """int32 ``(lines, MAX_LOGIT_BIASES)``: ids whose scores have a bias, as many as the row's words say; a row's
    line is its own."""
    biases: Tensor
    """float32, of the same shape."""

    def number(self, name: str) -> Tensor:
        """Column of a number of ``isolation.ipc.sampling`` that is a float, as float64."""
        return self.words[number_field(name)].view(torch.float64)

    def integer(self, name: str) -> Tensor:
        """Column of a number of ``isolation.ipc.sampling`` that is an integer."""
        return self.words[number_field(name)]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step chose, one entry a line of its logits."""

    tokens: Tensor
    """int64; ``FAILED`` where the logits were not finite."""
    logprobs: Tensor
    """float32: of the chosen tokens, under the model's own distribution within the mask, for rows that asked."""
    top_ids: Tensor
    """int32 ``(M, MAX_TOP_LOGPROBS)``: the likeliest first, as many as the row asked for; -1 behind them, and in place
    of what a mask forbids."""
    top_logprobs: Tensor
    """float32, of the same shape."""

    def part(self, begin: int, end: int) -> Sampled:
        """Some of the lines."""
        own = slice(begin, end)
        return Sampled(self.tokens[own], self.logprobs[own], self.top_ids[own], self.top_logprobs[own])


class Attend(Protocol):
    """Attention of one step's tokens; what the layers share was computed when it was made."""

    def __call__(self, q: Tensor, layer: KvLayer, rule: AttentionRule, /) -> Tensor:
        """Attend with ``q`` of shape ``(N, heads, D)``; gives ``(N, heads * value_dim)``."""
        ...


class Operations(Protocol):
    """The step's operations. Nothing here reads a tensor's content on the host."""

    exact: bool
    """Whether each computes a row in one order of roundings, whatever is beside it; products of matrices are not among
    them."""
    mixing: Mixing
    """When one pass of prompts and rows is better than two."""

    @property
    def has_palettes(self) -> bool:
        """Whether products are taken from palettes."""
        ...

    def take_palettes(self, model: Decoder, /) -> str:
        """Lay matrices in palettes beside those of the model, which is filled, and take products from them where that
        is faster. Says what was chosen."""
        ...

    def launch_palettes(self, model: Decoder, /) -> None:
        """Launch every form that ``take_palettes`` can choose, on memory without contents."""
        ...

    def norm(self, x: Tensor, residual: Tensor | None, norm: RmsNorm, /) -> Tensor:
        """A norm of ``x`` ``(N, size)``; with a residual ``x`` is added to it in place, and the sum is normalised."""
        ...

    def rotations(self, rotary: Rotary, positions: Tensor, dtype: torch.dtype, /) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of positions (int64, ``(N,)``), each ``(N, 1, width)``."""
        ...

    def fuses(self, x: Tensor, /) -> bool:
        """Whether products of so many rows, of this dtype, are best taken together with what surrounds them: a norm in
        front, the gate or the addition to the residual stream behind. What the next three compute is the same with and
        without."""
        ...

    def project(self, x: Tensor, linear: Linear, norm: RmsNorm | None, /) -> Tensor:
        """Rows ``(N, size)``, normalised unless there is no norm, through a map; a fresh tensor."""
        ...

    def project_gated(self, x: Tensor, linear: Linear, norm: RmsNorm | None, activation: Activation, /) -> Tensor:
        """Rows, normalised unless there is no norm, through a gated MLP's first map and its activation."""
        ...

    def project_onto(self, x: Tensor, linear: Linear, stream: Tensor, /) -> None:
        """Rows through a map, added to ``stream`` in place."""
        ...

    def turn_and_write(self, qkv: Tensor, layer: KvLayer, slots: Tensor, turn: RopeInputs, /) -> Tensor:
        """Normalise and rotate heads ``(N, H + 2 K, D)``, write keys and values to ``slots`` (int64, counted from the
        layer's first token; negative: nowhere); gives the queries ``(N, H, D)``."""
        ...

    def decoding(self, lengths: Tensor, tables: tuple[Tensor, ...], /) -> Attend:
        """Attention of one token a row: ``lengths`` int64 or int32 ``(rows,)``, 0 for none; ``tables`` by each of the
        layout's tables, int64 ``(rows, width)``. Rows of no length get zeros."""
        ...

    def prefilling(self, chunks: Chunks, beside: Beside | None = None, /) -> Attend:
        """Attention of prompt chunks, and of decoding rows in front of them if there are some; tokens of chunks of no
        length get anything finite or not, rows of no length zeros."""
        ...

    def gate(self, x: Tensor, activation: Activation, /) -> Tensor:
        """The activation of rows ``(N, 2 I)``."""
        ...

    def experts(self, x: Tensor, maps: ExpertMaps, /) -> Tensor:
        """Rows ``(N, hidden)`` through the experts that the router chooses for them, weighed and added up in float32
        in the order of experts; a fresh tensor of the dtype of ``x``."""
        ...

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns, /) -> Sampled:
        """A token for each line of logits, counted in ``columns.counts`` where its row has penalties. ``rows`` says
        whose line it is, ``positions`` where the token will stand. No row with penalties has two lines."""
        ...

    def begin_step(self, state: LoopState, bucket: int, /) -> StepRows:
        """What the first ``bucket`` lanes compute: rows that are not done and whose blocks are their own, as far as the
        step reads or writes them. Entries of block tables that the step does not read may be anything."""
        ...

    def end_step(self, state: LoopState, begun: StepRows, sampled: Sampled, /) -> None:
        """Advance the rows by what was chosen, end those that are at their end, and write the line of the rings."""
        ...

    def faults(self, tables: Tensor, expected: Tensor, seen: tuple[Tensor, Tensor], stamps: Tensor, /) -> Tensor:
        """Count, for each row, the entries from the first to before the second of ``seen`` (int64, one a row) that
        name a missing block or one with another stamp than is expected."""
        ...

    def zero(self, memory: Tensor, blocks: Tensor, /) -> None:
        """Make whole blocks (int64 ids) zero; the first axis of ``memory`` counts them."""
        ...


def _lines(memory: Tensor) -> Tensor:
    """A layer's tokens, ``(slots, heads * dim)``: slots are counted from the layer's first token, those of other layers
    between two blocks included."""
    blocks, _, heads, dim = memory.shape
    slots = (memory.stride(0) // memory.stride(1)) * (blocks - 1) + memory.shape[1]
    return memory.as_strided((slots, heads * dim), (memory.stride(1), 1))
