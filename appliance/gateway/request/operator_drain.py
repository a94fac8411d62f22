"""Whether requests are taken: the operator's drain, and the notice before the process ends."""

from __future__ import annotations

import time
from dataclasses import dataclass

from appliance.common.errors import UnavailableError
from appliance.gateway.request.audited_calls import AuditedCalls
from appliance.gateway.sandboxes.link import RETRY_AFTER_S

DRAIN_RETRY_S = 10.0
"""When a caller may try again that came during a drain: a client that has another machine goes there at once."""


@dataclass(slots=True)
class OperatorDrain:
    """A drain that the operator began and will end, while the process goes on; or the process's own, before it ends."""

    draining: bool = False
    leaving: bool = False
    """Whether the process is about to end: readiness says so, and requests are taken until the listeners close."""
    notice_s: float = 0.0
    """Seconds for which requests are taken after a drain began: routers look at readiness now and then."""
    refuses_at: float = 0.0
    """Time of ``time.monotonic`` from which a drain refuses requests."""

    def set(self, draining: bool, now: float) -> None:
        """Begin or end a drain; beginning one that has begun changes nothing."""
        if draining and not self.draining:
            self.refuses_at = now + self.notice_s
        self.draining = draining

    @property
    def begun(self) -> bool:
        """Whether routers shall send nothing more."""
        return self.draining or self.leaving


def check_taking(drain: OperatorDrain, audited: AuditedCalls) -> None:
    """Check that requests are taken at all.

    Raises:
        UnavailableError: they are not.
    """
    if drain.draining and time.monotonic() >= drain.refuses_at:
        raise UnavailableError("the appliance takes no requests at the moment", retry_after_s=DRAIN_RETRY_S)
    if audited.refuses:
        raise UnavailableError("no request is taken that cannot be accounted for", retry_after_s=RETRY_AFTER_S)
