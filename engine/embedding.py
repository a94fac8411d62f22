"""The runner of embedding models: hidden states behind the last norm, pooled into one vector a request.

An engine that embeds is an engine like any other: its requests are prompts with room for one token, which has no
meaning. So scheduling, chunking, fairness, deadlines and preemption are those of generation, and batches mix texts of
all tenants. A row keeps what pooling needs from one chunk to the next: the first hidden state, or the sum of all so
far in float32. A request that was preempted begins anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import BatchBuilder
from engine.foreign import run_without
from engine.kv.storage import KvStorage
from engine.model.attention import PagedAttention
from engine.model.decoder import Decoder
from engine.model.pooling import Mode, Pooling
from engine.sampler import Samples
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import FAILED, Chunk, StepPlan, StepResult
from isolation.ipc.messages import Embed, Embedding, Sampling, Submit

NO_MEANING = 0
"""The token that ends a request."""

LEAST_LENGTH = 1e-12
"""Vectors shorter than this are divided by it, as transformers' own normalisation does."""


class VectorSource(Protocol):
    """Where vectors are left."""

    def take_vectors(self) -> list[array[float] | None]:
        """Those of the last step, one for each row that was sampled; None for a broken one."""
        ...


class EmbeddingRunner:
    """A loaded decoder with its KV memory, and what is pooled of every row."""

    def __init__(self, model: Decoder, storage: KvStorage, limits: SchedulerLimits, pooling: Pooling) -> None:
        self.model = model
        self.storage = storage
        self.limits = limits
        self.pooling = pooling
        self._attention = PagedAttention(storage)
        self._batches = BatchBuilder(limits, storage)
        self._kept = torch.zeros(limits.max_num_seqs, model.config.hidden_size, device=model.device)
        self._vectors: list[array[float] | None] = []

    @property
    def backend(self) -> str:
        """What computes, and what is made of it, for people."""
        normalised = ", normalised" if self.pooling.normalise else ""
        return f"plain operations; vectors by {self.pooling.mode.value} pooling{normalised}"

    @property
    def writes_code(self) -> bool:
        """As a runner that generates on the plain path."""
        return self.model.dtype != torch.float32

    @property
    def deterministic(self) -> bool:
        """No: vectors are computed in batches of any shape."""
        return False

    def prove(self) -> None:
        """Nothing: it promises nothing."""

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
        if plan.zero_blocks:
            self.storage.zero(plan.zero_blocks)
            self._batches.stamp(plan.zero_blocks, plan.zero_stamps)
        for admission in plan.admissions:
            self._batches.admit(admission)
            self._kept[admission.row] = 0
        self._batches.grow(plan)
        self._vectors = []
        if not plan.decode_rows and not plan.prefills:
            return Samples([])
        foreign = self._batches.foreign(plan)
        return run_without(plan, foreign, self._run) if foreign else self._run(plan)

    def forget(self, rows: list[int]) -> None:
        """Overwrite the rows' tokens and what was pooled of them."""
        self._batches.forget(rows)
        self._kept[rows] = 0

    def _run(self, plan: StepPlan) -> Samples:
        batch = self._batches.build(plan)
        x = self.model.advance(self.model.embed(batch.token_ids), batch.positions, self._attention, batch.attention)
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
        if mode is Mode.MEAN:
            kept += self.model.norm(x).sum(0, dtype=torch.float32)
        elif mode is Mode.CLS and chunk.start == 0:
            kept.copy_(self.model.norm(x[:1])[0])
        elif mode is Mode.LAST and chunk.last:
            kept.copy_(self.model.norm(x[-1:])[0])

    def _finish(self, kept: Tensor, length: int) -> Tensor:
        """The vector of a row whose text has ended."""
        vector = kept / length if self.pooling.mode is Mode.MEAN else kept
        return vector / vector.norm().clamp_min(LEAST_LENGTH) if self.pooling.normalise else vector


def as_submit(message: Embed) -> Submit:
    """A text to be pooled as the scheduler knows it: a prompt with room for one token, of which nothing is kept."""
    return Submit(
        request=message.request,
        namespace=message.namespace,
        token_ids=message.token_ids,
        max_tokens=1,
        sampling=Sampling(temperature=0.0),
        ignore_eos=True,
        retain=False,
        weight=message.weight,
        priority=message.priority,
        deadline_us=message.deadline_us,
    )


def pair_vectors(result: StepResult, vectors: Sequence[array[float] | None]) -> list[Embedding]:
    """The vectors of a step by request: those that are broken have no place in the result's columns."""
    whole = [vector for vector in vectors if vector is not None]
    return [Embedding(request, vector) for request, vector in zip(result.requests, whole, strict=True)]


def _to_host(vector: Tensor) -> array[float] | None:
    """The numbers of a vector, None where one is not finite."""
    if not bool(vector.isfinite().all()):
        return None
    values = array("f")
    values.frombytes(vector.to("cpu", torch.float32).contiguous().numpy().tobytes())
    return values
