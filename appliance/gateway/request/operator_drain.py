"""Whether requests are taken, by the operator's word."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.common.errors import UnavailableError
from appliance.gateway.request.audited_calls import AuditedCalls
from appliance.gateway.sandboxes.link import RETRY_AFTER_S

DRAIN_RETRY_S = 10.0
"""When a caller may try again that came during a drain: a client that has another machine goes there at once."""


@dataclass(slots=True)
class OperatorDrain:
    """A drain that the operator began and will end; the process goes on."""

    draining: bool = False


def check_taking(drain: OperatorDrain, audited: AuditedCalls) -> None:
    """Check that requests are taken at all.

    Raises:
        UnavailableError: they are not.
    """
    if drain.draining:
        raise UnavailableError("the appliance takes no requests at the moment", retry_after_s=DRAIN_RETRY_S)
    if audited.refuses:
        raise UnavailableError("no request is taken that cannot be accounted for", retry_after_s=RETRY_AFTER_S)
