"""The decoding step on a card, piece by piece: ``python bench/gpu_decode.py [--rehearse] [--only SECTION]``.

Measures this card's read bandwidth, then as shares of it: products of few rows by our kernel over some ways to cut a
matrix, beside torch's own; decode attention over some shapes; and the whole step of a Llama 8B of random weights, with
everything that is fused and with nothing of it. Every piece rotates over more memory than the second-level cache holds,
and is timed as replays of a CUDA graph. One line of JSON a figure, tables at the end; an error is printed in full and
the next piece goes on. ``--rehearse`` runs everything in tiny sizes on a CPU, under Triton's interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import TritonError

from bench.gpu_engines import BLOCK, EIGHT_B, TINY, build_model
from engine.backends.attention import AttentionRule
from engine.backends.common.loading import layout_for, limits_for
from engine.backends.cuda.kernels import gemv
from engine.backends.cuda.kernels.activation import Gate
from engine.backends.cuda.kernels.ahead import compiling_only
from engine.backends.cuda.kernels.gemv import FewRows
from engine.backends.cuda.kernels.operations import KernelOperations, kernel_operations
from engine.backends.cuda.kernels.tile_map import DecodeShape
from engine.backends.cuda.kernels.tile_sizes import Configuration, configuration
from engine.backends.cuda.kernels.triton_common import Threads
from engine.backends.cuda.load import make_device_runner, without_spares
from engine.backends.cuda.runtime.operations import KvLayer
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

REHEARSE = "--rehearse" in sys.argv
ERRORS = (
    TritonError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a piece may end with; the next one goes on."""
BF16 = torch.bfloat16
DEVICE = torch.device("cpu" if REHEARSE else "cuda")
META = torch.device("meta")
ROTATED = 1 if REHEARSE else 400 << 20
"""Bytes that a piece rotates over: several times the second-level cache."""
ROUNDS = 1 if REHEARSE else 5
COUNTS = (1, 2, 4, 8)

PRODUCTS: dict[str, tuple[int, int, bool, str]] = {
    "qkv": (6_144, 4_096, True, ""),
    "o": (4_096, 4_096, False, ""),
    "gate_up": (14_336, 4_096, True, "silu"),
    "down": (4_096, 14_336, False, ""),
    "lm_head": (128_256, 4_096, True, ""),
}
"""Outputs, inputs, whether there is a norm in front, and the gate."""
if REHEARSE:
    PRODUCTS = {"qkv": (48, 64, True, ""), "gate_up": (32, 64, True, "silu"), "down": (32, 96, False, "")}

CUTS: dict[str, tuple[FewRows, ...]] = {
    "wide": (
        FewRows(),
        FewRows(launch=Threads(4, 6)),
        FewRows(programs=132),
        FewRows(programs=528),
        FewRows(depth=256, launch=Threads(4, 3)),
        FewRows(depth=64, launch=Threads(4, 6)),
        FewRows(outputs=128, launch=Threads(4, 3)),
        FewRows(outputs=32, launch=Threads(4, 5)),
        FewRows(outputs=16, depth=256, launch=Threads(4, 5)),
        FewRows(outputs=16, depth=256, launch=Threads(2, 6)),
        FewRows(early=True),
    ),
    "gate_up": (
        FewRows(),
        FewRows(launch=Threads(4, 6)),
        FewRows(gated_depth=128, launch=Threads(4, 3)),
        FewRows(gated_depth=32, launch=Threads(4, 8)),
        FewRows(outputs=32, gated_depth=128, launch=Threads(4, 4)),
        FewRows(outputs=16, gated_depth=256, launch=Threads(2, 4)),
        FewRows(outputs=128, gated_depth=64, launch=Threads(8, 4)),
        FewRows(early=True),
    ),
}
if REHEARSE:
    small = FewRows(outputs=16, depth=16, gated_depth=16, programs=4)
    CUTS = {"wide": (small, replace(small, programs=1)), "gate_up": (small,)}

