"""Weights in 8-bit floating point on a card: ``python bench/gpu_fp8.py [--rehearse] [--only SECTION] [--no-experts]``.

* ``exact``: rows rounded by the kernel and by its specification; torch's product of rounded numbers, and our products
  of few rows, against float64 of the very same numbers; whether a row of a tile of 128 depends on its place in it.
* ``few``: the products of a Llama 8B's layer for one row and for 8, over some ways to cut a matrix, beside bfloat16's.
* ``prefill``: the same of 64 to 8,192 rows by torch: bfloat16, 8 bits, and 8 bits with the rounding of rows.
* ``decode``: the forward pass of a Llama 8B of random weights as a graph, 1, 64 and 256 rows with 512 tokens each.
* the experts' table (``bench/gpu_moe.py``), unless ``--no-experts``.

Every piece is timed as replays of CUDA graphs, and what is compared in turns. One line of JSON a figure.
``--rehearse`` runs tiny sizes on a CPU, under Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import gpu_moe
from bench.gpu_engines import BLOCK, EIGHT_B, TINY, build_model, description
from bench.gpu_moe import in_turns
from bench.gpu_pieces import BF16, DEVICE, META, REHEARSE, ROTATED, Figures, end, noise, read_bandwidth, relative, tried
from engine.backends.common.loading import layout_for
from engine.backends.cuda.kernels import gemv
from engine.backends.cuda.kernels.activation import Gate
from engine.backends.cuda.kernels.ahead import LaunchForm, meeting_forms
from engine.backends.cuda.kernels.cache import name_kernels
from engine.backends.cuda.kernels.gemv import FewRows
from engine.backends.cuda.kernels.lines import LineCut, Map
from engine.backends.cuda.kernels.operations import KernelOperations, kernel_operations
from engine.backends.cuda.kernels.scaled_rows import round_rows
from engine.backends.cuda.kernels.tile_sizes import FEW_SCALED, configuration
from engine.backends.cuda.kernels.triton_common import Threads
from engine.backends.cuda.runtime.model import DeviceModel
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.config import EngineConfig
from engine.model.checkpoint.registry import build_model as build
from engine.model.layers import scaled
from engine.model.layers.decoder import Decoder

Product = tuple[int, int, bool, str]
"""Outputs, inputs, whether there is a norm in front, and the gate."""

PRODUCTS: dict[str, Product] = {
    "qkv": (6_144, 4_096, True, ""),
    "o": (4_096, 4_096, False, ""),
    "gate_up": (14_336, 4_096, True, "silu"),
    "down": (4_096, 14_336, False, ""),
}
SIZES, CONTEXT, TILE = EIGHT_B, 512, 128
FEW_COUNTS: tuple[int, ...] = (1, 8)
MANY_COUNTS: tuple[int, ...] = (64, 256, 2_048, 8_192)
STEP_ROWS: tuple[int, ...] = (1, 64, 256)
CUTS: dict[int, dict[str, FewRows]] = {
    1: {
        "8 lines": replace(FEW_SCALED, alone=LineCut(8, 8)),
        "4 lines, 4 warps": replace(FEW_SCALED, alone=LineCut(4, 4)),
        "8 lines, 8 bytes": replace(FEW_SCALED, alone=LineCut(8, 4, at_once=8)),
        "tensor cores": FEW_SCALED,
    },
    8: {
        "6 stages": FEW_SCALED,
        "4 stages": replace(FEW_SCALED, gated_depth=128, launch=Threads(4, 4)),
        "wide": FewRows(outputs=128, launch=Threads(8, 4)),
    },
}
if REHEARSE:
    PRODUCTS = {"qkv": (32, 64, True, ""), "gate_up": (32, 64, True, "silu")}
    SIZES, CONTEXT, TILE = TINY | {"num_layers": 1, "vocab_size": 64}, 16, 32
    MANY_COUNTS, STEP_ROWS = (17,), (1, 17)
    small = FewRows(outputs=16, depth=32, gated_depth=32, programs=4)
    CUTS = {1: {"lines": replace(small, alone=LineCut(4, 1))}, 8: {"tiles": small}}


def matrices(name: str, item: int) -> tuple[Tensor, int]:
    """A matrix in bfloat16, and how many a piece rotates over where a number has so many bytes."""
    outputs, size, _, kind = PRODUCTS[name]
    lines = outputs * (2 if kind else 1)
    return noise(lines, size, spread=size**-0.5), max(2, -(-ROTATED // (lines * size * item)))


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The matrix in 8 bits, and its scales."""
    numbers, scale = scaled.round_rows(weight)
    return numbers, scale.squeeze(1).contiguous()


