"""Routes of the policy: what an alias leads to, and which of its models serves a request. Pure.

An alias is a name that clients send as ``model``. Where a route and a served model have one name, the name is the
route's. A tenant whose patterns match the alias may use the models of its route by the alias, and by it alone. Prices,
public prefixes and everything else that a policy says of a model are those of the model that serves. A route may lead
to an adapter (``policy.adapters``) as to a model.

The choice is a function of the policy, the tenant's class, the states of the models and a *draw*, a number that follows
from the tenant, the alias and a key: equal keys give one model for as long as route and states stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from policy.adapters import base_of, granting_rule, holds, is_adapter
from policy.match import first_match
from policy.model import Choose, IsolationClass, ModelState, PolicySet, Route, Target, Tenant
from policy.prices import find_price

DRAW_BYTES = 8
"""Bytes of a draw: shares are exact to far less than one request in a lifetime."""

DRAWS = 1 << (8 * DRAW_BYTES)
"""Number of different draws, which are 0 and up."""

DRAW_DOMAIN = "athanor route 1"
"""Beginning of what is hashed for a draw. No digest of a policy is in it: a reload that leaves a route as it is moves
no conversation away from its cache."""


class ChoiceReason(StrEnum):
    """Reason why a route's model was chosen."""

    WEIGHT = "weight"
    """By its share."""
    CHEAPEST = "cheapest"
    UNREADY = "unready"
    """The model before it could not serve."""
    BUSY = "busy"
    """Requests waited in the model before it."""
    ASLEEP = "asleep"
    """The model before it slept."""
    NONE_READY = "none_ready"
    """No model of the route can serve; it is the one that would be chosen otherwise."""


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """Model that serves a request, and the reason."""

    model: str
    reason: ChoiceReason
    asleep: str = ""
    """Model that was passed over because it sleeps; empty for none."""


def draw_of(tenant: str, alias: str, key: str) -> int:
    """Return the draw of a request. Any text can be the key; tenants with equal keys draw apart."""
    parts = [part.encode("utf-8", "surrogatepass") for part in (DRAW_DOMAIN, tenant, alias, key)]
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return int.from_bytes(hashlib.blake2b(framed, digest_size=DRAW_BYTES).digest(), "big")


def choose(
    policy: PolicySet, route: Route, isolation_class: IsolationClass, states: Mapping[str, ModelState], draw: int
) -> RouteChoice:
    """Choose the model of one request.

    Args:
        policy: the policy, for its prices.
        route: one of its routes.
        isolation_class: class of the tenant that asks.
        states: states of the models by name; a model that is not in it is not served.
        draw: 0 and up to ``DRAWS``; decides where the weight does.
    """
    order = candidates(policy, route, isolation_class, draw)
    found = [_seen(isolation_class, route, states.get(name, ModelState.UNREADY)) for name in order]
    first = found[0]
    for wanted in _BETTER.get(first, ()) if first in route.fall_back_when else ():
        if wanted in found:
            passed = order[0] if first is ModelState.ASLEEP else ""
            return RouteChoice(order[found.index(wanted)], ChoiceReason(first.value), passed)
    by_rule = ChoiceReason(route.choose.value)
    return RouteChoice(order[0], by_rule if first is not ModelState.UNREADY else ChoiceReason.NONE_READY)


def candidates(policy: PolicySet, route: Route, isolation_class: IsolationClass, draw: int) -> list[str]:
    """Return the models that serve a request in the order in which they are tried, each once."""
    if route.choose is Choose.CHEAPEST:
        first = [target.model for target in _by_price(policy, route.to, isolation_class)]
    else:
        first = [_drawn(route.to, draw)]
    return list(dict.fromkeys([*first, *route.fallback]))


def likeliest(policy: PolicySet, route: Route, isolation_class: IsolationClass) -> str:
    """Return the model to which most requests of a route go while all of its models can serve."""
    if route.choose is Choose.CHEAPEST:
        return candidates(policy, route, isolation_class, 0)[0]
    return max(route.to, key=lambda target: target.weight).model


