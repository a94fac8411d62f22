"""Small engine for checks of guarantees, and its mixed traffic: random weights, fixed seeds."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import torch

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.offline import Answer, collect
from engine.model.checkpoint.checklist import targets
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model
from engine.model.layers.rotary import RopeScaling
from engine.startup.load import build_engine
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

VOCAB = 97
TENANTS = 4
KINDS = (Sampling(temperature=0.0), Sampling(seed=7), Sampling(temperature=0.7, top_p=0.8, repetition_penalty=1.2))

MakeEngine = Callable[[], Engine]


def small_engine(kernels: str = "", *, num_blocks: int = 48) -> Engine:
    """Build a Llama of ten thousand weights with blocks of four tokens; ``kernels`` is a directory of compiled
    kernels."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_positions=512,
        rms_norm_eps=1e-5,
        rope=RopeScaling(),
    )
    model, checklist = build_model(config, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, target in targets(checklist.pieces.values()).items():
        values = torch.randn(target.shape, generator=generator)
        target.copy_(1 + 0.1 * values if "norm" in name else 0.5 * values)
    block_bytes = 4 * sum(layer.numbers for layer in config.kv_layers) * 4
    return build_engine(
        EngineConfig(
            model_dir="-",
            model_digest="00",
            block_size=4,
            kv_bytes=(num_blocks + 1) * block_bytes,
            max_num_seqs=8,
            max_num_batched_tokens=24,
            threads=1,
            kernels=kernels,
        ),
        model,
    )


def tenant_key(number: int) -> bytes:
    """Return a tenant's namespace key."""
    return bytes([number + 1]) * 32


def mixed_request(number: int, draw: random.Random, longest: int) -> Submit:
    """Draw a request of one tenant: any length, with and without retention, with and without a common prefix."""
    start = draw.choice((0, draw.randrange(VOCAB)))
    length, output = draw.randint(1, longest), draw.randint(1, 24)
    return Submit(
        number,
        tenant_key(draw.randrange(TENANTS)),
        array("I", [(start + place) % VOCAB for place in range(length)]),
        output,
        draw.choice(KINDS),
        ignore_eos=True,
        retain=draw.random() < 0.7,
        logprobs=2,
        choices=2 if draw.random() < 0.1 else 1,
    )


def run_traffic(engine: Engine, requests: int, *, seed: int, longest: int = 60) -> dict[int, Answer]:
    """Send requests at random moments and cancel some of them; return answers by request."""
    draw = random.Random(seed)
    answers: dict[int, Answer] = {}
    sent: list[int] = []
    while len(sent) < requests or engine.has_work:
        while len(sent) < requests and (draw.random() < 0.4 or not engine.has_work):
            submit = mixed_request(4 * len(sent) + 4, draw, longest)
            sent.append(submit.request)
            engine.add(submit)
        if draw.random() < 0.03:
            engine.abort(draw.choice(sent))
        collect(engine, answers)
    return answers
