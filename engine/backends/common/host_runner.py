"""The backend around a forward pass on the host: intake, ownership check, forward, sample.

Nothing is computed of a row whose block table names a block that is not its own (``engine.core.kv.tags``): the rest of
the step runs without it, and its place in the samples says ``FAILED``, so that the commit ends its request.

``plain`` and ``native`` bring a ``Forward``; the steps around it are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.backends.common.batch import BatchBuilder
from engine.backends.common.intake import Ints
from engine.backends.common.masks import MaskedLogits
from engine.backends.common.sampler import Sampler
from engine.backends.common.sliced_sampling import Chooser
from engine.backends.common.storage import KvStorage
from engine.core.backend import Capabilities, Samples
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import FAILED, NO_ROWS, Chunk, RowMask, StepPlan
from engine.errors import ForeignBlockError
from engine.model.layers.decoder import Decoder
from isolation.ipc.logprob import PromptLogprobs


class StepLogits(NamedTuple):
    """Logits of a step, valid until the next forward pass."""

    logits: Tensor
    """One line for each of the plan's ``logit_lines``, ``(M, vocab_size)``."""
    best: Tensor | None
    """Place of each line's maximum, negative where it is not finite; None: not known."""
    next_positions: Ints
    """Position of the token to be chosen or scored by each line."""


class Forward(Protocol):
    """Computes the logits of a step."""

    model: Decoder
    """The model, as far as the forward pass has left it whole."""
    description: str
    """What computes, and why nothing faster does, for people."""
    checks_owners: bool
    """Whether ``__call__`` compares stamps itself, before it computes anything."""
    writes_code: bool
    """See ``Capabilities``."""
    operand_bytes: int
    """Bytes of a number that compiled products are fed; 0: plain operations compute."""
    compresses: bool
    """Whether some weights are kept in fewer bytes than they are published in."""

    def __call__(self, plan: StepPlan, batches: BatchBuilder, /) -> StepLogits:
        """Logits of a plan that computes at least one token.

        Raises:
            ForeignBlockError: a table names a block that is not its row's; nothing was read or written.
        """
        ...

    def is_exact(self) -> bool:
        """Whether rows get the same bits in any batch; tried while no request is live. Leaves the null block dirty."""
        ...

    def touch(self) -> None:
        """Write every page of large buffers once more."""
        ...


class HostRunner:
    """A loaded model with its KV memory and the state of all rows, computed on the host."""

    def __init__(self, forward: Forward, storage: KvStorage, limits: SchedulerLimits) -> None:
        self.forward = forward
        self.storage = storage
        self.limits = limits
        adapts = forward.model.bank is not None
        writes_code = forward.writes_code
        self.capabilities = Capabilities(
            deterministic=True, spill=True, publish=True, adapters=adapts, writes_code=writes_code
        )
        self.batches = BatchBuilder(limits, storage, adapters=self.capabilities.adapters)
        self._sampler = Sampler(limits.max_num_seqs, limits.vocab_size)
        self._chooser = Chooser(self._sampler, MaskedLogits(limits.eos_ids), limits.vocab_size)

    @property
    def model(self) -> Decoder:
        """The model that the forward pass computes."""
        return self.forward.model

    @property
    def description(self) -> str:
        """What computes, for people."""
        return self.forward.description

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """Record that blocks were filled from outside, for the holders of these stamps."""
        self.batches.stamp(blocks, stamps)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Samples:
        """Run one step; gives a token for each of the plan's ``sample_rows``."""
        self.take(plan)
        if not plan.decode_rows and not plan.prefills:
            return Samples([])
        return run_owned(self.batches, plan, self._run, checked=self.forward.checks_owners)

    def take(self, plan: StepPlan) -> None:
        """Take a plan's admissions, grown tables and zeroed blocks."""
        self.batches.intake.take(plan)
        for admission in plan.admissions:
            self._sampler.admit(admission)

    def takes_maximum(self, rows: list[int], masks: Mapping[int, RowMask]) -> bool:
        """Whether all these rows take the maximum of their logits, and nothing else of them is needed."""
        return not masks and self._sampler.wants_maximum(rows)

    def choose(self, logits: Tensor, rows: list[int], positions: Ints, masks: Mapping[int, RowMask]) -> Samples:
        """A token for each row of ``logits``; see ``Chooser.choose``."""
        return self._chooser.choose(logits, rows, positions, masks)

    def score(self, logits: Tensor, chunk: Chunk) -> PromptLogprobs:
        """Log-probabilities of the tokens that a chunk scores."""
        return self._chooser.score(logits, chunk.row, chunk.score_from, self.batches.scored_tokens(chunk))

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows."""
        self.batches.intake.forget(rows)
        self._sampler.forget(rows)

    def touch(self) -> None:
        """Write every page of the large buffers once more; only while no request is live."""
        self.storage.touch()
        self.forward.touch()

    @torch.inference_mode()
    def prove(self) -> None:
        """Try the deterministic class; where it fails, no deterministic request is served."""
        self.capabilities = replace(self.capabilities, deterministic=self.forward.is_exact())

    def _run(self, plan: StepPlan) -> Samples:
        """Compute and sample."""
        logits, best, next_positions = self.forward(plan, self.batches)
        rows = plan.sample_rows
        count = len(rows)
        if not rows:
            samples = Samples([])
        elif best is not None and self.takes_maximum(rows, plan.masks):
            samples = Samples(best[:count].tolist())
        else:
            samples = self.choose(logits[:count], rows, next_positions[:count], plan.masks)
        for chunk in plan.prefills:
            if chunk.num_scored:
                samples.prompts.append(self.score(logits[count : count + chunk.num_scored], chunk))
                count += chunk.num_scored
        self.batches.advance(plan, samples.token_ids)
        return samples


def run_owned(
    batches: BatchBuilder, plan: StepPlan, run: Callable[[StepPlan], Samples], *, checked: bool = False
) -> Samples:
    """Run a plan without the rows whose tables name blocks of others.

    Args:
        batches: the rows, with their tables and stamps.
        plan: computes at least one token.
        run: computes a plan; may raise ``ForeignBlockError``.
        checked: ``run`` compares stamps itself, so they are compared here only after it raised.
    """
    foreign = NO_ROWS if checked else batches.foreign(plan)
    if not foreign:
        try:
            return run(plan)
        except ForeignBlockError:
            foreign = batches.foreign(plan)
            assert foreign, "kernels and tables disagree about whose a block is"
    rows = plan.sample_rows
    rest = plan.computing({*plan.decode_rows, *(chunk.row for chunk in plan.prefills)} - foreign)
    samples = run(rest) if rest.num_tokens else Samples([])
    places = [place for place, row in enumerate(rows) if row not in foreign]
    token_ids = [FAILED] * len(rows)
    for place, token_id in zip(places, samples.token_ids, strict=True):
        token_ids[place] = token_id
    logprobs = [replace(entry, index=places[entry.index]) for entry in samples.logprobs]
    return Samples(token_ids, logprobs, samples.prompts, foreign)
