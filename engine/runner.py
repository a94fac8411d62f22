"""Executes step plans: zero, admit, build inputs, forward, sample. Everything with tensors is behind this class.

Nothing is computed of a row whose block table names a block that is not its own (``engine.kv.tags``).

The forward pass is the model's own, of plain tensor operations, or a ``Program``: the same model compiled.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import BatchBuilder, Ints, StepArrays
from engine.chooser import Chooser
from engine.errors import ForeignBlockError
from engine.foreign import run_without
from engine.kv.storage import KvStorage
from engine.masks import MaskedLogits
from engine.model.attention import PagedAttention
from engine.model.decoder import Decoder
from engine.sampler import Sampler, Samples
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import NO_ROWS, StepPlan
from engine.tiles import Tiles


class Program(Protocol):
    """A compiled model."""

    def forward(self, arrays: StepArrays) -> tuple[Tensor, Tensor]:
        """Logits of the wanted tokens, shape ``(M, vocab_size)``, and the place of each row's maximum (negative where
        it is not finite); valid until the next call.

        Raises:
            ForeignBlockError: a table names a block that is not its row's; nothing was read or written.
        """

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
        self._chooser = Chooser(self._sampler, MaskedLogits(limits.eos_ids), limits.vocab_size)
        self._tiles = Tiles(model, storage)
        self._deterministic = True
        self._exact: set[int] = set()
        """Rows whose numbers must not depend on the batch."""

    @property
    def backend(self) -> str:
        """What computes, and why nothing faster does, for people."""
        return self._backend

    @property
    def writes_code(self) -> bool:
        """oneDNN multiplies the 16-bit types and writes a kernel for every new number of rows; a program needs none."""
        return self.program is None and self.model.dtype != torch.float32

    @property
    def deterministic(self) -> bool:
        """Whether rows that ask for it get the same bits in any batch."""
        return self._deterministic

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """These blocks have been filled from outside, for the holders of these stamps."""
        self._batches.stamp(blocks, stamps)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Samples:
        """Run one step; gives a token for each of the plan's ``sample_rows``."""
        if plan.zero_blocks:
            self.storage.zero(plan.zero_blocks)
            self._batches.stamp(plan.zero_blocks, plan.zero_stamps)
        for admission in plan.admissions:
            self._batches.admit(admission)
            self._sampler.admit(admission)
            if admission.deterministic:
                self._exact.add(admission.row)
            else:
                self._exact.discard(admission.row)
        self._batches.grow(plan)
        if not plan.decode_rows and not plan.prefills:
            return Samples([])
        # A program compares stamps in its own pass over the tables, before it computes anything.
        foreign = self._batches.foreign(plan) if self.program is None else NO_ROWS
        if not foreign:
            try:
                return self._run(plan)
            except ForeignBlockError:
                foreign = self._batches.foreign(plan)
                assert foreign, "kernels and tables disagree about whose a block is"
        return run_without(plan, foreign, self._run)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows."""
        self._batches.forget(rows)
        self._sampler.forget(rows)

    def _run(self, plan: StepPlan) -> Samples:
        """Compute and sample."""
        logits, best, next_positions = self._forward(plan)
        rows = plan.sample_rows
        count = len(rows)
        if not rows:
            samples = Samples([])
        elif best is not None and not plan.masks and self._sampler.wants_maximum(rows):
            samples = Samples(best[:count].tolist())
        else:
            samples = self._chooser.choose(logits[:count], rows, next_positions[:count], plan.masks)
        for chunk in plan.prefills:
            if chunk.num_scored:
                lines = logits[count : count + chunk.num_scored]
                tokens = self._batches.scored_tokens(chunk)
                samples.prompts.append(self._chooser.score(lines, chunk.row, chunk.score_from, tokens))
                count += chunk.num_scored
        self._batches.advance(plan, samples.token_ids)
        return samples

    def touch(self) -> None:
        """Write every page of the large buffers once more; only while no request is live."""
        self.storage.touch()
        if self.program is not None:
            self.program.touch()

    @torch.inference_mode()
    def prove(self) -> None:
        """Try whether this model's rows are the same bits anywhere in a tile; where not, no deterministic request is
        served. Kernels compute each row by one order of roundings and need no trial. Leaves the null block dirty."""
        if self.program is None:
            self._deterministic = self._tiles.is_exact()

    def _forward(self, plan: StepPlan) -> tuple[Tensor, Tensor | None, Ints]:
        if self.program is not None:
            arrays = self._batches.arrays(plan)
            return *self.program.forward(arrays), arrays.next_positions
        ordinary, exact = self._split(plan)
        if exact is None:
            return self._forward_ordinary(plan)
        arrays = self._batches.arrays(exact)
        positions = arrays.next_positions
        logits = self._tiles.forward(arrays, exact.prefills)
        if ordinary is None:
            return logits, None, positions
        others, _, other_positions = self._forward_ordinary(ordinary)
        found = torch.cat((others, logits))
        lines = {key: line for line, key in enumerate(ordinary.logit_lines + exact.logit_lines)}
        order = np.array([lines[key] for key in plan.logit_lines], dtype=np.int64)
        return found[torch.from_numpy(order)], None, np.concatenate((other_positions, positions))[order]

    def _forward_ordinary(self, plan: StepPlan) -> tuple[Tensor, None, Ints]:
        batch = self._batches.build(plan)
        logits = self.model.forward(batch.token_ids, batch.positions, self._attention, batch.attention, batch.wanted)
        return logits, None, batch.next_positions

    def _split(self, plan: StepPlan) -> tuple[StepPlan | None, StepPlan | None]:
        """The plan's ordinary and its deterministic rows, None where there are none."""
        exact = self._exact
        if not exact:
            return plan, None
        parts: list[StepPlan | None] = []
        for wanted in (False, True):
            rows = [row for row in plan.decode_rows if (row in exact) is wanted]
            chunks = [chunk for chunk in plan.prefills if (chunk.row in exact) is wanted]
            parts.append(StepPlan(decode_rows=rows, prefills=chunks) if rows or chunks else None)
        return parts[0], parts[1]
