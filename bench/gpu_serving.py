"""The engine on the device backend under load: closed loops and a trace."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.gpu_engines import EIGHT_B, TINY, build_model, make_engine, weights_of
from bench.gpu_report import Meter, OutOfTimeError, Report
from engine.core.engine import Engine
from engine.model.layers.decoder import Decoder
from isolation.ipc.engine import StepOutput, Submit
from isolation.ipc.sampling import Sampling

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[1]
GREEDY = Sampling(temperature=0.0)


@dataclass(slots=True)
class World:
    """The model that all sections use, and how much is asked of it."""

    report: Report
    rates: dict[str, float]
    sizes: dict[str, Any]
    model: Decoder
    tensors: dict[str, torch.Tensor]
    prompt: int
    output: int
    streams: tuple[int, ...]

    def engine(self) -> Engine:
        """A warm engine; its KV takes what can be spared beside a second one."""
        most = max(self.streams)
        if self.report.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            kv_bytes = int(min(48 * GIB, max(4 * GIB, (free - 6 * GIB) // 2)))
        else:
            kv_bytes = 1 << 22
        context = 4 * (self.prompt + self.output)
        budget = 4_096 if self.report.device.type == "cuda" else 64
        engine = make_engine(self.model, kv_bytes=kv_bytes, rows=most, budget=budget, context=context)
        # Not the whole warm-up: what the host's sampler does is not measured here, and takes its time.
        engine.runner.prove()
        return engine


def make_world(report: Report, rates: dict[str, float]) -> World:
    """Random weights of the 8B shape, made on the device; of a toy in its place."""
    sizes = TINY if report.toy else EIGHT_B
    dtype = torch.float32 if report.toy else torch.bfloat16
    model = build_model(sizes, report.device, dtype)
    tensors = weights_of(model, sizes, report.device)
    report.put("weights", random=True, bytes=sum(one.nbytes for one in tensors.values()))
    if report.toy:
        return World(report, rates, sizes, model, tensors, 20, 8, (1, 4))
    return World(report, rates, sizes, model, tensors, 1_000, 256, (1, 8, 32, 64, 128, 200, 256))


@dataclass(slots=True)
class Load:
    """What a loop of requests gave."""

    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    """Seconds of steps that only decoded."""
    host: list[float] = field(default_factory=list)
    """Processor seconds of the same steps."""
    tokens: int = 0
    seconds: float = 0.0
    processor: float = 0.0
    joules: float | None = None
    busy: list[float] = field(default_factory=list)

    def row(self) -> dict[str, object]:
        """For the report."""

        def at(values: list[float], share: float) -> float | None:
            return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else None

        return {
            "tokens_per_s": self.tokens / self.seconds if self.seconds else None,
            "ttft_p50_s": at(self.first, 0.5),
            "ttft_p99_s": at(self.first, 0.99),
            "itl_p50_s": at(self.gaps, 0.5),
            "itl_p99_s": at(self.gaps, 0.99),
            "step_p50_s": at(self.steps, 0.5),
            "host_s_per_step": at(self.host, 0.5),
            "cores": self.processor / self.seconds if self.seconds else None,
            "joules_per_token": None if self.joules is None or not self.tokens else self.joules / self.tokens,
            "utilisation": statistics.fmean(self.busy) if self.busy else None,
        }


class Driver:
    """Feeds an engine and takes down when tokens come."""

    def __init__(self, world: World, engine: Engine, meter: Meter) -> None:
        self._world, self.engine, self._meter = world, engine, meter
        self._draw = random.Random(0)
        self._next = 1
        self._asked: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self.load = Load()
        self.ended = 0

    def add(self, prompt: int, output: int) -> None:
        """One more request, of tokens that nobody has asked before: nothing is found in a cache."""
        ids = array("I", [self._draw.randrange(self._world.sizes["vocab_size"]) for _ in range(prompt)])
        self.engine.add(Submit(self._next, bytes(32), ids, output, GREEDY, ignore_eos=True))
        self._asked[self._next] = time.perf_counter()
        self._next += 1

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._asked) + len(self._last)

    def step(self) -> None:
        """One step."""
        began, host = time.perf_counter(), time.process_time()
        output = self.engine.step()
        now, used = time.perf_counter(), time.process_time() - host
        if output is None:
            return
        self._take(output, now)
        if not output.starts and not self._asked:
            self.load.steps.append(now - began)
            self.load.host.append(used)

    def _take(self, output: StepOutput, now: float) -> None:
        self.load.tokens += len(output.token_ids)
        for request, finish in zip(output.requests, output.finishes, strict=True):
            asked = self._asked.pop(request, None)
            if asked is not None:
                self.load.first.append(now - asked)
            else:
                self.load.gaps.append(now - self._last[request])
            self._last[request] = now
            if finish:
                del self._last[request]
                self.ended += 1

    def measure(self, again: Iterator[None], seconds: float) -> Load:
        """Steps for so long, or until the section's time is over; ``again`` is advanced before each."""
        self.load = Load()
        joules, began, used = self._meter.joules(), time.perf_counter(), time.process_time()
        looked = 0.0
        for _ in again:
            self.step()
            now = time.perf_counter()
            if now - looked > 0.1 and (busy := self._meter.utilisation()) is not None:
                looked = now
                self.load.busy.append(busy)
            if now - began >= seconds or self._world.report.left() <= 0:
                break
        load = self.load
        load.seconds, load.processor = time.perf_counter() - began, time.process_time() - used
        after = self._meter.joules()
        load.joules = None if joules is None or after is None else after - joules
        return load

    def closed(self, streams: int, seconds: float) -> Load:
        """So many requests at any time, after a warm-up in which each has got a token."""
        world = self._world
        for _ in range(streams):
            # Of different lengths at first, so that they do not end together.
            self.add(world.prompt, max(2, int(world.output * (0.2 + 0.8 * self._draw.random()))))
        while self._asked:
            world.report.check()
            self.step()

        def again() -> Iterator[None]:
            while True:
                while self.live < streams:
                    self.add(world.prompt, world.output)
                yield

        load = self.measure(again(), seconds)
        for request in [*self._asked, *self._last]:
            self.engine.abort(request)
        self._asked.clear()
        self._last.clear()
        while self.engine.has_work:
            self.engine.step()
        return load


