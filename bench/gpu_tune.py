"""Chooses extents of attention's tiles by measuring on a card, offline: ``python bench/gpu_tune.py``.

Prints, for each width of heads, a row for ``engine/backends/cuda/kernels/tile_sizes.py``; somebody reads and commits
it, and what serves only looks it up. A candidate is timed over several mixes of lengths and counts by the geometric
mean of its times over those of the row that is there. One that does not compile, does not fit the card or gives other
numbers than the present row is passed over; one that is faster by less than measurements differ leaves the row as it
is. The number of tiles in a split is not tried: a row's bits would depend on the card.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.gpu_engines import Shape
from bench.gpu_report import Report, seconds_of

Candidate = TypeVar("Candidate")

MARGIN = 0.03
"""A candidate has to be faster by more than this share: two runs of one kernel differ by about as much."""

BUDGET_S = 400.0

DECODE_LENGTHS = ([4_096] * 64, [128, 512, 2_048, 8_192] * 16, [1_000] * 256, [16_384])
"""Mixes of contexts."""

PREFILL_LENGTHS = ([4_096] * 2, [512] * 16, [100, 300, 2_000, 1_600])


def choose(
    present: Candidate, candidates: Iterable[Candidate], measure: Callable[[Candidate], list[float] | None]
) -> tuple[Candidate, float]:
    """The best candidate and its time, relative to the present one's.

    Args:
        present: what is in the table; it stays unless one is faster by more than ``MARGIN``.
        candidates: to be tried; the present one may be among them.
        measure: seconds for each mix, None where a candidate cannot be used.

    Raises:
        ValueError: the present one cannot be used, so that nothing can be compared.
    """
    base = measure(present)
    if not base:
        raise ValueError("the present configuration cannot be used on this card")
    best, best_ratio = present, 1.0
    for candidate in candidates:
        times = None if candidate == present else measure(candidate)
        if times is None:
            continue
        ratio = math.exp(sum(math.log(one / other) for one, other in zip(times, base, strict=True)) / len(base))
        if ratio < best_ratio:
            best, best_ratio = candidate, ratio
    return (best, best_ratio) if best_ratio < 1 - MARGIN else (present, 1.0)


def decode_candidates(present: Any) -> list[Any]:
    """Tiles of other extents with splits of as many tokens as the present ones, and other numbers of programs."""
    launch, tokens = type(present.launch), present.tile * present.span
    return [
        replace(present, tile=tile, span=max(1, tokens // tile), launch=launch(warps, stages), resident=resident)
        for tile in (64, 128)
        if tile <= tokens
        for warps, stages, resident in itertools.product((4, 8), (2, 3), (2, 3, 4))
    ]


def prefill_candidates(present: Any) -> list[Any]:
    """Tiles of other extents."""
    launch = type(present.launch)
    return [
        replace(present, lines=lines, tile=tile, launch=launch(warps, stages))
        for lines, tile in itertools.product((64, 128), (32, 64, 128))
        for warps, stages in itertools.product((4, 8), (2, 3, 4))
        if lines > 64 or warps == 4
    ]


CANDIDATES: dict[str, Callable[[Any], list[Any]]] = {"decode": decode_candidates, "prefill": prefill_candidates}
MIXES = {"decode": DECODE_LENGTHS, "prefill": PREFILL_LENGTHS}


def present_row(dim: int) -> Any:
    """The row of this card's architecture for heads of this width."""
    major, minor = torch.cuda.get_device_capability()
    table = importlib.import_module("engine.backends.cuda.kernels.tile_sizes")
    return table.configuration(f"sm_{major}{minor}", dim)


def times_of(field: str, dim: int, value: Any, report: Report, rounds: int = 10) -> list[float] | None:
    """Seconds of one candidate for each mix of lengths, or None where it cannot be used."""
    kernels = importlib.import_module("bench.gpu_kernels")
    operations = importlib.import_module("engine.backends.cuda.kernels.operations")
    shape, present = Shape(32, 8, dim), present_row(dim)
    processors = torch.cuda.get_device_properties(report.device).multi_processor_count
    times = []
    for lengths in MIXES[field]:
        case = kernels.Case(report, lengths, shape, dtype=torch.bfloat16)
        found = []
        for one in (getattr(present, field), value):
            case.kernels = operations.KernelOperations(
                (shape.heads, shape.kv_heads), 1, replace(present, **{field: one}), processors
            )
            case.generator.manual_seed(5)
            run = getattr(case, field)(case.queries(len(lengths) if field == "decode" else sum(lengths)))
            try:
                found.append(run())
                torch.cuda.synchronize()
            except (RuntimeError, ValueError):
                return None
        if not torch.allclose(found[0].float(), found[1].float(), atol=2e-2, rtol=2e-2):
            return None
        times.append(seconds_of(run, report, rounds=rounds))
    return times


def compile_one(asked: tuple[str, int, Any]) -> None:
    """Run a candidate once, so that its kernel is in Triton's cache: in a process of its own, beside others."""
    report = Report(Path("/dev/null"), False, torch.device("cuda"))
    report.deadline = time.monotonic() + BUDGET_S
    times_of(*asked, report, rounds=1)


def tune(report: Report, dims: Iterable[int], fields: Iterable[str], processes: int) -> None:
    """Measure for heads of these widths, and print the rows."""
    asked = [
        (field, dim, one)
        for dim in dims
        for field in fields
        for one in CANDIDATES[field](getattr(present_row(dim), field))
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, asked))
    report.put("compiled", candidates=len(asked))
    for dim in dims:
        chosen = present_row(dim)
        for field in fields:

            def measured(value: Any, field: str = field, dim: int = dim) -> list[float] | None:
                times = times_of(field, dim, value, report)
                report.put("candidate", field=field, dim=dim, row=repr(value), seconds=times)
                return times

            present = getattr(chosen, field)
            best, ratio = choose(present, CANDIDATES[field](present), measured)
            chosen = replace(chosen, **{field: best}, measured=torch.cuda.get_device_name(report.device))
            report.put("tuned", field=field, dim=dim, ratio=ratio, row=repr(best))
        print(f"        {dim}: {chosen!r},", flush=True)


def main() -> None:
    """Tune for heads of 64, 128 and 256, or of what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-tune.jsonl"))
    parser.add_argument("--dims", type=int, nargs="*", default=(128, 64, 256))
    parser.add_argument("--fields", nargs="*", choices=tuple(CANDIDATES), default=tuple(CANDIDATES))
    parser.add_argument("--processes", type=int, default=min(12, os.cpu_count() or 1), help="that compile at once")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU, and tiles are chosen by time on one")
    report = Report(options.out, False, torch.device("cuda"))
    report.deadline = time.monotonic() + BUDGET_S
    tune(report, options.dims, options.fields, options.processes)


if __name__ == "__main__":
    main()
