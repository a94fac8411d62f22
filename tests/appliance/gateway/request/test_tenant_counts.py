"""What status shows of each tenant: requests, tokens and refusals since the start."""

from __future__ import annotations

from appliance.common.errors import CancelledError, InternalError, RateLimitedError
from appliance.gateway.request.tenant_counts import TenantCount, TenantCounts


def test_requests_are_counted_by_how_they_ended() -> None:
    """A limit's or a caller's fault is a refusal; a client that left and a defect of ours are not."""
    counts = TenantCounts()
    counts.add("a", error=None, tokens=12)
    counts.add("a", error=RateLimitedError("slow down"))
    counts.add("a", error=CancelledError("left"), tokens=3)
    counts.add("a", error=InternalError("ours"))
    assert counts.of("a") == TenantCount(requests=4, tokens=15, refused=1)
    assert counts.of("b") == TenantCount()
