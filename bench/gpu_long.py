"""256 streams of 1,000 prompt and 1,000 answer tokens on an 8B shape: this engine, and what of ``transformers`` runs.

``python bench/gpu_long.py [--toy] [--only ours continuous static] [--out FILE]``, from the repository's root. Parts run
in the order that is named, each in a process of its own with its limit of seconds, and a name may come twice:

* ``ours``: the whole job, from the first prompt token to the last answer token, the engine behind no wall;
* ``continuous``: the same job by their continuous batching; where it is not over within its limit, what it made until
  then counts, and its best rate of any quarter of the time;
* ``static``: decode alone, their static cache with all rows equally long and the step replayed as one graph: a bound,
  since it has neither prompts nor requests that come and go.

All have the same weights (random) and as much memory for keys and values.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.gpu_child import PartError, begin, told
from bench.gpu_peer import FIRST_S, OFFLINE, PAGE, PATIENCE, StaticStep, Theirs, our_engine
from bench.gpu_report import Meter, Report, synchronise
from bench.gpu_serving import Driver, World, make_world

STREAMS = 256
"""Requests of the job, all asked at once."""

LIMITS = {"ours": 60.0, "continuous": 50.0, "static": 12.0}
"""Seconds of the measured part of each, on a card."""

BEFORE_S = 60.0
"""Seconds for weights and for everything that is made before the first prompt."""

SPARE_BYTES = 12 << 30
"""Bytes of the card for what an engine computes with, beside keys and values."""

PARTS = 4
"""Parts of the time that ``continuous`` has a rate for."""


def measure(report: Report, name: str) -> None:
    """One part, in this process."""
    patience = PATIENCE if report.toy else 1.0
    begin(f"{name}: before", BEFORE_S * patience)
    world = make_world(report, {})
    sizes = {"prompt": 20, "output": 8} if report.toy else {"prompt": 1_000, "output": 1_000}
    world = replace(world, **sizes)  # type: ignore[arg-type]
    streams = 4 if report.toy else STREAMS
    runs: dict[str, Callable[[World, int, float], None]] = {"ours": ours, "continuous": continuous, "static": static}
    runs[name](world, streams, LIMITS[name] * patience)


def _pages(world: World, streams: int) -> int:
    """Pages for all requests at their longest, or as many as the card has room for."""
    wanted = streams * -(-(world.prompt + world.output) // PAGE) + 2
    if world.report.device.type != "cuda":
        return wanted
    sizes, free = world.sizes, torch.cuda.mem_get_info()[0] - SPARE_BYTES
    page_bytes = 2 * sizes["num_layers"] * sizes["num_kv_heads"] * sizes["head_dim"] * 2 * PAGE
    return min(wanted, int(free // page_bytes))


def ours(world: World, streams: int, limit_s: float) -> None:
    """The job on this engine; its steps that only decode, too."""
    engine = our_engine(world, streams, _pages(world, streams))
    driver = Driver(world, engine, Meter())
    for _ in range(streams):
        driver.add(world.prompt, world.output)
    begin("ours", limit_s + 5.0)
    synchronise(world.report.device)
    began, host = time.perf_counter(), time.process_time()
    while driver.live and time.perf_counter() - began < limit_s:
        driver.step()
    seconds, host = time.perf_counter() - began, time.process_time() - host
    row = driver.load.row()
    steps = sorted(driver.load.steps)
    world.report.put(
        "long",
        who="ours",
        streams=streams,
        tokens=driver.load.tokens,
        whole=not driver.live,
        seconds=seconds,
        tokens_per_s=driver.load.tokens / seconds,
        decode_step_s={share: steps[min(int(len(steps) * share), len(steps) - 1)] for share in (0.1, 0.5, 0.9)}
        if steps
        else None,
        last_first_token_s=max(driver.load.first, default=None),
        itl_p99_s=row["itl_p99_s"],
        host_s_per_step=row["host_s_per_step"],
        cores=host / seconds,
    )


def continuous(world: World, streams: int, limit_s: float) -> None:
    """The job by their continuous batching."""
    theirs = Theirs(world, streams, _pages(world, streams))
    begin("continuous", limit_s + 15.0)
    try:
        made = theirs.watch(streams, world.output, limit_s)
    finally:
        theirs.stop()
    seconds, tokens = made[-1]
    world.report.put(
        "long",
        who="continuous",
        attention=theirs.attention,
        streams=streams,
        tokens=tokens,
        whole=tokens == streams * world.output,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        best_tokens_per_s=best_rate(made, seconds / PARTS),
    )


def best_rate(made: list[tuple[float, int]], window_s: float) -> float:
    """Most tokens a second over any ``window_s`` of a job.

    Args:
        made: seconds since the job's begin and tokens made until then, in order of time.
        window_s: at least so many seconds lie between the two ends of a window.
    """
    best, first = 0.0, 0
    for at, tokens in made:
        while first + 1 < len(made) and at - made[first + 1][0] >= window_s:
            first += 1
        if at - made[first][0] >= window_s:
            best = max(best, (tokens - made[first][1]) / (at - made[first][0]))
    return best


@torch.no_grad()
def static(world: World, streams: int, limit_s: float) -> None:
    """Their step with a static cache at half of the answer, as one graph."""
    step = StaticStep(world, streams, at=world.prompt + world.output // 2, length=world.prompt + world.output)
    begin("static", limit_s + 5.0)
    # Their cache refuses a token behind its length.
    most = min(200, world.output // 2 - 3)
    rounds, began = 0, time.perf_counter()
    while rounds < most and time.perf_counter() - began < limit_s:
        step.run()
        synchronise(world.report.device)
        rounds += 1
    seconds = (time.perf_counter() - began) / rounds
    world.report.put("long", who="static", streams=streams, step_s=seconds, tokens_per_s=streams / seconds)


def main() -> int:
    """Measure each part in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--only", nargs="*", choices=tuple(LIMITS), default=["ours", "continuous", "static"])
    parser.add_argument("--out", type=Path, default=Path("gpu-long.jsonl"))
    parser.add_argument("--measure", choices=tuple(LIMITS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device("cpu" if options.toy else "cuda")
    if options.measure:
        report = Report(Path(os.devnull), options.toy, device)
        report.deadline = float("inf")
        measure(report, options.measure)
        sys.stdout.flush()
        # Their thread may stand still; everything is told.
        os._exit(0)
    if not options.toy and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --toy runs everything at toy size on the CPU")
    options.out.unlink(missing_ok=True)
    report = Report(options.out, options.toy, device)
    patience = PATIENCE if options.toy else 1.0
    for name in options.only:
        arguments = [str(Path(__file__).resolve()), "--measure", name, *(["--toy"] if options.toy else [])]
        whole_s = (BEFORE_S + LIMITS[name] + 15.0) * patience
        try:
            for line in told(arguments, first_s=FIRST_S * patience, whole_s=whole_s, environment=OFFLINE):
                report.put(line.pop("section"), **{key: value for key, value in line.items() if key != "at_s"})
        except PartError as error:
            report.failures[name] = str(error)
            print(f"failed: {name}: {error}", flush=True)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
