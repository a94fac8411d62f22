"""The device's operations as Triton kernels: what ``engine.backends.cuda.runtime`` calls on a GPU.

What the layers of a step share (maps of tiles, room for partial results) is made once a step. Whatever is allocated
here while a graph is recorded lies in the graph's own pool.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels import (
    activation,
    blocks,
    gemv,
    grouped,
    norm,
    palette_choice,
    prefill_attention,
    prefill_pipelined,
    rope,
    routing,
    sampler,
    scaled_rows,
    steps,
    tile_map,
)
from engine.backends.cuda.kernels.decode_attention import Partials, counters, decode_attention, joins
from engine.backends.cuda.kernels.lines import Map
from engine.backends.cuda.kernels.palette import PaletteMap
from engine.backends.cuda.kernels.tile_sizes import Configuration, configuration
from engine.backends.cuda.kernels.triton_common import power_of_two
from engine.backends.cuda.runtime import simulated_steps
from engine.backends.cuda.runtime.loop_state import LoopState, StepRows
from engine.backends.cuda.runtime.operations import (
    Activation,
    Attend,
    Beside,
    Chunks,
    ExpertMaps,
    KvLayer,
    RopeInputs,
    Sampled,
    SamplingColumns,
)
from engine.core.kv.layout import Reach
from engine.model.families.gpt_oss import ClampedSwiGlu
from engine.model.layers.blocks import GatedMlp
from engine.model.layers.decoder import Decoder
from engine.model.layers.layers import Linear, RmsNorm, gelu_mul, silu_mul
from engine.model.layers.rotary import Rotary
from engine.model.layers.scaled import E4M3, FEW, multiply_rounded
from isolation.ipc.messages import MAX_TOP_LOGPROBS

LEAST_CHUNKS = 16
"""Room for chunks is a power of two and no less: kernels are compiled by that number, so there are few of them."""


class KernelOperations:
    """See ``engine.backends.cuda.runtime.operations.Operations``."""

    exact = True

    def __init__(self, heads: tuple[int, int], vocab_size: int, chosen: Configuration, processors: int) -> None:
        """``heads``: of queries, and of keys and values; ``processors``: the GPU's multiprocessors."""
        self._heads, self._kv_heads = heads
        self._vocab_size = vocab_size
        self._chosen = chosen
        self.mixing = chosen.mixing
        self._processors = processors
        self._scratch: gemv.Scratch | None = None
        self._arrived: Tensor | None = None
        self._palettes: palette_choice.PaletteChoice | None = None

    @property
    def has_palettes(self) -> bool:
        """Whether products are taken from palettes."""
        return self._palettes is not None

    def take_palettes(self, model: Decoder, measure: palette_choice.Measure = palette_choice.replayed) -> str:
        """Lay palettes beside the matrices of gated MLPs, and take products from them where that is faster; see
        ``palette_choice``. Says what was chosen. Call it with filled weights, before anything is recorded."""
        matrices = self._room_for(_mlp_matrices(model))
        if self._scratch is None:
            return "palettes: no matrix can have one"
        found = palette_choice.PaletteChoice(self._chosen.few)
        found.choose(matrices, self._scratch, measure)
        self._palettes = found if found.palettes else None
        return str(found)

    def launch_palettes(self, model: Decoder) -> None:
        """Launch every form that ``take_palettes`` can choose, on memory without contents."""
        matrices = self._room_for(_mlp_matrices(model))
        if self._scratch is not None:
            palette_choice.launch_all(matrices, self._scratch)

    def _room_for(self, matrices: list[palette_choice.Matrix]) -> list[palette_choice.Matrix]:
        """Take scratch for all ways to multiply them."""
        if matrices:
            needed = palette_choice.most_numbers(matrices, self._chosen.few)
            if self._scratch is None or len(self._scratch.sums) < needed:
                self._scratch = gemv.Scratch.empty(needed, matrices[0].weight.device)
        return matrices

    def norm(self, x: Tensor, residual: Tensor | None, layer: RmsNorm) -> Tensor:
        """A norm with the residual stream's addition in front of it."""
        out = torch.empty_like(x)
        norm.rms_norm(x, residual, layer.weight, out, eps=layer.eps, offset=layer.offset)
        return out

    def rotations(self, rotary: Rotary, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines in one launch."""
        return rope.rotations(rotary, positions, dtype) if self._chosen.joined else rotary.tables(positions, dtype)

    def fuses(self, x: Tensor) -> bool:
        """Few rows of bfloat16: a step of them waits for weights alone."""
        return x.dtype == torch.bfloat16 and 0 < len(x) <= self._chosen.few.most

    def project(self, x: Tensor, linear: Linear, norm: RmsNorm | None) -> Tensor:
        """Norm and product in one launch where the rows are few."""
        if not self._multiplies(x, linear):
            if self._rounds(x, linear):
                return self._multiply_rounded(x, linear, norm)
            return linear(x if norm is None else self.norm(x, None, norm))
        assert linear.weight is not None
        out = x.new_empty(len(x), len(linear.weight))
        self._multiply(x, linear, norm, out)
        return out

    def project_gated(self, x: Tensor, linear: Linear, norm: RmsNorm | None, activation: Activation) -> Tensor:
        """Norm, product and gate in one launch where the rows are few."""
        gate = _gate(activation)
        if gate is None or gate.kind == "clamped" or not self._multiplies(x, linear):
            return self.gate(self.project(x, linear, norm), activation)
        assert linear.weight is not None
        out = x.new_empty(len(x), len(linear.weight) // 2)
        self._multiply(x, linear, norm, out, gate=gate)
        return out

    def project_onto(self, x: Tensor, linear: Linear, stream: Tensor) -> None:
        """Product and sum in one launch where the rows are few."""
        if self._multiplies(x, linear):
            self._multiply(x, linear, None, stream, adds=True)
        else:
            stream.add_(self.project(x, linear, None))

    def _multiplies(self, x: Tensor, linear: Linear) -> bool:
        """Whether the product is taken by the kernel for few rows."""
        known = linear.weight is not None and (linear.weight.dtype == x.dtype or linear.scale is not None)
        return known and linear.delta is None and self.fuses(x) and x.shape[1] % gemv.ALIGNED == 0

    def _rounds(self, x: Tensor, linear: Linear) -> bool:
        """Whether rows are rounded to 8 bits, and torch multiplies them so."""
        scaled = linear.weight is not None and linear.scale is not None
        return scaled and len(x) > FEW and x.dtype == torch.bfloat16

    def _multiply_rounded(self, x: Tensor, linear: Linear, norm: RmsNorm | None) -> Tensor:
        """The product of rows that are rounded behind their norm."""
        assert linear.weight is not None
        assert linear.scale is not None
        numbers = x.new_empty(x.shape, dtype=E4M3)
        row_scale = x.new_empty(len(x), 1, dtype=torch.float32)
        gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        offset = norm is not None and norm.offset
        scaled_rows.round_rows(x, numbers, row_scale, gain=gain, eps=eps, offset=offset)
        return multiply_rounded(numbers, row_scale, linear.weight, linear.scale, linear.bias, x.dtype)

    def _multiply(
        self,
        x: Tensor,
        linear: Linear,
        norm: RmsNorm | None,
        out: Tensor,
        *,
        gate: activation.Gate | None = None,
        adds: bool = False,
    ) -> None:
        assert linear.weight is not None
        few = self._chosen.few if linear.scale is None else self._chosen.few_scaled
        needed = gemv.numbers_needed(few, out.shape[1], x.shape[1], gate=gate is not None)
        if self._scratch is None or len(self._scratch.sums) < needed:
            # Larger ones come with the first step, before any is recorded.
            self._scratch = gemv.Scratch.empty(needed, x.device)
        gain, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        offset = norm is not None and norm.offset
        taken = None
        if self._palettes is not None and linear.scale is None and x.is_contiguous():
            taken = self._palettes.of(linear.weight, len(x), gate=gate is not None)
        if taken is not None:
            packed = PaletteMap(taken[0], linear.bias, gain, eps)
            palette_choice.multiply(x, packed, out, self._scratch, taken[1], gate=gate, offset=offset, adds=adds)
            return
        given = Map(linear.weight, linear.bias, gain, eps, linear.scale)
        gemv.few_rows(x, given, out, self._scratch, few, gate=gate, offset=offset, adds=adds)

    def turn_and_write(self, qkv: Tensor, layer: KvLayer, slots: Tensor, turn: RopeInputs) -> Tensor:
        """Norms, rotation and the write into the cache, in one pass."""
        q = qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * layer.heads, qkv.shape[2])
        early = self._chosen.few.early and self.fuses(qkv)
        rope.rope_and_write(qkv, q, layer, slots, turn, early=early)
        return q

    def decoding(self, lengths: Tensor, tables: tuple[Tensor, ...]) -> Attend:
        """One token a row: contexts split, programs as many as the bucket says."""
        return self._decoding(lengths, tables)

    def _decoding(self, lengths: Tensor, tables: tuple[Tensor, ...]) -> _Decoding:
        programs = self._chosen.programs(len(lengths), self._kv_heads, self._processors)
        if self._arrived is None:
            self._arrived = counters(self._heads, lengths.device)
        return _Decoding(self._chosen, programs, lengths.int(), tables, self._arrived)

    def prefilling(self, chunks: Chunks, beside: Beside | None = None) -> Attend:
        """All chunks in one launch a layer, and rows by those of a decoding step."""
        rows = None if beside is None else self._decoding(beside.lengths, beside.tables)
        return _Prefilling(self._chosen, (self._heads, self._kv_heads), chunks, rows)

    def gate(self, x: Tensor, kind: Activation) -> Tensor:
        """The activation in one pass, or by itself where no kernel knows it."""
        gate = _gate(kind)
        if gate is None:
            return kind(x)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        activation.activate(x, gate, out)
        return out

    def experts(self, x: Tensor, maps: ExpertMaps) -> Tensor:
        """Pairs of row and expert sorted by expert, and multiplied in tiles of one expert each."""
        rows, top, tile = len(x), maps.route.top, self._chosen.experts
        routed = routing.empty(rows, top, x.device)
        routing.route(maps.router.logits(x), maps.route, routed)
        dealt = grouped.Dealt.empty(rows, top, len(maps.down), tile.rows, x.device)
        grouped.deal(routed, tile.rows, dealt)
        if self._chosen.takes_torch(maps.gate_up, top, rows):
            return self._experts_by_torch(x, maps, routed, dealt)
        inner = x.new_empty(rows * top, maps.gate_up.shape[1])
        wide = grouped.ExpertMap(maps.gate_up, maps.gate_up_bias)
        before, after = ("before", "no") if maps.weigh_inputs else ("no", "after")
        grouped.multiply(x, wide, routed, dealt, inner, tile=tile, weigh=before)
        # Given back before parts are taken: a step that torch multiplies needs as much then as one with fewer tokens.
        inner = self.gate(inner, maps.activation)
        parts = x.new_empty(rows * top, x.shape[1], dtype=torch.float32)
        narrow = grouped.ExpertMap(maps.down, maps.down_bias)
        grouped.multiply(inner, narrow, routed, dealt, parts, tile=tile, weigh=after)
        out = torch.empty_like(x)
        grouped.add_up(parts, routed, out)
        return out

    def _experts_by_torch(self, x: Tensor, maps: ExpertMaps, routed: routing.Routed, dealt: grouped.Dealt) -> Tensor:
        """Experts by torch's products of groups: rows are gathered by expert, and what comes out is rounded once more
        than by our own, as the model's own experts do."""
        pairs = routed.experts.numel()
        rows = x.new_empty(pairs, x.shape[1])
        grouped.gather(x, routed, dealt.order, rows, weigh=maps.weigh_inputs)
        experts = None
        if maps.gate_up_bias is not None or maps.down_bias is not None:
            experts = routed.experts.flatten().index_select(0, dealt.order.long()).long()
        wide = grouped.ExpertMap(maps.gate_up, maps.gate_up_bias)
        inner = self.gate(grouped.multiply_by_torch(rows, wide, dealt.counts, experts), maps.activation)
        narrow = grouped.ExpertMap(maps.down, maps.down_bias)
        parts = grouped.multiply_by_torch(inner, narrow, dealt.counts, experts)
        out = torch.empty_like(x)
        grouped.add_up(parts, routed, out, order=dealt.order, weigh=not maps.weigh_inputs)
        return out

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns) -> Sampled:
        """A token for each line, by the request's own counter generator."""
        out = sampler.Chosen.empty(len(rows), self._vocab_size, MAX_TOP_LOGPROBS, logits.device)
        sampler.sample(logits, rows, positions, columns, out, self._chosen.sampler)
        return Sampled(out.tokens.long(), out.logprobs, out.top_ids, out.top_logprobs)

    def begin_step(self, state: LoopState, bucket: int) -> StepRows:
        """What lanes compute, in one launch."""
        if self._chosen.joined and steps.begins(state):
            return steps.begin_step(state, bucket)
        return simulated_steps.begin_step(self.faults, state, bucket)

    def end_step(self, state: LoopState, begun: StepRows, sampled: Sampled) -> None:
        """Rows advance, in one launch."""
        if self._chosen.joined and steps.begins(state):
            steps.end_step(state, begun, sampled)
        else:
            simulated_steps.end_step(state, begun, sampled)

    def faults(self, tables: Tensor, expected: Tensor, seen: tuple[Tensor, Tensor], stamps: Tensor) -> Tensor:
        """Entries whose block is not the one that is expected."""
        found = torch.empty(len(tables), dtype=torch.int32, device=tables.device)
        begins, ends = seen
        blocks.compare_stamps(tables, expected, (begins.int(), ends.int()), stamps, found)
        return found

    def zero(self, memory: Tensor, ids: Tensor) -> None:
        """Whole blocks."""
        blocks.zero_blocks(memory, ids)