def turned(numbers: Tensor, count: int) -> list[Tensor]:
    """So many matrices of the same numbers at other places."""
    bits = numbers.view(torch.uint8) if numbers.dtype == scaled.E4M3 else numbers
    return [numbers, *(bits.roll(one + 1, 0).view(numbers.dtype) for one in range(count - 1))]


def exact(figures: Figures, _: float) -> None:
    """What the kernels and torch compute, against float64 of the same numbers."""
    for name, (_, size, normed, _kind) in PRODUCTS.items():
        weight, scale = rounded(matrices(name, 1)[0])
        x, gain = noise(TILE, size), noise(size)
        numbers, row_scale = torch.empty(x.shape, dtype=scaled.E4M3, device=DEVICE), noise(TILE, 1).float()
        round_rows(x, numbers, row_scale, gain=gain if normed else None, eps=1e-5)
        told, told_scale = scaled.round_rows(F.rms_norm(x, (size,), gain, 1e-5) if normed else x)
        other = (numbers.float() != told.float()).double().mean().item()
        found = scaled.multiply_rounded(numbers, row_scale, weight, scale, None, BF16)
        asked = (numbers.double() @ weight.double().T) * row_scale.double() * scale.double()
        moved = numbers.view(torch.uint8).roll(5, 0).view(scaled.E4M3)
        again = scaled.multiply_rounded(moved, row_scale.roll(5, 0), weight, scale, None, BF16)
        unrounded = (F.rms_norm(x, (size,), gain, 1e-5) if normed else x).double() @ (
            weight.double() * scale.double().unsqueeze(1)
        ).T
        figures.put(
            "exact", piece=name, other_numbers=other, scales=relative(row_scale, told_scale.double()),
            product=relative(found, asked), of_unrounded=relative(found, unrounded),
            same_bits_elsewhere=torch.equal(again.roll(-5, 0), found),
        )  # fmt: skip


def few(figures: Figures, bandwidth: float) -> None:
    """Products of few rows."""
    for name in PRODUCTS:
        for rows in FEW_COUNTS:
            tried(partial(few_of, figures, bandwidth, name, rows), f"few {name} x {rows}")


def few_of(figures: Figures, bandwidth: float, name: str, rows: int) -> None:
    """One product of so many rows: bfloat16, and 8 bits cut in several ways."""
    outputs, size, normed, kind = PRODUCTS[name]
    whole, _ = matrices(name, 2)
    numbers, scale = rounded(whole)
    copies = matrices(name, 1)[1]
    gain, gate = noise(size) if normed else None, Gate(kind) if kind else None
    x, out = noise(rows, size), torch.empty(rows, outputs, device=DEVICE, dtype=BF16)
    wanted = few_reference(x, numbers, scale, gain, kind)
    scratch = gemv.Scratch.empty(1 << 16 if REHEARSE else 1 << 24, DEVICE)
    runs: dict[str, Callable[[], object]] = {}
    errors: dict[str, float] = {}

    def add(kind_: str, held: list[Tensor], own: Tensor | None, cut: FewRows) -> None:
        def run() -> None:
            for weight in held:
                gemv.few_rows(x, Map(weight, None, gain, 1e-5, own), out, scratch, cut, gate=gate)

        gemv.few_rows(x, Map(held[0], None, gain, 1e-5, own), out, scratch, cut, gate=gate)
        errors[kind_] = relative(out, wanted)
        runs[kind_] = run

    usual = CUTS[8]["tiles"] if REHEARSE else configuration("sm_90", 128).few
    tried(partial(add, "bf16", turned(whole, copies), None, usual), f"{name} bf16")
    held = turned(numbers, copies)
    for cut_name, cut in CUTS[rows].items():
        tried(partial(add, f"fp8, {cut_name}", held, scale, cut), f"{name} {cut_name}")
    for kind_, seconds in in_turns(runs).items():
        moved = whole.nbytes if kind_ == "bf16" else numbers.nbytes
        each = seconds / copies
        figures.put(
            "few", piece=name, rows=rows, kind=kind_, us=round(each * 1e6, 2), gb_per_s=moved / each / 1e9,
            share=moved / each / bandwidth, error=errors[kind_],
        )  # fmt: skip


def few_reference(x: Tensor, numbers: Tensor, scale: Tensor, gain: Tensor | None, kind: str) -> Tensor:
    """The product and what surrounds it, in float64."""
    wide = x.double()
    if gain is not None:
        wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5) * gain.double()
    y = (wide @ numbers.double().T) * scale.double()
    if kind:
        left, right = y.chunk(2, 1)
        y = F.silu(left) * right
    return y