def closed_loops(world: World) -> None:
    """So many streams at a time, each asking again when it is answered."""
    report = world.report
    engine, meter = world.engine(), Meter()
    share = 0.5 if report.toy else 12.0
    for streams in world.streams:
        report.check()
        load = Driver(world, engine, meter).closed(streams, min(share, report.left()))
        taken = getattr(engine.runner, "num_taken", 0)
        report.put("closed loop", streams=streams, taken_after_ready=taken, **load.row())
        if streams == 1 and load.steps:
            read = sum(tensor.nbytes for name, tensor in world.tensors.items() if "embed" not in name)
            layout = engine.runner.storage.layout
            read += layout.token_bytes * (world.prompt + world.output // 2)
            figure = read / statistics.median(load.steps) / world.rates["read_bytes_per_s"]
            report.figure("decode_share_batch_1", figure)
        if streams == (max(world.streams) if report.toy else 200) and load.host:
            steady(Driver(world, engine, meter), streams)
            report.figure("host_ms_per_step", statistics.median(load.host) * 1e3)
            report.figure("host_cores_at_200", load.processor / load.seconds)


def steady(driver: Driver, streams: int) -> None:
    """The host's processor time of steps in which nobody comes or goes."""
    report, rounds = driver._world.report, 4 if driver._world.report.toy else 60
    prompt, output = (4, 3 * rounds) if report.toy else (30, 3 * rounds)
    for _ in range(streams):
        driver.add(prompt, output)
    while driver._asked:
        report.check()
        driver.step()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(rounds):
        driver.step()
    host, wall = (time.process_time() - used) / rounds, (time.perf_counter() - began) / rounds
    report.put("steady steps", streams=streams, host_s_per_step=host, step_s=wall)
    for request in [*driver._asked, *driver._last]:
        driver.engine.abort(request)
    while driver.engine.has_work:
        driver.engine.step()


def trace(world: World) -> None:
    """Arrivals in the shape of Azure's conversation trace (prompts of about 1,000 tokens, outputs of about 200, both
    with long tails), at rising rates until the engine cannot keep up; utilisation as the driver tells it."""
    report = world.report
    engine, meter = world.engine(), Meter()
    rate = 20.0 if report.toy else 8.0
    best = None
    for _ in range(2 if report.toy else 4):
        report.check()
        driver = Driver(world, engine, meter)
        load = driver.measure(arrivals(driver, world, rate), 0.5 if report.toy else 14.0)
        row = load.row()
        late = driver.live / max(driver.ended + driver.live, 1)
        report.put("trace", requests_per_s=rate, ended=driver.ended, still_waiting=driver.live, **row)
        best = row["utilisation"] if row["utilisation"] is not None else best
        with suppress(OutOfTimeError):
            for request in range(1, driver._next):
                engine.abort(request)
            while engine.has_work:
                report.check()
                engine.step()
        if late > 0.5:
            break
        rate *= 2
    if isinstance(best, float):
        report.figure("utilisation_saturated", best)


def arrivals(driver: Driver, world: World, rate: float) -> Iterator[None]:
    """Requests as their time comes, drawn; one is always there."""
    draw = random.Random(1)
    began, at = time.perf_counter(), 0.0
    longest = 3 * world.prompt
    while True:
        while at <= time.perf_counter() - began or not driver.live:
            prompt = min(longest, max(1, int(world.prompt * draw.lognormvariate(-0.3, 0.8))))
            driver.add(prompt, min(world.output * 2, max(1, int(world.output * draw.lognormvariate(-0.5, 0.7)))))
            at += draw.expovariate(rate)
        yield
