"""Takes all memory of the device that steps will need, before anybody is served.

Torch's allocator keeps what is freed, gives it out again, and asks the driver only where nothing that it keeps is
large enough. A step frees all that it took, so between steps what is kept lies there whole. So it is enough that the
largest step was run: with its need known, everything that nobody holds is given back, and taken again in one piece that
is a little larger (and, for what the allocator keeps apart as small, in pieces of a size). Smaller steps then find room
in it, whatever their sizes are; many small pieces of the sizes of the largest step would not give that.

What is asked of the driver afterwards is counted. It is nothing, and a figure of an engine's health.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.backends.cuda.runtime.copying import ArenaSizes, Copies, make_copies
from engine.backends.cuda.runtime.side_queue import SideQueue
from engine.core.kv.tags import NO_STAMP
from engine.core.scheduler.limits import SCORED_ROWS, SchedulerLimits
from engine.core.scheduler.plan import Admission, Chunk, RowMask, StepPlan
from engine.errors import ConfigurationError
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES, LogitBias
from isolation.ipc.messages import MAX_TOP_LOGPROBS
from isolation.ipc.sampling import EXAMPLE

SMALL_BYTES = 1 << 20
"""What torch's allocator calls small: it is taken from segments of its own, of two such pieces each."""

LEAST_SMALL = 64
"""Pieces of ``SMALL_BYTES`` that are kept at the least. A step of some hundred tokens has few large tensors and more
small ones than the largest step."""

MARGIN = 1.25
"""Share of the largest step's need that is kept: some is lost between two tensors."""

ATTEMPTS = 3
"""Times that the piece is taken, each time larger by ``MARGIN``, until the largest steps find all they need in it."""


class DeviceMemory(Protocol):
    """What gives out a device's memory."""

    def begin(self) -> None:
        """Measure what is needed from here on."""
        ...

    def settle(self, margin: float) -> None:
        """Keep so many times what was needed since ``begin``, in one piece, and nothing else that nobody holds."""
        ...

    def taken(self) -> int:
        """How often memory of the device, or page-locked memory, was taken from the driver."""
        ...


class TorchMemory:
    """Torch's allocator for a GPU. Memory belongs to the stream on which it is taken: everything here is called on that
    of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held = self._now()

    def begin(self) -> None:
        """Measure from here on."""
        torch.cuda.synchronize(self._device)
        # What is part of a cycle is held until the collector comes, and would count as held for good.
        gc.collect()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held = self._now()

    def settle(self, margin: float) -> None:
        """Take what was needed in one piece."""
        most = torch.cuda.memory_stats(self._device)
        large, small = (
            int(most[f"allocated_bytes.{pool}_pool.peak"]) - held
            for pool, held in zip(("large", "small"), self._held, strict=True)
        )
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        pieces = max(LEAST_SMALL, int(2 * margin * small) // SMALL_BYTES)
        sizes = [max(int(margin * large), 2 * SMALL_BYTES), *[SMALL_BYTES] * pieces]
        kept = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        del kept

    def taken(self) -> int:
        """Calls of the driver that gave memory."""
        device = torch.cuda.memory_stats(self._device)["num_device_alloc"]
        return int(device) + int(torch.cuda.host_memory_stats()["num_host_alloc"])

    def _now(self) -> tuple[int, int]:
        stats = torch.cuda.memory_stats(self._device)
        return int(stats["allocated_bytes.large_pool.current"]), int(stats["allocated_bytes.small_pool.current"])


@dataclass(frozen=True, slots=True)
class Resources:
    """What an engine shares with the device beside its tensors."""

    copies: Copies
    memory: DeviceMemory | None
    """None where nothing is counted."""
    side: SideQueue | None = None
    """Queue of whole blocks' copies; None: one that fits the device."""


def make_resources(device: torch.device, sizes: ArenaSizes) -> Resources:
    """Those of a GPU: an arena of these sizes, and torch's allocator; elsewhere copies that need neither."""
    return Resources(make_copies(device, sizes), TorchMemory(device) if device.type == "cuda" else None)


def take_memory(memory: DeviceMemory, run_largest: Callable[[], None]) -> int:
    """Take what the largest steps need; gives how often they took memory from the driver all the same, in the last
    attempt: 0, unless something takes another amount each time.

    Raises:
        ConfigurationError: the device has not so much.
    """
    try:
        return _take_memory(memory, run_largest)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            "the GPU has no room for the largest step beside weights and KV: lower max_num_batched_tokens or "
            "max_num_seqs, give the model less kv_bytes, or put fewer models on the card"
        ) from error


def _take_memory(memory: DeviceMemory, run_largest: Callable[[], None]) -> int:
    # The first time libraries take workspaces, which they keep.
    run_largest()
    memory.begin()
    run_largest()
    more, margin = 0, MARGIN
    for _ in range(ATTEMPTS):
        memory.settle(margin)
        before = memory.taken()
        memory.begin()
        run_largest()
        more, margin = memory.taken() - before, margin * MARGIN
        if not more:
            break
    return more


def largest_plans(limits: SchedulerLimits, num_blocks: int, *, deterministic: bool = False) -> list[StepPlan]:
    """Plans that need as much as any: all tokens of a step in one prompt, and in as many as there are rows, each with
    everything that a request may ask for; once more of deterministic rows, where there are some. They may only be run
    while no request is live, and leave rows and blocks that have to be made zero."""
    tokens, context = limits.max_num_batched_tokens, limits.max_context - 1
    rows = min(limits.max_num_seqs, tokens)
    plans = []
    for count in sorted({-(-tokens // context) if tokens > context else 1, rows}):
        if count > rows:
            continue
        lengths, left = [], tokens
        for row in range(count):
            lengths.append(max(1, min(context, left - (count - row - 1))))
            left -= lengths[-1]
        plans += [
            _plan(limits, lengths, num_blocks, exact=exact) for exact in ((True, False) if deterministic else (False,))
        ]
    return plans


def _plan(limits: SchedulerLimits, lengths: list[int], num_blocks: int, *, exact: bool) -> StepPlan:
    """Prompts of these lengths, all of which end."""
    vocab, scores = limits.vocab_size, SCORED_ROWS
    biased = range(min(MAX_LOGIT_BIASES, vocab))
    bias = LogitBias(array("I", biased), array("f", [1.0] * len(biased)))
    everything = RowMask(b"\xff" * (4 * -(-vocab // 32)), accepting=True)
    plan = StepPlan(zero_blocks=list(range(1, num_blocks + 1)), zero_stamps=[NO_STAMP] * num_blocks)
    for row, length in enumerate(lengths):
        scored = min(scores, length - 1)
        scores -= scored
        plan.admissions.append(
            Admission(
                row=row,
                token_ids=array("I", [place % vocab for place in range(length)]),
                num_prompt=length,
                sampling=EXAMPLE,
                logprobs=MAX_TOP_LOGPROBS,
                blocks=(),
                deterministic=exact,
                prompt_logprobs=MAX_TOP_LOGPROBS,
                # It ends with its first token, so that no step is run ahead for it.
                limit=length + 1,
                logit_bias=bias,
            )
        )
        plan.prefills.append(Chunk(row, 0, length, True, 1 if scored else 0, scored))
        plan.masks[row] = everything
    return plan


def return_freed() -> None:
    """Give memory that nothing uses back to the driver, before the card's room for keys and values is asked for."""
    torch.cuda.empty_cache()