def prefill(figures: Figures, _: float) -> None:
    """Products of many rows."""
    sums: dict[tuple[int, str], list[float]] = {}
    for name, rows in ((name, rows) for rows in MANY_COUNTS for name in PRODUCTS):

        def measure(name: str = name, rows: int = rows) -> None:
            for kind, seconds in many_of(name, rows).items():
                weight = PRODUCTS[name]
                work = 2.0 * rows * weight[0] * (2 if weight[3] else 1) * weight[1]
                figures.put(
                    "prefill",
                    piece=name,
                    rows=rows,
                    kind=kind,
                    us=round(seconds * 1e6, 2),
                    tflops=work / seconds / 1e12,
                )
                one = sums.setdefault((rows, kind), [0.0, 0.0])
                one[0], one[1] = one[0] + work, one[1] + seconds

        tried(measure, f"prefill {name} x {rows}")
    for (rows, kind), (work, seconds) in sums.items():
        figures.put("prefill", piece="layer", rows=rows, kind=kind, us=seconds * 1e6, tflops=work / seconds / 1e12)


def many_of(name: str, rows: int) -> dict[str, float]:
    """Seconds of one product of so many rows."""
    whole, copies = matrices(name, 1)
    numbers, scale = rounded(whole)
    copies = min(copies, 8)
    wide, held = turned(whole, copies), turned(numbers, copies)
    x = noise(rows, whole.shape[1])
    line = torch.empty(x.shape, dtype=scaled.E4M3, device=DEVICE), torch.empty(rows, 1, device=DEVICE)
    round_rows(x, *line)

    def bf16() -> None:
        for one in wide:
            F.linear(x, one)

    def fp8() -> None:
        for one in held:
            scaled.multiply_rounded(*line, one, scale, None, BF16)

    def fp8_rounded() -> None:
        for one in held:
            round_rows(x, *line)
            scaled.multiply_rounded(*line, one, scale, None, BF16)

    found = in_turns({"bf16": bf16, "fp8": fp8, "fp8 and rounding": fp8_rounded})
    return {kind: seconds / copies for kind, seconds in found.items()}


def decode(figures: Figures, bandwidth: float) -> None:
    """The forward pass of a step, both ways in turns."""
    plain = build_model(SIZES, DEVICE, BF16)
    models = {"bf16": plain, "fp8": rounded_model(plain)}
    for rows in STEP_ROWS:

        def measure(rows: int = rows) -> None:
            runs = {kind: step(model, rows) for kind, model in models.items()}
            logits = {kind: run() for kind, run in runs.items()}
            for kind, seconds in in_turns(runs).items():
                rate = model_bytes(models[kind]) / seconds
                figures.put(
                    "decode", piece="8B", rows=rows, kind=kind, us=round(seconds * 1e6, 1), gb_per_s=rate / 1e9,
                    share=rate / bandwidth, tokens_per_s=round(rows / seconds, 1),
                    finite=bool(logits[kind].isfinite().all()), of_bf16=relative(logits[kind], logits["bf16"].double()),
                )  # fmt: skip

        tried(measure, f"decode x {rows}")


def rounded_model(plain: Decoder) -> Decoder:
    """The same model with its layers' maps in 8 bits; everything else is shared."""
    model, _ = build(description(SIZES), BF16, DEVICE, scaled=True)
    for mine, theirs in zip(model._linears, plain._linears, strict=True):
        if mine.scale is None:
            mine.weight = theirs.weight
            continue
        numbers, scale = scaled.round_rows(theirs.loaded)
        mine.loaded.copy_(numbers)
        mine.scale.copy_(scale.squeeze(1))
    model.embedding.weight = plain.embedding.weight
    model.norm.weight = plain.norm.weight
    for layer, like in zip(model.layers, plain.layers, strict=True):
        for one, other in zip(layer.sublayers, like.sublayers, strict=True):
            assert one.before is not None
            assert other.before is not None
            one.before.weight = other.before.weight
    return model


def model_bytes(model: Decoder) -> int:
    """What a step reads of a model."""
    linears = [linear for linear in model._linears if linear.weight is not None]
    return sum(linear.loaded.nbytes + (0 if linear.scale is None else linear.scale.nbytes) for linear in linears)


