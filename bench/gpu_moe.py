"""Experts on a card: our kernel beside torch's products of groups: ``python bench/gpu_moe.py [--rehearse]``.

Layers of Mixtral's shape and of Qwen3-30B-A3B's, steps of 1 to 8,192 tokens, three cuts of our kernel and torch, in
turns, as replays of CUDA graphs; the first rows of each against float32. One line of JSON a figure, then the rows for
``engine/backends/cuda/kernels/tile_sizes.py``. ``--rehearse`` runs tiny sizes on a CPU, under Triton's interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_pieces import BF16, DEVICE, META, REHEARSE, Figures, end, noise, relative, tried
from engine.backends.cuda.kernels import routing
from engine.backends.cuda.kernels.ahead import LaunchForm, meeting_forms
from engine.backends.cuda.kernels.cache import name_kernels
from engine.backends.cuda.kernels.grouped import ProductTile
from engine.backends.cuda.kernels.operations import KernelOperations
from engine.backends.cuda.kernels.tile_sizes import Configuration, ExpertRow, configuration
from engine.backends.cuda.kernels.triton_common import Threads
from engine.backends.cuda.runtime.operations import ExpertMaps
from engine.model.layers.layers import Linear, Memory, silu_mul
from engine.model.layers.routing import Router, Rule, Softmax, SoftmaxOfTop

Shape = tuple[int, int, int, Rule]
"""Experts, hidden numbers, numbers between an expert's maps, and how tokens are routed."""

SHAPES: dict[str, Shape] = {
    "mixtral": (8, 4_096, 14_336, SoftmaxOfTop(2)),
    "qwen3-30b-a3b": (128, 2_048, 768, Softmax(8, True)),
}
TOKENS: tuple[int, ...] = (1, 8, 64, 256, 2_048, 8_192)
if REHEARSE:
    SHAPES = {"mixtral": (4, 32, 48, SoftmaxOfTop(2)), "qwen3-30b-a3b": (6, 32, 16, Softmax(3, True))}
    TOKENS = (1, 4)

LONG = 2_048
"""Tokens from which on one call is timed at a time: it reads more than any cache holds by itself."""
CALLS = 1 if REHEARSE else 4
"""Calls of fewer tokens that are timed together, each with its own."""
ROUNDS = 1 if REHEARSE else 5
CHECKED = 32
"""Rows that are computed in float32."""

TILES = {
    "ours": None,
    "ours, wide": ProductTile(128, 128, 64, Threads(8, 3)),
    "ours, flat": ProductTile(16, 128, 128, Threads(4, 4)),
}
if REHEARSE:
    TILES = {"ours": ProductTile(16, 16, 16), "ours, wide": ProductTile(32, 16, 16)}
TORCH = "torch"


def chosen(name: str, shape: Shape) -> Configuration:
    """How a way computes."""
    found = configuration("sm_90", 128)
    if name == TORCH:
        experts, hidden, inner, _ = shape
        tile = replace(found.experts, rows=16) if REHEARSE else found.experts
        return replace(found, experts=tile, by_torch=(ExpertRow(experts, hidden, inner, 1, "this bench"),))
    tile = TILES[name]
    return found if tile is None else replace(found, experts=tile)


def ways(shape: Shape) -> dict[str, KernelOperations]:
    """All ways to compute a layer."""
    return {name: KernelOperations((4, 4), 16, chosen(name, shape), 132) for name in (*TILES, TORCH)}


def maps_of(shape: Shape, device: torch.device) -> ExpertMaps:
    """A layer of random weights, or one without contents."""
    experts, hidden, inner, rule = shape
    memory = Memory(BF16, device)
    router = Linear.empty(hidden, experts, bias=False, memory=memory)
    gate_up, down = memory.empty(experts, 2 * inner, hidden), memory.empty(experts, hidden, inner)
    if device.type != "meta":
        for one in (router.loaded, gate_up, down):
            one.normal_(0.0, one.shape[-1] ** -0.5)
    return ExpertMaps(Router(router, rule), rule, gate_up, down, None, None, silu_mul, False)


