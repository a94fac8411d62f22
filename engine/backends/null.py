"""A backend that computes nothing: for measuring everything around a model, and for nothing else. Stdlib only.

It gives ids by a fixed rule, so that scheduler, loop, ring, sandbox, gateway and API do all their work on a stream that
is the same at every run. The id at position ``p`` of a request with seed ``s`` is entry ``s + p`` of one pseudo-random
walk over ordinary ids of the model's vocabulary: it depends on the request alone, never on its neighbours, so a request
that was preempted or replayed gives the same ids again.

A configuration asks for it by ``runner: "null"``; ``step_us`` makes every step take at least that long, so that the
rhythm of an accelerator can be imitated (200 rows at 85 steps/s are 17,000 tokens/s).
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable

from engine.core.backend import Capabilities, Samples
from engine.core.kv.layout import KvLayout
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import StepPlan
from engine.errors import AdapterError
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs

WALK_LENGTH = 1 << 12
"""Ids before the walk repeats; a power of two. No measured answer is as long."""

WALK_SEED = 0x0A7A_0202
"""Seed of the one walk."""

LEAST_SLEEP_S = 1e-3
"""Shorter sleeps take this long in a sandbox anyway, so they are left out and made up for by a later step."""


class NullStorage:
    """The shape of a KV cache without its memory."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout

    def touch(self) -> None:
        """Do nothing: there is no memory."""


class NullRunner:
    """Gives ids by rule. ``step_s``: least seconds from the beginning of one step to that of the next."""

    capabilities = Capabilities(deterministic=True)
    description = "nothing: ids are given by rule"

    def __init__(
        self,
        limits: SchedulerLimits,
        layout: KvLayout,
        step_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits
        self.storage = NullStorage(layout)
        self._walk = walk(limits)
        self._at = [0] * limits.max_num_seqs
        self._wants_logprobs = [False] * limits.max_num_seqs
        self._step_s = step_s
        self._clock = clock
        self._sleep = sleep
        self._due = 0.0

    def touch(self) -> None:
        """Do nothing: there is no memory."""

    def prove(self) -> None:
        """Do nothing: ids given by rule are the same in any batch."""

    def execute(self, plan: StepPlan) -> Samples:
        """One step: a look-up for each row that samples, then the rest of the step's time asleep."""
        at, walk = self._at, self._walk
        mask = WALK_LENGTH - 1
        for admission in plan.admissions:
            if admission.adapter:
                raise AdapterError(admission.adapter)
            at[admission.row] = (admission.sampling.seed + len(admission.token_ids)) & mask
            self._wants_logprobs[admission.row] = admission.logprobs >= 0
        rows = plan.sample_rows
        token_ids = [walk[at[row]] for row in rows]
        for row in rows:
            at[row] = (at[row] + 1) & mask
        # Certainty: what was chosen by rule has probability 1, and nothing else has any.
        logprobs = [TokenLogprobs(place, 0.0, (), ()) for place, row in enumerate(rows) if self._wants_logprobs[row]]
        prompts = [
            PromptLogprobs(0, chunk.score_from, array("d", bytes(8 * chunk.num_scored)))
            for chunk in plan.prefills
            if chunk.num_scored
        ]
        if self._step_s and plan.num_tokens:
            self._pace()
        return Samples(token_ids, logprobs, prompts)

    def forget(self, rows: list[int]) -> None:
        """Do nothing: a row keeps a place in the walk, and no token."""

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """Do nothing: no block has content."""

    def _pace(self) -> None:
        """Sleep until this step is over. A step that came late moves all later ones."""
        now = self._clock()
        self._due = max(self._due + self._step_s, now)
        if self._due - now >= LEAST_SLEEP_S:
            self._sleep(self._due - now)


def walk(limits: SchedulerLimits) -> list[int]:
    """``WALK_LENGTH`` ids from the middle half of the vocabulary, where ordinary words are, without ends of text."""
    low, high = limits.vocab_size // 4, limits.vocab_size - limits.vocab_size // 4
    ordinary = [token for token in range(low, high) if token not in limits.eos_ids] or [0]
    return random.Random(WALK_SEED).choices(ordinary, k=WALK_LENGTH)  # noqa: S311 - a script, not a secret
