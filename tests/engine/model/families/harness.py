"""What the tests of families share: our runner on a model from disk, mixed schedules, recorded logits."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from engine.backends.common.host_runner import HostRunner
from engine.backends.common.loading import layout_for, limits_for
from engine.backends.common.masks import MaskedLogits
from engine.backends.common.sliced_sampling import Chooser
from engine.backends.common.storage import KvStorage
from engine.backends.native.load import choose
from engine.backends.native.load import make_forward as make_native
from engine.backends.plain.load import make_forward as make_plain
from engine.config import EngineConfig
from engine.core.backend import Samples
from engine.core.scheduler.plan import Admission, Chunk, StepPlan
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.weights import load_model
from engine.model.layers.parallel import ALONE, Parallel
from isolation.ipc.sampling import Sampling

BLOCK = 4
TOLERANCE = 1e-4
Execute = Callable[[StepPlan], object]


class Recorder:
    """Takes the sampler's place: keeps the logits, and continues as told or with the likeliest."""

    def __init__(self, tokens: dict[int, list[int]] | None = None) -> None:
        self.tokens = tokens
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        """By row and position of the next token."""
        self.chosen: dict[tuple[int, int], int] = {}

    def wants_maximum(self, rows: list[int]) -> bool:
        """No: it looks at the logits."""
        return False

    def admit(self, admission: Admission) -> None:
        """Sampling numbers do not matter here."""

    def sample(self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor) -> Samples:
        """Record and continue."""
        ids = []
        for line, row in enumerate(rows):
            place = row, int(positions[line])
            self.logits[place] = logits[line].float().clone()
            ids.append(int(logits[line].argmax()) if self.tokens is None else self.tokens[row][place[1]])
            self.chosen[place] = ids[-1]
        return Samples(ids)


def load_runner(
    folder: Path,
    tokens: dict[int, list[int]] | None = None,
    dtype: str = "auto",
    *,
    kernels: str = "",
    int8: bool = False,
    parallel: Parallel = ALONE,
) -> tuple[HostRunner, Recorder]:
    """Our model from the folder, with a recorder for a sampler."""
    config = EngineConfig(
        model_dir=str(folder),
        model_digest="00",
        dtype=dtype,
        block_size=BLOCK,
        kv_bytes=1 << 22,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        threads=2 if kernels else 1,
        kernels=kernels,
        quantization="int8" if int8 else "none",
    )
    description = load_model_config(str(folder))
    model = load_model(
        str(folder), description, dtype=dtype, device=torch.device("cpu"), packed=False, parallel=parallel
    )
    # These schedules name the blocks themselves, in one table.
    layout = replace(layout_for(config, description, str(model.dtype).removeprefix("torch."), parallel), groups=())
    limits = limits_for(config, description, layout)
    storage = KvStorage(layout, max_context=limits.max_context, dtype=model.dtype, device=model.device)
    if kernels:
        forward = make_native(config, model, choose(config, model, limits), storage, limits)
    else:
        forward = make_plain(config, model, storage)
    runner = HostRunner(forward, storage, limits)
    recorder = Recorder(tokens)
    runner._sampler = recorder
    runner._chooser = Chooser(recorder, MaskedLogits(frozenset()), runner.limits.vocab_size)
    return runner, recorder


def admission(row: int, tokens: list[int], num_prompt: int, length: int = 0) -> Admission:
    """A row with blocks of its own, not in order, for all its tokens, or for ``length`` of them."""
    width = -(-(length or len(tokens)) // BLOCK)
    blocks = tuple(1 + row + 8 * ((index * 5) % 32) for index in range(width))
    return Admission(
        row=row,
        token_ids=array("I", tokens[:num_prompt]),
        num_prompt=num_prompt,
        sampling=Sampling(),
        logprobs=-1,
        blocks=blocks,
    )


def run_mixed(
    execute: Execute, tokens: dict[int, list[int]], prompts: dict[int, int], chunk: int, lengths: dict[int, int]
) -> None:
    """Prefill each row in chunks while the rows before it decode, then decode all until their lengths are computed."""
    started: list[int] = []
    done = dict(prompts)

    def decodable() -> list[int]:
        return [row for row in started if done[row] <= lengths[row]]

    for row, num_prompt in prompts.items():
        for start in range(0, num_prompt, chunk):
            length = min(chunk, num_prompt - start)
            plan = StepPlan(decode_rows=decodable())
            if start == 0:
                plan.admissions.append(admission(row, tokens[row], num_prompt, lengths[row]))
            plan.prefills.append(Chunk(row, start, length, start + length == num_prompt))
            execute(plan)
            for decoded in plan.decode_rows:
                done[decoded] += 1
        started.append(row)
        done[row] += 1
    while rows := decodable():
        execute(StepPlan(decode_rows=rows))
        for row in rows:
            done[row] += 1


def random_tokens(lengths: dict[int, int], vocab: int) -> dict[int, list[int]]:
    """Random ids, so many a row."""
    generator = torch.Generator().manual_seed(7)
    return {row: torch.randint(0, vocab, (length,), generator=generator).tolist() for row, length in lengths.items()}


def whole_line(recorder: Recorder, prompt: list[int], row: int, length: int) -> list[int]:
    """A row's prompt and what was chosen after it, ``length`` tokens in all."""
    return prompt + [recorder.chosen[row, position] for position in range(len(prompt), length)]
