"""Pure: the part of an appliance's status that ``athanor top`` shows."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.common.status import Alert, ApplianceLoad, ApplianceStatus, ModelStatus, TenantStatus
from appliance.common.tenant_order import busiest_first


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """ApplianceLoad of one model's engine."""

    name: str
    state: str
    running: int
    waiting: int
    kv_used: float | None
    """Share of KV blocks in use, 0 to 1; None before there is a pool."""
    num_blocks: int
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Use of the whole appliance."""

    version: str
    sandbox: str
    load: ApplianceLoad
    models: tuple[ModelUsage, ...]
    tenants: tuple[TenantStatus, ...]
    """Those at work first, the busiest on top."""
    alerts: tuple[Alert, ...] = ()
    """What the operator should know now, the worst first."""


def usage(status: ApplianceStatus) -> Usage:
    """Return what tenants use, by the gateway's own counts and clock."""
    return Usage(
        version=status.version,
        sandbox=status.sandbox,
        load=status.load,
        models=tuple(map(_model, (*status.models, *status.own))),
        tenants=tuple(sorted(status.tenants, key=busiest_first)),
        alerts=status.alerts,
    )


def _model(model: ModelStatus) -> ModelUsage:
    engine = model.engine
    return ModelUsage(
        name=f"{model.name} of {model.tenant}" if model.tenant else model.name,
        state=model.state,
        running=engine.running,
        waiting=engine.waiting,
        kv_used=1 - engine.free_blocks / engine.num_blocks if engine.num_blocks else None,
        num_blocks=engine.num_blocks,
        restarts=engine.restarts + model.text.restarts,
    )
