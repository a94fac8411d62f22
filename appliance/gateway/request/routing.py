"""Requests for routes of the policy: the model that serves each, chosen once, before all other work on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from appliance.gateway.generate_request import (
    AttestRequest,
    EmbedRequest,
    GenerateRequest,
    ModelCard,
    Principal,
    Routable,
    TokenizerRequest,
)
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.model_states import model_state
from appliance.gateway.sandboxes.tenant_sandboxes import TenantSandboxes
from policy.match import first_match
from policy.model import ModelState, PolicySet, Route, Tenant
from policy.routes import RouteChoice, choose, draw_of, visible_route


@dataclass(slots=True)
class Routing:
    """Chooses models of routes by the states of their sandboxes."""

    models: Mapping[str, ModelSandboxes]
    """Shared sandboxes by model."""
    tenant_sandboxes: TenantSandboxes
    chosen: Callable[[str, RouteChoice], None]
    """Called with the alias and the choice of each request."""
    _listed: tuple[PolicySet | None, dict[tuple[str, ...], list[Route]]] = field(default_factory=lambda: (None, {}))
    """A policy, and the routes that lists of model patterns have shown in it so far."""

    def routed(self, policy: PolicySet, principal: Principal, request: Routable) -> Routable:
        """Return the request with the model that serves it, where it names a route that its tenant may use; else as it
        is. A request that was routed stays where it is."""
        tenant = policy.tenants.get(principal.tenant)
        route = None if request.alias else visible_route(policy, tenant, request.model)
        if tenant is None or route is None:
            return request
        key = (request.cache_key if isinstance(request, GenerateRequest) else "") or request.request_id
        states = {name: self._state(name, tenant, request) for name in route.models}
        choice = choose(policy, route, tenant.isolation_class, states, draw_of(tenant.id, route.id, key))
        self.chosen(route.id, choice)
        return replace(request, model=choice.model, alias=route.id)

    def cards(self, policy: PolicySet, principal: Principal) -> list[ModelCard]:
        """Return the routes that a tenant may use, each as a model: with the context that all of its models have."""
        tenant = policy.tenants.get(principal.tenant)
        if tenant is None:
            return []
        return [self._card(route) for route in self._visible(policy, tenant)]

    def _visible(self, policy: PolicySet, tenant: Tenant) -> list[Route]:
        """Return the routes that a tenant may use. They are looked for once for each policy: a list of models takes a
        time that does not tell how many routes others have."""
        if self._listed[0] is not policy:
            self._listed = policy, {}
        known = self._listed[1]
        if tenant.models not in known:
            known[tenant.models] = [
                route for name, route in policy.routes.items() if first_match(tenant.models, name) is not None
            ]
        return known[tenant.models]

    def _state(self, name: str, tenant: Tenant, request: Routable) -> ModelState:
        shared = self.models.get(name)
        if shared is not None and not _takes(shared, request):
            return ModelState.UNREADY
        return model_state(shared, self.tenant_sandboxes.find(name, tenant.id), tenant.isolation_class)

    def _card(self, route: Route) -> ModelCard:
        served = [self.models[name] for name in route.models if name in self.models]
        contexts = [model.capacity.max_context for model in served if model.capacity is not None]
        embeds = bool(served) and all(model.runner == "embed" for model in served)
        created = min((model.created for model in served), default=0)
        return ModelCard(route.id, created, min(contexts, default=0), "embed" if embeds else "model")


def _takes(model: ModelSandboxes, request: Routable) -> bool:
    """Return whether a model does what a request asks for: text or vectors. Every model has a tokenizer, and can be
    attested."""
    return isinstance(request, TokenizerRequest | AttestRequest) or isinstance(request, EmbedRequest) == (
        model.runner == "embed"
    )
