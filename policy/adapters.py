"""Adapters in the policy: names, and who may use which. Pure.

An adapter's name is ``MODEL:ADAPTER``; no served model has a name of this form. A tenant may use those that its own
list, or that of a tenant group of its, has by their whole names: no pattern matches one, so a tenant that may use every
model may use no adapter of others. What it may ask for by such a name is the model with the adapter, and not the model
alone.

The name takes the place of an alias: what a request asks for is looked up in the tenant's own list, so neither answer
nor time tell whether a name that is not there belongs to somebody else.
"""

from __future__ import annotations

from policy.match import first_match
from policy.model import PolicySet, Tenant

SEPARATOR = ":"
"""Between the names of a model and of its adapter."""


def is_adapter(name: str) -> bool:
    """Return whether a name has the form of an adapter's; names of models that have a colon have a slash too."""
    return name.count(SEPARATOR) == 1 and "/" not in name


def base_of(name: str) -> str:
    """Return the name of the model that serves a name: an adapter's, or the model's own."""
    return name.partition(SEPARATOR)[0]


def granting_rule(policy: PolicySet, tenant: Tenant, name: str) -> str | None:
    """Return the place, below the tenant, of what lets it use a name: ``models[2]``, ``adapters[0]``; None without."""
    if name in tenant.adapters:
        return f"adapters[{tenant.adapters.index(name)}]"
    route = policy.routes.get(name)
    if is_adapter(name) if route is None else not all(holds(tenant, one) for one in route.models):
        return None
    place = first_match(tenant.models, name)
    return None if place is None else f"models[{place}]"


def served_by(tenant: Tenant, name: str) -> tuple[str, str, str]:
    """Return model, adapter and alias of a request for a name that is no route's: of an adapter of the tenant, or of
    the model of that name."""
    return (base_of(name), name, name) if name in tenant.adapters else (name, "", "")


def split(target: str) -> tuple[str, str]:
    """Return the model that serves what a route leads to, and the adapter, empty for none."""
    return base_of(target), target if is_adapter(target) else ""


def holds(tenant: Tenant, name: str) -> bool:
    """Return whether the tenant may use what a name leads to: a model, or an adapter that it has."""
    return not is_adapter(name) or name in tenant.adapters
