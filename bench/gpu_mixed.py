"""Prompts and decoding rows in one pass on a card, beside two: ``python bench/gpu_mixed.py [--rehearse]``, 50 seconds.

A Llama 8B of random weights in bfloat16, rows with contexts of 1,000 tokens. ``tokens``: a small model in float32 gives
each request the same tokens with one pass as with two. ``passes``: milliseconds of a prompt's tokens and one token of
each row, as two passes (the recorded step behind the prompt) and as one, in turns; several one behind another, as where
prompts go on, so that the host is waited for by neither. ``load``: tokens a second where requests come at
random, 64 at a time, with either, in turns. At the end the row of ``engine/backends/cuda/kernels/tile_sizes.py`` that
the times say.

Kernels are compiled first, by all processors. ``--rehearse`` runs everything in tiny sizes on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from bench.gpu_engines import BLOCK, EIGHT_B, TINY, build_model, description, make_engine
from bench.gpu_pieces import BF16, DEVICE, REHEARSE, Figures, end, tried
from engine.backends.cuda.kernels.ahead import LaunchForm, absent_operations, meeting_forms
from engine.backends.cuda.kernels.cache import name_kernels
from engine.backends.cuda.kernels.tile_sizes import MIXING
from engine.backends.cuda.runtime.mixing import ALWAYS, ANY, NEVER, Mixing
from engine.backends.cuda.runtime.prefill import Prefilled
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.offline import Answer, collect
from engine.core.scheduler.plan import Admission, Chunk
from engine.core.scheduler.scheduler import Scheduler
from engine.startup.enumerate_kernels import rehearse
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
BUDGET_S = 120.0 if REHEARSE else 50.0
"""Seconds in all; what is left out is told."""

ROWS = 4 if REHEARSE else 200
CONTEXT = 20 if REHEARSE else 1_000
BEHIND = 16 if REHEARSE else 64
"""Tokens that rows may gain while they are timed."""
PROMPTS = (5, 16) if REHEARSE else (256, 512, 2_048, 8_192)
LONGEST = max(PROMPTS)
CELLS = [(tokens, rows) for tokens in PROMPTS for rows in ((2, 4) if REHEARSE else (64, 200))]
MORE = [] if REHEARSE else [(512, 16), (512, 128), (64, 200), (128, 200), (2_048, 128), (64, 64), (128, 128), (512, 96)]
"""Cells of the table for which the time may not be there."""
LIVE = 3 if REHEARSE else 64
LOAD_S = 0.5 if REHEARSE else 2.4
LOAD_BUDGET = 16 if REHEARSE else 2_048
"""Tokens of a step under load: prompts are cut."""
RATE = 50.0 if REHEARSE else 60.0
"""Requests a second: more than are served, so that there are always so many as may be live."""

SIZES: dict[str, Any] = TINY if REHEARSE else EIGHT_B


def compile_all(figures: Figures) -> None:
    """Fill Triton's cache with every form of both models' launches, by all processors."""
    began, children = time.monotonic(), []
    count = min(16, os.cpu_count() or 1)
    for part in range(count):
        child = os.fork()
        if not child:
            status = 1
            try:
                _compile(part, count)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    figures.put("compile", seconds=time.monotonic() - began, processes=count, failed=failed)


def _compile(part: int, count: int) -> None:
    """One process's share of the forms."""
    torch.set_num_threads(1)
    met = 0

    def meet(form: LaunchForm) -> None:
        nonlocal met
        met += 1
        if met % count == part:
            form.compile()

    for sizes, dtype, rows in ((EIGHT_B, BF16, ROWS + 1), (TINY, torch.float32, 8)):
        shape = description(sizes)
        name = str(dtype).removeprefix("torch.")
        config = EngineConfig(
            model_dir="", model_digest="00", dtype=name, block_size=BLOCK, max_num_seqs=rows,
            max_num_batched_tokens=rows, backend="device",
        )  # fmt: skip
        with meeting_forms("sm_90", meet):
            rehearse(config, shape, dtype, absent_operations(shape, "sm_90"))


