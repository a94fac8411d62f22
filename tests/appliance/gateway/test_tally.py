"""What status shows of each tenant: requests, tokens and refusals since the start."""

from __future__ import annotations

from appliance.errors import CancelledError, InternalError, RateLimitedError
from appliance.gateway.tally import Tally, TenantTally


def test_requests_are_counted_by_how_they_ended() -> None:
    """A limit's or a caller's fault is a refusal; a client that left and a defect of ours are not."""
    tally = Tally()
    tally.add("a", error=None, tokens=12)
    tally.add("a", error=RateLimitedError("slow down"))
    tally.add("a", error=CancelledError("left"), tokens=3)
    tally.add("a", error=InternalError("ours"))
    assert tally.of("a") == TenantTally(requests=4, tokens=15, refused=1)
    assert tally.of("b") == TenantTally()
