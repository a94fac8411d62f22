"""The engine alone, in one process without a channel: prefill and decode rates, and their share of what memory allows.

A program of its own, since nothing else of a measurement may load tensors: ``python -m
appliance.operator.bench.engine_alone --model DIR`` prints one JSON object. For each batch size a closed group of equal
requests runs: first all prompts, then decoding. The roofline of decoding is the speed of memory, read in the same run:
a step reads every weight once and every sequence's keys and values, so its share is the bytes of a step, over its time,
over the best rate that all cores together reach.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from appliance.operator.bench.memory_speed import read_rates
from engine.backends.common.host_runner import HostRunner
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.coded.codec import open_numpy_codec
from engine.startup.load import load_engine
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

NAMESPACE = bytes(32)


def cache_bytes() -> int:
    """The largest cache of the processor; 0 where the system does not tell."""
    found = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        found.append(int(text.rstrip("KM")) * unit)
    return max(found)


def weight_bytes(folder: Path) -> int:
    """Bytes of the weights as plain tensors; what a decoding step reads is this, but for a table of embeddings of its
    own."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with SafetensorsFile(path, open_numpy_codec) as file:
            total += sum(entry.data_bytes for entry in file.tensors.values())
    return total


def submit_batch(engine: Engine, count: int, shape: tuple[int, int], first_id: int) -> None:
    """Queue equal requests with prompts that nothing else begins with."""
    prompt_tokens, output_tokens = shape
    vocab = engine.scheduler.limits.vocab_size
    for number in range(first_id, first_id + count):
        prompt = array("I", [(number * 7 + place * 3) % vocab for place in range(prompt_tokens)])
        engine.add(Submit(number, NAMESPACE, prompt, output_tokens, Sampling(temperature=0.0), ignore_eos=True))


def measure(engine: Engine, count: int, shape: tuple[int, int], first_id: int) -> dict[str, float]:
    """One row: rates of one batch size."""
    submit_batch(engine, count, shape, first_id)
    started: set[int] = set()
    began = time.perf_counter()
    while len(started) < count:
        output = engine.step()
        started.update(output.requests if output is not None else ())
    prefill_s = time.perf_counter() - began
    steps: list[float] = []
    produced = 0
    began = time.perf_counter()
    while engine.has_work:
        at = time.perf_counter()
        output = engine.step()
        steps.append(time.perf_counter() - at)
        produced += len(output.requests) if output is not None else 0
    decode_s = time.perf_counter() - began
    return {
        "batch": count,
        "prefill_tokens_per_s": count * shape[0] / prefill_s,
        "decode_tokens_per_s": produced / decode_s,
        "step_s": statistics.median(steps),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rows and what they stand on."""
    shape = (options.prompt_tokens, options.output_tokens)
    batches = [int(text) for text in options.batches.split(",")]
    config = EngineConfig(
        model_dir=str(options.model),
        model_digest="00",
        dtype=options.dtype,
        threads=options.threads,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(512, *batches),
        kv_bytes=options.kv_mib << 20,
        max_context=sum(shape) + 16,
        prefix_caching=False,
        kernels=options.kernels,
    )
    [rate] = read_rates(len(os.sched_getaffinity(0)))
    engine = load_engine(config)
    runner = engine.runner
    assert isinstance(runner, HostRunner), "this configuration names a model"
    model = runner.model
    token_bytes = 2 * model.config.num_layers * model.config.num_kv_heads * model.config.head_dim * model.dtype.itemsize
    weights = weight_bytes(options.model)
    rows = []
    for line, batch in enumerate(batches):
        row = measure(engine, batch, shape, 1 + 100_000 * line)
        step_bytes = weights + batch * (shape[0] + shape[1] / 2) * token_bytes
        row["roofline_share"] = step_bytes / row["step_s"] / rate
        rows.append(row)
    return {
        "model": options.model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": options.threads,
        "backend": runner.description,
        "read_bytes_per_s": rate,
        "weight_bytes": weights,
        "cache_bytes": cache_bytes(),
        "prompt_tokens": shape[0],
        "output_tokens": shape[1],
        "rows": rows,
    }


def main() -> int:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Figures of the engine alone, as one JSON object.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", default="")
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1))
    parser.add_argument("--kv-mib", type=int, default=256)
    sys.stdout.write(json.dumps(run(parser.parse_args())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
