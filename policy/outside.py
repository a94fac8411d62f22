"""Denials of calls from where, or at times at which, a tenant is not served. Pure.

The module imports only the standard library.
"""

from __future__ import annotations

from policy.decision import Decision, Effect, Reason
from policy.hours import opens_in, span_text
from policy.match import first_match
from policy.model import External, IsolationClass, PolicySet, Retention, Tenant
from policy.networks import admits
from policy.request import AccessRequest
from policy.told import listed


def outside_denial(policy: PolicySet, tenant: Tenant, access: AccessRequest) -> Decision | None:
    """Deny a call from outside of the tenant's networks, in none of its or the model's regions, to a model outside of
    the appliance that it may not use, or out of its hours: of an admitted request, whose prompt is counted, the hours
    may have ended."""
    if tenant.networks and access.address is not None and not admits(tenant.networks, access.address):
        return Decision(
            effect=Effect.DENY,
            reason=Reason.NETWORK_NOT_ALLOWED,
            rule=f"tenants.{tenant.id}.networks",
            message="this tenant's credentials are not taken from this address",
            policy_digest=policy.digest,
        )
    if tenant.regions and access.region is not None and access.region not in tenant.regions:
        return Decision(
            effect=Effect.DENY,
            reason=Reason.REGION_NOT_ALLOWED,
            rule=f"tenants.{tenant.id}.regions",
            message=f"this tenant is served in {listed(tenant.regions)}, and this appliance is in "
            f"{access.region or 'no region'}",
            policy_digest=policy.digest,
        )
    if access.region is not None and (wrong := region_rule(tenant, access.model, access.region)) is not None:
        return Decision(
            effect=Effect.DENY,
            reason=Reason.REGION_NOT_ALLOWED,
            rule=f"tenants.{tenant.id}.model_regions[{wrong}]",
            message=f"this model is served to this tenant in {listed(tenant.model_regions[wrong].regions)}, and this "
            f"appliance is in {access.region or 'no region'}",
            policy_digest=policy.digest,
        )
    if access.external and not may_leave(tenant):
        return Decision(
            effect=Effect.DENY,
            reason=Reason.EXTERNAL_NOT_ALLOWED,
            rule=f"tenants.{tenant.id}.external",
            message="this model is computed outside of this appliance, and this tenant may not use such models",
            policy_digest=policy.digest,
        )
    if not tenant.hours or access.unix_s is None or access.input_tokens is not None:
        return None
    wait = opens_in(tenant.hours, access.unix_s)
    if not wait:
        return None
    return Decision(
        effect=Effect.DENY,
        reason=Reason.OUT_OF_HOURS,
        rule=f"tenants.{tenant.id}.hours",
        message=f"this tenant is served at {', '.join(tenant.hours)} UTC, next in {span_text(wait)}",
        policy_digest=policy.digest,
        retry_after_s=wait,
    )


def region_rule(tenant: Tenant, model: str, region: str) -> int | None:
    """Return the index of the first entry of ``model_regions`` by which a model is not served in a region; None where
    it is."""
    for index, one in enumerate(tenant.model_regions):
        if region not in one.regions and first_match(one.models, model) is not None:
            return index
    return None


def may_leave(tenant: Tenant) -> bool:
    """Return whether a tenant may use models that are computed outside of the appliance."""
    if tenant.external is not External.BY_CLASS:
        return tenant.external is External.ALLOW
    return tenant.isolation_class is IsolationClass.SHARED and tenant.retention is not Retention.NONE
