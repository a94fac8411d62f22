"""Figures of the engine alone, in one process without a channel: tokens a second, and what a step costs to plan.

By default a model of athanor-mini's shape with random weights. Each line runs one batch of equal requests: first all
prompts (those that are ready decode beside them), then decoding only. ``scheduler`` is the processor time of
``schedule`` and ``commit`` in a decoding step.
Run: ``python bench/engine.py [--model DIR] [--dtype float32] [--threads 1]``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from array import array
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.model.checkpoint.checklist import targets
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model
from engine.model.layers.rotary import RopeScaling
from engine.startup.load import build_engine, load_engine
from engine.startup.warmup import warm_up
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

SHAPE = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=192,
    intermediate_size=512,
    num_layers=6,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=2_048,
    max_positions=4_096,
    rms_norm_eps=1e-5,
    rope=RopeScaling(),
    tie_word_embeddings=True,
)
CASES = ((1, 128, 100), (8, 128, 100), (32, 128, 100), (128, 128, 50), (8, 400, 50))
"""Requests, prompt tokens, output tokens."""


def random_engine(config: EngineConfig) -> Engine:
    """An engine around random weights."""
    torch.manual_seed(0)
    torch.set_num_threads(config.threads)
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    model, checklist = build_model(SHAPE, dtype, torch.device("cpu"))
    for name, target in targets(checklist.pieces.values()).items():
        target.fill_(1.0) if "norm" in name else target.normal_(0.0, 0.05)
    model.pack()
    engine = build_engine(config, model)
    warm_up(engine)
    return engine


def watch(engine: Engine) -> list[float]:
    """Collect the planning time of every step, in microseconds."""
    times: list[float] = []
    schedule, commit = engine.scheduler.schedule, engine.scheduler.commit

    def timed_schedule(**given):
        start = time.thread_time()
        plan = schedule(**given)
        times.append((time.thread_time() - start) * 1e6)
        return plan

    def timed_commit(*given):
        start = time.thread_time()
        result = commit(*given)
        times[-1] += (time.thread_time() - start) * 1e6
        return result

    engine.scheduler.schedule, engine.scheduler.commit = timed_schedule, timed_commit
    return times


def run(engine: Engine, times: list[float], case: tuple[int, int, int], first_id: int) -> str:
    """One line of the table."""
    count, num_prompt, num_output = case
    vocab = engine.scheduler.limits.vocab_size
    for number in range(first_id, first_id + count):
        prompt = array("I", [(number * 7 + place) % vocab for place in range(num_prompt)])
        namespace = number.to_bytes(32, "little")
        engine.add(Submit(number, namespace, prompt, num_output, Sampling(temperature=0.0), ignore_eos=True))
    start, begun = time.perf_counter(), set()
    while len(begun) < count:
        begun.update(engine.step().requests)
    prefill_s = time.perf_counter() - start
    times.clear()
    start, produced, steps = time.perf_counter(), 0, 0
    while engine.has_work:
        produced += len(engine.step().requests)
        steps += 1
    decode_s = time.perf_counter() - start
    planning = sorted(times)
    return (
        f"{count:>8} {num_prompt:>7} {num_output:>7} {count * num_prompt / prefill_s:>10.0f} "
        f"{produced / decode_s:>9.0f} {decode_s / steps * 1e3:>8.2f} "
        f"{statistics.median(planning):>11.0f} {planning[int(0.99 * len(planning))]:>8.0f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    config = EngineConfig(
        model_dir=str(options.model or "random"),
        model_digest="00",
        dtype=options.dtype,
        threads=options.threads,
        kv_bytes=128 << 20,
        max_context=1_024,
        prefix_caching=False,
    )
    engine = load_engine(config) if options.model else random_engine(config)
    times = watch(engine)
    model = engine.runner.model
    print(f"model {options.model or 'random'}, {model.dtype}, {options.threads} thread(s), {engine.ready()}")
    print("requests  prompt  output  prefill/s  decode/s  ms/step  scheduler us      p99")
    for line, case in enumerate(CASES):
        print(run(engine, times, case, 1 + 1_000 * line))


if __name__ == "__main__":
    main()
