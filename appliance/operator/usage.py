"""Pure: the part of an appliance's status that ``athanor top`` shows."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.common.status import Alert, ApplianceStatus, ModelStatus, TenantStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """Load of one model's engine."""

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
    up_s: float
    seconds: float
    """Seconds that the rates are of; 0: there are none yet."""
    tokens_per_s: float
    models: tuple[ModelUsage, ...]
    tenants: tuple[TenantStatus, ...]
    """The busiest first."""
    alerts: tuple[Alert, ...] = ()
    """What the operator should know now, the worst first."""


def usage(status: ApplianceStatus, now: float) -> Usage:
    """Return what tenants use; ``now`` is Unix time."""
    tenants = sorted(status.tenants, key=lambda one: (-(one.tokens_per_s or 0.0), -one.in_flight, one.id))
    return Usage(
        version=status.version,
        sandbox=status.sandbox,
        up_s=max(0.0, now - status.started_at),
        seconds=status.rates_over_s,
        tokens_per_s=sum(one.tokens_per_s or 0.0 for one in tenants),
        models=tuple(map(_model, status.models)),
        tenants=tuple(tenants),
        alerts=status.alerts,
    )


def _model(model: ModelStatus) -> ModelUsage:
    engine = model.engine
    return ModelUsage(
        name=model.name,
        state=model.state,
        running=engine.running,
        waiting=engine.waiting,
        kv_used=1 - engine.free_blocks / engine.num_blocks if engine.num_blocks else None,
        num_blocks=engine.num_blocks,
        restarts=engine.restarts + model.text.restarts,
    )
