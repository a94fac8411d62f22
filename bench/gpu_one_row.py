"""One row on a card: ``python bench/gpu_one_row.py [--rehearse] [--only products|steps]``, less than a minute.

Products of a Llama 8B's matrices by the kernel for several rows and by that for one, cut in some ways, with launches
that begin before the one in front of them ends and without; each rotates over more memory than a cache holds. Then the
whole step, all ways in turns, so that what else changes meanwhile meets all of them. Shares are of this card's reading.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.gpu_decode import PRODUCTS, reference
from bench.gpu_engines import EIGHT_B, TINY, build_model
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
from bench.gpu_steps import WAYS, make_engine, weight_bytes
from engine.backends.cuda.kernels import gemv
from engine.backends.cuda.kernels.activation import Gate
from engine.backends.cuda.kernels.ahead import LaunchForm, meeting_forms
from engine.backends.cuda.kernels.cache import name_kernels
from engine.backends.cuda.kernels.gemv import FewRows
from engine.backends.cuda.kernels.lines import LineCut, Map
from engine.core.engine import Engine
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

CUTS = (
    FewRows(),
    FewRows(early=True),
    *(
        replace(FewRows(early=early), alone=lines)
        for lines in (LineCut(8, 4), LineCut(4, 4), LineCut(16, 4), LineCut(8, 2), LineCut(8, 8), LineCut(16, 8))
        for early in (False, True)
    ),
    FewRows(alone=LineCut(8, 4, 2_048), early=True),
    FewRows(alone=LineCut(8, 4, 6_144), early=True),
)
COMPARED = ("fused", "early", "alone", "alone, early", "alone, early, 2048", "alone, early, whole")
TURNS, TOKENS = (1, 4) if REHEARSE else (4, 80)
WARM_TOKENS = 2 if REHEARSE else 16


def products(figures: Figures, bandwidth: float) -> None:
    """All matrices, cut in all ways."""
    for name, (outputs, size, normed, kind) in PRODUCTS.items():
        lines = outputs * (2 if kind else 1)
        copies = max(2, -(-ROTATED // (lines * size * 2)))
        first = noise(lines, size, spread=size**-0.5)
        weights = [first, *(first.roll(one + 1, 0) for one in range(copies - 1))]
        gain, gate = noise(size) if normed else None, Gate(kind) if kind else None
        x, out = noise(1, size), torch.empty(1, outputs, device=DEVICE, dtype=BF16)
        wanted = reference(x, first, gain, kind)
        for cut in CUTS:

            def measure(
                cut: FewRows = cut,
                name: str = name,
                gate: Gate | None = gate,
                gain: torch.Tensor | None = gain,
                weights: list[torch.Tensor] = weights,
                given: tuple[torch.Tensor, ...] = (x, out, wanted),
            ) -> None:
                x, out, wanted = given
                needed = gemv.numbers_needed(cut, out.shape[1], x.shape[1], gate=gate is not None)
                scratch = gemv.Scratch.empty(needed, DEVICE)

                def run() -> None:
                    for weight in weights:
                        gemv.few_rows(x, Map(weight, None, gain, 1e-5), out, scratch, cut, gate=gate)

                gemv.few_rows(x, Map(weights[0], None, gain, 1e-5), out, scratch, cut, gate=gate)
                error = relative(out, wanted)
                taken = seconds_of(run, len(weights))
                moved = weights[0].nbytes
                figures.put(
                    "product", piece=name, rows=1, kind="alone" if cut.alone else "several", us=taken * 1e6,
                    gb_per_s=moved / taken / 1e9, share=moved / taken / bandwidth, error=error, cut=repr(cut),
                )  # fmt: skip

            tried(measure, f"{name} by {cut}")


def step_seconds(engine: Engine, number: int) -> float:
    """The median of a row's steps."""
    sampling = Sampling(temperature=0.0)
    ids = array("I", range(3, 35))
    engine.add(Submit(number, bytes(32), ids, WARM_TOKENS + TOKENS, sampling, ignore_eos=True))
    times, last = [], 0.0
    while engine.has_work:
        output = engine.step()
        now = time.perf_counter()
        if output is not None and output.token_ids:
            times.append(now - last)
            last = now
    return statistics.fmean(sorted(times[WARM_TOKENS:])[: -max(1, TOKENS // 20)])


def steps(figures: Figures, bandwidth: float) -> None:
    """The whole step in several ways, in turns."""
    sizes, dtype = (TINY, torch.float32) if REHEARSE else (EIGHT_B, BF16)
    model = build_model(sizes, DEVICE, dtype)
    weights = weight_bytes(model)
    engines: dict[str, Engine] = {}
    for kind in COMPARED:

        def make(kind: str = kind) -> None:
            engine = make_engine(model, 1, WAYS[kind])
            engine.runner.prove()
            engines[kind] = engine

        tried(make, f"engine {kind}")
    found: dict[str, list[float]] = {kind: [] for kind in engines}
    for turn in range(TURNS):
        for kind, engine in engines.items():
            found[kind].append(step_seconds(engine, 1 + turn))
    for kind, times in found.items():
        taken = statistics.median(times)
        figures.put(
            "step", piece="8B", rows=1, kind=kind, us=taken * 1e6, gb_per_s=weights / taken / 1e9,
            share=weights / taken / bandwidth, tokens_per_s=1 / taken, all_us=[round(one * 1e6) for one in times],
        )  # fmt: skip


def compile_form(form: LaunchForm) -> None:
    """Compile a form into Triton's cache."""
    form.compile()


def compile_cut(given: tuple[str, FewRows]) -> None:
    """Compile one product into Triton's cache, without the card."""
    name_kernels()
    name, cut = given
    outputs, size, normed, kind = PRODUCTS[name]

    def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    scratch = gemv.Scratch(empty(1 << 20, dtype=torch.float32), empty(gemv.MOST_COUNTERS, dtype=torch.int32))
    mapped = Map(empty(outputs * (2 if kind else 1), size), None, empty(size) if normed else None, 1e-5)
    with meeting_forms("sm_90", compile_form):
        gemv.few_rows(empty(1, size), mapped, empty(1, outputs), scratch, cut, gate=Gate(kind) if kind else None)


def main() -> None:
    """Run the sections."""
    name_kernels()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", choices=("products", "steps"))
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = Figures()
    sections: tuple[Callable[[Figures, float], None], ...] = (products, steps)
    if not REHEARSE and options.only != "steps":
        with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_cut, [(name, cut) for name in PRODUCTS for cut in CUTS]))
    with torch.inference_mode():
        bandwidth = read_bandwidth(figures)
        for section in sections:
            if options.only in (None, section.__name__):
                tried(lambda section=section: section(figures, bandwidth), section.__name__)
    figures.table()


if __name__ == "__main__":
    main()
    end()