def tokens_equal(figures: Figures) -> None:
    """Requests whose prompts are cut, with one pass and with two."""
    model = build_model(TINY, DEVICE, torch.float32)
    draw = random.Random(3)
    longest, most, count = (60, 6, 8) if REHEARSE else (150, 30, 60)
    asked = []
    for number in range(1, count + 1):
        ids = array("I", [draw.randrange(3, 250) for _ in range(draw.randint(1, longest))])
        asked.append(Submit(number, bytes(32), ids, draw.randint(2, most), GREEDY, ignore_eos=True))
    found, mixed, taken = [], 0, 0
    for mixing in (NEVER, ALWAYS):
        engine = make_engine(model, kv_bytes=1 << 23, rows=8, budget=16 if REHEARSE else 48, context=256, mixing=mixing)
        engine.runner.prove()
        answers: dict[int, Answer] = {}
        for place, submit in enumerate(asked):
            engine.add(submit)
            for _ in range(place % 4):
                if engine.has_work:
                    collect(engine, answers)
        while engine.has_work:
            collect(engine, answers)
        found.append({number: one.token_ids for number, one in answers.items()})
        mixed, taken = engine.runner.num_mixed, engine.runner.num_taken
    differ = sum(found[0][number] != found[1][number] for number in found[0])
    figures.put("tokens", requests=len(asked), mixed_passes=mixed, differ=differ, taken_after_ready=taken)


