"""What was seen of one request, as plain values."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

now = time.perf_counter
"""The one clock of all measurements, in seconds. Not the event loop's: uvloop's ticks in whole milliseconds."""


@dataclass(slots=True)
class Sample:
    """One request as its client saw it; times are seconds of one monotonic clock."""

    tenant: int
    wanted_tokens: int
    due: float
    """When it should have been sent."""
    sent: float
    """When its bytes were given to the kernel."""
    ended: float = 0.0
    """When its answer was complete, or it failed."""
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    """When each event with text came; a server may put several tokens into one."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    """As the server reports them; without a report the prompt's length as planned, and one token an event."""
    counted: bool = False
    """The server reported its counts."""
    failure: str = ""
    """Empty, or one of ``connect``, ``disconnect``, ``timeout``, ``malformed``, ``wrong length``, ``error CODE``,
    ``http STATUS``, ``client full``."""
    reconnects: int = 0
    """Times that an idle connection was found closed by the server, and the request sent again on a new one."""

    @property
    def ok(self) -> bool:
        """Whether the whole answer came, in the length asked for."""
        return not self.failure

    @property
    def ttft_s(self) -> float:
        """Time to first token: from the moment it was sent."""
        return self.arrivals[0] - self.sent

    @property
    def e2e_s(self) -> float:
        """From the moment it was sent to the end of the answer."""
        return self.ended - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token or one event."""
        if self.output_tokens < 2 or len(self.arrivals) < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)
