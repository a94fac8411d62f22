"""The smallest backend: the next token is the last one plus one. A new backend is a module like this and one row."""

from __future__ import annotations

from engine.backends.common.intake import RowIntake, TableRows
from engine.backends.common.loading import Loaded, LoadSource, layout_for, limits_for
from engine.backends.null import NullStorage
from engine.core.backend import Capabilities, Samples
from engine.core.scheduler.plan import Admission, StepPlan


class ToyBackend:
    """Counts up from the last token of a prompt."""

    capabilities = Capabilities(deterministic=True)
    description = "counting"

    def __init__(self, source: LoadSource) -> None:
        layout = layout_for(source.config, source.description, "float32", source.parallel)
        self.parallel = source.parallel
        self.storage = NullStorage(layout)
        self.limits = limits_for(source.config, source.description, layout)
        self._rows = RowIntake(self.limits.max_num_seqs, layout, self)

    def execute(self, plan: StepPlan) -> Samples:
        """Take the plan, then count."""
        self._rows.take(plan)
        tokens = [(int(self._rows.last[row]) + 1) % self.limits.vocab_size for row in plan.sample_rows]
        self._rows.last[plan.sample_rows] = tokens
        return Samples(tokens)

    def assign(self, admission: Admission, _blocks: TableRows, _stamps: TableRows) -> None:
        """Start from the prompt's last token."""
        self._rows.last[admission.row] = admission.token_ids[-1]

    def forget(self, rows: list[int]) -> None:
        """Overwrite the tokens of these rows."""
        self._rows.forget(rows)

    def nothing(self, *_: object) -> None:
        """Do nothing: there are no blocks."""

    extend = renew = adopt = prove = touch = nothing


def load(source: LoadSource) -> Loaded:
    """Build the toy from the model's description; no weights are read."""
    return Loaded(backend=ToyBackend(source))
