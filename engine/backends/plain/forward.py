"""The forward pass of plain tensor operations: ordinary rows in one batch, deterministic rows in tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.backends.common.batch import BatchBuilder
from engine.backends.common.host_runner import StepLogits
from engine.backends.common.intake import Ints
from engine.backends.common.storage import KvStorage
from engine.backends.plain.grouping import Grouping
from engine.backends.plain.paged_attention import AttentionBatch, PagedAttention
from engine.backends.plain.tiles import Tiles
from engine.core.scheduler.plan import StepPlan
from engine.model.layers.blocks import NO_ADAPTERS
from engine.model.layers.decoder import Decoder


class StepBatch(NamedTuple):
    """Inputs of one forward pass."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    wanted: Tensor
    """For each of the plan's ``logit_lines`` the index of its token in the step."""
    next_positions: Ints
    """For each of the plan's ``logit_lines`` the position of the token to be chosen or scored."""
    adapters: Tensor
    """See ``engine.model.layers.blocks.StepContext``."""


class PlainForward:
    """A model's own forward pass over paged KV memory."""

    checks_owners = False
    operand_bytes = 0
    compresses = False

    def __init__(self, model: Decoder, storage: KvStorage, description: str = "plain operations") -> None:
        self.model = model
        self.description = description
        # oneDNN multiplies the 16-bit types and writes a kernel for every new number of rows.
        self.writes_code = model.dtype != torch.float32
        self._device = storage.device
        self._storage = storage
        self._grouping = Grouping(storage)
        self._tiles = Tiles(model, storage)

    def touch(self) -> None:
        """Do nothing: buffers belong to the storage."""

    def is_exact(self) -> bool:
        """Whether this model's rows are the same bits anywhere in a tile; see ``Tiles.is_exact``."""
        return self._tiles.is_exact()

    def __call__(self, plan: StepPlan, batches: BatchBuilder, /) -> StepLogits:
        """Logits of a plan that computes at least one token."""
        ordinary, exact = _split(plan, batches.intake.exact)
        if exact is None:
            return self._ordinary(plan, batches)
        arrays = batches.arrays(exact)
        positions = arrays.next_positions
        logits = self._tiles.forward(arrays, exact.prefills)
        if ordinary is None:
            return StepLogits(logits, None, positions)
        others, _, other_positions = self._ordinary(ordinary, batches)
        found = torch.cat((others, logits))
        lines = {key: line for line, key in enumerate(ordinary.logit_lines + exact.logit_lines)}
        order = np.array([lines[key] for key in plan.logit_lines], dtype=np.int64)
        return StepLogits(found[torch.from_numpy(order)], None, np.concatenate((other_positions, positions))[order])

    def advance(self, batch: StepBatch) -> Tensor:
        """Residual stream behind the last layer, ``(N, hidden)``."""
        model, attend = self.model, PagedAttention(self._storage, batch.attention)
        return model.advance(model.embed(batch.token_ids), batch.positions, attend, batch.adapters)

    def batch(self, plan: StepPlan, batches: BatchBuilder) -> StepBatch:
        """Inputs for a plan that computes at least one token; decoding rows come by falling length."""
        arrays = batches.arrays(plan, by_length=True)
        count = arrays.num_decode
        attention = self._grouping.batch(arrays, arrays.positions[:count] + 1, plan.prefills)
        return StepBatch(
            token_ids=self._tensor(arrays.token_ids),
            positions=self._tensor(arrays.positions),
            attention=attention,
            wanted=self._tensor(arrays.wanted),
            next_positions=arrays.next_positions,
            adapters=self._tensor(arrays.adapters) if len(arrays.adapters) else NO_ADAPTERS,
        )

    def _ordinary(self, plan: StepPlan, batches: BatchBuilder) -> StepLogits:
        batch = self.batch(plan, batches)
        attend = PagedAttention(self._storage, batch.attention)
        logits = self.model.forward(batch.token_ids, batch.positions, attend, batch.wanted, batch.adapters)
        return StepLogits(logits, None, batch.next_positions)

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _split(plan: StepPlan, exact: set[int]) -> tuple[StepPlan | None, StepPlan | None]:
    """The plan's ordinary and its deterministic rows, None where there are none."""
    if not exact:
        return plan, None
    parts: list[StepPlan | None] = []
    for wanted in (False, True):
        rows = [row for row in plan.decode_rows if (row in exact) is wanted]
        chunks = [chunk for chunk in plan.prefills if (chunk.row in exact) is wanted]
        parts.append(StepPlan(decode_rows=rows, prefills=chunks) if rows or chunks else None)
    return parts[0], parts[1]
