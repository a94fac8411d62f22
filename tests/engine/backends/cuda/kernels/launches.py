"""Launches at the shapes of served models: what test_compile compiles. Nothing is computed; memory is ``meta``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels import (
    activation,
    adapters,
    blocks,
    decode_attention,
    gemv,
    grouped,
    norm,
    palette,
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
from engine.backends.cuda.kernels.lines import LineCut, Map
from engine.backends.cuda.kernels.operations import KernelOperations
from engine.backends.cuda.kernels.palette import Palette, PaletteMap
from engine.backends.cuda.kernels.tile_sizes import configuration
from engine.backends.cuda.runtime.loop_state import LoopState
from engine.backends.cuda.runtime.operations import Chunks, ExpertMaps, KvLayer, RopeInputs, Sampled, SamplingColumns
from engine.backends.cuda.runtime.rows import NUM_FIELDS, RowLayout
from engine.backends.cuda.runtime.tables import Tables
from engine.core.kv.layout import FULL, KvGroup, Reach
from engine.model.families.gpt_oss import ClampedSwiGlu
from engine.model.layers.layers import Linear, Memory, OffsetRmsNorm, RmsNorm, gelu_mul, silu_mul
from engine.model.layers.rotary import RopeScaling, Rotary
from engine.model.layers.routing import GroupedSigmoid, Router, Softmax, SoftmaxOfTop
from engine.model.layers.scaled import E4M3
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES

ROWS, TOKENS, BLOCKS, VOCAB = 64, 256, 1_000, 128_256
META = torch.device("meta")
ARCHITECTURE = f"sm_{sys.argv[1]}" if sys.argv[1:] and sys.argv[1].isdigit() else "sm_90"
PROCESSORS = 132
BF16 = torch.bfloat16


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Something with a shape, strides and a dtype."""
    return torch.empty(shape, dtype=dtype, device=META)


def whole(*shape: int) -> Tensor:
    """The same of int32."""
    return tensor(*shape, dtype=torch.int32)


def attention(
    kv_heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    *,
    latent: bool = False,
    cap: float = 0.0,
    sinks: bool = False,
    reach: Reach = FULL,
    rows: int = ROWS,
) -> Callable[[], None]:
    """Both kinds of attention of one layer, and the maps in front of them."""

    def start() -> None:
        heads = kv_heads * group
        keys = tensor(BLOCKS, 16, kv_heads, key_dim)
        values = keys[..., :value_dim] if latent else tensor(BLOCKS, 16, kv_heads, value_dim)
        layer = KvLayer(keys, values, reach=reach, latent=latent)
        rule = AttentionRule(key_dim**-0.5, cap, tensor(heads) if sinks else None)
        chosen = configuration(ARCHITECTURE, max(key_dim, value_dim))
        shape = chosen.decode
        programs = chosen.programs(rows, kv_heads, PROCESSORS)
        map_ = tile_map.DecodeMap.empty(rows, programs, shape, META)
        lengths, tables = whole(rows), whole(rows, 512)
        tile_map.map_decode(lengths, reach, shape, map_)
        partials = decode_attention.Partials.empty(rows, heads, value_dim, shape, META)
        for dealt in (map_, None) if decode_attention.joins(rows, group, value_dim) else (map_,):
            decode_attention.decode_attention(
                tensor(rows, heads, key_dim),
                layer,
                (tables, lengths),
                (dealt, shape, partials),
                rule,
                tensor(rows, heads, value_dim),
            )
        _, _, queries = prefill_attention.heads_together(heads, kv_heads, chosen.prefill.lines)
        chunk_map = tile_map.ChunkMap.empty(TOKENS, 4, queries, META)
        tile_map.map_chunks(whole(4), queries, chunk_map)
        chunks = prefill_attention.ChunkPlaces(whole(4), whole(4), whole(4), whole(4, 512))
        prefill_attention.prefill_attention(
            tensor(TOKENS, heads, key_dim),
            layer,
            chunks,
            (chunk_map, chosen.prefill),
            rule,
            tensor(TOKENS, heads, value_dim),
        )

    return start