CONTEXTS: dict[str, Callable[[int], list[int]]] = {
    "1k": lambda rows: [1_000] * rows,
    "4k": lambda rows: [4_000] * rows,
    "mixed": lambda rows: [(128, 512, 2_048, 8_192)[row % 4] for row in range(rows)],
}
ROWS: tuple[int, ...] = (1, 8, 64, 256)
KV_HEADS, GROUP, DIM = 8, 4, 128
if REHEARSE:
    CONTEXTS = {"short": lambda rows: [5 + row for row in range(rows)]}
    ROWS, KV_HEADS, GROUP, DIM = (1, 3, 20), 2, 2, 16

SHAPES: tuple[DecodeShape, ...] = (
    DecodeShape(64, 4, 32, Threads(4, 3)),
    DecodeShape(64, 4, 32, Threads(4, 4)),
    DecodeShape(64, 4, 32, Threads(4, 2)),
    DecodeShape(128, 2, 32, Threads(4, 2)),
    DecodeShape(128, 2, 32, Threads(8, 3)),
    DecodeShape(32, 8, 32, Threads(2, 4)),
    DecodeShape(32, 8, 32, Threads(4, 5)),
)
if REHEARSE:
    SHAPES = (DecodeShape(16, 1, 4),)


@dataclass(slots=True)
class Figures:
    """What was measured, printed at once and again as tables."""

    began: float = field(default_factory=time.monotonic)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def put(self, section: str, **values: Any) -> None:
        """One figure."""
        line = {"section": section, **values}
        self.lines.append(line)
        print(json.dumps({**line, "at_s": round(time.monotonic() - self.began, 1)}), flush=True)

    def table(self) -> None:
        """The best of each piece, and what it is compared with."""
        print(f"\n{'piece':34} {'GB/s':>8} {'share':>7}  by")
        chosen: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for line in self.lines:
            if "share" in line:
                chosen.setdefault((line["section"], line["piece"], line["rows"]), []).append(line)
        for (section, piece, rows), lines in chosen.items():
            for kind in sorted({line["kind"] for line in lines}):
                best = max((line for line in lines if line["kind"] == kind), key=lambda line: float(line["share"]))
                name = f"{section} {piece} x {rows}"
                print(f"{name:34} {best['gb_per_s']:8.0f} {best['share']:7.3f}  {kind} {best.get('cut', '')}")


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Seconds of one of ``repeats`` pieces that a call starts: the median of replays of a graph."""
    run()
    if DEVICE.type != "cuda":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) / repeats
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    taken = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(taken)


def tried(work: Callable[[], None], name: str) -> None:
    """Do it; an error is printed in full, and nothing else ends by it."""
    try:
        work()
    except ERRORS:
        print(f"--- {name} failed\n{traceback.format_exc()}", flush=True)


def read_bandwidth(figures: Figures) -> float:
    """Bytes a second of a sum over memory that no cache holds."""
    source = torch.ones((1 << 20) if REHEARSE else (1 << 30), device=DEVICE)
    best = max(source.nbytes / seconds_of(source.sum, 1) for _ in range(3))
    name = "cpu" if REHEARSE else torch.cuda.get_device_name()
    figures.put("bandwidth", device=name, gb_per_s=best / 1e9, torch=torch.__version__)
    return best


def noise(*shape: int, spread: float = 1.0) -> Tensor:
    """Normal numbers in bfloat16."""
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).mul_(spread).to(BF16)


def products(figures: Figures, bandwidth: float) -> None:
    """All products at all numbers of rows."""
    for name in PRODUCTS:
        tried(lambda name=name: product(figures, bandwidth, name), f"product {name}")


def product(figures: Figures, bandwidth: float, name: str) -> None:
    """One product."""
    outputs, size, normed, kind = PRODUCTS[name]
    lines = outputs * (2 if kind else 1)
    copies = max(2, -(-ROTATED // (lines * size * 2)))
    first = noise(lines, size, spread=size**-0.5)
    weights = [first, *(first.roll(one + 1, 0) for one in range(copies - 1))]
    gain = noise(size) if normed else None
    gate = Gate(kind) if kind else None
    for rows in COUNTS:
        x, out = noise(rows, size), torch.empty(rows, outputs, device=DEVICE, dtype=BF16)
        wanted = reference(x, first, gain, kind)
        moved = lines * size * 2

        def said(kind_: str, taken: float, error: float, rows: int = rows, moved: int = moved, **more: Any) -> None:
            rate = moved / taken
            figures.put(
                "product", piece=name, rows=rows, kind=kind_, us=taken * 1e6, gb_per_s=rate / 1e9,
                share=rate / bandwidth, error=error, **more,
            )  # fmt: skip

        def theirs(x: Tensor = x) -> None:
            for weight in weights:
                F.linear(x, weight)

        taken = seconds_of(theirs, copies)
        said("torch", taken, relative(F.linear(x, first), x.double() @ first.double().T))
        for cut in CUTS["gate_up" if kind else "wide"]:

            def measure(cut: FewRows = cut, x: Tensor = x, out: Tensor = out, wanted: Tensor = wanted) -> None:
                scratch = gemv.Scratch.empty(gemv.numbers_needed(cut, outputs, size, gate=bool(kind)), DEVICE)

                def ours() -> None:
                    for weight in weights:
                        gemv.few_rows(x, gemv.Map(weight, None, gain, 1e-5), out, scratch, cut, gate=gate)

                gemv.few_rows(x, gemv.Map(first, None, gain, 1e-5), out, scratch, cut, gate=gate)
                error = relative(out, wanted)
                same = out[:1].clone()
                gemv.few_rows(x[:1], gemv.Map(first, None, gain, 1e-5), out, scratch, cut, gate=gate)
                said("ours", seconds_of(ours, copies), error, cut=repr(cut), alone=torch.equal(same, out[:1]))

            tried(measure, f"{name} x {rows} by {cut}")


def reference(x: Tensor, weight: Tensor, gain: Tensor | None, kind: str) -> Tensor:
    """The product and what surrounds it, in float64."""
    wide = x.double()
    if gain is not None:
        wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5) * gain.double()
    y = torch.cat([wide @ part.double().T for part in weight.split(16_384)], 1)
    if kind:
        left, right = y.chunk(2, 1)
        y = F.silu(left) * right
    return y


def relative(found: Tensor, wanted: Tensor) -> float:
    """Largest error over the largest value."""
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


def attention(figures: Figures, bandwidth: float) -> None:
    """Decode attention at all numbers of rows and contexts."""
    for rows, (name, lengths) in itertools.product(ROWS, CONTEXTS.items()):
        tried(
            lambda rows=rows, name=name, lengths=lengths: attended(figures, bandwidth, rows, name, lengths(rows)),
            f"attention {rows} x {name}",
        )


def attended(figures: Figures, bandwidth: float, rows: int, name: str, lengths: list[int]) -> None:
    """One batch."""
    needed = [-(-length // BLOCK) for length in lengths]
    blocks, width = sum(needed), -(-max(needed) // 16) * 16
    numbers = KV_HEADS * DIM
    moved = sum(lengths) * numbers * 2 * 2
    copies = min(64, max(2, -(-ROTATED // moved)))
    # Layers beside each other in a block, as an engine has them.
    layers = 2 if REHEARSE else min(copies, 32)
    keys, values = (
        torch.empty(blocks + 1, layers * BLOCK, KV_HEADS, DIM, device=DEVICE, dtype=BF16).normal_() for _ in range(2)
    )
    order = torch.randperm(blocks) + 1
    tables = torch.zeros(rows, width, dtype=torch.int64)
    for row, part in enumerate(order.split(needed)):
        tables[row, : len(part)] = part
    tables = tables.to(DEVICE)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    parts = [slice(one * BLOCK, (one + 1) * BLOCK) for one in range(layers)]
    kv = [KvLayer(keys[:, part], values[:, part]) for part in parts]
    q = noise(rows, KV_HEADS * GROUP, DIM)
    rule = AttentionRule(DIM**-0.5)
    first: list[Tensor] = []
    for shape in SHAPES:

        def measure(shape: DecodeShape = shape) -> None:
            attend = decoder(shape).decoding(sizes, (tables,))
            found = attend(q, kv[0], rule)

            def run() -> None:
                for one in range(copies):
                    attend(q, kv[one % layers], rule)

            taken = seconds_of(run, copies)
            error = relative(found, first[0].double()) if first else 0.0
            figures.put(
                "attention", piece=name, rows=rows, kind="ours", us=taken * 1e6, gb_per_s=moved / taken / 1e9,
                share=moved / taken / bandwidth, cut=repr(shape), differs=error, finite=bool(found.isfinite().all()),
            )  # fmt: skip
            first.append(found)

        tried(measure, f"attention {rows} x {name} by {shape}")


def decoder(shape: DecodeShape) -> KernelOperations:
    """Operations whose decode attention is cut so."""
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count if DEVICE.type == "cuda" else 132
    chosen = replace(configuration("sm_90", DIM), decode=shape)
    return KernelOperations((KV_HEADS * GROUP, KV_HEADS), 1, chosen, processors)


def steps(figures: Figures, bandwidth: float) -> None:
    """The whole step at batch 1 and 8."""
    sizes, dtype = (TINY, torch.float32) if REHEARSE else (EIGHT_B, BF16)
    model = build_model(sizes, DEVICE, dtype)
    weights = sum(one.nbytes for one in _tensors(model)) - model.embedding.weight.nbytes
    for (kind, change), rows in itertools.product(WAYS.items(), (1, 8)):
        if rows == 1 or kind in ("fused", "early", "separate"):
            tried(
                lambda rows=rows, kind=kind, change=change: stepped(
                    figures, bandwidth, make_engine(model, rows, change), weights, rows, kind
                ),
                f"step {kind} x {rows}",
            )


def early(chosen: Configuration, ahead: int, splits: DecodeShape | None = None) -> Configuration:
    """Launches that begin before the one in front of them is over."""
    found = replace(chosen, few=replace(chosen.few, early=True, ahead=ahead))
    return found if splits is None else replace(found, decode=splits)


WAYS: dict[str, Callable[[Configuration], Configuration]] = {
    "fused": lambda chosen: replace(chosen, few=replace(chosen.few, early=False)),
    "early": lambda chosen: early(chosen, 1_024),
    "early, 256": lambda chosen: early(chosen, 256),
    "early, 2048": lambda chosen: early(chosen, 2_048),
    "early, short splits": lambda chosen: early(chosen, 1_024, DecodeShape(64, 2, 32, Threads(4, 2))),
    "separate": lambda chosen: replace(chosen, few=replace(chosen.few, most=0), joined=False),
}
"""Ways to compute a step."""


def _tensors(model: Any) -> Iterable[Tensor]:
    yield model.embedding.weight
    yield model.head.linear.loaded if not model.packed or DEVICE.type == "cuda" else model.embedding.weight
    for layer in model.layers:
        first, second = layer.sublayers
        for linear in (first.block.qkv, first.block.out.linear, second.block.gate_up, second.block.down.linear):
            if linear.weight is not None:
                yield linear.weight


def make_engine(model: Any, rows: int, change: Callable[[Configuration], Configuration]) -> Engine:
    """The real scheduler around the device's runner."""
    config = EngineConfig(
        model_dir="",
        model_digest="00",
        block_size=BLOCK,
        kv_bytes=(1 << 22) if REHEARSE else (6 << 30),
        max_context=256 if REHEARSE else 4_096,
        max_num_seqs=rows,
        max_num_batched_tokens=64 if REHEARSE else 4_096,
        backend="device",
    )
    layout = without_spares(layout_for(config, model.config, str(model.dtype).removeprefix("torch.")), rows)
    limits = limits_for(config, model.config, layout)
    shape = model.config
    operations = None
    if not REHEARSE:
        heads = shape.num_heads, shape.num_kv_heads
        operations = kernel_operations(heads, shape.head_dim, shape.vocab_size, DEVICE)
        operations._chosen = change(operations._chosen)
    runner = make_device_runner(config, model, layout, limits, operations)
    pool = BlockPool(layout.num_blocks)
    cache = PrefixCache(pool, root=layout.root("00"), block_size=BLOCK, caching=True)
    return Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), runner)


