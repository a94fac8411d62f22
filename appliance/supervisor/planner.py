"""Plans sandboxes while the appliance runs: those of single tenants, and engines that get another card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

from appliance.supervisor.adapters import of_tenant
from appliance.supervisor.boot import BootPlan, plan_boot
from appliance.supervisor.gpu import Cards
from appliance.supervisor.model_keepers import ModelKeepers
from isolation.gvisor.runtime import Runtime
from isolation.ipc.messages import Role
from policy.model import PolicySet


class Planner:
    """Plans one sandbox beside all that are there; its methods block, and are called in threads."""

    def __init__(self, models: ModelKeepers, runtime: Runtime, policy: Callable[[], PolicySet]) -> None:
        """``policy`` reads the one in force."""
        self._models, self._runtime, self._policy = models, runtime, policy
        self.others: Callable[[], Iterable[BootPlan]] = tuple
        """Plans of single tenants' sandboxes; set by the owner."""
        self.out: Callable[[], Mapping[int, str]] = dict
        """Why each card that gets no engine gets none; set by the owner."""

    def plan(self, model: str, tenant: str, role: Role) -> BootPlan:
        """Plan a tenant's own sandbox.

        Raises:
            KeyError: the model is not served.
            StartError: its engine finds no card.
        """
        return self._plan(model, tenant, role, self.out())

    def is_external(self, model: str) -> bool:
        """Return whether a model is computed outside of the appliance; one that is not served is not."""
        with suppress(KeyError):
            return self._models.planned(model).entry.external is not None
        return False

    def replan(self, old: BootPlan, out: Mapping[int, str] = MappingProxyType({})) -> BootPlan | None:
        """Plan the same sandbox anew, without the cards of ``out``; None: its model is served no more.

        Raises:
            StartError: its engine finds no card.
        """
        try:
            return self._plan(old.model, old.tenant, old.role, out)
        except KeyError:
            return None

    def _plan(self, model: str, tenant: str, role: Role, out: Mapping[int, str]) -> BootPlan:
        one = self._models.planned(model)
        files = of_tenant(one.files, self._policy(), tenant) if tenant else one.files
        planned = (*(keeper.plan for keeper in self._models.keepers), *self._models.coming, *self.others())
        cards = Cards((held.card for held in planned if held.card is not None), out=out)
        return plan_boot(one.appliance, one.entry, files, self._runtime, role, tenant, cards)
