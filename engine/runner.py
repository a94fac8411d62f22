"""Executes step plans: zero, admit, build inputs, forward, sample. Everything with tensors is behind this class.

The forward pass is the model's own, of plain tensor operations, or a ``Program``: the same model compiled.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.batch import BatchBuilder, Ints, StepArrays
from engine.kv.storage import KvStorage
from engine.masks import MaskedLogits
from engine.model.attention import PagedAttention
from engine.model.decoder import Decoder
from engine.sampler import Sampler, Samples
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import StepPlan


class Program(Protocol):
    """A compiled model."""

    def forward(self, arrays: StepArrays) -> tuple[Tensor, Tensor]:
        """Logits of the wanted tokens, shape ``(M, vocab_size)``, and the place of each row's maximum (negative where
        it is not finite); valid until the next call."""

    def touch(self) -> None:
        """Write every page of its buffers once more."""


class Runner:
    """A loaded model with its KV memory and the state of all rows."""

    def __init__(
        self,
        model: Decoder,
        storage: KvStorage,
        limits: SchedulerLimits,
        program: Program | None = None,
        *,
        backend: str = "plain operations",
    ) -> None:
        self.model = model
        self.program = program
        self._backend = backend
        self.storage = storage
        self.limits = limits
        self._attention = PagedAttention(storage)
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)
        self._batches = BatchBuilder(limits, storage)
        self._masked = MaskedLogits(limits.eos_ids)

    @property
    def backend(self) -> str:
        """What computes, and why nothing faster does, for people."""
        return self._backend

    @property
    def writes_code(self) -> bool:
        """oneDNN multiplies the 16-bit types and writes a kernel for every new number of rows; a program needs none."""
        return self.program is None and self.model.dtype != torch.float32

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Samples:
        """Run one step; gives a token for each of the plan's ``sample_rows``."""
        if plan.zero_blocks:
            self.storage.zero(plan.zero_blocks)
        for admission in plan.admissions:
            self._batches.admit(admission)
            self._sampler.admit(admission)
        if not plan.decode_rows and not plan.prefills:
            return Samples([])
        logits, best, next_positions = self._forward(plan)
        rows = plan.sample_rows
        if not rows:
            samples = Samples([])
        elif plan.masks:
            samples = self._sampler.sample(self._masked.apply(logits, rows, plan.masks), rows, next_positions)
        elif best is not None and self._sampler.wants_maximum(rows):
            samples = Samples(best.tolist())
        else:
            samples = self._sampler.sample(logits, rows, next_positions)
        self._batches.advance(plan, samples.token_ids)
        return samples

    def touch(self) -> None:
        """Write every page of the large buffers once more; only while no request is live."""
        self.storage.touch()
        if self.program is not None:
            self.program.touch()

    def _forward(self, plan: StepPlan) -> tuple[Tensor, Tensor | None, Ints]:
        if self.program is not None:
            arrays = self._batches.arrays(plan)
            return *self.program.forward(arrays), arrays.next_positions
        batch = self._batches.build(plan)
        logits = self.model.forward(batch.token_ids, batch.positions, self._attention, batch.attention, batch.wanted)
        return logits, None, batch.next_positions
