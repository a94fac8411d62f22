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
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_engines import BLOCK
from bench.gpu_pieces import (
    BF16,
    DEVICE,
    META,
    REHEARSE,
    ROTATED,
    Figures,
    end,
    noise,
    read_bandwidth,
    relative,
    seconds_of,
    tried,
)
from bench.gpu_steps import steps
from engine.backends.attention import AttentionRule
from engine.backends.cuda.kernels import gemv
from engine.backends.cuda.kernels.activation import Gate
from engine.backends.cuda.kernels.ahead import LaunchForm, meeting_forms
from engine.backends.cuda.kernels.cache import name_kernels
from engine.backends.cuda.kernels.gemv import FewRows
from engine.backends.cuda.kernels.lines import Map
from engine.backends.cuda.kernels.operations import KernelOperations
from engine.backends.cuda.kernels.tile_map import DecodeShape
from engine.backends.cuda.kernels.tile_sizes import configuration
from engine.backends.cuda.kernels.triton_common import Threads
from engine.backends.cuda.runtime.operations import KvLayer

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
                        gemv.few_rows(x, Map(weight, None, gain, 1e-5), out, scratch, cut, gate=gate)

                gemv.few_rows(x, Map(first, None, gain, 1e-5), out, scratch, cut, gate=gate)
                error = relative(out, wanted)
                same = out[:1].clone()
                gemv.few_rows(x[:1], Map(first, None, gain, 1e-5), out, scratch, cut, gate=gate)
                # Before the timing, which writes there too.
                alone = torch.equal(same, out[:1])
                said("ours", seconds_of(ours, copies), error, cut=repr(cut), alone=alone)

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


def compile_form(form: LaunchForm) -> None:
    """Compile a form into Triton's cache."""
    form.compile()


def compile_product(given: tuple[str, FewRows]) -> None:
    """Compile one product into Triton's cache, without the card."""
    name_kernels()
    name, cut = given
    outputs, size, normed, kind = PRODUCTS[name]

    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    scratch = gemv.Scratch(empty(1 << 20, dtype=torch.float32), empty(gemv.MOST_COUNTERS, dtype=torch.int32))
    mapped = Map(empty(outputs * (2 if kind else 1), size), None, empty(size) if normed else None, 1e-5)
    with meeting_forms(f"sm_{ARCHITECTURE}", compile_form):
        gemv.few_rows(empty(8, size), mapped, empty(8, outputs), scratch, cut, gate=Gate(kind) if kind else None)


def compile_attention(given: tuple[DecodeShape, int]) -> None:
    """Compile attention of a shape and a number of rows into Triton's cache."""
    name_kernels()
    shape, rows = given
    memory = torch.empty(100, 32 * BLOCK, KV_HEADS, DIM, dtype=BF16, device=META)
    layer = KvLayer(memory[:, :BLOCK], memory[:, :BLOCK])
    sizes = torch.empty(rows, dtype=torch.int32, device=META)
    tables = torch.empty(rows, 64, dtype=torch.int64, device=META)
    chosen = replace(configuration("sm_90", DIM), decode=shape)
    with meeting_forms(f"sm_{ARCHITECTURE}", compile_form):
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
    name_kernels()  # one order everywhere, so that what was compiled beside is found
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", choices=("compile", "products", "attention", "steps"))
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = Figures()
    if not REHEARSE and options.only != "steps":
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
    end()
