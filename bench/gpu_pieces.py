"""Where benches of a step's pieces on a card run, how a piece is timed, and the table of figures.

Under ``--rehearse`` everything runs in tiny sizes on a CPU, by Triton's interpreter, which the program asks for before
it loads torch.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

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


_failed: list[str] = []


def tried(work: Callable[[], None], name: str) -> None:
    """Do it; an error is printed in full, and nothing else ends by it but the exit status (``end``)."""
    try:
        work()
    except ERRORS:
        _failed.append(name)
        print(f"--- {name} failed\n{traceback.format_exc()}", flush=True)


def end() -> NoReturn:
    """End the process, with status 1 and the names where pieces failed."""
    if _failed:
        print(f"{len(_failed)} pieces failed: {'; '.join(_failed)}", flush=True)
    sys.exit(1 if _failed else 0)


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


def relative(found: Tensor, wanted: Tensor) -> float:
    """Largest error over the largest value."""
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()
