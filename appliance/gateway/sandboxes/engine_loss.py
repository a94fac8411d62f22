"""Why the supervisor ends an engine because of its GPU, as the requests inside are told. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.common.control_cards import GPU_LOST, GPU_MEMORY, EngineEnds
from appliance.common.errors import GpuLostError, GpuMemoryError, UnavailableError
from appliance.gateway.sandboxes.link import RETRY_AFTER_S


@dataclass(frozen=True, slots=True)
class EngineLoss:
    """What ended an engine."""

    reason: str
    """``GPU_LOST`` or ``GPU_MEMORY``."""
    card: int

    @classmethod
    def told(cls, message: EngineEnds) -> EngineLoss:
        """Read the supervisor's message.

        Raises:
            ValueError: no supervisor of this release sends it.
        """
        if message.reason not in (GPU_LOST, GPU_MEMORY) or message.card < 0:
            raise ValueError("a reason for the end of an engine that no supervisor of this release gives")
        return cls(message.reason, message.card)

    @property
    def requests_may_be_at_fault(self) -> bool:
        """Whether what is inside counts as suspect, and is tried again as after any death: a request may have taken the
        memory; none takes a card off the bus, and no engine comes up on a lost one."""
        return self.reason != GPU_LOST

    @property
    def words(self) -> str:
        """The reason in words."""
        if self.reason == GPU_LOST:
            return f"its GPU, card {self.card}, is lost"
        return f"it held more than its share of the memory of card {self.card}"

    def error(self) -> UnavailableError:
        """Make the error of a request that was inside."""
        if self.reason == GPU_LOST:
            text = f"the GPU that computed the answer, card {self.card}, is lost; the answer cannot be completed"
            return GpuLostError(text, retry_after_s=RETRY_AFTER_S)
        text = f"the model's engine took more than its share of the memory of card {self.card} and was ended"
        return GpuMemoryError(text, retry_after_s=RETRY_AFTER_S)
