"""The backend of embedding models and classifiers: hidden states behind the last norm, pooled into one vector a
request; of a classifier, the vector is what its head makes of them, a number for each label.

An engine that embeds schedules like any other: its requests are prompts with room for one token, which has no
meaning. So scheduling, chunking, fairness, deadlines and preemption are those of generation, and batches mix texts of
all tenants. A row keeps what pooling needs from one chunk to the next: the first hidden state, or the sum of all so
far in float32. A request that was preempted begins anew.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from engine.backends.common.batch import BatchBuilder
from engine.backends.common.host_runner import run_owned
from engine.backends.common.storage import KvStorage
from engine.backends.plain.forward import PlainForward
from engine.core.backend import Capabilities, Samples
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import FAILED, Chunk, StepPlan
from engine.model.layers.decoder import Decoder
from engine.model.layers.pooling import Pooling, PoolingMode

NO_MEANING = 0
"""The token that ends a request."""

LEAST_LENGTH = 1e-12
"""Vectors shorter than this are divided by it, as transformers' own normalisation does."""


class EmbeddingRunner:
    """A loaded decoder with its KV memory, and what is pooled of every row."""

    def __init__(
        self,
        model: Decoder,
        storage: KvStorage,
        limits: SchedulerLimits,
        pooling: Pooling,
        labels: Tensor | None = None,
    ) -> None:
        """``labels``: the classification head, ``(labels, hidden)``; None: vectors are given as they are pooled."""
        self.model = model
        self.storage = storage
        self.limits = limits
        self.pooling = pooling
        self._labels = None if labels is None else labels.float()
        self._forward = PlainForward(model, storage)
        self.capabilities = Capabilities(embed=True, writes_code=self._forward.writes_code)
        self._batches = BatchBuilder(limits, storage, adapters=self.capabilities.adapters)
        self._kept = torch.zeros(limits.max_num_seqs, model.config.hidden_size, device=model.device)
        self._vectors: list[array[float] | None] = []

    @property
    def description(self) -> str:
        """What computes, and how vectors are pooled, for people."""
        if self._labels is not None:
            return f"plain operations; {len(self._labels)} labels by {self.pooling.mode.value} pooling"
        normalised = ", normalised" if self.pooling.normalise else ""
        return f"plain operations; vectors by {self.pooling.mode.value} pooling{normalised}"

    def prove(self) -> None:
        """Do nothing: vectors are computed in batches of any shape, so no class is promised."""

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """Record that blocks were filled from outside, for the holders of these stamps."""
        self._batches.stamp(blocks, stamps)

    def touch(self) -> None:
        """Write every page of the large buffers once more; only while no request is live."""
        self.storage.touch()

    def take_vectors(self) -> list[array[float] | None]:
        """See ``VectorSource``."""
        taken, self._vectors = self._vectors, []
        return taken

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Samples:
        """Run one step; a row whose text ends leaves its vector, and gets a token of no meaning."""
        self._batches.intake.take(plan)
        for admission in plan.admissions:
            self._kept[admission.row] = 0
        self._vectors = []
        if not plan.decode_rows and not plan.prefills:
            return Samples([])
        return run_owned(self._batches, plan, self._run)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the rows' tokens and what was pooled of them."""
        self._batches.intake.forget(rows)
        self._kept[rows] = 0

    def _run(self, plan: StepPlan) -> Samples:
        x = self._forward.advance(self._forward.batch(plan, self._batches))
        # Rows that decode are those of warm-up: a request has ended when its vector is there.
        ended = [self._kept[row] for row in plan.decode_rows]
        place = len(plan.decode_rows)
        for chunk in plan.prefills:
            self._pool(chunk, x[place : place + chunk.length])
            place += chunk.length
            if chunk.last:
                ended.append(self._finish(self._kept[chunk.row], chunk.start + chunk.length))
        self._vectors = [_to_host(vector) for vector in ended]
        token_ids = [NO_MEANING if vector is not None else FAILED for vector in self._vectors]
        self._batches.advance(plan, token_ids)
        return Samples(token_ids)

    def _pool(self, chunk: Chunk, x: Tensor) -> None:
        """Take a chunk's part of the residual stream, ``(T, hidden)``, into what the row keeps."""
        kept, mode = self._kept[chunk.row], self.pooling.mode
        if mode is PoolingMode.MEAN:
            kept += self.model.norm(x).sum(0, dtype=torch.float32)
        elif mode is PoolingMode.CLS and chunk.start == 0:
            kept.copy_(self.model.norm(x[:1])[0])
        elif mode is PoolingMode.LAST and chunk.last:
            kept.copy_(self.model.norm(x[-1:])[0])

    def _finish(self, kept: Tensor, length: int) -> Tensor:
        """The vector of a row whose text has ended."""
        vector = kept / length if self.pooling.mode is PoolingMode.MEAN else kept
        if self._labels is not None:
            vector = self._labels @ vector
        return vector / vector.norm().clamp_min(LEAST_LENGTH) if self.pooling.normalise else vector


def _to_host(vector: Tensor) -> array[float] | None:
    """The numbers of a vector, None where one is not finite."""
    if not bool(vector.isfinite().all()):
        return None
    values = array("f")
    values.frombytes(vector.to("cpu", torch.float32).contiguous().numpy().tobytes())
    return values
