"""What a warm engine still takes from the driver: nothing, with copies through its arena; and the same answers as with
torch's own cache of page-locked memory, which takes more whenever a size comes that it has not seen."""

from __future__ import annotations

import random
from array import array
from contextlib import suppress
from typing import Any

import torch

from bench.gpu_engines import TINY, build_model, make_engine
from bench.gpu_report import OutOfTimeError, Report
from engine.backends.cuda.runtime.copying import ArenaCopies, CachedCopies
from engine.backends.cuda.runtime.device_memory import Resources, TorchMemory
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.offline import Answer, collect
from engine.core.scheduler.plan import RowMask
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.engine import Submit
from isolation.ipc.logit_bias import LogitBias
from isolation.ipc.sampling import Sampling

MOST_STEPS = 5_000
"""No schedule takes as many."""


def allocations(report: Report) -> None:
    """Drawn requests of all kinds through two engines around the same weights: one with its arena, then one with
    torch's cache in its place."""
    model = build_model(TINY, report.device, torch.float32)
    rows, schedules = (4, 1) if report.toy else (16, 40)
    engine = make_engine(model, kv_bytes=1 << 22, rows=rows, budget=16 * rows, context=512)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner), "the device backend was asked for"
    wanted: list[Any] = []
    for name in ("arena", "cache"):
        if name == "cache":
            # Requests have all ended: the same KV serves another runner.
            memory = TorchMemory(report.device) if report.device.type == "cuda" else None
            resources = Resources(CachedCopies(report.device), memory)
            runner = DeviceRunner(
                runner.model, runner.storage, runner.limits, runner._loop._operations, resources=resources
            )
            engine = _around(runner)
        # Not the whole warm-up: what it adds is for the processor.
        runner.prove()
        runner.touch()
        answers: list[Any] = []
        with suppress(OutOfTimeError):
            for seed in range(schedules):
                report.check()
                answers.append({key: one.token_ids for key, one in answer(engine, seed, rows).items()})
        copies = runner._copies
        arena = {}
        if isinstance(copies, ArenaCopies):
            arena = {"num_copies": copies.num_copies, "num_waits": copies.ring.num_waits}
        report.put("memory", copies=name, schedules=len(answers), taken_after_ready=runner.num_taken, **arena)
        if name == "arena":
            report.figure("taken_after_ready", runner.num_taken)
            wanted = answers
    pairs = list(zip(wanted, answers, strict=False))
    report.put("memory answers", equal=sum(one == other for one, other in pairs), of=len(pairs))


def _around(runner: DeviceRunner) -> Engine:
    """The real scheduler around a runner."""
    limits, layout = runner.limits, runner.storage.layout
    pool = BlockPool(layout.num_blocks)
    cache = PrefixCache(pool, root=layout.root("00"), block_size=layout.block_size, caching=True)
    return Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), runner)


def answer(engine: Engine, seed: int, rows: int) -> dict[int, Answer]:
    """Requests of all kinds that come at drawn steps, until all have ended."""
    draw, vocab = random.Random(seed), int(TINY["vocab_size"])
    waiting = {number: draw.randint(0, 30) for number in range(1, 3 * rows)}
    structured = {number for number in waiting if draw.random() < 0.25}
    answers: dict[int, Answer] = {}
    for step in range(MOST_STEPS):
        for number in [number for number, at in waiting.items() if at <= step]:
            del waiting[number]
            engine.add(_request(number, draw, vocab, structured=number in structured))
        for number in structured.difference(waiting):
            place = len(answers[number].token_ids) if number in answers else 0
            words = random.Random(1_000 * number + place).randbytes(4 * -(-vocab // 32) - 4) + bytes(4)
            engine.scheduler.set_mask(number, place, RowMask(b"\x10" + words[1:], accepting=False))
        if engine.has_work:
            collect(engine, answers)
        elif not waiting and not engine.has_live_requests:
            return answers
    raise RuntimeError("the requests do not end")


def _request(number: int, draw: random.Random, vocab: int, *, structured: bool) -> Submit:
    """One of any kind."""
    ids = array("I", sorted(draw.sample(range(vocab), draw.choice((1, 7, 200)))))
    return Submit(
        number,
        bytes(32),
        array("I", [draw.randrange(vocab) for _ in range(draw.choice((1, 3, 40, 200)))]),
        draw.randint(1, 40),
        Sampling(
            temperature=draw.choice((0.0, 0.8)),
            top_p=draw.choice((1.0, 0.9)),
            seed=number,
            repetition_penalty=draw.choice((1.0, 1.2)),
            presence_penalty=draw.choice((0.0, 0.5)),
        ),
        ignore_eos=True,
        structured=structured,
        logprobs=draw.choice((-1, -1, 0, 20)),
        prompt_logprobs=draw.choice((-1, -1, 3)),
        logit_bias=LogitBias(ids, array("f", [draw.uniform(-2, 2) for _ in ids])) if draw.random() < 0.3 else None,
    )