def pipelined() -> None:
    """Prompts of Llama 3.1 8B by the form for sm_90, over a layer's part of memory that holds several."""
    memory = tensor(BLOCKS, 4 * 16, 8, 128)
    layer, shape = KvLayer(memory[:, 16:32], memory[:, 16:32]), prefill_pipelined.PipelinedShape()
    _, _, queries = prefill_attention.heads_together(32, 8, shape.lines)
    map_ = tile_map.ChunkMap.empty(TOKENS, 4, queries, META)
    chunks = prefill_attention.ChunkPlaces(whole(4), whole(4), whole(4), tensor(4, 512, dtype=torch.int64))
    q, rule = tensor(TOKENS, 32, 128), AttentionRule(128**-0.5)
    assert prefill_pipelined.fits(q, layer, rule)
    prefill_pipelined.prefill_pipelined(q, layer, chunks, (map_, shape), rule, tensor(TOKENS, 32, 128))


def rows() -> None:
    """Norms, gates and rotations of Llama 3.1 8B and of Qwen3."""
    x, out = tensor(TOKENS, 4_096), tensor(TOKENS, 4_096)
    norm.rms_norm(x, tensor(TOKENS, 4_096), tensor(4_096), out, eps=1e-5)
    norm.rms_norm(x, None, tensor(4_096), out, eps=1e-5, offset=True)
    for kind in activation.KINDS:
        activation.activate(tensor(TOKENS, 28_672), activation.Gate(kind), tensor(TOKENS, 14_336))  # type: ignore[arg-type]
    layer = KvLayer(tensor(BLOCKS, 16, 8, 128), tensor(BLOCKS, 16, 8, 128))
    slots, head = tensor(TOKENS, dtype=torch.int64), RmsNorm(128, 1e-6, Memory(BF16, META))
    for norms in (None, (head, head)):
        turn = RopeInputs(tensor(TOKENS, 1, 128), tensor(TOKENS, 1, 128), norms)
        rope.rope_and_write(tensor(TOKENS, 48, 128), tensor(TOKENS, 32, 128), layer, slots, turn)


def few_rows() -> None:
    """The four products of a layer of Llama 3.1 8B and its logits, as a step of eight rows computes them; biases."""
    shape = configuration(ARCHITECTURE, 128).few
    scratch = gemv.Scratch(tensor(1 << 24, dtype=torch.float32), whole(gemv.MOST_COUNTERS))
    gain = tensor(4_096)
    for outputs, size, normed, gate in (
        (6_144, 4_096, True, None),
        (4_096, 4_096, False, None),
        (14_336, 4_096, True, activation.Gate("silu")),
        (4_096, 14_336, False, None),
        (VOCAB, 4_096, True, None),
    ):
        weight = tensor(outputs * (1 if gate is None else 2), size)
        for bias in (None, tensor(len(weight))):
            given = Map(weight, bias, gain if normed else None, 1e-5)
            adds = outputs == 4_096
            gemv.few_rows(tensor(8, size), given, tensor(8, outputs), scratch, shape, gate=gate, adds=adds)
            # A100 fetches nothing ahead, and starts no kernel before the one in front has ended.
            for early in () if ARCHITECTURE == "sm_80" else (False, True):
                one = replace(shape, alone=LineCut(fetched=2_048), early=early)
                gemv.few_rows(tensor(1, size), given, tensor(1, outputs), scratch, one, gate=gate, adds=adds)


def scaled() -> None:
    """The four products of a layer of Llama 3.1 8B with matrices in 8 bits, of eight rows and of one; rows of a prompt
    rounded, as wide as its widest and as Llama 3.1 70B's."""
    shape = configuration(ARCHITECTURE, 128).few_scaled
    scratch = gemv.Scratch(tensor(1 << 24, dtype=torch.float32), whole(gemv.MOST_COUNTERS))
    gain = tensor(4_096)
    for outputs, size, normed, gate in (
        (6_144, 4_096, True, None),
        (4_096, 4_096, False, None),
        (14_336, 4_096, True, activation.Gate("silu")),
        (4_096, 14_336, False, None),
    ):
        lines, adds = outputs * (1 if gate is None else 2), outputs == 4_096
        weight, scale = tensor(lines, size, dtype=E4M3), tensor(lines, dtype=torch.float32)
        given = Map(weight, None, gain if normed else None, 1e-5, scale)
        for rows_, cut in (
            (8, shape),
            (1, replace(shape, alone=LineCut(8, 8))),
            (1, replace(shape, alone=LineCut(16, 4, at_once=8))),
        ):
            gemv.few_rows(tensor(rows_, size), given, tensor(rows_, outputs), scratch, cut, gate=gate, adds=adds)
    for size in (4_096, 14_336, 28_672):
        for known in (None, tensor(size)):
            out, scales = tensor(TOKENS, size, dtype=E4M3), tensor(TOKENS, 1, dtype=torch.float32)
            scaled_rows.round_rows(tensor(TOKENS, size), out, scales, gain=known, eps=1e-5)


