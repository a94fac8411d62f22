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
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
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


def launches() -> list[tuple[int, int]]:
    """Warps and stages that are tried."""
    return list(itertools.product((2, 4, 8), (1, 2, 3, 4)))


def decode_candidates(present: Any) -> list[Any]:
    """Tiles of other extents with splits of as many tokens as the present ones."""
    launch, tokens = type(present.launch), present.tile * present.span
    return [
        replace(present, tile=tile, span=max(1, tokens // tile), launch=launch(warps, stages))
        for tile in (16, 32, 64, 128)
        if tile <= tokens
        for warps, stages in launches()
    ]


def prefill_candidates(present: Any) -> list[Any]:
    """Tiles of other extents."""
    launch = type(present.launch)
    return [
        replace(present, lines=lines, tile=tile, launch=launch(warps, stages))
        for lines, tile in itertools.product((32, 64, 128), (32, 64, 128))
        for warps, stages in launches()
    ]


def tune(report: Report, dim: int) -> None:
    """Measure for heads of this width, and print the row."""
    kernels = importlib.import_module("bench.gpu_kernels")
    table = importlib.import_module("engine.backends.cuda.kernels.tile_sizes")
    operations = importlib.import_module("engine.backends.cuda.kernels.operations")
    shape = Shape(32, 8, dim)
    properties = torch.cuda.get_device_properties(report.device)
    present = table.configuration(f"sm_{properties.major}{properties.minor}", dim)

    def measured(field: str, mixes: Iterable[list[int]], value: object) -> list[float] | None:
        times = []
        for lengths in mixes:
            case = kernels.Case(report, lengths, shape, dtype=torch.bfloat16)
            found = []
            for one in (getattr(present, field), value):
                case.kernels = operations.KernelOperations(
                    (shape.heads, shape.kv_heads), 1, replace(present, **{field: one}), properties.multi_processor_count
                )
                count = len(lengths) if field == "decode" else sum(lengths)
                case.generator.manual_seed(5)
                make = case.decode if field == "decode" else case.prefill
                try:
                    run = make(case.queries(count))
                    found.append(run())
                    torch.cuda.synchronize()
                except (RuntimeError, ValueError):
                    return None
            if not torch.allclose(found[0].float(), found[1].float(), atol=2e-2, rtol=2e-2):
                return None
            times.append(seconds_of(run, report, rounds=10))
        return times

    chosen = present
    for field, mixes, candidates in (
        ("decode", DECODE_LENGTHS, decode_candidates(present.decode)),
        ("prefill", PREFILL_LENGTHS, prefill_candidates(present.prefill)),
    ):
        best, ratio = choose(getattr(present, field), candidates, lambda value, f=field, m=mixes: measured(f, m, value))
        chosen = replace(chosen, **{field: best}, measured=torch.cuda.get_device_name(report.device))
        report.put("tuned", field=field, dim=dim, ratio=ratio, row=repr(best))
    print(f"        {dim}: {chosen!r},")


def main() -> None:
    """Tune for heads of 64, 128 and 256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-tune.jsonl"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU, and tiles are chosen by time on one")
    report = Report(options.out, False, torch.device("cuda"))
    report.deadline = time.monotonic() + BUDGET_S
    for dim in (128, 64, 256):
        tune(report, dim)


if __name__ == "__main__":
    main()
