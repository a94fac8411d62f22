"""Executes step plans: zero, admit, build inputs, forward, sample. Everything with tensors is behind this class."""

from __future__ import annotations

import torch

from engine.batch import BatchBuilder
from engine.kv.storage import KvStorage
from engine.model.attention import PagedAttention
from engine.model.llama import LlamaForCausalLM
from engine.sampler import Sampler, Samples
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import StepPlan


class Runner:
    """A loaded model with its KV memory and the state of all rows."""

    def __init__(self, model: LlamaForCausalLM, storage: KvStorage, limits: SchedulerLimits) -> None:
        self.model = model
        self.storage = storage
        self.limits = limits
        self._attention = PagedAttention(storage, model.config.num_heads)
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)
        self._batches = BatchBuilder(limits, storage)

    @property
    def writes_code(self) -> bool:
        """oneDNN multiplies the 16-bit types, and writes a kernel for every new number of rows."""
        return self.model.dtype != torch.float32

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
        batch = self._batches.build(plan)
        logits = self.model.forward(batch.token_ids, batch.positions, self._attention, batch.attention, batch.wanted)
        rows = plan.sample_rows
        samples = self._sampler.sample(logits, rows, batch.next_positions) if rows else Samples([])
        self._batches.advance(plan, samples.token_ids)
        return samples
