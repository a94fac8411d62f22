"""Whether a line of a batch may begin: only in room that no other request needs.

Lines run with the lowest priority, so in an engine they get what other requests leave. Before that, none begins while
requests wait in the engine of its model, while a request of its own tenant waits for a limit, or while less than half
of what the tenant may have at once is left: of its places, its rate of requests and its rate of tokens. So the other
half is there for a request that comes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from appliance.common.batch_status import Obstacle
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.operator_drain import OperatorDrain
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.model_states import model_state
from appliance.gateway.sandboxes.tenant_sandboxes import TenantSandboxes
from policy.adapters import base_of
from policy.model import ModelState, Tenant

RUNNING_IN_ALL = 32
"""Lines of all tenants that run at a time: enough to fill the batches of an engine."""

RUNNING_EACH = 16
"""Lines of one tenant that run at a time."""

KEPT_FREE = 2
"""One part in so many of what a tenant may have at once is left to its other requests."""


@dataclass(frozen=True, slots=True)
class Room:
    """Looks at limits and engines, without taking anything."""

    ledger: Ledger
    models: Mapping[str, ModelSandboxes]
    """Shared sandboxes by model."""
    tenant_sandboxes: TenantSandboxes
    asleep: Callable[[ModelSandboxes, str], ModelState] = lambda _model, _tenant: ModelState.READY
    """State of a model that sleeps, as in ``Routing``."""
    drain: OperatorDrain = field(default_factory=OperatorDrain)
    """Whether the operator has the appliance take no requests: a line that began would fail, and be tried again."""

    def may_begin(self, tenant: str, model: str, running: int) -> bool:
        """Return whether a line may begin; see ``obstacle``."""
        return self.obstacle(tenant, model, running) is Obstacle.NONE

    def obstacle(self, tenant: str, model: str, running: int) -> Obstacle:
        """Return why no line of a tenant may begin now, beside so many that run; ``model`` is the model or route of
        its batch's last line, empty while none is known. None may while the operator drains; of a tenant that is
        gone all may: each ends with an error."""
        if self.drain.begun:
            return Obstacle.DRAINED
        known = self.ledger.policy.tenants.get(tenant)
        if known is None:
            return Obstacle.NONE
        if running >= RUNNING_EACH:
            return Obstacle.ENOUGH
        limits, rates = known.limits, self.ledger.rates(tenant)
        free = (
            not self.ledger.lines.of(tenant)
            and self.ledger.concurrency(tenant) < max(1, limits.concurrency // KEPT_FREE)
            and rates.remaining_requests * KEPT_FREE >= rates.limit_requests
            and rates.remaining_tokens * KEPT_FREE >= rates.limit_tokens
        )
        return self._of_model(known, model) if free else Obstacle.LIMIT

    def _of_model(self, tenant: Tenant, name: str) -> Obstacle:
        route = self.ledger.policy.routes.get(name)
        names = dict.fromkeys(map(base_of, route.models if route is not None else (name,)))
        found = [self._of_one(tenant, self.models[one]) for one in names if one in self.models]
        if not found or Obstacle.NONE in found:
            return Obstacle.NONE
        return Obstacle.BUSY if Obstacle.BUSY in found else Obstacle.MODEL

    def _of_one(self, tenant: Tenant, model: ModelSandboxes) -> Obstacle:
        own = self.tenant_sandboxes.find(model.name, tenant.id)
        asleep = ModelState.READY if model.sleep_state.awake else self.asleep(model, tenant.id)
        if model_state(model, own, tenant.isolation_class, asleep) is not ModelState.READY:
            return Obstacle.MODEL
        sandboxes = own if tenant.isolation_class.own_engine else model
        engine = None if sandboxes is None else sandboxes.engine
        return Obstacle.NONE if engine is None or not engine.stats.waiting else Obstacle.BUSY
