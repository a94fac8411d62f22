"""How a request ended, in one of five words that mean the same in metrics, traces, status, top and console. Pure."""

from __future__ import annotations

from appliance.common.errors import ApplianceError, ModelAsleepError, QuarantinedError

OK, REFUSED, INVALID, CANCELLED, FAILED = OUTCOMES = ("ok", "refused", "invalid", "cancelled", "failed")
"""``refused``: by a credential, a rule or a limit; ``invalid``: the caller's mistake; ``cancelled``: the client left;
``failed``: the appliance's fault."""

REFUSING = frozenset({401, 403, 409, 429})
"""HTTP statuses of a refusal: no credential that holds, a rule of the policy, a policy that changed, a limit."""

CLIENT_LEFT = 499
"""HTTP status of a request whose client left: neither served nor refused."""

SERVER_FAULT = 500
"""HTTP status from which on the appliance is at fault."""


def outcome_of(error: ApplianceError | None) -> str:
    """Return the word of ``OUTCOMES`` for what ended a request; None: it was answered."""
    if error is None:
        return OK
    status = error.wire.http
    if status == CLIENT_LEFT:
        return CANCELLED
    if isinstance(error, ModelAsleepError):
        return REFUSED  # By the limit of memory that the operator has set.
    if status >= SERVER_FAULT:
        return FAILED
    # Quarantine has the status of a mistake, because the same request must not be sent again, but it is our decision.
    return REFUSED if status in REFUSING or isinstance(error, QuarantinedError) else INVALID
