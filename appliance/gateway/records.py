"""What status shows of sandboxes and of the supervisor: values that ``sandboxes`` keeps current."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class SandboxRecord:
    """What status shows of one sandbox."""

    state: str = "booting"
    generation: int = 0
    restarts: int = 0
    pid: int = 0
    since: float = field(default_factory=time.time)
    cause: str = ""

    def become(self, state: str, cause: str = "") -> None:
        """Enter a state now."""
        self.state, self.cause, self.since = state, cause, time.time()


@dataclass(slots=True)
class Attachment:
    """What the supervisor told on attaching."""

    sandbox: str = "unknown"
    limits: str = "unknown"
    attached: bool = False
