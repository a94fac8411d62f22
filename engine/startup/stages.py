"""Where the layers of a model are cut into stages of a pipeline: by the time that each takes on this machine.

The slowest stage sets the pace of a pipeline. Layers of one kind (the same tensors in the same shapes) take the same
time, so one of each kind is built with random weights and timed, without attention to earlier tokens: what it costs
grows with the context and is alike in most layers. The head is timed on a part of the vocabulary, for its time grows
with the number of ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from engine.backends.attention import AttentionRule
from engine.errors import ConfigurationError
from engine.model.checkpoint.checklist import Checklist
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import build_model, describe_model
from engine.model.checkpoint.weights import DTYPE_NAMES
from engine.model.layers.decoder import Decoder
from engine.model.layers.experts import MixtureOfExperts
from engine.model.layers.parallel import Parallel, Span

ROWS = 8
"""Rows of a timed step: a decode step of some requests."""

TIMES = 15
"""Steps that are timed, of which the quickest counts: whatever else runs on the machine makes a step slower and none
quicker, and a layer that is timed in a bad moment would get a stage to itself. One before them is not timed."""

HEAD_IDS = 16_384
"""Ids of a timed head at the most: with 2,048 inputs their numbers fit no cache of today's processors."""

SPREAD = 0.02
"""Half the width of the interval that random weights are drawn from."""


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds of a step of ``ROWS`` rows."""

    layers: tuple[float, ...]
    """Time of each layer."""
    head: float
    """Time of what follows the last layer."""


@dataclass(frozen=True, slots=True)
class _NoAttention:
    """In the place of attention: gives zeros of the right shape."""

    value_dim: int
    fixed_shapes: ClassVar[bool] = False

    def __call__(self, _place: int, qkv: tuple[Tensor, Tensor, Tensor | None], _rule: AttentionRule, /) -> Tensor:
        q = qkv[0]
        return q.new_zeros(q.shape[0], q.shape[1] * self.value_dim)


@torch.inference_mode()
def measure_layers(model: ModelConfig, parallel: Parallel, dtype: str) -> LayerCosts:
    """Time one layer of each kind.

    Args:
        model: its description.
        parallel: what a rank holds of a layer, without a group.
        dtype: of the configuration; ``auto`` is timed in bfloat16.

    Raises:
        ConfigurationError: the model cannot be divided among so many ranks.
    """
    numbers = DTYPE_NAMES["bfloat16" if dtype == "auto" else dtype]
    held = [replace(parallel, layers=(index, index + 1)) for index in range(model.num_layers)]
    found = [_kind(describe_model(model, one), index) for index, one in enumerate(held)]
    costs = {}
    for kind in dict.fromkeys(found):
        places = [place for place, one in enumerate(found) if one == kind]
        # One in the middle, which has neither the embedding nor the head beside it where there are several.
        costs[kind] = _time(model, held[places[len(places) // 2]], numbers)
    return LayerCosts(tuple(costs[kind] for kind in found), _time_head(model, parallel, numbers))


def _kind(checklist: Checklist, index: int) -> tuple[tuple[str, int], ...]:
    """Names within a layer, with the numbers that this rank holds of each."""
    mark = f".layers.{index}."
    return tuple(
        (name.partition(mark)[2], sum(home.target.numel() for home in piece.homes))
        for name, piece in checklist.pieces.items()
        if mark in name
    )


def _time(model: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> float:
    """Seconds of the one layer that ``parallel`` has, without attention to earlier tokens."""
    index = parallel.stage(model.num_layers).start
    decoder = _random_model(model, parallel, dtype, f".layers.{index}.")
    attend = _NoAttention(model.kv_layers[index].value_dim)
    positions = torch.arange(ROWS)
    return _quickest(model, dtype, lambda x: decoder.advance(x, positions, attend))


def _time_head(model: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> float:
    """Seconds of what follows the last layer."""
    last = replace(parallel, layers=(model.num_layers - 1, model.num_layers))
    ids = min(model.vocab_size, HEAD_IDS)
    decoder = _random_model(replace(model, vocab_size=ids), last, dtype, "")
    rows = torch.arange(ROWS)
    return _quickest(model, dtype, lambda x: decoder.logits(x, rows)) * model.vocab_size / ids


def _random_model(model: ModelConfig, parallel: Parallel, dtype: torch.dtype, mark: str) -> Decoder:
    """A part of the model in which tensors with ``mark`` in their names have random numbers."""
    decoder, checklist = build_model(model, dtype, torch.device("cpu"), parallel)
    for name, piece in checklist.pieces.items():
        for home in piece.homes if mark in name else ():
            home.target.uniform_(-SPREAD, SPREAD)
    decoder.pack()
    return decoder


def _quickest(model: ModelConfig, dtype: torch.dtype, step: Callable[[Tensor], object]) -> float:
    """Least seconds of a step of ``ROWS`` rows of the residual stream."""
    taken = []
    for _ in range(1 + TIMES):
        x = torch.randn(ROWS, model.hidden_size, dtype=dtype)
        begun = time.perf_counter()
        step(x)
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])


def count_experts(model: ModelConfig) -> int:
    """Experts of the layers that have some, the fewest of any; 0 where no layer has experts."""
    decoder = build_model(model, torch.float32, torch.device("meta"))[0]
    blocks = [one.block for layer in decoder.layers for one in layer.sublayers]
    return min((block.experts.total for block in blocks if isinstance(block, MixtureOfExperts)), default=0)


def cut_layers(costs: Sequence[float], stages: int, head: float = 0.0) -> tuple[Span, ...]:
    """Cut layers into stages so that the slowest takes as little time as can be.

    Args:
        costs: seconds of each layer.
        stages: how many.
        head: seconds of what follows the last layer.

    Raises:
        ConfigurationError: there are fewer layers than stages.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ConfigurationError(f"{count} layers cannot be cut into {stages} stages")
    weights = [*costs[:-1], costs[-1] + head]
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    best: list[tuple[float, tuple[Span, ...]]] = [(sums[stop], ((0, stop),)) for stop in range(count + 1)]
    for number in range(2, stages + 1):
        best = [
            min(
                (
                    (max(best[start][0], sums[stop] - sums[start]), (*best[start][1], (start, stop)))
                    for start in range(number - 1, stop)
                ),
                default=best[0],
            )
            for stop in range(count + 1)
        ]
    return best[count][1]