def reference(x: Tensor, maps: ExpertMaps) -> Tensor:
    """First rows through the experts that the kernel routes them to, in float32. Scores in bfloat16 are often equal,
    and the router's product may depend on how many rows there are."""
    routed = routing.empty(len(x), maps.route.top, x.device)
    routing.route(maps.router.logits(x), maps.route, routed)
    x, weights, chosen_ = x[:CHECKED], routed.weights[:CHECKED], routed.experts[:CHECKED]
    out = torch.zeros(x.shape, device=x.device)
    for expert in chosen_.unique().tolist():
        rows, place = (chosen_ == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].float() @ maps.gate_up[expert].float().T).chunk(2, 1)
        y = (F.silu(gate) * up) @ maps.down[expert].float().T
        out.index_add_(0, rows, y * weights[rows, place].unsqueeze(1))
    return out


def in_turns(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of a call of each, the median of replays of their graphs in turns."""
    started: dict[str, Callable[[], object]] = {}
    for name, run in runs.items():
        run()
        if DEVICE.type != "cuda":
            started[name] = run
            continue
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        started[name] = graph.replay
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, start in started.items():
            taken[name].append(once(start))
    return {name: statistics.median(times) for name, times in taken.items()}


def once(start: Callable[[], object]) -> float:
    """Seconds of one call."""
    if DEVICE.type != "cuda":
        began = time.perf_counter()
        start()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    start()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(figures: Figures, name: str, tokens: int, maps: ExpertMaps) -> None:
    """One shape and number of tokens."""
    shape = SHAPES[name]
    _, hidden, inner, rule = shape
    calls = 1 if tokens >= LONG else CALLS
    given = [noise(tokens, hidden) for _ in range(calls)]
    wanted = reference(given[0], maps).double()
    found, errors = ways(shape), {}
    for way, run in list(found.items()):

        def check(way: str = way, run: KernelOperations = run) -> None:
            errors[way] = relative(run.experts(given[0], maps)[:CHECKED], wanted)

        tried(check, f"{name} x {tokens} by {way}")
    good = {way: run for way, run in found.items() if way in errors}

    def call(run: KernelOperations) -> None:
        for x in given:
            run.experts(x, maps)

    taken = {way: one / calls for way, one in in_turns({way: partial(call, run) for way, run in good.items()}).items()}
    work = 6.0 * tokens * rule.top * hidden * inner
    for way, seconds in taken.items():
        figures.put(
            "experts", shape=name, tokens=tokens, way=way, us=round(seconds * 1e6, 2),
            tflops=round(work / seconds / 1e12, 2), error=float(f"{errors[way]:.3g}"),
            of_ours=round(seconds / taken["ours"], 3),
        )  # fmt: skip


def table(figures: Figures) -> None:
    """The rows for the table of tile sizes."""
    lines = [line for line in figures.lines if line["section"] == "experts"]
    for name, (experts, hidden, inner, _) in SHAPES.items():
        least = 0
        for tokens in reversed(TOKENS):
            times = {line["way"]: line["us"] for line in lines if (line["shape"], line["tokens"]) == (name, tokens)}
            if TORCH not in times or times[TORCH] >= times["ours"]:
                break
            least = tokens
        row = f"ExpertRow({experts}, {hidden}, {inner}, {least}, ...)" if least else "no row: our kernel for all"
        print(f"{name}: {row}", flush=True)


def experts(figures: Figures) -> None:
    """All shapes and numbers of tokens."""
    for name, shape in SHAPES.items():
        maps = maps_of(shape, DEVICE)
        for tokens in TOKENS:
            tried(partial(measure, figures, name, tokens, maps), f"experts {name} x {tokens}")
        del maps
    table(figures)


def compile_form(form: LaunchForm) -> None:
    """Compile a form into Triton's cache."""
    form.compile()


def compile_experts(given: tuple[str, str]) -> None:
    """Compile one way for one shape, without the card."""
    name_kernels()
    name, way = given
    shape = SHAPES[name]
    run, maps = KernelOperations((4, 4), 16, chosen(way, shape), 132), maps_of(shape, META)
    with meeting_forms("sm_90", compile_form):
        for tokens in TOKENS:
            run.experts(torch.empty(tokens, shape[1], dtype=BF16, device=META), maps)


COMPILED = [(name, way) for name in SHAPES for way in (*TILES, TORCH)]


def main() -> None:
    """Compile, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.parse_args()
    torch.manual_seed(0)
    figures = Figures()
    if not REHEARSE:
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_experts, COMPILED))
        name_kernels()
    with torch.inference_mode():
        experts(figures)


if __name__ == "__main__":
    main()
    end()