def visible_route(policy: PolicySet, tenant: Tenant | None, name: str) -> Route | None:
    """Return the route of this name that the tenant may use; None without one. A route that leads to an adapter is for
    those alone that have the adapter."""
    route = policy.routes.get(name)
    if route is None or tenant is None or granting_rule(policy, tenant, name) is None:
        return None
    return route


def leads(policy: PolicySet, tenant: Tenant, target: str, alias: str) -> bool:
    """Return whether what a tenant asked for leads to ``target``, a model or an adapter: the alias, or without one the
    model's own name. The alias of an adapter that is asked for by its name is that name."""
    if not holds(tenant, target):
        return False
    route = policy.routes.get(alias or target)
    if route is None:
        return alias == target if is_adapter(target) else not alias
    return bool(alias) and target in route.models


def reachable(
    routes: Mapping[str, Route], patterns: Iterable[str], adapters: Iterable[str], models: Iterable[str]
) -> tuple[str, ...]:
    """Return those of ``models``, in their order, that serve a tenant with these patterns and adapters: by their own
    names, by an alias, or with one of the adapters alone. To be asked about a request only together with ``leads``: it
    does not say by which."""
    adapters, models = tuple(adapters), tuple(models)
    alone = frozenset(reachable_alone(routes, patterns, adapters, models))
    # A route leads to an adapter only for those that have it, so there are no others than these.
    adapted = frozenset(map(base_of, adapters))
    return tuple(name for name in models if name in alone or name in adapted)


def reachable_alone(
    routes: Mapping[str, Route], patterns: Iterable[str], adapters: Iterable[str], models: Iterable[str]
) -> tuple[str, ...]:
    """Return those of ``models`` that serve such a tenant without an adapter, by their own names or by an alias."""
    patterns = tuple(patterns)
    led = _led(routes, patterns, adapters)
    return tuple(
        name for name in models if name in led or (name not in routes and first_match(patterns, name) is not None)
    )


def shares(targets: Sequence[Target]) -> list[tuple[str, float]]:
    """Return each target with its part of the requests, between 0 and 1."""
    total = sum(target.weight for target in targets)
    return [(target.model, target.weight / total) for target in targets]


def _led(routes: Mapping[str, Route], patterns: tuple[str, ...], adapters: Iterable[str]) -> set[str]:
    """Return what the routes lead to that a tenant may use: those that the patterns match, and to all of whose adapters
    it has a right."""
    held = frozenset(adapters)
    return {
        name
        for route in routes.values()
        if first_match(patterns, route.id) is not None
        and all(not is_adapter(one) or one in held for one in route.models)
        for name in route.models
    }


_BETTER: Mapping[ModelState, tuple[ModelState, ...]] = {
    ModelState.UNREADY: (ModelState.READY, ModelState.BUSY, ModelState.ASLEEP),
    ModelState.ASLEEP: (ModelState.READY, ModelState.BUSY),
    ModelState.BUSY: (ModelState.READY,),
}
"""State in which a model is passed over -> states of a model that serves in its place, the best first: a model in which
requests wait is better than one that is not there or has to wake, and no better than one like it."""


def _seen(isolation_class: IsolationClass, route: Route, state: ModelState) -> ModelState:
    """Return a model's state as a route takes it for a tenant of this class: how busy others keep a model that it
    shares with them is nothing for a class that is shown nothing of others, and a sleeping model wakes for its request
    unless the route says otherwise."""
    if state is ModelState.ASLEEP:
        return state if state in route.fall_back_when else ModelState.READY
    return ModelState.READY if state is ModelState.BUSY and isolation_class.exact else state


def _drawn(targets: tuple[Target, ...], draw: int) -> str:
    left = draw * sum(target.weight for target in targets) // DRAWS
    for target in targets:
        left -= target.weight
        if left < 0:
            return target.model
    raise ValueError(f"a draw is at least 0 and less than {DRAWS}")


def _by_price(policy: PolicySet, targets: tuple[Target, ...], isolation_class: IsolationClass) -> list[Target]:
    """Return targets from the cheapest on, those without a price last; in their own order where prices are equal."""

    def place(target: Target) -> tuple[bool, int]:
        price = find_price(policy, target.model, isolation_class)
        return price is None, 0 if price is None else price.input + price.output

    return sorted(targets, key=place)
