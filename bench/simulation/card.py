"""A backend that computes nothing and says how long a card would have taken: the only part of a host that is not real.

It takes the plans of the real scheduler and counts rows, contexts and prompt tokens for ``StepTimes``. It also counts
the tokens that it would have computed, in all and for each row, so that what a dead host loses is a difference of two
counts and no estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.backend import Capabilities, Samples

if TYPE_CHECKING:
    from bench.simulation.step_times import StepTimes
    from engine.core.kv.layout import KvLayout
    from engine.core.scheduler.limits import SchedulerLimits
    from engine.core.scheduler.plan import StepPlan

TOKEN = 7
"""The one id that every row gets: outputs end at their length."""


class CardStorage:
    """The shape of a KV cache without its memory."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout

    def touch(self) -> None:
        """Do nothing: there is no memory."""


class SimulatedCard:
    """A ``engine.core.backend.Backend`` of one card."""

    capabilities = Capabilities()
    description = "simulated"

    def __init__(self, limits: SchedulerLimits, layout: KvLayout, times: StepTimes) -> None:
        self.limits = limits
        self.storage = CardStorage(layout)
        self._times = times
        self._block_bytes = limits.block_size * times.kv_token_bytes
        self.steps = 0
        """Steps so far."""
        self._known = [0] * limits.max_num_seqs
        """Tokens of each row when it was admitted."""
        self._chunks = [0] * limits.max_num_seqs
        """Prompt tokens that were computed of each row since then."""
        self._began = [-1] * limits.max_num_seqs
        """Step behind which each row decodes, -1 while it does not."""
        self._context = 0
        """Tokens of context of all rows that decode."""
        self.seconds = 0.0
        """Time that the last step takes."""
        self.decodes = 0
        """Rows that decoded in the last step; they are the first of its output."""
        self.computed = 0
        """Tokens computed so far."""
        self.prompt_computed = 0
        """Prompt tokens among them."""
        self.closed = 0
        """Tokens computed for rows that are vacated since."""
        self.closing = 0
        """Part of ``closed`` of the last step, whose output nobody has yet."""

    def execute(self, plan: StepPlan) -> Samples:
        """Count a step; every sampled row gets the same token."""
        self.steps += 1
        self.closing = 0
        for admission in plan.admissions:
            self._vacate(admission.row)
            self._known[admission.row] = len(admission.token_ids)
        rows, context, prompt, attended = len(plan.decode_rows), self._context, 0, 0.0
        self._context += rows
        for chunk in plan.prefills:
            prompt += chunk.length
            attended += chunk.length * (chunk.start + chunk.length / 2)
            self._chunks[chunk.row] += chunk.length
            if chunk.last:
                self._began[chunk.row] = self.steps
                self._context += self._known[chunk.row] + 1
        self.computed += rows + prompt
        self.prompt_computed += prompt
        self.decodes = rows
        zeroed = len(plan.zero_blocks) * self._block_bytes
        self.seconds = self._times.seconds(rows, context, prompt, attended, zeroed)
        return Samples([TOKEN] * len(plan.sample_rows))

    def forget(self, rows: list[int]) -> None:
        """Take note that rows are vacated."""
        for row in rows:
            self._vacate(row)

    def work(self, row: int) -> int:
        """Return the tokens computed for a row since its admission."""
        began = self._began[row]
        return self._chunks[row] + (self.steps - began if began >= 0 else 0)

    def length(self, row: int) -> int:
        """Return the tokens of a row: the prompt and, where it decodes, the output with the token of the last step."""
        began = self._began[row]
        return self._known[row] + (self.steps - began + 1 if began >= 0 else 0)

    def prove(self) -> None:
        """Do nothing: there are no bits."""

    def touch(self) -> None:
        """Do nothing: there is no memory."""

    def adopt(self, blocks: list[int], stamps: list[int]) -> None:
        """Do nothing: blocks have no content here."""

    def _vacate(self, row: int) -> None:
        done, began = self.work(row), self._began[row]
        self.closed += done
        self.closing += done
        if began >= 0:
            self._context -= self._known[row] + 1 + self.steps - began
        self._chunks[row], self._began[row] = 0, -1
