"""What the stamps of KV blocks cost: processor time spent on them, as a share of all that a load takes.

``python bench/tags.py`` serves the embedded model and, with ``--large``, random weights of the shape of a model of half
a billion (Qwen2.5-0.5B), on plain operations and, where a C compiler is there, on compiled kernels. Counted are: the
comparison before each step, with kernels the *whole* pass over indices and tables of which it is a part, called once
more by itself; the stamps' way from the pool into the plan; and their writing into tables and array. The share is of
the thread that steps, which is all of the engine with one thread; it needs no second build to compare with, and a busy
machine moves both of its sides.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.common.catalog import embedded_model
from appliance.operator import kernels
from engine.backends.native.abi import Program, Step
from engine.backends.native.program import NativeModel
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.offline import generate
from engine.model.checkpoint.checklist import targets
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model
from engine.model.layers.rotary import RopeScaling
from engine.startup.load import build_engine, load_engine
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

LOADS = {
    "decode 1 row": (1, 32, 96),
    "decode 16 rows": (16, 32, 96),
    "decode 64 rows": (64, 32, 48),
    "decode 16 rows at 800": (16, 800, 64),
    "prompts of 800": (8, 800, 1),
}
"""Requests, prompt tokens, output tokens."""

ROUNDS = 3
"""Times each load is run; the median share counts."""


class Meter:
    """Nanoseconds of this thread that are spent in chosen calls."""

    def __init__(self) -> None:
        self.spent_ns = 0

    def wrap(self, owner: Any, name: str) -> None:
        """Count a method's time from now on."""
        made: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return made(*args, **named)
            finally:
                self.spent_ns += time.thread_time_ns() - begin

        setattr(owner, name, timed)

    def repeat_check(self, program: NativeModel) -> None:
        """After each step of the kernels, call them for their checks alone, and count what that takes longer than a
        call for nothing."""
        forward, library, made = program.forward, program._library, program._program
        empty = Program(**{name: getattr(made, name) for name, _ in Program._fields_} | {"count": 0})
        step, nothing = ctypes.byref(program._step), ctypes.byref(Step())

        def timed(arrays: Any) -> Any:
            result = forward(arrays)
            begin = time.thread_time_ns()
            library.handle.athanor_run(ctypes.byref(empty), nothing)
            middle = time.thread_time_ns()
            library.handle.athanor_run(ctypes.byref(empty), step)
            # A call into the kernels was made before there were stamps.
            self.spent_ns += max(0, time.thread_time_ns() - middle - (middle - begin))
            return result

        program.forward = timed  # type: ignore[method-assign]


def instrument(engine: Engine) -> Meter:
    """Count everything that stamps need."""
    meter, runner = Meter(), engine.runner
    pool = _Slotless(engine.scheduler._pool)
    for name in ("stamps", "new_stamps"):
        meter.wrap(pool, name)
    for owner in (engine.scheduler, engine.scheduler._running, engine.scheduler._planner):
        owner._pool = pool
    batches = runner.batches
    meter.wrap(batches, "stamp")
    if isinstance(runner.forward, NativeModel):
        meter.repeat_check(runner.forward)
    else:
        meter.wrap(batches, "foreign")
    return meter


class _Slotless:
    """The pool with attributes that can be set."""

    def __init__(self, pool: Any) -> None:
        self._inner = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def mini(kernel_dir: str) -> Engine:
    """The embedded model."""
    return load_engine(
        EngineConfig(
            model_dir=str(embedded_model()),
            model_digest="00",
            kv_bytes=1 << 28,
            max_num_seqs=64,
            threads=1,
            kernels=kernel_dir,
            max_num_batched_tokens=512,
        )
    )


def large(kernel_dir: str) -> Engine:
    """Random bfloat16 weights of the shape of Qwen2.5-0.5B."""
    config = ModelConfig(
        architecture="Qwen2ForCausalLM",
        hidden_size=896,
        intermediate_size=4_864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=151_936,
        max_positions=32_768,
        rms_norm_eps=1e-6,
        rope=RopeScaling(),
        attention_bias=True,
        tie_word_embeddings=True,
    )
    model, checklist = build_model(config, torch.bfloat16, torch.device("cpu"))
    for target in targets(checklist.pieces.values()).values():
        target.normal_(0.0, 0.02)
    return build_engine(
        EngineConfig(
            model_dir="-",
            model_digest="00",
            kv_bytes=1 << 29,
            max_num_seqs=64,
            threads=1,
            kernels=kernel_dir,
            max_num_batched_tokens=512,
            max_context=2_048,
        ),
        model,
    )


def share(engine: Engine, meter: Meter, load: tuple[int, int, int]) -> tuple[float, float]:
    """Share of the thread's time that stamps take, and microseconds a token."""
    rows, prompt, output = load
    vocab = engine.scheduler.limits.vocab_size
    submits = [
        Submit(
            number,
            bytes([number + 1]) * 32,
            array("I", [(7 * number + place) % vocab for place in range(prompt)]),
            output,
            Sampling(temperature=0.0),
            ignore_eos=True,
            retain=False,
        )
        for number in range(rows)
    ]
    meter.spent_ns = 0
    begin = time.thread_time_ns()
    generate(engine, submits)
    spent = time.thread_time_ns() - begin
    return meter.spent_ns / spent, spent / 1_000 / (rows * (output if output > 1 else prompt))


def measure(name: str, engine: Engine, *, shrink: int = 1) -> None:
    """Print the shares of all loads."""
    torch.set_num_threads(1)
    meter = instrument(engine)
    longest = engine.scheduler.limits.max_context
    for label, (rows, prompt, output) in LOADS.items():
        load = rows, min(prompt, longest - output), max(1, output // shrink)
        runs = [share(engine, meter, load) for _ in range(1 if shrink > 1 else ROUNDS)]
        typical = median(part for part, _ in runs)
        token_us = min(us for _, us in runs)
        print(f"{name:<22} {label:<24} {100 * typical:6.3f} % of {token_us:9.1f} us a token", flush=True)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="also the shape of half a billion weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folders = {"plain": ""}
        if kernels.find_compiler() is not None:
            kernels.build(Path(folder))
            folders["compiled"] = folder
        for path, kernel_dir in folders.items():
            measure(f"mini, {path}", mini(kernel_dir))
        if options.large:
            for path, kernel_dir in reversed(folders.items()):
                measure(f"0.5B shape, {path}", large(kernel_dir), shrink=6)


if __name__ == "__main__":
    main()
