"""Roles of operators, and the one table of what each of them may do: methods of the operator's API and routes of the
admin listener. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from appliance.common.errors import RoleError


class OperatorRole(StrEnum):
    """What an operator may do."""

    VIEWER = "viewer"
    """Read."""
    OPERATOR = "operator"
    """Drain the appliance, change models and requests; read."""
    SECURITY = "security"
    """Change policy and keys, forget tenants; read."""


EVERY = frozenset(OperatorRole)

_ADMIN, _POLICY = "/athanor.admin.v1.AdminService/", "/athanor.policy.v1.PolicyService/"

_TABLE: Mapping[OperatorRole, tuple[str, ...]] = {
    OperatorRole.VIEWER: (
        *(f"{_ADMIN}{name}" for name in ("GetServerInfo", "ListTenants", "GetTenant", "ListCredentials")),
        *(f"{_ADMIN}{name}" for name in ("ListRequests", "ListModels")),
        *(f"{_POLICY}{name}" for name in ("Check", "Diff", "Explain", "Test", "History", "Schema", "Init")),
        f"{_POLICY}GetShadow",
        *("GET /", "GET /console", "GET /console/", "GET /console/{name}"),
        *("GET /console/look", "GET /console/requests/{wanted}"),
        *("GET /console/usage", "GET /console/usage.csv", "GET /console/usage/models", "GET /console/fleet"),
        *("GET /drain", "GET /health/live", "GET /health/ready", "GET /keys", "GET /metrics", "GET /policy/shadow"),
        *("GET /requests", "GET /runbooks", "GET /status", "GET /tenants", "GET /traces", "GET /traces/{wanted}"),
    ),
    OperatorRole.OPERATOR: (
        *(f"{_ADMIN}{name}" for name in ("Drain", "Resume", "CancelRequest")),
        *(f"{_ADMIN}{name}" for name in ("AddModel", "RemoveModel", "SleepModel", "WakeModel")),
        *("POST /drain", "POST /resume", "POST /requests/{wanted}/cancel", "POST /models/{name}/{order}"),
    ),
    OperatorRole.SECURITY: (
        *(f"{_ADMIN}{name}" for name in ("CreateCredential", "RevokeCredential", "RotateCredential", "ForgetTenant")),
        *(f"{_POLICY}{name}" for name in ("Apply", "Rollback", "SetShadow", "ClearShadow")),
        "GET /console/usage/users",  # Who of a tenant's end users sent how much, if under pseudonyms.
        "POST /reload",  # It puts in force whatever policy and keys are on the disk.
    ),
}

NEEDED: Mapping[str, OperatorRole] = {name: role for role, names in _TABLE.items() for name in names}
"""The role that each thing needs: a method by its gRPC path, a route by its method and its pattern. What is not here is
done for nobody."""

LOCAL_ONLY = frozenset({"POST /operator/calls"})
"""Routes of the admin listener that no operator elsewhere has: programs of this machine alone tell the gateway so."""


def with_reading(found: Iterable[OperatorRole]) -> frozenset[OperatorRole]:
    """Return roles as they count: each of them lets its holder read."""
    roles = frozenset(found)
    return roles | {OperatorRole.VIEWER} if roles else roles


def require(found: Iterable[OperatorRole], role: OperatorRole, what: str, given_by: str = "operator_api") -> None:
    """Check that a caller has a role.

    Args:
        found: the caller's roles.
        role: the role that is needed.
        what: the method's path, or the route, for the message.
        given_by: the section of the configuration that gives roles to this caller.

    Raises:
        RoleError: the caller has not that role; message and details name it.
    """
    if role not in found:
        shown = what.rpartition("/")[2] if what.startswith("/") else what
        raise RoleError(
            f"{shown or 'this'} needs the role {role.value}; {given_by} in athanor.yaml gives it",
            details={"role": role.value},
        )
