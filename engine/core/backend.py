"""What the core needs of a backend, whatever computes: step plans in, tokens out; no tensors."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.core.kv.layout import KvLayout
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import NO_ROWS, StepPlan
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Features that a backend has on this machine, with this model."""

    deterministic: bool = False
    """Rows that ask for it get the same bits in any batch. Known after ``Backend.prove``."""
    spill: bool = False
    """KV blocks can be copied out of and into its storage (``adopt``)."""
    embed: bool = False
    """Rows give vectors instead of tokens."""
    adapters: bool = False
    """Rows with an adapter are computed; a backend without this refuses them with ``AdapterError``."""
    publish: bool = False
    """KV of a prefix can be shared between requests, so public prefixes can be published."""
    gpu: bool = False
    """It talks to the driver of a GPU, so lock-down must allow the driver's calls."""
    writes_code: bool = False
    """A library that it calls writes machine code when it meets new shapes, so lock-down must allow that."""
    warm_rows: tuple[int, ...] = ()
    """Numbers of prompts in one step for which it loads code of its own: warm-up runs each, for after lock-down nothing
    can be loaded."""


@dataclass(slots=True)
class Samples:
    """Results of a step: tokens of the sampled rows, ``FAILED`` where the logits were broken."""

    token_ids: list[int]
    """Tokens of the plan's ``sample_rows``, row after row."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """For rows that asked; ``index`` is the token's place in ``token_ids``."""
    prompts: list[PromptLogprobs] = field(default_factory=list)
    """For the plan's chunks that score their prompts, in order; the request's id is left open."""
    foreign: frozenset[int] = NO_ROWS
    """Rows of which nothing was computed, because a block in their tables is not theirs; their tokens are ``FAILED``,
    and their chunks have no place in ``prompts``."""
    counts: Sequence[int] = ()
    """Number of tokens of each of the ``sample_rows``, 0 to ``SchedulerLimits.max_row_tokens``; empty: one each."""

    def placed(self, broken: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities by their place in the output. Tokens at the places ``broken`` (ascending) are not in the
        output, so later entries move up."""
        if not broken:
            return tuple(self.logprobs)
        left_out = frozenset(broken)
        return tuple(
            replace(entry, index=entry.index - bisect_left(broken, entry.index))
            for entry in self.logprobs
            if entry.index not in left_out
        )


class VectorSource(Protocol):
    """A backend that embeds leaves the vectors of each step here."""

    def take_vectors(self) -> list[array[float] | None]:
        """Vectors of the last step, one for each row that was sampled; None for a broken one."""


class StepStorage(Protocol):
    """KV memory of a backend."""

    @property
    def layout(self) -> KvLayout:
        """Shape of the memory, and the number of blocks."""

    def touch(self) -> None:
        """Write every page once more."""


class Backend(Protocol):
    """Executes step plans."""

    @property
    def limits(self) -> SchedulerLimits:
        """Bounds that every plan keeps."""

    @property
    def storage(self) -> StepStorage:
        """KV memory."""

    @property
    def capabilities(self) -> Capabilities:
        """Features of this backend; ``prove`` may withdraw ``deterministic``."""

    @property
    def description(self) -> str:
        """What computes, for people."""

    def prove(self) -> None:
        """Try the deterministic class on this machine; only while no request is live, before the last ``touch``."""

    def touch(self) -> None:
        """Write every page of the large buffers once more; only while no request is live."""

    def execute(self, plan: StepPlan) -> Samples:
        """Run one step: zero blocks, admit and grow rows, compute; tokens for each of the plan's ``sample_rows``."""

    def forget(self, rows: list[int]) -> None:
        """Overwrite what is kept of these rows, whose requests have ended or went back to a queue."""

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """Record that blocks were filled from outside, for the holders of these stamps."""
