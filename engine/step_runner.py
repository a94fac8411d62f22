"""What the loop needs of whatever executes its plans: a loaded model, or the null runner of benchmarks."""

from __future__ import annotations

from typing import Protocol

from engine.kv.layout import KvLayout
from engine.sampler import Samples
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.plan import StepPlan


class StepStorage(Protocol):
    """The KV memory behind a runner."""

    @property
    def layout(self) -> KvLayout:
        """Its shape, and the blocks there are."""
        ...

    def touch(self) -> None:
        """Write every page once more."""
        ...


class StepRunner(Protocol):
    """Executes step plans."""

    @property
    def limits(self) -> SchedulerLimits:
        """The bounds that every plan keeps."""
        ...

    @property
    def storage(self) -> StepStorage:
        """Its KV memory."""
        ...

    @property
    def writes_code(self) -> bool:
        """Whether a library that it calls writes machine code as it meets new shapes."""
        ...

    @property
    def backend(self) -> str:
        """What computes, for people."""
        ...

    @property
    def deterministic(self) -> bool:
        """Whether rows that ask for it get the same bits in any batch."""
        ...

    def prove(self) -> None:
        """Try that on this machine; only while no request is live, and before the last ``touch``."""
        ...

    def touch(self) -> None:
        """Write every page of its large buffers once more; only while no request is live."""
        ...

    def execute(self, plan: StepPlan) -> Samples:
        """Run one step; gives a token for each of the plan's ``sample_rows``."""
        ...

    def forget(self, rows: list[int]) -> None:
        """Overwrite what was kept of these rows' requests, which have ended or were sent back to a queue."""
        ...
