"""What the deterministic class costs: tokens for each second of processor time, as a share of the ordinary path's.

``python bench/deterministic.py`` builds a random Llama (about 45 million weights; ``--layers``, ``--hidden`` change
that), and runs the same requests with and without the class, alternating, on plain operations (float32 and bfloat16)
and, where a C compiler is there, on compiled kernels. One thread, so that a busy machine moves nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from array import array
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.operator import kernels
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.offline import generate
from engine.model.checkpoint.checklist import targets
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model
from engine.model.layers.rotary import RopeScaling
from engine.startup.load import build_engine
from engine.startup.warmup import warm_up
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

ROUNDS = 3
"""Times each side runs; the median of the ratios counts."""

LOADS = {
    "decode 1 row": (1, 16, 48),
    "decode 4 rows": (4, 16, 48),
    "decode 16 rows": (16, 16, 48),
    "decode 16 rows at 600": (16, 600, 24),
    "prompts of 500": (4, 500, 1),
}
"""Requests, prompt tokens, output tokens."""


def build(options: argparse.Namespace, dtype: torch.dtype, kernel_dir: str) -> Engine:
    """An engine around random weights."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_layers=options.layers,
        num_heads=8,
        num_kv_heads=4,
        head_dim=options.hidden // 8,
        vocab_size=8_000,
        max_positions=2_048,
        rms_norm_eps=1e-5,
        rope=RopeScaling(),
    )
    model, checklist = build_model(config, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for target in targets(checklist.pieces.values()).values():
        target.copy_(torch.randn(target.shape, generator=generator) * 0.02)
    engine = build_engine(
        EngineConfig(model_dir="-", model_digest="00", kv_bytes=1 << 29, max_num_seqs=32, kernels=kernel_dir), model
    )
    torch.set_num_threads(1)
    warm_up(engine)
    return engine


def seconds(engine: Engine, load: tuple[int, int, int], *, deterministic: bool) -> float:
    """Processor time of one load; nothing of it is found by the next."""
    rows, prompt, output = load
    one = Submit(
        0,
        bytes(32),
        array("I", range(1, prompt + 1)),
        output,
        Sampling(temperature=0.0),
        ignore_eos=True,
        retain=False,
        deterministic=deterministic,
    )
    started = time.process_time()
    generate(engine, [replace(one, request=number) for number in range(rows)])
    return time.process_time() - started


def measure(name: str, engine: Engine) -> None:
    """Print the loads' rates and ratios."""
    for label, load in LOADS.items():
        rows, prompt, output = load
        tokens = rows * (output if output > 1 else prompt)
        pairs = []
        for turn in range(ROUNDS):
            both = {}
            for exact in (False, True) if turn % 2 else (True, False):
                both[exact] = seconds(engine, load, deterministic=exact)
            pairs.append(both)
        ordinary = median(tokens / pair[False] for pair in pairs)
        share = median(pair[False] / pair[True] for pair in pairs)
        print(f"{name:18} {label:22} {ordinary:9.0f} tokens/s ordinary   {share:5.2f} of it deterministic", flush=True)


def main() -> None:
    """Run all settings."""
    parser = argparse.ArgumentParser(description="cost of the deterministic class")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.float32, torch.bfloat16):
            short = str(dtype).removeprefix("torch.")
            measure(f"plain {short}", build(options, dtype, ""))
        if kernels.find_compiler() is not None:
            kernels.build(Path(folder))
            measure("kernels bfloat16", build(options, torch.bfloat16, folder))


if __name__ == "__main__":
    main()
