"""Everything that is to be known of a GPU, in one call of less than ten minutes, with a verdict for each bar.

Needs the repository, torch (2.11 or later, with its Triton), numpy and ``transformers``; no network, no installation.
Run from the repository's root: ``python bench/gpu.py [--out FILE]``. Sections, each with a budget of seconds:

* ``roofline``: this machine's own rates, which all shares are of;
* ``exactness``: attention against float64, the graph loop against the eager one over 500 schedules;
* ``memory``: what a warm engine still takes from the driver under requests of all kinds;
* ``kernels``: attention's share of memory bandwidth and of the best library kernel, the sampler;
* ``cold``: process start to first token, 16 GB of weights in memory's file system;
* ``closed``: 1 to 256 streams of 1,000 tokens and 256 tokens, host time, processor and energy a token;
* ``peer``: ``transformers``' continuous batching and its static cache on the same weights, in a process of its own;
* ``trace``: arrivals in the shape of a published trace at rising rates, utilisation at saturation;
* ``isolation``: inside and outside of gVisor, where ``runsc`` is there.

Weights are random, of the shape of Llama 3.1 8B. Results are written to the file as they come; a section that fails or
takes too long is noted, and the next one runs. ``--toy`` runs all of it on a CPU in seconds: it shows that the script
works, and nothing about speed.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench import gpu_kernels, gpu_memory, gpu_peer, gpu_serving, gpu_start
from bench.gpu_report import OutOfTimeError, Report

BUDGETS = {
    "roofline": 15.0,
    "exactness": 60.0,
    "memory": 25.0,
    "kernels": 45.0,
    "cold": 75.0,
    "closed": 130.0,
    "peer": 100.0,
    "trace": 65.0,
    "isolation": 25.0,
}
"""Seconds of each section: 540 of the 600 that a call has."""

TOY_PATIENCE = 4.0
"""So many times longer at toy size, where the processor is shared."""

TOTAL_S = 585.0
"""When the summary is written whatever is still running."""


def main() -> int:
    """Run the sections; gives 0 when all of them came to their end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--out", type=Path, default=Path("gpu-results.jsonl"))
    parser.add_argument("--only", nargs="*", choices=tuple(BUDGETS), default=tuple(BUDGETS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--child-routes", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        gpu_start.child(options.child, options.began)
        return 0
    if options.child_routes:
        gpu_start.routes(options.child_routes)
        return 0
    if not options.toy and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --toy runs everything at toy size on the CPU")
    options.out.unlink(missing_ok=True)
    device = torch.device("cpu" if options.toy else "cuda")
    report = Report(options.out, options.toy, device)
    report.put("machine", torch=torch.__version__, device=gpu_kernels.name_of(device), kernel=os.uname().release)
    watch = threading.Timer(TOTAL_S, _end, (report,))
    watch.daemon = True
    watch.start()
    gc.freeze()  # What was imported stays: the collector need not look at it again after each section.
    run_sections(report, options.only)
    watch.cancel()
    print(report.summary())
    return 1 if report.failures else 0


def run_sections(report: Report, wanted: tuple[str, ...]) -> None:
    """One after the other, whatever becomes of each."""
    rates: dict[str, float] = {"read_bytes_per_s": float("nan"), "copy_bytes_per_s": float("nan")}
    worlds: list[gpu_serving.World] = []

    def world() -> gpu_serving.World:
        if not worlds:
            worlds.append(gpu_serving.make_world(report, rates))
        return worlds[0]

    sections: dict[str, Callable[[], object]] = {
        "roofline": lambda: rates.update(gpu_kernels.roofline(report)),
        "exactness": lambda: gpu_kernels.exactness(report),
        "memory": lambda: gpu_memory.allocations(report),
        "kernels": lambda: gpu_kernels.kernels(report, rates),
        "cold": lambda: gpu_start.cold_start(world()),
        "closed": lambda: gpu_serving.closed_loops(world()),
        "peer": lambda: gpu_peer.beside_transformers(report),
        "trace": lambda: gpu_serving.trace(world()),
        "isolation": lambda: gpu_start.isolation(world()),
    }
    for name, run in sections.items():
        if name in wanted:
            _run_section(report, name, run)
            # Engines are part of cycles, and a recording keeps its memory as long as it is there.
            gc.collect()
            if report.device.type == "cuda":
                torch.cuda.empty_cache()


def _run_section(report: Report, name: str, run: Callable[[], object]) -> None:
    """One section under its budget: it looks at the time itself, and an alarm ends it where it does not."""
    budget = BUDGETS[name] * (TOY_PATIENCE if report.toy else 1.0)
    began = time.monotonic()
    report.deadline = began + budget
    previous = signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, budget + 5)
    try:
        run()
    except OutOfTimeError:
        report.failures[name] = f"its {budget:.0f} s were over"
    except Exception as error:  # noqa: BLE001 - the border of a section: it is told, and the next one runs
        report.failures[name] = f"{type(error).__name__}: {str(error)[:300]}"
        traceback.print_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    report.put("section", name=name, seconds=time.monotonic() - began, failed=report.failures.get(name))


def _alarm(*_: object) -> None:
    raise OutOfTimeError


def _end(report: Report) -> None:
    """The call's time is over: what is known is told, and the process ends."""
    report.failures["call"] = f"{TOTAL_S:.0f} s were over"
    print(report.summary(), flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
