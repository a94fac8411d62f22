"""Order in which tenants are shown. Pure."""

from __future__ import annotations

from appliance.common.status import TenantStatus


def busiest_first(one: TenantStatus) -> tuple[bool, float, int, str]:
    """Return the key by which tenants are sorted: those at work first (a request in flight, or one that ended in the
    seconds that rates are of); by output tokens a second, then by requests in flight, both falling; then by name."""
    at_work = bool(one.in_flight or one.requests_per_s or one.output_tokens_per_s)
    return not at_work, -(one.output_tokens_per_s or 0.0), -one.in_flight, one.id
