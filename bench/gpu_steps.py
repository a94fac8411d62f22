"""Whole decoding steps of a Llama 8B on a card, computed in several ways: a section of ``bench/gpu_decode.py``."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.gpu_engines import BLOCK, EIGHT_B, TINY, build_model
from bench.gpu_pieces import BF16, DEVICE, REHEARSE, Figures, tried
from engine.backends.common.loading import layout_for, limits_for
from engine.backends.cuda.kernels.lines import LineCut
from engine.backends.cuda.kernels.operations import kernel_operations
from engine.backends.cuda.kernels.tile_map import DecodeShape
from engine.backends.cuda.kernels.tile_sizes import Configuration
from engine.backends.cuda.kernels.triton_common import Threads
from engine.backends.cuda.load import make_device_runner, without_spares
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling


def steps(figures: Figures, bandwidth: float) -> None:
    """The whole step at batch 1 and 8."""
    sizes, dtype = (TINY, torch.float32) if REHEARSE else (EIGHT_B, BF16)
    model = build_model(sizes, DEVICE, dtype)
    weights = weight_bytes(model)
    for (kind, change), rows in itertools.product(WAYS.items(), (1, 8)):
        if rows == 1 or kind in ("fused", "early", "separate"):
            tried(
                lambda rows=rows, kind=kind, change=change: stepped(
                    figures, bandwidth, make_engine(model, rows, change), weights, rows, kind
                ),
                f"step {kind} x {rows}",
            )


def weight_bytes(model: Any) -> int:
    """What a step reads of a model at the least."""
    return sum(one.nbytes for one in _tensors(model)) - int(model.embedding.weight.nbytes)


def early(chosen: Configuration, ahead: int, splits: DecodeShape | None = None) -> Configuration:
    """Launches that begin before the one in front of them is over."""
    found = replace(chosen, few=replace(chosen.few, early=True, ahead=ahead, alone=None))
    return found if splits is None else replace(found, decode=splits)


def alone(chosen: Configuration, lines: LineCut, *, early: bool = False) -> Configuration:
    """One row by the kernel that is for one."""
    return replace(chosen, few=replace(chosen.few, alone=lines, early=early))


WAYS: dict[str, Callable[[Configuration], Configuration]] = {
    "fused": lambda chosen: replace(chosen, few=replace(chosen.few, early=False, alone=None)),
    "early": lambda chosen: early(chosen, 1_024),
    "early, 256": lambda chosen: early(chosen, 256),
    "early, 2048": lambda chosen: early(chosen, 2_048),
    "early, short splits": lambda chosen: early(chosen, 1_024, DecodeShape(64, 2, 32, Threads(4, 2))),
    "alone": lambda chosen: alone(chosen, LineCut()),
    "alone, early": lambda chosen: alone(chosen, LineCut(), early=True),
    "alone, early, 2048": lambda chosen: alone(chosen, LineCut(fetched=2_048), early=True),
    "alone, early, whole": lambda chosen: alone(chosen, LineCut(fetched=8_192), early=True),
    "separate": lambda chosen: replace(chosen, few=replace(chosen.few, most=0), joined=False),
}
"""Ways to compute a step."""


def _tensors(model: Any) -> Iterable[Tensor]:
    yield model.embedding.weight
    yield model.head.linear.loaded if not model.packed or DEVICE.type == "cuda" else model.embedding.weight
    for layer in model.layers:
        first, second = layer.sublayers
        for linear in (first.block.qkv, first.block.out.linear, second.block.gate_up, second.block.down.linear):
            if linear.weight is not None:
                yield linear.weight


def make_engine(model: Any, rows: int, change: Callable[[Configuration], Configuration]) -> Engine:
    """The real scheduler around the device's runner."""
    config = EngineConfig(
        model_dir="",
        model_digest="00",
        block_size=BLOCK,
        kv_bytes=(1 << 22) if REHEARSE else (6 << 30),
        max_context=256 if REHEARSE else 4_096,
        max_num_seqs=rows,
        max_num_batched_tokens=64 if REHEARSE else 4_096,
        backend="device",
    )
    layout = without_spares(layout_for(config, model.config, str(model.dtype).removeprefix("torch.")), rows)
    limits = limits_for(config, model.config, layout)
    shape = model.config
    operations = None
    if not REHEARSE:
        heads = shape.num_heads, shape.num_kv_heads
        operations = kernel_operations(heads, shape.head_dim, shape.vocab_size, DEVICE)
        operations._chosen = change(operations._chosen)
    runner = make_device_runner(config, model, layout, limits, operations)
    pool = BlockPool(layout.num_blocks)
    cache = PrefixCache(pool, root=layout.root("00"), block_size=BLOCK, caching=True)
    return Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), runner)


def stepped(figures: Figures, bandwidth: float, engine: Engine, weights: int, rows: int, kind: str) -> None:
    """Greedy rows of a short prompt: weights are all that is read."""
    engine.runner.prove()
    count = 12 if REHEARSE else 400
    for row in range(rows):
        engine.add(
            Submit(
                row + 1,
                bytes(32),
                array("I", range(3 + row, 35 + row)),
                count,
                Sampling(temperature=0.0),
                ignore_eos=True,
            )
        )
    tokens, began, ended = 0, 0.0, 0.0
    asked = (count // 4, count - 8)
    while engine.has_work:
        output = engine.step()
        if output is None:
            continue
        tokens += len(output.token_ids)
        at = tokens // rows
        if at >= asked[0] and not began:
            began, first = time.perf_counter(), tokens
        if at <= asked[1]:
            ended, last = time.perf_counter(), tokens
    taken = (ended - began) / ((last - first) / rows)
    figures.put(
        "step", piece="8B", rows=rows, kind=kind, us=taken * 1e6, gb_per_s=weights / taken / 1e9,
        share=weights / taken / bandwidth, tokens_per_s=rows / taken,
    )  # fmt: skip
    if DEVICE.type == "cuda":
        tried(lambda: profile(figures, engine, rows, kind), f"profile {kind} x {rows}")


def profile(figures: Figures, engine: Engine, rows: int, kind: str) -> None:
    """Which launches a step's time goes to."""
    sampling = Sampling(temperature=0.0)
    for row in range(rows):
        engine.add(Submit(1_000 + row, bytes(32), array("I", range(7 + row, 27 + row)), 24, sampling, ignore_eos=True))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        while engine.has_work:
            engine.step()
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    for event in events[:24]:
        figures.put(
            "profile", kind=kind, batch=rows, name=event.key[:80], count=event.count,
            us_each=event.self_device_time_total / max(event.count, 1),
        )  # fmt: skip
    figures.put("launches", kind=kind, batch=rows, in_all=sum(event.count for event in events), tokens=24)
