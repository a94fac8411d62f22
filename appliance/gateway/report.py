"""The gateway's state as the values that status, readiness and the console show."""

from __future__ import annotations

import time
from collections.abc import Callable

from appliance.gateway.policy_file import PolicyFile
from appliance.gateway.records import SandboxRecord
from appliance.gateway.rooms import ModelRooms
from appliance.gateway.sandboxes import Sandboxes
from appliance.gateway.service import GatewayService
from appliance.status import (
    Alert,
    ApplianceStatus,
    EngineStatus,
    ModelStatus,
    Readiness,
    TenantStatus,
    TextStatus,
)
from appliance.version import VERSION


class Report:
    """Reads, never changes."""

    def __init__(
        self,
        service: GatewayService,
        sandboxes: Sandboxes,
        policy: PolicyFile,
        alerts: Callable[[], tuple[Alert, ...]],
    ) -> None:
        """``alerts`` gives what the operator should know now."""
        self._service = service
        self._alerts = alerts
        self._sandboxes = sandboxes
        self._policy = policy
        self._started_at = time.time()

    def readiness(self) -> Readiness:
        """Whether a request would be taken now."""
        missing = [name for name, rooms in self._service.rooms.items() if not rooms.ready]
        if any(rooms.draining for rooms in self._service.rooms.values()):
            return Readiness(ready=False, reason="draining")
        if missing:
            return Readiness(ready=False, reason=f"sandboxes of {', '.join(missing)} are not up")
        return Readiness(ready=True)

    def status(self) -> ApplianceStatus:
        """The whole picture."""
        ledger = self._service.ledger
        attachment = self._sandboxes.attachment
        tallies = {tenant: self._service.tally.of(tenant) for tenant in ledger.policy.tenants}
        tenants = tuple(
            TenantStatus(
                id=tenant.id, isolation_class=tenant.isolation_class.value,
                in_flight=ledger.concurrency(tenant.id), max_in_flight=tenant.limits.concurrency,
                requests=tallies[tenant.id].requests, tokens=tallies[tenant.id].tokens,
                refused=tallies[tenant.id].refused,
            )
            for tenant in ledger.policy.tenants.values()
        )
        return ApplianceStatus(
            version=VERSION, started_at=self._started_at, sandbox=attachment.sandbox, cgroup=attachment.limits,
            models=tuple(self._model(rooms) for rooms in self._service.rooms.values()),
            own=tuple(self._model(rooms) for rooms in self._service.house.rooms),
            public=tuple(self._service.publications.views()),
            tenants=tenants, policy=self._policy.status(ledger.policy), alerts=self._alerts(),
        )

    def _model(self, rooms: ModelRooms) -> ModelStatus:
        kind = self._sandboxes.attachment.sandbox
        engine, text = self._sandboxes.record_of(rooms, "engine"), self._sandboxes.record_of(rooms, "text")
        stats = rooms.engine.stats if rooms.engine is not None else None
        there = rooms.text is not None if engine is None else rooms.ready
        state = "draining" if rooms.draining else "ready" if there else "starting"
        shown = EngineStatus(state="shared", kind=kind)
        if engine is not None:
            shown = EngineStatus(
                state=engine.state, kind=kind, generation=engine.generation, restarts=engine.restarts,
                pid=engine.pid or None, uptime_s=_uptime(engine),
                num_blocks=rooms.capacity.num_blocks if rooms.capacity and stats else 0,
                free_blocks=stats.free_blocks if stats else 0,
                running=stats.running if stats else 0, waiting=stats.waiting if stats else 0,
            )
        text = text or SandboxRecord()
        return ModelStatus(
            name=rooms.name, state=state, runner=rooms.runner, tenant=rooms.tenant, engine=shown,
            text=TextStatus(
                state=text.state, kind=kind, generation=text.generation, restarts=text.restarts,
                pid=text.pid or None, uptime_s=_uptime(text),
            ),
        )


def _uptime(record: SandboxRecord) -> float | None:
    return time.time() - record.since if record.state == "ready" else None
