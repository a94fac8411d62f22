"""What adapters cost on compiled kernels: decode steps of one batch, each row with an adapter of its own, against the
same batch with none.

    python bench/adapters.py                    # 64 adapters of 8 tenants, rank 16, the 0.5B shape; one thread
    python bench/adapters.py --threads 4 --wall # on a machine with nothing else to do

Both batches run in one engine, in turns, so that both meet the same machine. Times are processor time unless --wall is
given: with one thread the two agree where nothing else runs, and a busy machine changes processor time least. The bound
is the base's step and, one after the other, the reading of every byte of the adapters once at the measured speed of
memory; their products are a few percent of the base's. Bars: 0.8 of the base's throughput, or 0.9 of the bound.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.operator.bench.memory_speed import read_rates
from bench.cpu_cases import HALF_B, make_half_b
from engine.backends.native.library import open_libraries
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.startup.load import load_engine
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

TENANTS = 8
PROMPT = 2
"""Tokens of a prompt: what is measured are decode steps."""
SHARE, OF_BOUND = 0.8, 0.9
"""Bars."""

KERNELS = Path(sys.prefix) / "share" / "athanor" / "kernels"


def shapes() -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every linear map of a layer."""
    hidden, inner, dim = HALF_B["hidden_size"], HALF_B["intermediate_size"], HALF_B["head_dim"]
    wide, narrow = HALF_B["num_attention_heads"] * dim, HALF_B["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj": (hidden, wide),
        "self_attn.k_proj": (hidden, narrow),
        "self_attn.v_proj": (hidden, narrow),
        "self_attn.o_proj": (wide, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def make_adapters(folder: Path, rank: int, count: int) -> list[str]:
    """Adapters for all linear maps with the same random numbers, each read into memory of its own; returns the digests
    that stand for them."""
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(HALF_B["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes().items():
            prefix = f"base_model.model.model.layers.{layer}.{name}.lora_"
            down, up = (torch.randn(shape, generator=generator) * 0.02 for shape in ((rank, inputs), (outputs, rank)))
            tensors |= {f"{prefix}A.weight": down.bfloat16(), f"{prefix}B.weight": up.bfloat16()}
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    first = folder / digests[0]
    first.mkdir()
    save_file(tensors, first / "adapter_model.safetensors")
    (first / "adapter_config.json").write_text(json.dumps(config))
    for digest in digests[1:]:
        (folder / digest).mkdir()
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            (folder / digest / name).hardlink_to(first / name)
    return digests


def load(model: Path, adapters: Path, digests: list[str], threads: int) -> Engine:
    """An engine on the best compiled kernels, with these adapters."""
    form = next(open_libraries(str(KERNELS))).variant
    config = EngineConfig(
        model_dir=str(model),
        model_digest="00",
        threads=threads,
        kv_bytes=128 << 20,
        max_context=256,
        kernels=str(KERNELS),
        form=form,
        backend="plain",
        prefix_caching=False,
        adapters=json.dumps({digest: str(adapters / digest) for digest in digests}) if digests else "",
        adapter_bytes=8 << 30,
    )
    return load_engine(config, warm=False, say=lambda line: print(f"  {line}"))


def decode(engine: Engine, digests: list[bytes], tokens: int, clock: Callable[[], float]) -> list[float]:
    """Seconds of each decode step of one batch: a row for each of these adapters, nothing for none."""
    draw, times = random.Random(1), []
    for number, digest in enumerate(digests, 1):
        ids = array("I", (draw.randrange(3, HALF_B["vocab_size"]) for _ in range(PROMPT)))
        key = bytes([number % TENANTS + 1]) * 32
        engine.add(Submit(number, key, ids, tokens, Sampling(temperature=0.0), ignore_eos=True, adapter=digest))
    while engine.has_work:
        began = clock()
        output = engine.step()
        if output is not None and len(output.requests) == len(digests) and not output.starts:
            times.append(clock() - began)
    return times


def main() -> int:
    """Measure, print figures and bars; 1 where neither is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true")
    given = parser.parse_args()
    clock = time.perf_counter if given.wall else time.process_time
    (speed,) = read_rates(given.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_half_b(folder)
        digests = make_adapters(folder, given.rank, given.adapters)
        without = load(model, folder, [], given.threads)
        unchanged = [min(decode(without, [b""] * given.adapters, given.tokens, clock)) for _ in range(given.rounds)]
        del without
        engine = load(model, folder, digests, given.threads)
        own = [bytes.fromhex(digest) for digest in digests]
        times: dict[str, list[float]] = {"base": [], "own": [], "one": []}
        for _ in range(given.rounds):
            times["base"] += decode(engine, [b""] * given.adapters, given.tokens, clock)
            times["own"] += decode(engine, own, given.tokens, clock)
            times["one"] += decode(engine, own[:1] * given.adapters, given.tokens, clock)
    return report(given, times, min(unchanged), speed)


def report(given: argparse.Namespace, times: dict[str, list[float]], unchanged: float, speed: float) -> int:
    """Print figures and bars; 1 where neither is reached."""
    base, own, one = (min(times[name]) for name in ("base", "own", "one"))
    numbers = HALF_B["num_hidden_layers"] * sum(given.rank * (i + o) for i, o in shapes().values())
    read = 2 * numbers * given.adapters / speed
    flops = 2 * numbers * given.adapters
    bound = base / (base + read)
    rows = given.adapters
    kind = "wall clock" if given.wall else "processor time"
    print(f"{rows} rows, rank {given.rank}, {given.threads} thread(s), {kind}; memory {speed / 1e9:.1f} GB/s")
    print(
        f"  base alone          {base * 1e3:8.1f} ms a step  {rows / base:7.1f} tokens/s  (median {_ms(times['base'])})"
    )
    print(
        f"  an adapter a row     {own * 1e3:8.1f} ms a step  {rows / own:7.1f} tokens/s  (median {_ms(times['own'])})"
    )
    print(
        f"  one adapter for all  {one * 1e3:8.1f} ms a step  {rows / one:7.1f} tokens/s  (median {_ms(times['one'])})"
    )
    print(
        f"  base, engine without adapters {unchanged * 1e3:8.1f} ms a step: {unchanged / base:.3f} of the one with them"
    )
    print(
        f"  adapters: {2 * numbers * given.adapters / 1e6:.0f} MB and {flops / 1e9:.2f} GFLOP a step; bound {bound:.3f}"
    )
    share = base / own
    print(
        f"share of the base's throughput: {share:.3f} (bar {SHARE}); of the bound: {share / bound:.3f} (bar {OF_BOUND})"
    )
    return 0 if share >= SHARE or share >= OF_BOUND * bound else 1


def _ms(values: list[float]) -> str:
    return f"{statistics.median(values) * 1e3:.1f}"


if __name__ == "__main__":
    sys.exit(main())