def palettes() -> None:
    """Both products of an MLP of Llama 3.1 8B from palettes, one row, eight and sixteen, in all ways."""
    for cut in (*palette_choice.ONE_ROW, *palette_choice.SEVERAL_ROWS):
        scratch = gemv.Scratch(tensor(1 << 24, dtype=torch.float32), whole(gemv.MOST_COUNTERS))
        for outputs, size, gate in ((14_336, 4_096, activation.Gate("silu")), (4_096, 14_336, None)):
            lines = outputs * (1 if gate is None else 2)
            given = PaletteMap(Palette.empty(lines, size, 1, META), None, None if gate is None else tensor(size), 1e-5)
            for rows in (1, 8, 16):
                x, out = tensor(rows, size), tensor(rows, outputs)
                palette_choice.multiply(x, given, out, scratch, cut, gate=gate, adds=gate is None)
    palette.expand(Palette.empty(4_096, 14_336, 1, META), tensor(4_096, 14_336))


def palette_direct() -> None:
    """One of the forms whose language is Gluon."""
    scratch = gemv.Scratch(tensor(1 << 24, dtype=torch.float32), whole(gemv.MOST_COUNTERS))
    given = PaletteMap(Palette.empty(4_096, 14_336, 1, META), None, None, 1e-5)
    cut = palette_choice.SEVERAL_ROWS[0]
    palette_choice.multiply(tensor(8, 14_336), given, tensor(8, 4_096), scratch, cut, adds=True)


def adapted() -> None:
    """Adapters of rank 16 and 64 beside the projections of Llama 3.1 8B: one fused of three, one of two."""
    tile = adapters.AdapterTile()
    groups = adapters.Groups.empty(ROWS, META)
    adapters.group_rows(whole(ROWS), groups)
    for inputs, pieces, rank in (
        (4_096, [(0, 4_096), (4_096, 1_024), (5_120, 1_024)], 16),
        (4_096, [(0, 14_336), (14_336, 14_336)], 64),
    ):
        given = adapters.SlotFactors.empty(64, inputs, pieces, rank, BF16, META, tile)
        sums = tensor(adapters.sums_needed(given, ROWS, tile), dtype=torch.float32)
        adapters.shrink(tensor(ROWS, inputs), groups, given, sums, tile)
        adapters.expand(groups, given, sums, tensor(ROWS, given.up.shape[1]), tile)


def experts() -> None:
    """DeepSeek-V3's routing, and the products of Qwen3-30B-A3B's experts."""
    bias = tensor(256, dtype=torch.float32)
    routing.route(tensor(TOKENS, 256), GroupedSigmoid(8, bias, 8, 4, True, 2.5), routing.empty(TOKENS, 8, META))
    routed = routing.empty(TOKENS, 8, META)
    routing.route(tensor(TOKENS, 128), Softmax(8, True), routed)
    tile = configuration(ARCHITECTURE, 128).experts
    dealt = grouped.Dealt.empty(TOKENS, 8, 128, tile.rows, META)
    grouped.deal(routed, tile.rows, dealt)
    inner = tensor(TOKENS * 8, 1_536)
    gate_up = grouped.ExpertMap(tensor(128, 1_536, 2_048))
    grouped.multiply(tensor(TOKENS, 2_048), gate_up, routed, dealt, inner, tile=tile)
    parts = tensor(TOKENS * 8, 2_048, dtype=torch.float32)
    down = grouped.ExpertMap(tensor(128, 2_048, 768))
    grouped.multiply(tensor(TOKENS * 8, 768), down, routed, dealt, parts, tile=tile, weigh="after")
    grouped.add_up(parts, routed, tensor(TOKENS, 2_048))
    for weigh in (False, True):
        grouped.gather(tensor(TOKENS, 2_048), routed, dealt.order, tensor(TOKENS * 8, 2_048), weigh=weigh)
        sums = tensor(TOKENS, 2_048)
        grouped.add_up(tensor(TOKENS * 8, 2_048), routed, sums, order=dealt.order, weigh=weigh)


def columns_of(words: torch.Tensor, lines: int) -> SamplingColumns:
    """What so many rows ask of the choice of their tokens."""
    biases = tensor(lines, MAX_LOGIT_BIASES, dtype=torch.float32)
    return SamplingColumns(words, whole(lines, VOCAB), whole(lines, 4_008), whole(lines, MAX_LOGIT_BIASES), biases)


