"""What the operator sees and ends of the requests that run, and the drain: for the admin listener."""

from __future__ import annotations

import time

from appliance.common.errors import CancelledError
from appliance.common.live_requests import MAX_LISTED, DrainStatus, LiveRequest, LiveRequests
from appliance.gateway.request.lifecycle import Lifecycle
from appliance.gateway.request.service import GatewayService


class LiveWork:
    """The requests of one gateway."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    def requests(self, tenant: str = "") -> LiveRequests:
        """Return the requests that wait or run, of one tenant or of all, the oldest first."""
        chosen = [one for one in self._service.live if not tenant or one.principal.tenant == tenant]
        chosen.sort(key=lambda one: one.trace.age_s, reverse=True)
        shown = tuple(_shown(one) for one in chosen[:MAX_LISTED])
        return LiveRequests(requests=shown, left_out=len(chosen) - len(shown))

    def cancel(self, request_id: str) -> LiveRequests | None:
        """End a request, as if its caller had left; gives it as it was, None where there is none of this id."""
        found = [one for one in self._service.live if one.call.request_id == request_id]
        shown = tuple(_shown(one) for one in found)
        for one in found:
            one.withdraw(CancelledError("the operator of this appliance ended the request"))
        return LiveRequests(requests=shown) if found else None

    def drain(self, draining: bool | None = None) -> DrainStatus:
        """Begin or end a drain, or leave it; gives its state."""
        if draining is not None:
            self._service.operator_drain.set(draining, time.monotonic())
        return DrainStatus(draining=self._service.operator_drain.draining, running=len(self._service.live))


def _shown(one: Lifecycle) -> LiveRequest:
    outcome = one.outcome
    return LiveRequest(
        id=one.call.request_id,
        tenant=one.principal.tenant,
        model=one.call.alias or one.call.model,
        credential=one.principal.credential,
        state="running" if outcome.started else "waiting",
        age_s=round(one.trace.age_s, 3),
        input_tokens=outcome.input_tokens,
        output_tokens=outcome.output_tokens,
    )