class Passes:
    """Rows in the middle of their outputs and one prompt, beside each other on a runner."""

    def __init__(self, runner: DeviceRunner) -> None:
        self._runner = runner
        self._host = runner._rows
        held = (CONTEXT + BEHIND) // BLOCK + 1
        for row in range(ROWS):
            self._place(row, range(1 + row * held, 1 + (row + 1) * held))
        first = 1 + ROWS * held
        self._place(ROWS, range(first, first + LONGEST // BLOCK + 1))
        draw = np.random.default_rng(0)
        self._host.known[ROWS] = draw.integers(3, SIZES["vocab_size"], LONGEST + 1)
        self._rewind()
        self._rows = {rows: np.arange(rows) for _, rows in (*CELLS, *MORE)}

    def _place(self, row: int, blocks: range) -> None:
        admission = Admission(row, array("I", [5]), 1, GREEDY, -1, ())
        self._host.assign(admission, [list(blocks)], [[]])

    def _rewind(self) -> None:
        for row in range(ROWS):
            self._runner._deltas.resume(row, 5 + row % 50, CONTEXT)
        self._host.ahead[:ROWS] = CONTEXT

    def _prompt(self, tokens: int, lanes: int = 0) -> Prefilled:
        return self._runner._prefill.run([Chunk(ROWS, 0, tokens, last=True)], lanes)

    def warm(self, rows: int) -> None:
        """Record the step of so many rows."""
        for _ in range(3):
            launch = self._step(self._rows[rows])
            self._runner._launcher.tokens(launch)
        self._rewind()

    def _step(self, rows: Any, run: Callable[[int], object] | None = None) -> Any:
        launch = self._runner._launcher.launch(rows, self._host.ahead, run=run)
        self._host.ahead[rows] += 1
        return launch

    def two(self, tokens: int, rows: int) -> tuple[Any, Prefilled]:
        """A prompt, and the step behind it."""
        self._runner._loop.announce(self._runner._deltas)
        prefilled = self._prompt(tokens)
        return self._step(self._rows[rows]), prefilled

    def one(self, tokens: int, rows: int) -> tuple[Any, Prefilled]:
        """Both in one pass."""
        kept: list[Prefilled] = []
        launch = self._step(self._rows[rows], lambda lanes: kept.append(self._prompt(tokens, lanes)))
        return launch, kept[0]

    def seconds(self, way: Callable[[int, int], tuple[Any, Prefilled]], tokens: int, rows: int, repeats: int) -> float:
        """Seconds of one of several, started one behind another; each one's results are taken when the next one was
        started."""
        self._rewind()
        self._take(way(tokens, rows))
        began, before = time.perf_counter(), None
        for _ in range(repeats):
            now = way(tokens, rows)
            if before is not None:
                self._take(before)
            before = now
        self._take(before)
        return (time.perf_counter() - began) / repeats

    def _take(self, given: tuple[Any, Prefilled] | None) -> None:
        assert given is not None
        launch, prefilled = given
        self._runner._launcher.tokens(launch)
        prefilled.verdicts.numpy()

    def alike(self, tokens: int, rows: int) -> dict[str, object]:
        """How far the results of both are from each other: logits of the prompt's end, and rows' tokens."""
        found = []
        for way in (self.two, self.one):
            self._rewind()
            launch, prefilled = way(tokens, rows)
            chosen = self._runner._launcher.tokens(launch)[:rows].copy()
            logits = prefilled.logits[0].double().cpu()
            prefilled.verdicts.numpy()
            found.append((chosen, logits))
        (first, wanted), (second, given) = found
        return {
            "rows_equal": float((first == second).mean()),
            "negative": int((first < 0).sum() + (second < 0).sum()),
            "logits_error": ((given - wanted).abs().max() / wanted.abs().max()).item(),
        }


def passes(figures: Figures, engine: Engine, left: Callable[[], float]) -> dict[tuple[int, int], float]:
    """Milliseconds that one pass saves, by tokens and rows."""
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    saved: dict[tuple[int, int], float] = {}
    with runner._queue(), torch.inference_mode():
        timed = Passes(runner)
        warmed: set[int] = set()
        for tokens, rows in (*CELLS, *MORE):
            if left() < (3 if (tokens, rows) in CELLS else 4 * 1.5 * LOAD_S + 4):
                figures.put("left out", tokens=tokens, rows=rows)
                continue
            if rows not in warmed:
                timed.warm(rows)
                warmed.add(rows)
                figures.put("alike", tokens=PROMPTS[0], rows=rows, **timed.alike(PROMPTS[0], rows))
            repeats, rounds = (1, 1) if REHEARSE else (2, 2) if tokens > 4_096 else (6, 3)
            taken: dict[str, list[float]] = {"one": [], "two": []}
            for _ in range(rounds):
                for way in ("two", "one"):
                    taken[way].append(timed.seconds(getattr(timed, way), tokens, rows, repeats) * 1e3)
            one, two = (statistics.median(taken[way]) for way in ("one", "two"))
            saved[tokens, rows] = two - one
            figures.put(
                "passes", tokens=tokens, rows=rows, one_ms=one, two_ms=two, saved_ms=two - one, over=one / two,
                one_least=min(taken["one"]), two_least=min(taken["two"]),
            )  # fmt: skip
    return saved


class Load:
    """Requests that come at random, as many at a time as there may be."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._draw = random.Random(5)
        self._next = 1
        self._live: dict[int, float] = {}
        self.first: list[float] = []
        self.tokens = self.prompts = self.steps = 0

    def add(self) -> None:
        """One more request."""
        draw = self._draw
        scale = 0.03 if REHEARSE else 1.0
        prompt = max(1, min(int(1_000 * scale * draw.lognormvariate(-0.3, 0.8)), int(4_000 * scale)))
        output = max(2, min(int(200 * scale * draw.lognormvariate(-0.3, 0.7)), int(800 * scale)))
        ids = array("I", [draw.randrange(3, SIZES["vocab_size"]) for _ in range(prompt)])
        self._engine.add(Submit(self._next, bytes(32), ids, output, GREEDY, ignore_eos=True))
        self._live[self._next] = time.perf_counter()
        self.prompts += prompt
        self._next += 1

    def run(self, seconds: float) -> float:
        """Serve for so long; gives the seconds."""
        began = at = time.perf_counter()
        asked: set[int] = set(self._live)
        while (now := time.perf_counter()) - began < seconds:
            while at <= now and len(self._live) < LIVE:
                at = max(at, now - 0.1) + self._draw.expovariate(RATE)
                self.add()
            output = self._engine.step() if self._engine.has_work else None
            if output is None:
                continue
            self.steps += 1
            self.tokens += len(output.token_ids)
            now = time.perf_counter()
            for request, finish in zip(output.requests, output.finishes, strict=True):
                if request in self._live and request not in asked:
                    asked.add(request)
                    self.first.append(now - self._live[request])
                if finish:
                    self._live.pop(request, None)
        return time.perf_counter() - began

    def end(self) -> None:
        """Give all up."""
        for request in list(self._live):
            self._engine.abort(request)
        self._live.clear()
        while self._engine.has_work:
            self._engine.step()


def load(figures: Figures, engine: Engine, mixings: dict[str, Mixing], left: Callable[[], float]) -> None:
    """Tokens a second with each, in turns."""
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    with runner._queue(), torch.inference_mode():
        runner._launcher.reset()
        if not REHEARSE:
            for rows in range(1, LIVE + 1):
                if rows in runner._launcher._buckets and rows not in runner._launcher.recorded:
                    for _ in range(2):
                        runner._launcher._run(rows, runner._launcher._replayer.run, reports=False)
            runner._launcher.reset()
    runner.touch()
    limits = replace(runner.limits, max_num_batched_tokens=LOAD_BUDGET)
    pool = BlockPool(runner.storage.layout.num_blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=BLOCK, caching=True)
    served = Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), runner)
    for turn in range(1 if REHEARSE else 2):
        for name, mixing in mixings.items():
            if left() < LOAD_S + 2:
                figures.put("left out", load=name, turn=turn)
                continue
            runner._ahead._mixing = mixing
            made = Load(served)
            for _ in range(LIVE):
                made.add()
            made.run(LOAD_S / 2)
            before = made.tokens, made.prompts, made.steps, runner.num_mixed
            made.first.clear()
            seconds = made.run(LOAD_S)
            figures.put(
                "load", kind=name, turn=turn, live=LIVE, tokens_per_s=(made.tokens - before[0]) / seconds,
                prompt_tokens_per_s=(made.prompts - before[1]) / seconds, steps=made.steps - before[2],
                mixed=runner.num_mixed - before[3],
                ttft_p50_s=statistics.median(made.first) if made.first else None,
            )  # fmt: skip
            made.end()


def suggest(figures: Figures, saved: dict[tuple[int, int], float], gap_ms: float) -> None:
    """The table that the times say: for each number of tokens the most rows that gain by one pass."""

    def most(least: float) -> list[tuple[int, int]]:
        sizes = sorted({tokens for tokens, _ in saved})
        return [
            (tokens, max((rows for at, rows in saved if at == tokens and saved[at, rows] > least), default=0))
            for tokens in sizes
        ]

    figures.put("table", goes_on=most(0.1), ends=most(gap_ms), gap_ms=gap_ms, unlimited=ANY)


def main() -> None:
    """Run the sections."""
    name_kernels()
    if REHEARSE:
        torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--gap-ms", type=float, default=1.3, help="what a host takes between two plans")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="in all; what is left out is told")
    options = parser.parse_args()
    figures, began = Figures(), time.monotonic()

    def left() -> float:
        return options.seconds - (time.monotonic() - began)

    if not REHEARSE:
        tried(lambda: compile_all(figures), "compile")
    figures.put("machine", card="cpu" if REHEARSE else torch.cuda.get_device_name(), torch=torch.__version__)
    tried(lambda: tokens_equal(figures), "tokens")
    gc.collect()
    model = build_model(SIZES, DEVICE, torch.float32 if REHEARSE else BF16)
    blocks = ROWS * ((CONTEXT + BEHIND) // BLOCK + 1) + LONGEST // BLOCK + 8 + 2 * (ROWS + 1)
    kv_bytes = (1 << 23) if REHEARSE else blocks * (2 << 20)
    engine = make_engine(
        model, kv_bytes=kv_bytes, rows=ROWS + 1, budget=LONGEST + ROWS + 1, context=2 * LONGEST + 256, mixing=NEVER
    )
    figures.put("ready", seconds=time.monotonic() - began)
    saved: dict[tuple[int, int], float] = {}
    tried(lambda: saved.update(passes(figures, engine, left)), "passes")
    mixings = {"two": NEVER, "one": ALWAYS}
    if not REHEARSE:
        mixings = {"two": NEVER, "one": MIXING}
    tried(lambda: load(figures, engine, mixings, left), "load")
    tried(lambda: suggest(figures, saved, options.gap_ms), "table")
    figures.put("over", seconds=time.monotonic() - began, budget=options.seconds)


if __name__ == "__main__":
    main()
    end()