class _Decoding:
    """Attention of one token a row: a map of tiles for each reach that layers have, and room for all of them."""

    def __init__(
        self, chosen: Configuration, programs: int, lengths: Tensor, tables: tuple[Tensor, ...], arrived: Tensor
    ) -> None:
        self._shape, self._join, self._early = chosen.decode, chosen.joined, chosen.few.early
        self._programs = programs
        self._lengths = lengths
        self._tables = tables
        self._arrived = arrived
        self._maps: dict[Reach, tile_map.DecodeMap] = {}
        self._partials: Partials | None = None

    def __call__(self, q: Tensor, layer: KvLayer, rule: AttentionRule) -> Tensor:
        out = q.new_empty(*q.shape[:2], layer.values.shape[3])
        self.attend(q, layer, rule, out)
        return out.flatten(1)

    def attend(self, q: Tensor, layer: KvLayer, rule: AttentionRule, out: Tensor) -> None:
        """Attend with the first rows of ``q``, one a row of the step, and write those of ``out``."""
        rows, heads, width = len(self._lengths), q.shape[1], layer.values.shape[3]
        device, q, out = q.device, q[:rows], out[:rows]
        map_ = self._maps.get(layer.reach)
        joined = self._join and joins(rows, heads // layer.heads, width)
        if map_ is None and not joined:
            map_ = tile_map.DecodeMap.empty(rows, self._programs, self._shape, device)
            tile_map.map_decode(self._lengths, layer.reach, self._shape, map_)
            self._maps[layer.reach] = map_
        if self._partials is None:
            self._partials = Partials.empty(rows, heads, width, self._shape, device, self._arrived)
        placed = self._tables[layer.table], self._lengths
        decode_attention(q, layer, placed, (map_, self._shape, self._partials), rule, out, early=self._early)


class _Prefilling:
    """Attention of prompt chunks: a map of tiles for each number of queries that a tile of some layers has. Rows in
    front of them are computed in the same memory, by launches of their own."""

    def __init__(self, chosen: Configuration, heads: tuple[int, int], chunks: Chunks, beside: _Decoding | None) -> None:
        count, device = len(chunks.lengths), chunks.lengths.device
        room = power_of_two(count, LEAST_CHUNKS)
        begins, lengths, starts = torch.zeros(3, room, dtype=torch.int32, device=device)
        for target, source in ((begins, chunks.begins), (lengths, chunks.lengths), (starts, chunks.starts)):
            target[:count] = source
        self._placed = []
        for source in chunks.tables:
            table = source.new_zeros(room, source.shape[1])
            table[:count] = source
            self._placed.append(prefill_attention.ChunkPlaces(begins, lengths, starts, table))
        self._chosen, self._heads, self._beside = chosen, heads, beside
        self._tokens = sum(length for _, length in chunks.spans)
        self._lengths = lengths
        self._maps: dict[int, tile_map.ChunkMap] = {}

    def __call__(self, q: Tensor, layer: KvLayer, rule: AttentionRule) -> Tensor:
        # Tokens of a chunk that is not computed keep zeros: what comes of them goes nowhere.
        out = q.new_zeros(*q.shape[:2], layer.values.shape[3])
        placed, shape, pipelined = self._placed[layer.table], self._chosen.prefill, self._chosen.pipelined
        if pipelined is not None and prefill_pipelined.fits(q, layer, rule):
            mapped = self._mapped(pipelined.lines), pipelined
            prefill_pipelined.prefill_pipelined(q, layer, placed, mapped, rule, out)
        else:
            mapped_plain = self._mapped(shape.lines), shape
            prefill_attention.prefill_attention(q, layer, placed, mapped_plain, rule, out)
        if self._beside is not None:
            self._beside.attend(q, layer, rule, out)
        return out.flatten(1)

    def _mapped(self, lines: int) -> tile_map.ChunkMap:
        _, _, queries = prefill_attention.heads_together(*self._heads, lines)
        found = self._maps.get(queries)
        if found is None:
            found = tile_map.ChunkMap.empty(self._tokens, len(self._lengths), queries, self._lengths.device)
            tile_map.map_chunks(self._lengths, queries, found)
            self._maps[queries] = found
        return found


def kernel_operations(
    heads: tuple[int, int],
    dim: int,
    vocab_size: int,
    device: torch.device,
    architecture: str = "",
    *,
    separate: bool = False,
) -> KernelOperations:
    """The operations for heads like these, the widest of ``dim`` numbers, on this device; where that is no GPU those of
    an architecture (one without a row of its own when it is not named), for the interpreter and for the compiler.
    ``separate``: products are torch's, and nothing is computed together with anything else, for comparison."""
    processors = 4
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        architecture, processors = f"sm_{properties.major}{properties.minor}", properties.multi_processor_count
    chosen = configuration(architecture, dim)
    if separate:
        chosen = replace(chosen, few=replace(chosen.few, most=0), joined=False)
    return KernelOperations(heads, vocab_size, chosen, processors)


def _mlp_matrices(model: Decoder) -> list[palette_choice.Matrix]:
    """Matrices of gated MLPs that a step of few rows takes together with the norm in front and the sum behind."""
    found = []
    for part in (part for layer in model.layers for part in layer.sublayers):
        block = part.block
        if not isinstance(block, GatedMlp) or part.after is not None or part.share != 1.0:
            continue
        gate, wide, narrow = _gate(block.activation), block.gate_up, block.down.linear
        if gate is None or gate.kind == "clamped" or wide.delta is not None or narrow.delta is not None:
            continue
        gain, offset = (None, False) if part.before is None else (part.before.weight, part.before.offset)
        found.append(palette_choice.Matrix(wide.loaded, gate, gain, wide.bias, offset))
        found.append(palette_choice.Matrix(narrow.loaded, None, None, narrow.bias))
    return [one for one in found if one.weight.dtype != E4M3 and palette_choice.fits(one.weight)]


def _gate(kind: Activation) -> activation.Gate | None:
    """What the kernel knows an activation by."""
    if kind is silu_mul:
        return activation.Gate("silu")
    if kind is gelu_mul:
        return activation.Gate("gelu")
    if isinstance(kind, ClampedSwiGlu):
        return activation.Gate("clamped", kind.alpha, kind.limit)
    return None
