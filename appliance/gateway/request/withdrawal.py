"""Whether a running request still holds under the policy and the keys that have just come into force.

A request was admitted under a policy that may be gone before its answer is complete. What it was admitted for must hold
until its end: the caller's credential and tenant, the model, and what decides where its tokens are computed and kept
(isolation class, retention, namespace, sharing group). Limits and rates are for the next request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from appliance.common.errors import (
    ApplianceError,
    FeatureNotAllowedError,
    PermissionDeniedError,
    PolicyChangedError,
    UnauthenticatedError,
)
from appliance.common.kv_shares import group_account
from appliance.gateway.generate_request import Principal
from policy.decision import Obligations
from policy.evaluate import principal as find_tenant
from policy.evaluate import visible_models
from policy.kept import keeps_files
from policy.model import PolicySet, Tenant
from policy.outside import may_leave, region_rule
from policy.routes import leads


@dataclass(frozen=True, slots=True)
class Admitted:
    """What a request was admitted with."""

    principal: Principal
    model: str
    obligations: Obligations
    namespace: bytes
    group: bytes
    alias: str = ""
    """Route by which the model was asked for; empty: by its own name."""
    batch: bool = False
    """Whether it is a line of a batch."""
    adapter: str = ""
    """Whole name of its adapter; empty: without one."""
    region: str = ""
    """Region of the appliance; empty for none."""
    external: bool = False
    """Whether the model is computed outside of the appliance."""
    policy: str = ""
    """Digest of the policy."""


def caller_withdrawn(caller: Principal, policy: PolicySet, *, credential_holds: bool) -> ApplianceError | None:
    """Return the error that ends a request whose tenant or credential is gone; None while both hold. Pure.

    The error names the rule and the policy, for the operator alone, where the policy has no such tenant or gives the
    credential to none or another."""
    if caller.tenant not in policy.tenants:
        rule = "tenants"
    elif find_tenant(policy, caller.credential) != caller.tenant:
        rule = f"tenants.{caller.tenant}.credentials"
    else:  # No policy ends the requests of a key that was revoked or has expired.
        return None if credential_holds else credential_gone()
    return credential_gone().by_cut(rule, policy.digest, hidden=True)


def credential_gone() -> ApplianceError:
    """The error that ends a request whose caller's credential has expired or was revoked."""
    return UnauthenticatedError("the credential of this request was withdrawn; the request was stopped")


def reason_to_end(
    admitted: Admitted, policy: PolicySet, namespaces: Mapping[str, bytes], *, credential_holds: bool
) -> ApplianceError | None:
    """The error that ends a request which does not hold any more; None while it holds. Pure.

    The error names the rule and the digest of the policy that end it, unless a key alone does.

    Args:
        admitted: the request.
        policy: in force.
        namespaces: keys in force, by account name.
        credential_holds: whether an API key is known, not revoked and not expired; True for a certificate.
    """
    caller, tenant = admitted.principal, policy.tenants.get(admitted.principal.tenant)
    withdrawn = caller_withdrawn(caller, policy, credential_holds=credential_holds)
    if tenant is None or withdrawn is not None:
        return withdrawn
    refused = _refused(admitted, policy, tenant)
    if refused is not None:
        rule, error = refused
        return error.by_cut(rule, policy.digest)
    changed = _changed(admitted, tenant, namespaces)
    if not changed:
        return None
    error = PolicyChangedError(
        f"the tenant's {', '.join(changed)} changed while the request ran, and it was stopped; the same request may be "
        "sent again"
    )
    if admitted.policy == policy.digest:  # The key of its sharing group was destroyed: no policy ends the request.
        return error
    rule = next(filter(None, changed.values()), "")
    return error.by_cut(rule, policy.digest) if rule else error


def _refused(admitted: Admitted, policy: PolicySet, tenant: Tenant) -> tuple[str, ApplianceError] | None:
    """Return the rule by which a policy serves a request no more, and its error; None where it would serve it."""
    name, own = admitted.alias or admitted.model, f"tenants.{tenant.id}"
    if not visible_models(policy, tenant.id, (name,)):
        message = f"this tenant may not use the model {name} any more; the request was stopped"
        return f"{own}.models", PermissionDeniedError(message, param="model")
    if tenant.regions and admitted.region not in tenant.regions:
        message = "this tenant may not be served in this region any more; the request was stopped"
        return f"{own}.regions", PermissionDeniedError(message)
    if (wrong := region_rule(tenant, admitted.model, admitted.region)) is not None:
        message = f"the model {name} may not be served to this tenant in this region any more; the request was stopped"
        return f"{own}.model_regions[{wrong}]", PermissionDeniedError(message, param="model")
    if admitted.external and not may_leave(tenant):
        message = (
            f"this tenant may not use the model {name}, which is computed outside of this appliance, any more; the "
            "request was stopped"
        )
        return f"{own}.external", PermissionDeniedError(message, param="model")
    if admitted.batch and not keeps_files(tenant):
        key = "retention" if tenant.features.batches else "features.batches"
        message = "this tenant may not use files and batches any more; the request was stopped"
        return f"{own}.{key}", FeatureNotAllowedError(message)
    if not leads(policy, tenant, admitted.adapter or admitted.model, admitted.alias):
        message = (
            f"the route {name} changed while the request ran, and it was stopped; the same request may be sent again"
        )
        return f"routes.{name}", PolicyChangedError(message)
    return None


def _changed(admitted: Admitted, tenant: Tenant, namespaces: Mapping[str, bytes]) -> dict[str, str]:
    """Return what decides where a request's tokens are computed and kept, and is not as it was, with its rule; a key is
    no rule of the policy."""
    own, known = f"tenants.{tenant.id}", admitted.obligations
    group = namespaces.get(group_account(tenant.group), b"") if tenant.group is not None else b""
    differs = {
        ("isolation class", f"{own}.class"): tenant.isolation_class is not known.isolation_class,
        ("retention", f"{own}.retention"): tenant.retention is not known.retention,
        ("namespace", f"{own}.namespace"): tenant.namespace is not known.namespace,
        ("key", ""): namespaces.get(tenant.id) != admitted.namespace,
        ("sharing group", "sharing_groups"): group != admitted.group,
    }
    return {what: rule for (what, rule), there in differs.items() if there}
