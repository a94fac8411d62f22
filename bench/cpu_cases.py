"""Models that the measurements of the CPU path load, and our engine on one of them."""

from __future__ import annotations

import argparse
import statistics
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from appliance.common.catalog import EMBEDDED_MODEL, embedded_model
from appliance.operator.demo import DTYPES
from bench.probe import Stretch
from engine.backends.native.abi import Kind
from engine.backends.native.program import NativeModel
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.startup.load import load_engine
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

PROMPT = 32
KV_BYTES = 256 << 20

HALF_B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4_864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4_096,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what is measured on it."""

    name: str
    folder: Path
    dtype: str
    streams: tuple[int, ...]
    tokens: int
    """Tokens of each stream."""
    context: int


class Ours:
    """Our engine on one model."""

    def __init__(
        self,
        case: Case,
        options: argparse.Namespace,
        kernel_folder: Path | None,
        *,
        most_streams: int = 32,
        backend: str = "auto",
    ) -> None:
        config = EngineConfig(
            model_dir=str(case.folder),
            model_digest="00",
            dtype=case.dtype,
            threads=options.threads,
            kv_bytes=KV_BYTES,
            max_context=case.context,
            max_num_seqs=most_streams,
            prefix_caching=False,
            backend=backend,
            kernels=str(kernel_folder or ""),
            quantization="int8" if options.weights == "int8" else "none",
        )
        self.engine: Engine = load_engine(config)
        self.context = case.context
        self._next = 1
        self.fastest_s = 0.0
        """Fastest step of the last measurement."""

    def weights(self) -> list[Stretch]:
        """Where the weights of its products lie; nothing without compiled kernels."""
        program = getattr(self.engine.runner, "forward", None)
        if not isinstance(program, NativeModel):
            return []
        products = [op for ops in program._ops for op in ops if op.kind == Kind.LINEAR]
        item = 1.0 if program._builder.dtype == torch.int8 else program._builder.dtype.itemsize
        return [Stretch(op.weight, int(op.inputs * op.outputs * item * (0.75 if op.palette else 1))) for op in products]

    def start(self, streams: int, steps: int) -> range:
        """Begin so many streams that decode for so many steps together; gives their requests' numbers.

        Prompts are computed before this returns, and a step takes few of them where the model is slow, so no stream
        ends before.
        """
        vocab = self.engine.scheduler.limits.vocab_size
        numbers = range(self._next, self._next + streams)
        for number in numbers:
            prompt = array("I", [(number * 7 + place) % min(vocab, 500) for place in range(PROMPT)])
            key = number.to_bytes(32, "little")
            most = min(steps + PROMPT * streams, self.context - PROMPT)
            self.engine.add(Submit(number, key, prompt, most, Sampling(temperature=0.0), ignore_eos=True))
        self._next += streams
        while (output := self.engine.step()) is None or len(output.requests) < streams or output.starts:
            if not self.engine.has_work:
                sys.exit(f"not all of {streams} streams were in one step before they ended")
        return numbers

    def steps(self, count: int, clock: Clock) -> list[float]:
        """Times of so many decode steps of all the streams that were begun."""
        times = list[float]()
        while len(times) < count:
            if not self.engine.has_work:
                sys.exit("the streams ended before they were measured")
            start = clock()
            self.engine.step()
            times.append(clock() - start)
        return times

    def stop(self, numbers: range) -> None:
        """End these streams."""
        for number in numbers:
            self.engine.abort(number)
        while self.engine.has_work:
            self.engine.step()

    def step_seconds(self, streams: int, tokens: int, clock: Clock) -> float:
        """Median time of so many decode steps, less the first, of so many streams."""
        numbers = self.start(streams, tokens)
        times = self.steps(tokens - 1, clock)
        self.stop(numbers)
        self.fastest_s = min(times)
        return statistics.median(times)


def make_half_b(folder: Path) -> Path:
    """The 0.5B shape with random weights, as a checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    target = folder / "half-b"
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(LlamaConfig(**HALF_B)).save_pretrained(target)
    finally:
        torch.set_default_dtype(default)
    return target


def stories(data: Path, streams: tuple[int, ...]) -> list[Case]:
    """The trained stories260K; nothing where the folder of data lacks it."""
    folder = data / "models" / "stories260K-hf"
    return [Case("stories", folder, "float32", streams, 200, 512)] if folder.is_dir() else []


def mini(streams: tuple[int, ...]) -> Case:
    """The embedded model in the type that it is served in."""
    return Case("mini", embedded_model(), DTYPES[EMBEDDED_MODEL], streams, 200, 512)


def half_b(folder: Path, streams: tuple[int, ...], tokens: int) -> Case:
    """The 0.5B shape, written below a folder."""
    return Case("half-b", make_half_b(folder), "bfloat16", streams, tokens, 1_024)
