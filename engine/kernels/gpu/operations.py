"""The device's operations as Triton kernels: what ``engine.device`` calls on a GPU.

What the layers of a step share (maps of tiles, room for partial results) is made once a step. Whatever is allocated
here while a graph is recorded lies in the graph's own pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.device.operations import Attend, Chunks, KvLayer, SamplingColumns, Turn
from engine.kernels.gpu import activation, blocks, norm, prefill_attention, rope, sampler, tile_map
from engine.kernels.gpu.attention_tile import PagedLayer
from engine.kernels.gpu.configurations import Configuration, configuration
from engine.kernels.gpu.decode_attention import Partials, decode_attention
from engine.kernels.gpu.dialect import power_of_two
from engine.kv.layout import FULL
from engine.model.attention import AttentionRule

SILU = activation.Gate("silu")

LEAST_CHUNKS = 16
"""Room for chunks is a power of two and no less: kernels are compiled by that number, so there are few of them."""


class KernelOperations:
    """See ``engine.device.operations.Operations``."""

    def __init__(
        self, heads: tuple[int, int], dim: int, vocab_size: int, chosen: Configuration, processors: int
    ) -> None:
        """``heads``: of queries, and of keys and values; ``processors``: the GPU's multiprocessors."""
        self._heads, self._kv_heads = heads
        self._dim = dim
        self._vocab_size = vocab_size
        self._chosen = chosen
        self._processors = processors
        self._none: dict[torch.device, tuple[Tensor, ...]] = {}

    def norm(self, x: Tensor, residual: Tensor | None, gain: Tensor, eps: float) -> Tensor:
        """RMS norm with the residual stream's addition in front of it."""
        out = torch.empty_like(x)
        norm.rms_norm(x, residual, gain, out, eps=eps)
        return out

    def turn_and_write(self, qkv: Tensor, layer: KvLayer, slots: Tensor, turn: Turn) -> Tensor:
        """Norms, rotation and the write into the cache, in one pass."""
        q = qkv.new_empty(qkv.shape[0], self._heads, self._dim)
        heads = None if turn.gains is None else rope.HeadNorm(*turn.gains, turn.eps)
        rope.rope_and_write(qkv, q, _paged(layer), slots, rope.Rotation(turn.cosines, turn.sines), heads)
        return q

    def decoding(self, lengths: Tensor, tables: Tensor) -> Attend:
        """One token a row: contexts split, programs as many as the bucket says."""
        shape = self._chosen.decode
        programs = self._chosen.programs(len(lengths), self._kv_heads, self._processors)
        map_ = tile_map.DecodeMap.empty(len(lengths), programs, shape, lengths.device)
        lengths = lengths.int()
        tile_map.map_decode(lengths, FULL, shape, map_)
        partials = Partials.empty(len(lengths), self._heads, self._dim, shape, lengths.device)

        def attend(q: Tensor, layer: KvLayer, rule: AttentionRule) -> Tensor:
            out = torch.empty_like(q)
            decode_attention(q, _paged(layer), (tables, lengths), (map_, shape, partials), rule, out)
            return out.flatten(1)

        return attend

    def prefilling(self, chunks: Chunks) -> Attend:
        """All chunks in one launch a layer."""
        count, device = len(chunks.lengths), chunks.lengths.device
        room = power_of_two(count, LEAST_CHUNKS)
        begins, lengths, starts = torch.zeros(3, room, dtype=torch.int32, device=device)
        tables = chunks.tables.new_zeros(room, chunks.tables.shape[1])
        for target, source in (
            (begins, chunks.begins), (lengths, chunks.lengths), (starts, chunks.starts), (tables, chunks.tables),
        ):  # fmt: skip
            target[:count] = source
        shape = self._chosen.prefill
        _, _, queries = prefill_attention.heads_together(self._heads, self._kv_heads, shape.lines)
        map_ = tile_map.ChunkMap.empty(sum(length for _, length in chunks.spans), room, queries, device)
        tile_map.map_chunks(lengths, queries, map_)
        placed = prefill_attention.Chunks(begins, lengths, starts, tables)

        def attend(q: Tensor, layer: KvLayer, rule: AttentionRule) -> Tensor:
            # Tokens of a chunk that is not computed keep zeros: what comes of them goes nowhere.
            out = torch.zeros_like(q)
            prefill_attention.prefill_attention(q, _paged(layer), placed, (map_, shape), rule, out)
            return out.flatten(1)

        return attend

    def gate(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        activation.activate(x, SILU, out)
        return out

    def sample(self, logits: Tensor, rows: Tensor, positions: Tensor, columns: SamplingColumns) -> Tensor:
        """A token for each line, by the request's own counter generator."""
        nothing, no_penalties, no_counts, no_masks = self._nothing(len(columns.seed), logits.device)
        state = sampler.SamplingRows(
            columns.temperature, columns.top_k, columns.top_p, columns.log_min_p, columns.seed, columns.limit,
            columns.stop_ids, nothing, nothing, nothing, no_penalties, no_counts, no_masks,
        )  # fmt: skip
        out = sampler.Chosen.empty(len(rows), self._vocab_size, 1, logits.device)
        sampler.sample(logits, rows, positions, state, out)
        return out.tokens.long()

    def faults(self, tables: Tensor, expected: Tensor, ends: Tensor, stamps: Tensor) -> Tensor:
        """Entries whose block is not the one that is expected."""
        found = torch.empty(len(tables), dtype=torch.int32, device=tables.device)
        ends = ends.int()
        blocks.compare_stamps(tables, expected, (torch.zeros_like(ends), ends), stamps, found)
        return found

    def zero(self, memory: Tensor, ids: Tensor) -> None:
        """Whole blocks."""
        blocks.zero_blocks(memory, ids)

    def _nothing(self, rows: int, device: torch.device) -> tuple[Tensor, ...]:
        """Rows that have no penalties, no mask and no wish for log-probabilities: the host sees to those that have."""
        if device not in self._none:
            self._none[device] = (
                torch.full((rows,), -1, dtype=torch.int32, device=device),
                torch.zeros(1, 3, device=device),
                torch.zeros(1, 1, dtype=torch.int32, device=device),
                torch.zeros(1, 1, dtype=torch.int32, device=device),
            )
        return self._none[device]


def kernel_operations(
    heads: tuple[int, int], dim: int, vocab_size: int, device: torch.device, architecture: str = ""
) -> KernelOperations:
    """The operations for heads like these on this device; where that is no GPU those of an architecture (one without a
    row of its own when it is not named), for the interpreter and for the compiler."""
    if device.type != "cuda":
        return KernelOperations(heads, dim, vocab_size, configuration(architecture, dim), 4)
    properties = torch.cuda.get_device_properties(device)
    chosen = configuration(f"sm_{properties.major}{properties.minor}", dim)
    return KernelOperations(heads, dim, vocab_size, chosen, properties.multi_processor_count)


def _paged(layer: KvLayer) -> PagedLayer:
    return PagedLayer(layer.keys, layer.values, FULL)