def sampling(form: sampler.SamplerForm = sampler.PLAIN_FORM) -> None:
    """A step's choice with everything that a row may ask for, of Llama 3's vocabulary."""
    words = tensor(NUM_FIELDS, ROWS, dtype=torch.int64)
    columns = columns_of(words, 4)
    out = sampler.Chosen.empty(ROWS, VOCAB, 20, META)
    sampler.sample(tensor(ROWS, VOCAB), whole(ROWS), tensor(ROWS, dtype=torch.int64), columns, out, form)


def sampling_lean() -> None:
    """The same in few instructions."""
    sampling(sampler.LEAN_FORM)


def guards() -> None:
    """Blocks made zero, and tags."""
    blocks.zero_blocks(tensor(BLOCKS, 16, 8, 128), whole(32))
    tables = whole(ROWS, 512)
    expected = tensor(ROWS, 512, dtype=torch.int64)
    blocks.compare_stamps(tables, expected, (whole(ROWS), whole(ROWS)), tensor(BLOCKS, dtype=torch.int64), whole(ROWS))


def steps_around() -> None:
    """The beginning and the end of a step with three tables a row, and rotations."""
    groups = (KvGroup(FULL, 16), KvGroup(Reach("window", 128), 16), KvGroup(Reach("chunk", 64), 32))
    tables = Tables(groups, (512,) * 3, 512)
    layout = RowLayout(ROWS, ROWS, 4, tables.width)
    lines, long = layout.lines, torch.int64
    state = LoopState(
        layout=layout,
        tables=tables,
        fields=tensor(NUM_FIELDS, lines, dtype=long),
        stops=tensor(lines, 4, dtype=long),
        entries=tensor(lines, tables.width, dtype=long),
        expected=tensor(lines, tables.width, dtype=long),
        lanes=tensor(ROWS, dtype=long),
        firsts=tensor(3, dtype=long),
        stamps=tensor(BLOCKS, dtype=long),
        ring=tensor(64, ROWS, dtype=long),
        reports=whole(64, ROWS, 41),
        turn=tensor(1, dtype=long),
    )
    begun = steps.begin_step(state, ROWS)
    chosen = Sampled(tensor(ROWS, dtype=long), tensor(ROWS, dtype=torch.float32), whole(ROWS, 20), whole(ROWS, 20))
    steps.end_step(state, begun, replace(chosen, top_logprobs=tensor(ROWS, 20, dtype=torch.float32)))
    rope.rotations(Rotary(RopeScaling(), 128, META), tensor(ROWS, dtype=long), BF16)


def device() -> None:
    """A decoding step and a prompt of Llama 3.1 8B as the device backend launches them: its rows are 64-bit words."""
    run = KernelOperations((32, 8), VOCAB, configuration(ARCHITECTURE, 128), PROCESSORS)
    memory = tensor(BLOCKS, 32 * 16, 8, 128)
    layer = KvLayer(memory[:, 16:32], memory[:, 16:32])
    words, rule = tensor(ROWS, dtype=torch.int64), AttentionRule(128**-0.5)
    tables = tensor(ROWS, 512, dtype=torch.int64)
    run.decoding(words, (tables,))(tensor(ROWS, 32, 128), layer, rule)
    run.decoding(words[:8], (tables[:8],))(tensor(8, 32, 128), layer, rule)
    few = words[:3]
    chunks = Chunks(few, few, few, (tables[:3],), ((0, 100), (100, 100), (200, 56)))
    run.prefilling(chunks)(tensor(TOKENS, 32, 128), layer, rule)
    fields = tensor(NUM_FIELDS, ROWS, dtype=torch.int64)
    columns = columns_of(fields, ROWS)
    run.sample(tensor(ROWS, VOCAB), words, words, columns)
    run.faults(tables, tables, (words, words), tensor(BLOCKS, dtype=torch.int64))
    run.zero(memory, words)
    turn = RopeInputs(tensor(TOKENS, 1, 128), tensor(TOKENS, 1, 128))
    run.turn_and_write(tensor(TOKENS, 48, 128), layer, tensor(TOKENS, dtype=torch.int64), turn)
    run.norm(tensor(TOKENS, 4_096), tensor(TOKENS, 4_096), RmsNorm(4_096, 1e-5, Memory(BF16, META)))
    run.gate(tensor(TOKENS, 28_672), silu_mul)


