"""Requests for routes of the policy: the model that serves each, chosen once, before all other work on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from appliance.common.external_config import EXTERNAL
from appliance.gateway.generate_request import (
    AnyRequest,
    EmbedRequest,
    GenerateRequest,
    Principal,
    Routable,
    ScoreOperation,
    ScoreRequest,
)
from appliance.gateway.model_card import ModelCard
from appliance.gateway.sandboxes.model_leaving import Leaving
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.model_states import model_state
from appliance.gateway.sandboxes.tenant_sandboxes import TenantSandboxes
from policy.adapters import base_of, served_by, split
from policy.model import ModelState, PolicySet, Route, Tenant
from policy.outside import may_leave
from policy.routes import RouteChoice, choose, draw_of, visible_route

_Lists = tuple[tuple[str, ...], tuple[str, ...]]
"""A tenant's patterns of models, and its adapters."""


@dataclass(slots=True)
class Routing:
    """Chooses models of routes by the states of their sandboxes."""

    models: Mapping[str, ModelSandboxes]
    """Shared sandboxes by model."""
    tenant_sandboxes: TenantSandboxes
    chosen: Callable[[str, RouteChoice], None]
    """Called with the alias and the choice of each request."""
    asleep: Callable[[ModelSandboxes, str], ModelState] = lambda _model, _tenant: ModelState.READY
    """State of a model that sleeps, for a tenant's request (``SleepControl.route_state``)."""
    _listed: tuple[PolicySet | None, dict[_Lists, list[Route]]] = field(default_factory=lambda: (None, {}))
    """A policy, and the routes that lists of model patterns and of adapters have shown in it so far."""

    def routed(self, policy: PolicySet, principal: Principal, request: Routable) -> Routable:
        """Return the request with the model that serves it, where it names a route or an adapter that its tenant may
        use; else as it is. A request that was routed stays where it is."""
        tenant = policy.tenants.get(principal.tenant)
        route = None if request.alias else visible_route(policy, tenant, request.model)
        if tenant is None or request.alias:
            return request
        if route is None:
            return self._adapted(tenant, request)
        key = (request.cache_key if isinstance(request, GenerateRequest) else "") or request.request_id
        states = {name: self._state(name, tenant, request, route) for name in route.models}
        choice = choose(policy, route, tenant.isolation_class, states, draw_of(tenant.id, route.id, key))
        self.chosen(route.id, choice)
        model, adapter = split(choice.model)
        return replace(request, model=model, alias=route.id, adapter=adapter, passed_over=base_of(choice.asleep))

    def cards(self, policy: PolicySet, principal: Principal) -> list[ModelCard]:
        """Return the routes that a tenant may use, each as a model: with the context that all of its models have; and
        its adapters."""
        tenant = policy.tenants.get(principal.tenant)
        if tenant is None:
            return []
        adapted = [(name, self.models.get(base_of(name))) for name in tenant.adapters]
        return [
            *(self._card(route) for route in self._visible(policy, tenant)),
            *(
                ModelCard(name, model.created, model.capacity.max_context if model.capacity else 0)
                for name, model in adapted
                if model is not None and model.leaving is not Leaving.FOR_GOOD and name in model.adapters
            ),
        ]

    def _adapted(self, tenant: Tenant, request: Routable) -> Routable:
        """Return the request with model and adapter, where it names an adapter of its tenant's. Names are looked up in
        that tenant's own list alone: one of others takes as long as one that is not there."""
        model, adapter, alias = served_by(tenant, request.model)
        if not adapter or model not in self.models or adapter not in self.models[model].adapters:
            return request
        return replace(request, model=model, alias=alias, adapter=adapter)

    def _visible(self, policy: PolicySet, tenant: Tenant) -> list[Route]:
        """Return the routes that a tenant may use. They are looked for once for each policy: a list of models takes a
        time that does not tell how many routes others have."""
        if self._listed[0] is not policy:
            self._listed = policy, {}
        known, key = self._listed[1], (tenant.models, tenant.adapters)
        if key not in known:
            known[key] = [
                route for name, route in policy.routes.items() if visible_route(policy, tenant, name) is not None
            ]
        return known[key]

    def _state(self, name: str, tenant: Tenant, request: Routable, route: Route) -> ModelState:
        model, adapter = split(name)
        shared = self.models.get(model)
        if shared is not None and (not takes(shared.runner, request) or (adapter and adapter not in shared.adapters)):
            return ModelState.UNREADY
        if shared is not None and shared.runner == EXTERNAL and not may_leave(tenant):
            return ModelState.UNREADY
        asleep = ModelState.READY if shared is None or shared.sleep_state.awake else self.asleep(shared, tenant.id)
        if shared is not None and shared.sleep_state.asleep and not tenant.features.wake:
            asleep = ModelState.UNREADY
        elif ModelState.ASLEEP in route.fall_back_when and shared is not None and not shared.sleep_state.awake:
            # One that cannot be woken now is not there at all; memory in use by others is another reason to pass over.
            asleep = asleep if asleep is ModelState.UNREADY else ModelState.ASLEEP
        return model_state(shared, self.tenant_sandboxes.find(model, tenant.id), tenant.isolation_class, asleep)

    def _card(self, route: Route) -> ModelCard:
        bases = [base_of(name) for name in route.models]
        served = [self.models[name] for name in bases if name in self.models]
        contexts = [model.capacity.max_context for model in served if model.capacity is not None]
        runners = {model.runner for model in served}
        runner = runners.pop() if runners in ({"embed"}, {"classify"}) else "model"
        created = min((model.created for model in served), default=0)
        return ModelCard(route.id, created, min(contexts, default=0), runner)


def not_passed_on(request: AnyRequest) -> tuple[str, str] | None:
    """Return what of a request no external model gives, and the field that asks for it; None where there is nothing."""
    if not isinstance(request, GenerateRequest):
        return None
    tools, grammar = request.tools, request.grammar
    asked = (
        ("log-probabilities", "logprobs", request.logprobs >= 0),
        ("log-probabilities of the prompt", "prompt_logprobs", request.prompt_logprobs >= 0),
        ("structured output", "" if grammar is None else grammar.param, grammar is not None),
        ("a call of a tool that must be made", "" if tools is None else tools.param, tools is not None and tools.held),
        ("deterministic answers", "deterministic", request.deterministic),
        ("typical_p", "typical_p", request.sampling.typical_p < 1.0),
    )
    return next(((what, param) for what, param, wanted in asked if wanted), None)


def takes(runner: str, request: AnyRequest) -> bool:
    """Return whether a model with this runner does what a request asks for. Every model has a tokenizer, and can be
    attested."""
    if isinstance(request, GenerateRequest):
        return runner not in ("embed", "classify") and (runner != EXTERNAL or not_passed_on(request) is None)
    if isinstance(request, EmbedRequest):
        return runner == "embed"
    if isinstance(request, ScoreRequest):
        return runner == "classify" or (runner == "embed" and request.operation is not ScoreOperation.CLASSIFY)
    return True