def step(model: Decoder, rows: int, run: KernelOperations | None = None) -> Callable[[], Tensor]:
    """What computes the logits of one token of so many rows, each with a context."""
    config = EngineConfig(
        model_dir="", model_digest="00", block_size=BLOCK, max_context=CONTEXT, max_num_seqs=rows, backend="device",
        kv_bytes=1 << 20 if REHEARSE else 1 << 30,
    )  # fmt: skip
    shape, device = model.config, model.device
    blocks = CONTEXT // BLOCK
    layout = replace(layout_for(config, shape, "bfloat16"), num_blocks=rows * blocks + 1)
    if run is None:
        run = kernel_operations((shape.num_heads, shape.num_kv_heads), shape.head_dim, shape.vocab_size, device)
    forward = DeviceModel(model, DeviceStorage(layout, rows, run, BF16, device), run)
    place = torch.full((rows,), CONTEXT - 1, dtype=torch.int64, device=device)
    table = torch.arange(1, rows * blocks + 1, device=device).view(rows, blocks)
    slots = table[:, -1] * layout.block_rows + BLOCK - 1
    tokens = torch.arange(3, 3 + rows, device=device)
    return lambda: forward.decode(tokens, place, (slots,), (table,), place + 1)


def compile_form(form: LaunchForm) -> None:
    """Compile a form into Triton's cache."""
    form.compile()


def compile_step(kind: str, rows: int) -> None:
    """The forms of a step."""
    model, _ = build(description(SIZES | {"num_layers": 1}), BF16, META, scaled=kind == "fp8")
    shape = model.config
    heads = shape.num_heads, shape.num_kv_heads
    # Of the form that the card's own processors give it, which is no part of any kernel.
    step(model, rows, kernel_operations(heads, shape.head_dim, shape.vocab_size, META, "sm_90"))()


def compile_few(name: str, rows: int) -> None:
    """The forms of a product of few rows."""
    outputs, size, normed, kind = PRODUCTS[name]
    lines = outputs * (2 if kind else 1)

    def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    scratch = gemv.Scratch(empty(1 << 24, dtype=torch.float32), empty(gemv.MOST_COUNTERS, dtype=torch.int32))
    gain, gate = empty(size) if normed else None, Gate(kind) if kind else None
    given = Map(empty(lines, size, dtype=scaled.E4M3), None, gain, 1e-5, empty(lines, dtype=torch.float32))
    for cut in CUTS[rows].values():
        gemv.few_rows(empty(rows, size), given, empty(rows, outputs), scratch, cut, gate=gate)
    plain = Map(empty(lines, size), None, gain, 1e-5)
    gemv.few_rows(empty(rows, size), plain, empty(rows, outputs), scratch, configuration("sm_90", 128).few, gate=gate)
    for rows_ in (TILE, *MANY_COUNTS):
        x = empty(rows_, size)
        for known in (None, gain):
            round_rows(x, empty(rows_, size, dtype=scaled.E4M3), empty(rows_, 1, dtype=torch.float32), gain=known)


def compile_one(given: tuple[str, Any, Any]) -> None:
    """Compile what one task says, without the card."""
    kind, first, second = given
    if kind == "experts":
        gpu_moe.compile_experts((first, second))
        return
    name_kernels()
    with meeting_forms("sm_90", compile_form), torch.inference_mode():
        (compile_step if kind == "step" else compile_few)(first, second)


def compile_all(figures: Figures, *, experts: bool) -> None:
    """Fill Triton's cache with all processors, so that the card waits for no compiler."""
    tasks: list[tuple[str, Any, Any]] = [("step", kind, rows) for rows in STEP_ROWS for kind in ("bf16", "fp8")]
    tasks += [("few", name, rows) for name in PRODUCTS for rows in FEW_COUNTS]
    tasks += [("experts", *one) for one in gpu_moe.COMPILED] if experts else []
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=get_context("spawn")) as pool:
        for task, future in [(task, pool.submit(compile_one, task)) for task in tasks]:
            tried(future.result, f"compile {task}")
    figures.put("compiled", tasks=len(tasks))


SECTIONS = (exact, few, prefill, decode)


def main() -> None:
    """Compile, then run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--no-experts", action="store_true")
    parser.add_argument("--only", choices=("compile", *(section.__name__ for section in SECTIONS)))
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = Figures()
    if not REHEARSE:
        tried(lambda: compile_all(figures, experts=not options.no_experts and options.only is None), "compile")
        name_kernels()
    if options.only == "compile":
        return
    with torch.inference_mode():
        bandwidth = read_bandwidth(figures)
        for section in SECTIONS:
            if options.only in (None, section.__name__):
                tried(partial(section, figures, bandwidth), section.__name__)
                if DEVICE.type == "cuda":
                    torch.cuda.empty_cache()
        if options.only is None and not options.no_experts:
            tried(partial(gpu_moe.experts, figures), "experts")
    figures.table()


if __name__ == "__main__":
    main()
    end()