def device_windows() -> None:
    """A decoding step and a prompt of gpt-oss-20b on the device backend: two tables a row, windows by turns with whole
    contexts, sinks, biases of experts."""
    run = KernelOperations((64, 8), VOCAB, configuration(ARCHITECTURE, 64), PROCESSORS)
    keys, values = tensor(BLOCKS, 12 * 16, 8, 64), tensor(BLOCKS, 12 * 16, 8, 64)
    full = KvLayer(keys[:, :16], values[:, :16])
    window = KvLayer(keys[:, 16:32], values[:, 16:32], 1, Reach("window", 128))
    words, rule = tensor(ROWS, dtype=torch.int64), AttentionRule(64**-0.5, sinks=tensor(64))
    entries = tensor(ROWS, 1_024, dtype=torch.int64)
    tables = entries.split((512, 512), 1)
    decode = run.decoding(words, tables)
    chunks = Chunks(words[:2], words[:2], words[:2], tuple(part[:2] for part in tables), ((0, 100), (100, 156)))
    prefill = run.prefilling(chunks)
    few = run.decoding(words[:8], tuple(part[:8] for part in tables))
    for layer in (full, window):
        few(tensor(8, 64, 64), layer, rule)
        decode(tensor(ROWS, 64, 64), layer, rule)
        prefill(tensor(TOKENS, 64, 64), layer, rule)
    memory = Memory(BF16, META)
    run.experts(
        tensor(ROWS, 2_880),
        ExpertMaps(
            Router(Linear.empty(2_880, 32, bias=True, memory=memory), route := SoftmaxOfTop(4)),
            route,
            tensor(32, 5_760, 2_880),
            tensor(32, 2_880, 2_880),
            tensor(32, 5_760),
            tensor(32, 2_880),
            ClampedSwiGlu(1.702, 7.0),
            False,
        ),
    )


def device_latent() -> None:
    """A decoding step and a prompt of DeepSeek-V3's attention on the device backend, and Gemma's norms and gate."""
    run = KernelOperations((128, 1), VOCAB, configuration(ARCHITECTURE, 576), PROCESSORS)
    memory = tensor(BLOCKS, 4 * 16, 1, 576)
    layer = KvLayer(memory[:, 16:32], memory[:, 16:32, :, :512], latent=True)
    words, rule = tensor(ROWS, dtype=torch.int64), AttentionRule(0.1)
    tables = (tensor(ROWS, 512, dtype=torch.int64),)
    run.decoding(words, tables)(tensor(ROWS, 128, 576), layer, rule)
    run.decoding(words[:8], (tables[0][:8],))(tensor(8, 128, 576), layer, rule)
    chunks = Chunks(words[:1], words[:1], words[:1], (tables[0][:1],), ((0, TOKENS),))
    run.prefilling(chunks)(tensor(TOKENS, 128, 576), layer, rule)
    norm_, head = (OffsetRmsNorm(size, 1e-6, Memory(BF16, META)) for size in (3_840, 256))
    run.norm(tensor(TOKENS, 3_840), tensor(TOKENS, 3_840), norm_)
    run.norm(tensor(TOKENS, 3_840), None, norm_)
    run.gate(tensor(TOKENS, 30_720), gelu_mul)
    kv = tensor(BLOCKS, 40 * 16, 8, 256)
    turn = RopeInputs(tensor(TOKENS, 1, 256), tensor(TOKENS, 1, 256), (head, head))
    slots = tensor(TOKENS, dtype=torch.int64)
    run.turn_and_write(tensor(TOKENS, 32, 256), KvLayer(kv[:, :16], kv[:, :16]), slots, turn)


LAUNCHES = {
    "llama": attention(8, 4, 128, 128),
    "llama, few rows": attention(8, 4, 128, 128, rows=8),
    "gemma": attention(4, 2, 256, 256, cap=50.0, reach=Reach("window", 4_096)),
    "gpt-oss": attention(8, 8, 64, 64, sinks=True, reach=Reach("window", 128)),
    "deepseek": attention(1, 128, 576, 512, latent=True),
    "rows": rows,
    **({"pipelined": pipelined} if ARCHITECTURE == "sm_90" else {}),
    "few rows": few_rows,
    # A100 has no products of 8-bit floating point numbers, and its assembler no conversions.
    **({} if ARCHITECTURE == "sm_80" else {"scaled": scaled}),
    "palettes": palettes,
    "palette direct": palette_direct,
    "adapters": adapted,
    "experts": experts,
    "sampling": sampling,
    "sampling, lean": sampling_lean,
    "guards": guards,
    "steps": steps_around,
    "device": device,
    "device windows": device_windows,
    "device latent": device_latent,
}