def stepped(figures: Figures, bandwidth: float, engine: Engine, weights: int, rows: int, kind: str) -> None:
    """Greedy rows of a short prompt: weights are all that is read."""
    engine.runner.prove()
    count = 12 if REHEARSE else 400
    for row in range(rows):
        engine.add(
            Submit(
                row + 1,
                bytes(32),
                array("I", range(3 + row, 35 + row)),
                count,
                Sampling(temperature=0.0),
                ignore_eos=True,
            )
        )
    tokens, began, ended = 0, 0.0, 0.0
    asked = (count // 4, count - 8)
    while engine.has_work:
        output = engine.step()
        if output is None:
            continue
        tokens += len(output.token_ids)
        at = tokens // rows
        if at >= asked[0] and not began:
            began, first = time.perf_counter(), tokens
        if at <= asked[1]:
            ended, last = time.perf_counter(), tokens
    taken = (ended - began) / ((last - first) / rows)
    figures.put(
        "step", piece="8B", rows=rows, kind=kind, us=taken * 1e6, gb_per_s=weights / taken / 1e9,
        share=weights / taken / bandwidth, tokens_per_s=rows / taken,
    )  # fmt: skip
    if DEVICE.type == "cuda":
        tried(lambda: profile(figures, engine, rows, kind), f"profile {kind} x {rows}")


def profile(figures: Figures, engine: Engine, rows: int, kind: str) -> None:
    """Which launches a step's time goes to."""
    sampling = Sampling(temperature=0.0)
    for row in range(rows):
        engine.add(Submit(1_000 + row, bytes(32), array("I", range(7 + row, 27 + row)), 24, sampling, ignore_eos=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        while engine.has_work:
            engine.step()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    for event in events[:24]:
        figures.put(
            "profile", kind=kind, batch=rows, name=event.key[:80], count=event.count,
            us_each=event.self_device_time_total / max(event.count, 1),
        )  # fmt: skip
    figures.put("launches", kind=kind, batch=rows, in_all=sum(event.count for event in events), tokens=24)


def compile_product(given: tuple[str, FewRows]) -> None:
    """Compile one product into Triton's cache, without the card."""
    name, cut = given
    outputs, size, normed, kind = PRODUCTS[name]

    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    scratch = gemv.Scratch(empty(1 << 20, dtype=torch.float32), empty(gemv.MOST_COUNTERS, dtype=torch.int32))
    mapped = gemv.Map(empty(outputs * (2 if kind else 1), size), None, empty(size) if normed else None, 1e-5)
    with compiling_only(f"sm_{ARCHITECTURE}"):
        gemv.few_rows(empty(8, size), mapped, empty(8, outputs), scratch, cut, gate=Gate(kind) if kind else None)


def compile_attention(given: tuple[DecodeShape, int]) -> None:
    """Compile attention of a shape and a number of rows into Triton's cache."""
    shape, rows = given
    memory = torch.empty(100, 32 * BLOCK, KV_HEADS, DIM, dtype=BF16, device=META)
    layer = KvLayer(memory[:, :BLOCK], memory[:, :BLOCK])
    sizes = torch.empty(rows, dtype=torch.int32, device=META)
    tables = torch.empty(rows, 64, dtype=torch.int64, device=META)
    chosen = replace(configuration("sm_90", DIM), decode=shape)
    with compiling_only(f"sm_{ARCHITECTURE}"):
        run = KernelOperations((KV_HEADS * GROUP, KV_HEADS), 1, chosen, 132)
        q = torch.empty(rows, KV_HEADS * GROUP, DIM, dtype=BF16, device=META)
        run.decoding(sizes, (tables,))(q, layer, AttentionRule(DIM**-0.5))


ARCHITECTURE = 90


def compile_all(figures: Figures) -> None:
    """Fill Triton's cache with all processors, so that the card waits for no compiler."""
    tasks: list[tuple[Callable[[Any], None], Any]] = [
        (compile_product, (name, cut))
        for name, (_, _, _, kind) in PRODUCTS.items()
        for cut in CUTS["gate_up" if kind else "wide"]
    ]
    tasks += [(compile_attention, one) for one in itertools.product(SHAPES, ROWS)]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=get_context("spawn")) as pool:
        for (_, given), future in [(task, pool.submit(*task)) for task in tasks]:
            tried(future.result, f"compile {given}")
    figures.put("compiled", tasks=len(tasks))


def main() -> None:
    """Run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", choices=("compile", "products", "attention", "steps"))
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = Figures()
    if not REHEARSE:
        tried(lambda: compile_all(figures), "compile")
    if options.only == "compile":
        return
    with torch.inference_mode():
        bandwidth = read_bandwidth(figures)
        for section in (products, attention, steps):
            if options.only in (None, section.__name__):
                tried(lambda section=section: section(figures, bandwidth), section.__name__)
    figures.table()


if __name__ == "__main__":
    main()
