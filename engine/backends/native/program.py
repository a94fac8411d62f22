"""A model as a list of operations for the compiled kernels: weights packed, buffers taken, pointers fixed, once.

``NativeModel`` takes over a loaded and not yet packed model, matrix by matrix, so that its weights are never in memory
twice. The plain tensor code of ``engine.model`` is the specification of what the program computes; sums and the
residual stream are float32 here, and what a product is fed has the weights' dtype, or float32 where the processor
multiplies no bfloat16.

A program may quantise its products to int8. Activations then get a scale for each row, from that row alone: what a
neighbour in the batch holds can not move a request's numbers.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from engine.backends.common.batch import BatchBuilder, StepArrays
from engine.backends.common.block_table import BlockTables
from engine.backends.common.host_runner import StepLogits
from engine.backends.common.storage import KvStorage
from engine.backends.native.abi import PANEL, Kind, Mode, Op, Program, Step
from engine.backends.native.adapting import PackedPlace, StepPieces, packed_places
from engine.backends.native.compression import compress
from engine.backends.native.library import Library
from engine.backends.native.packing import FED, FED_TO_DOTS, TYPES, Packed, interleave, pack, padded_inputs
from engine.backends.native.plain_form import PlainLayer, check_supported
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import StepPlan
from engine.model.layers.decoder import Decoder
from engine.model.layers.layers import Linear
from engine.model.layers.rotary import inverse_frequencies

CACHE_LINE = 64
"""Bytes of a counter that threads share, so that no two lie together."""

HALF_PANEL = PANEL // 2
"""Outputs of a gate that lie side by side, before as many of the map that they multiply."""

SPARE_ROWS = 32
"""Rows of an operand are rounded up to this: tiles are read whole."""

SOLO_PRODUCTS = 32 << 20
"""Multiplications up to which a step is run by one thread: waking the others takes as long."""


class Builder:
    """Collects operations and keeps alive what they point to."""

    def __init__(self, *, max_tokens: int, dtype: torch.dtype, dots: bool) -> None:
        self.ops: list[Op] = []
        self.adapted: list[Op] = []
        """Operations of a step in which some row has an adapter."""
        self.dtype = dtype
        """Dtype of weights: float32, bfloat16 or int8."""
        self.fed = (FED_TO_DOTS if dots else FED)[dtype]
        """Dtype of operands."""
        self._rows = -(-max_tokens // SPARE_ROWS) * SPARE_ROWS
        self._kept: list[Tensor] = []
        self.weights: list[Tensor] = []
        """Packed weights, which no step writes."""
        self.rooms: list[Tensor] = []
        """What each step writes before it reads it; zero at first."""
        self._tables: list[object] = []

    def keep(self, tensor: Tensor) -> int:
        """Keep a tensor and give its address."""
        assert tensor.is_contiguous(), "kernels read memory as it lies"
        assert tensor.device.type == "cpu", "kernels read host memory"
        self._kept.append(tensor)
        return tensor.data_ptr()

    def floats(self, width: int) -> int:
        """Room for float32 rows."""
        return self._room(torch.zeros(self._rows, width))

    def operand(self, width: int) -> tuple[int, int]:
        """Room for rows that a product is fed, and for their scales."""
        rows = torch.zeros(self._rows, padded_inputs(width, self.dtype), dtype=self.fed)
        return self._room(rows), self.floats(1)

    def _room(self, tensor: Tensor) -> int:
        """Keep a room and give its address."""
        self.rooms.append(tensor)
        return self.keep(tensor)

    def add(self, kind: Kind, **fields: object) -> None:
        """Append an operation."""
        self.ops.append(Op(kind=kind, **fields))
        self.adapted.append(Op(kind=kind, **fields))

    def adapt(  # noqa: PLR0913 - what an operation has
        self,
        places: list[PackedPlace],
        shape: tuple[int, int],
        operand: int,
        output: int,
        *,
        adapters: int,
        gated: bool = False,
        wanted: bool = False,
        by_id: bool = False,
    ) -> None:
        """Append, for steps with adapters, what these add to a result; ``shape``: numbers of a row in and out."""
        for one in places:
            table = one.table(adapters)
            self._tables.append((table, one))
            self.adapted.append(
                Op(
                    kind=Kind.ADAPT,
                    dtype=TYPES[self.dtype],
                    mode=Mode.ADD if by_id else Mode.STORE,
                    wanted=wanted,
                    inputs=shape[0],
                    outputs=shape[1],
                    heads=one.count,
                    kv_heads=HALF_PANEL if gated else max(HALF_PANEL, one.count),
                    dim=(HALF_PANEL if one.place else 0) if gated else one.place,
                    weight=ctypes.addressof(table),
                    input=operand,
                    output=output,
                )
            )

    def addresses(self, packed: Packed) -> dict[str, int]:
        """Where the parts of a weight besides its numbers lie."""
        parts = {"scale": packed.scale, "sums": packed.sums, "bias": packed.bias}
        if (compression := packed.compression) is not None:
            parts |= {"palette": compression.palette, "starts": compression.starts, "patches": compression.patches}
        return {name: self.keep(part) for name, part in parts.items() if part is not None}

    def linear(
        self, packed: Packed, operand: tuple[int, int], output: int, mode: Mode, *, wanted: bool = False
    ) -> None:
        """Append a product."""
        addresses = self.addresses(packed)
        self.weights.append(packed.weight)
        self.add(
            Kind.LINEAR,
            dtype=packed.dtype,
            mode=mode,
            wanted=wanted,
            inputs=packed.inputs,
            outputs=packed.outputs,
            weight=self.keep(packed.weight),
            input=operand[0],
            in_scale=operand[1],
            output=output,
            **addresses,
        )


class NativeModel:
    """A program with its buffers; ``forward`` is one call into the library."""

    checks_owners = True
    """The library compares stamps in its own pass over the tables, before it computes anything."""
    writes_code = False

    def __init__(
        self,
        library: Library,
        model: Decoder,
        storage: KvStorage,
        limits: SchedulerLimits,
        *,
        int8: bool = False,
        compressed: bool = True,
        reason: str = "",
    ) -> None:
        """Take the matrices of the model over.

        Args:
            library: opened kernels.
            model: loaded, and not packed.
            storage: the KV memory.
            limits: of a step.
            int8: quantise the weights.
            compressed: hold bfloat16 weights in fewer bytes where that loses nothing.
            reason: why this form was chosen, for people.
        """
        layers = check_supported(model, limits.max_context)
        self.model = model
        self._library = library
        self._compressed = compressed
        self._step = Step()
        dtype = torch.int8 if int8 else model.dtype
        self._builder = Builder(max_tokens=limits.max_num_batched_tokens, dtype=dtype, dots=library.has_dot_products)
        self._logits = torch.zeros(limits.max_logit_lines, limits.vocab_size)
        self._best = torch.zeros(limits.max_logit_lines, dtype=torch.int64)
        self._products = self._stored_bytes = self._held_bytes = 0
        self._storage = storage
        self._tables: BlockTables | None = None
        """Those whose addresses the step has."""
        self._num_adapters = 0 if model.bank is None else len(model.bank.numbers)
        self._ops: list[object] = []
        self._build(model, layers)
        if model.bank is not None:
            model.bank.arena = None  # all of it is in panels now
        self.description, self.compresses = self._describe(reason), self._held_bytes < self._stored_bytes
        self.operand_bytes = self._builder.fed.itemsize
        adapted = self._builder.adapted
        self._counters = torch.zeros((len(adapted) + 1) * CACHE_LINE + CACHE_LINE, dtype=torch.uint8)
        self._program = self._program_of(self._builder.ops, limits)
        self._adapted = self._program_of(adapted, limits) if self._num_adapters else None
        self._pieces = StepPieces()

    def _program_of(self, ops: list[Op], limits: SchedulerLimits) -> Program:
        layout = self._storage.layout
        array = (Op * len(ops))(*ops)
        self._ops.append(array)
        return Program(
            ops=ctypes.addressof(array),
            count=len(ops),
            block_size=layout.block_size,
            vocab_size=limits.vocab_size,
            num_slots=(layout.num_blocks + 1) * layout.block_size,
            max_rows=limits.max_num_seqs,
            adapters=self._num_adapters,
            kv_dtype=TYPES[self._storage.dtype],
            solo_tokens=SOLO_PRODUCTS // self._products,
            counters=-(-self._counters.data_ptr() // CACHE_LINE) * CACHE_LINE,
        )

    def __call__(self, plan: StepPlan, batches: BatchBuilder, /) -> StepLogits:
        """Logits of a plan that computes at least one token."""
        arrays = batches.arrays(plan)
        return StepLogits(*self.forward(arrays), arrays.next_positions)

    def is_exact(self) -> bool:
        """Whether rows get the same bits in any batch: yes, kernels compute each row by one order of roundings."""
        return True

    def forward(self, arrays: StepArrays) -> tuple[Tensor, Tensor]:
        """Compute one step.

        Returns:
            Float32 logits of shape ``(len(arrays.wanted), vocab_size)`` and the place of each row's maximum (-1 where
            it is not finite); valid until the next call.

        Raises:
            ForeignBlockError: a table names a block that is not its row's; nothing was read or written.
        """
        step = self._step
        assert len(arrays.wanted) <= len(self._best), "more lines of logits than there is room for"
        step.tokens, step.wanted_count = len(arrays.token_ids), len(arrays.wanted)
        step.token_ids = arrays.token_ids.ctypes.data
        step.positions = arrays.positions.ctypes.data
        (slots,), (tables,) = arrays.slots, arrays.tables
        step.slots = slots.ctypes.data
        step.rows = arrays.rows.ctypes.data
        step.wanted = arrays.wanted.ctypes.data
        if tables is not self._tables:
            self._tables = tables
            step.tables, step.expected = tables.tables.ctypes.data, tables.expected.ctypes.data
            step.table_width = tables.tables.shape[1]
            step.stamps = arrays.stamps.ctypes.data
        program = self._program
        step.pieces.count = step.wanted_pieces.count = 0
        if self._adapted is not None and arrays.adapters.any():
            program = self._adapted
            self._pieces.clear()
            self._pieces.fill(step.pieces, arrays.adapters)
            self._pieces.fill(step.wanted_pieces, arrays.adapters[arrays.wanted])
        self._library.run(program, step)
        return self._logits[: step.wanted_count], self._best[: step.wanted_count]

    def _describe(self, reason: str) -> str:
        """Which kernels compute and why, and the share of the weights' bytes that they keep, for people."""
        stored, held = self._stored_bytes, self._held_bytes
        kept = f"; weights in {round(100 * held / stored)} % of their bytes, without loss" if held < stored else ""
        return self._library.description + kept + (f"; {reason}" if reason else "")

    @property
    def constant(self) -> list[Tensor]:
        """Return the tensors that no step writes."""
        return self._builder.weights

    def touch(self) -> None:
        """Write zeros into every page of the logits and rooms: a checkpoint holds no page of zeros."""
        for tensor in (self._logits, *self._builder.rooms):
            tensor.zero_()

    def _build(self, model: Decoder, layers: list[PlainLayer]) -> None:
        config, build = model.config, self._builder
        hidden, half = config.hidden_size, config.head_dim // 2
        head = self._pack(model.head.linear)
        shared = model.head_is_embedding and build.dtype != torch.int8
        table = head if shared else Packed(model.embedding.weight, config.vocab_size, hidden)
        build.weights.append(table.weight)
        x, operand = build.floats(hidden), build.operand(hidden)
        angles = build.floats(half), build.floats(half)
        build.add(
            Kind.EMBED,
            dtype=table.dtype,
            mode=Mode.ADD if shared else Mode.STORE,
            outputs=hidden,
            weight=build.keep(table.weight),
            output=x,
            **build.addresses(table),
        )
        places = packed_places(model.embedding.delta)
        build.adapt(places, (config.vocab_size, hidden), 0, x, adapters=self._num_adapters, by_id=True)
        model.release_embedding()
        frequencies = inverse_frequencies(config.rope, config.head_dim).contiguous()
        build.add(
            Kind.ANGLES,
            dim=config.head_dim,
            number=config.rope.attention_factor,
            weight=build.keep(frequencies),
            cosines=angles[0],
            sines=angles[1],
        )
        rooms = _Rooms(build, model, x, operand, angles)
        for layer in layers:
            self._build_layer(layer, rooms)
        self._norm(model.norm.weight, config.rms_norm_eps, x, operand, wanted=True)
        logits = build.keep(self._logits)
        build.linear(head, operand, logits, Mode.STORE, wanted=True)
        self._adapt(model.head.linear, (hidden, config.vocab_size), operand, logits, wanted=True)
        build.add(
            Kind.BEST,
            wanted=True,
            inputs=config.vocab_size,
            input=self._logits.data_ptr(),
            output=build.keep(self._best),
        )

    def _build_layer(self, layer: PlainLayer, rooms: _Rooms) -> None:
        config, build, x, operand = rooms.config, self._builder, rooms.x, rooms.operand
        heads = {"heads": config.num_heads, "kv_heads": config.num_kv_heads, "dim": config.head_dim}
        turned = {"cosines": rooms.angles[0], "sines": rooms.angles[1]} if layer.rotated else {}
        gains = {} if layer.head_gains is None else {"weight": build.keep(layer.head_gains.float().contiguous())}
        keys, values = self._storage.keys[layer.place], self._storage.values[layer.place]
        places = {"keys": keys.data_ptr(), "values": values.data_ptr()}
        self._norm(layer.attention_norm.weight, config.rms_norm_eps, x, operand)
        qkv = self._pack(layer.qkv)
        build.linear(qkv, operand, rooms.qkv, Mode.STORE)
        self._adapt(layer.qkv, (qkv.inputs, qkv.outputs), operand, rooms.qkv)
        build.add(Kind.ROPE, input=rooms.qkv, number=config.rms_norm_eps, **heads, **places, **turned, **gains)
        build.add(
            Kind.ATTEND,
            dtype=TYPES[build.dtype],
            number=layer.scale,
            input=rooms.qkv,
            output=rooms.attended_wide or rooms.attended[0],
            **heads,
            **places,
        )
        self._quantise(config.num_heads * config.head_dim, rooms.attended_wide, rooms.attended)
        out = self._pack(layer.out)
        build.linear(out, rooms.attended, x, Mode.ADD)
        self._adapt(layer.out, (out.inputs, out.outputs), rooms.attended, x)
        self._norm(layer.mlp_norm.weight, config.rms_norm_eps, x, operand)
        self._gate(layer, rooms)
        self._quantise(config.intermediate_size, rooms.gated_wide, rooms.gated)
        down = self._pack(layer.down)
        build.linear(down, rooms.gated, x, Mode.ADD)
        self._adapt(layer.down, (down.inputs, down.outputs), rooms.gated, x)

    def _gate(self, layer: PlainLayer, rooms: _Rooms) -> None:
        """The gated product, with its activation; where adapters add to it, the activation waits for them."""
        build, places = self._builder, packed_places(layer.gate_up.delta)
        gate_up, target = self._pack(layer.gate_up, gated=True), rooms.gated_wide or rooms.gated[0]
        build.linear(gate_up, rooms.operand, target, Mode.SWIGLU)
        if not places:
            return
        wide = -(-gate_up.outputs // PANEL) * PANEL
        whole = build.adapted.pop()
        whole.mode, whole.outputs, whole.output = Mode.STORE, wide, rooms.halves(wide)
        build.adapted.append(whole)
        shape, operand = (gate_up.inputs, wide), rooms.operand[0]
        build.adapt(places, shape, operand, whole.output, adapters=self._num_adapters, gated=True)
        inner = gate_up.outputs // 2
        gate = Op(
            kind=Kind.GATE, dtype=TYPES[build.dtype], inputs=wide, outputs=inner, input=whole.output, output=target
        )
        build.adapted.append(gate)

    def _adapt(
        self, linear: Linear, shape: tuple[int, int], operand: tuple[int, int], output: int, *, wanted: bool = False
    ) -> None:
        """What adapters add to the product that was appended last."""
        places = packed_places(linear.delta)
        self._builder.adapt(places, shape, operand[0], output, adapters=self._num_adapters, wanted=wanted)

    def _norm(self, gain: Tensor, eps: float, x: int, operand: tuple[int, int], *, wanted: bool = False) -> None:
        self._builder.add(
            Kind.NORM,
            dtype=TYPES[self._builder.dtype],
            wanted=wanted,
            inputs=len(gain),
            number=eps,
            weight=self._builder.keep(gain.float().contiguous()),
            input=x,
            output=operand[0],
            out_scale=operand[1],
        )

    def _quantise(self, width: int, wide: int, operand: tuple[int, int]) -> None:
        if self._builder.dtype == torch.int8:
            self._builder.add(Kind.QUANTISE, inputs=width, input=wide, output=operand[0], out_scale=operand[1])

    def _pack(self, linear: Linear, *, gated: bool = False) -> Packed:
        """Pack a matrix and release the stored form."""
        weight, bias = linear.loaded, linear.bias
        self._products += weight.numel()
        outputs = weight.shape[0]
        if gated:
            weight = interleave(*weight.chunk(2))
            bias = None if bias is None else interleave(*bias.chunk(2))
        linear.release()
        packed = pack(weight, bias, int8=self._builder.dtype == torch.int8)
        del weight
        compressed = compress(self._library, packed) if self._compressed else packed
        self._stored_bytes += packed.weight.nbytes
        self._held_bytes += compressed.weight.nbytes
        return replace(compressed, outputs=outputs)


class _Rooms:
    """Buffers that all layers use."""

    def __init__(
        self, build: Builder, model: Decoder, x: int, operand: tuple[int, int], angles: tuple[int, int]
    ) -> None:
        config = self.config = model.config
        self.x, self.operand, self.angles = x, operand, angles
        wide = config.num_heads * config.head_dim
        self.qkv = build.floats(wide + 2 * config.num_kv_heads * config.head_dim)
        self.attended, self.gated = build.operand(wide), build.operand(config.intermediate_size)
        quantised = build.dtype == torch.int8
        self.attended_wide = build.floats(wide) if quantised else 0
        """Results of int8 before they are quantised; 0 where there is no such step."""
        self._build, self._halves = build, 0
        self.gated_wide = build.floats(config.intermediate_size) if quantised else 0

    def halves(self, width: int) -> int:
        """Room for a gated product before its activation, where adapters add to it."""
        if not self._halves:
            self._halves = self._build.floats(width)
        return self._halves
