"""Runs of a strict tenant's requests, alone and beside any load that an attacker can put into the engine; seeded.

A *co-batch* is one such load: other tenants' requests of any kind (ordinary and deterministic, cancelled, with several
outputs, structured, with long prompts that evict the tenant's own) in an engine with few blocks and small steps, which
the tenant's requests enter at random moments. The plain backend is used: there, a row's computation depends on its
batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np
import torch

from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.kv.leaving import SpillChannel
from engine.core.offline import Answer, collect
from engine.core.scheduler.forecast import Forecast
from engine.model.checkpoint.checklist import targets
from engine.model.checkpoint.fields import Fields
from engine.model.checkpoint.registry import FAMILIES, build_model
from engine.startup.load import build_engine
from isolation.ipc.engine import StepOutput, Submit
from isolation.ipc.grammar import Masks, MaskState
from isolation.ipc.logit_bias import LogitBias
from isolation.ipc.messages import Finish
from isolation.ipc.sampling import Sampling

VOCAB = 97
BLOCK = 4
CONTEXT = 90
MOST_STEPS = 20_000
"""Steps within which a load must finish."""

BIAS = LogitBias(array("I", range(0, VOCAB, 3)), array("f", [3.0] * len(range(0, VOCAB, 3))))
"""Bias of some requests: a third of all ids are likelier."""

KINDS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=20, top_p=0.9),
    Sampling(temperature=1.2, min_p=0.02, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
)

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
MODELS = {
    "dense": {**_COMMON, "architectures": ["LlamaForCausalLM"]},
    "experts": {
        **_COMMON,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_theta": 10_000.0,
    },
}
"""Model descriptions by name: ten thousand weights, and a model whose rows are sorted by expert."""


def engine_of(model: str, spill: SpillChannel | None = None, **fields: object) -> Engine:
    """Build a fresh engine with fixed random weights; ``spill`` is the tier for its evicted blocks."""
    description = Fields("config.json", dict(MODELS[model]))
    config = FAMILIES[description.architecture(tuple(FAMILIES))].read(description)
    built, checklist = build_model(config, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, target in targets(checklist.pieces.values()).items():
        values = torch.randn(target.shape, generator=generator) * (1.0 if "embed" in name or "lm_head" in name else 0.3)
        target.copy_(1 + 0.1 * values if "norm" in name else values)
    blocks = int(str(fields.pop("num_blocks", 400)))
    block_bytes = BLOCK * sum(layer.numbers for layer in config.kv_layers) * built.dtype.itemsize
    values_of = {"max_num_seqs": 20, "max_num_batched_tokens": 256, "max_context": CONTEXT, "threads": 1, **fields}
    return build_engine(
        EngineConfig(
            model_dir="-",
            model_digest="00",
            block_size=BLOCK,
            kv_bytes=(blocks + 1) * block_bytes,
            **values_of,  # type: ignore[arg-type]
        ),
        built,
        spill,
    )


def small_engine(model: str, draw: np.random.Generator, spill: SpillChannel | None = None) -> Engine:
    """Build an engine with few blocks and small steps, drawn at random."""
    return engine_of(
        model,
        spill,
        num_blocks=int(draw.choice([34, 60, 300])),
        max_num_batched_tokens=int(draw.choice([20, 33, 64, 200])),
        max_num_seqs=int(draw.choice([5, 16, 20])),
    )


@contextmanager
def reckless() -> Iterator[None]:
    """Start requests without regard to memory, so that it runs out and some are preempted."""
    with patch.object(Forecast, "fits", lambda *_args, **_named: True):
        yield


def requests_of(
    draw: np.random.Generator, first: int, count: int, *, tenant: int, longest: int, **fields: object
) -> list[Submit]:
    """Build requests of all kinds: some structured, some with two outputs, some with a bias. Ids are four apart."""
    found = []
    for number in range(first, first + 4 * count, 4):
        tokens = draw.integers(0, VOCAB, int(draw.integers(1, longest))).tolist()
        sampling = replace(KINDS[int(draw.integers(len(KINDS)))], seed=number)
        sort = int(draw.integers(6))
        shape: dict[str, object] = {"choices": 2} if sort == 0 else {"structured": sort == 1}
        if sort == 2:
            shape["logit_bias"] = BIAS
        found.append(
            Submit(
                number,
                bytes([tenant]) * 32,
                array("I", tokens),
                int(draw.integers(2, 12)),
                sampling,
                ignore_eos=True,
                **{"logprobs": int(draw.integers(4)), **shape, **fields},  # type: ignore[arg-type]
            )
        )
    return found


@dataclass(slots=True)
class CoBatch:
    """Requests in progress in one engine."""

    engine: Engine
    draw: np.random.Generator
    answers: dict[int, Answer] = field(default_factory=dict)
    _structured: set[int] = field(default_factory=set)
    _due: list[tuple[int, int]] = field(default_factory=list)

    def run(self, submits: Iterable[Submit], cancelled: Iterable[int] = ()) -> None:
        """Run all requests to their ends; they are submitted, and some cancelled, at random steps."""
        waiting, doomed = list(submits), list(cancelled)
        self.draw.shuffle(waiting)  # type: ignore[arg-type]
        for _ in range(MOST_STEPS):
            if not waiting and not self.engine.has_live_requests:
                return
            for _ in range(int(self.draw.integers(0, 4))):
                if waiting:
                    self._add(waiting.pop())
            if doomed and not self.draw.integers(6):
                self.engine.abort(doomed[int(self.draw.integers(len(doomed)))])
            self._send_masks()
            self._step()
        raise RuntimeError(f"a load did not come to its end within {MOST_STEPS} steps")

    def _add(self, submit: Submit) -> None:
        self.engine.add(submit)
        if submit.structured:
            self._structured.add(submit.request)
            self._due.append((submit.request, 0))

    def _step(self) -> None:
        # ``collect`` reads the outputs that await a mask.
        output = self.engine.step() if self.engine.has_work else None
        if output is None:
            return
        collect(_Said(output), self.answers)  # type: ignore[arg-type]
        for request, finish in zip(output.requests, output.finishes, strict=True):
            if request in self._structured and finish == Finish.NONE:
                self._due.append((request, len(self.answers[request].token_ids)))

    def _send_masks(self) -> None:
        """Send masks at random: each with an even chance at a step, or at once when there is no other work."""
        idle = not self.engine.has_work
        come = [entry for entry in self._due if idle or self.draw.integers(2)]
        self._due = [entry for entry in self._due if entry not in come]
        if come:
            requests, positions = zip(*come, strict=True)
            rows = b"".join(_allowed(request, position) for request, position in come)
            self.engine.set_masks(
                Masks(array("Q", requests), array("I", positions), bytes([MaskState.OPEN] * len(come)), rows)
            )


@dataclass(frozen=True, slots=True)
class _Said:
    """Output of one step, in the form that ``collect`` reads."""

    output: StepOutput

    def step(self) -> StepOutput:
        """Return the output."""
        return self.output


def _allowed(request: int, position: int) -> bytes:
    """Compute the mask of one token: about half of the ids, equal for every call."""
    bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
    bits[:VOCAB] = np.random.default_rng((request, position)).integers(0, 2, VOCAB)
    bits[int(np.random.default_rng(request).integers(VOCAB))] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def content(answer: Answer) -> tuple[object, ...]:
    """Return the content that must be bit-equal: tokens, finish reason and every log-probability."""
    return answer.failure, answer.token_ids, answer.finish, [replace(one, index=0) for one in answer.logprobs]
