"""Pure: two looks at an appliance's status to what it did between them."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.status import Alert, ApplianceStatus, TenantStatus


@dataclass(frozen=True, slots=True)
class Sample:
    """The status at a moment (Unix time)."""

    at: float
    status: ApplianceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """One tenant. Rates are of requests that ended between the looks; None: not counted."""

    id: str
    isolation_class: str
    in_flight: int
    max_in_flight: int | None
    tokens_per_s: float | None
    """Input and output tokens."""
    requests_per_s: float | None
    refused_per_s: float | None
    tokens: int | None
    """Since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """One model's engine at the second look."""

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
    """The whole appliance."""

    version: str
    sandbox: str
    up_s: float
    seconds: float
    """Between the looks."""
    tokens_per_s: float
    models: tuple[ModelUsage, ...]
    tenants: tuple[TenantUsage, ...]
    """The busiest first."""
    alerts: tuple[Alert, ...] = ()
    """What the operator should know at the second look, the worst first."""


def measure(before: Sample, after: Sample) -> Usage:
    """What happened between two looks; rates are 0 where no time has passed or the appliance was started anew."""
    seconds = max(0.0, after.at - before.at)
    same = before.status.started_at == after.status.started_at
    known = {tenant.id: tenant for tenant in before.status.tenants} if same else {}
    tenants = [_tenant(known.get(tenant.id), tenant, seconds) for tenant in after.status.tenants]
    tenants.sort(key=lambda one: (-(one.tokens_per_s or 0.0), -one.in_flight, one.id))
    return Usage(
        version=after.status.version, sandbox=after.status.sandbox, up_s=max(0.0, after.at - after.status.started_at),
        seconds=seconds, tokens_per_s=sum(one.tokens_per_s or 0.0 for one in tenants), models=_models(after.status),
        tenants=tuple(tenants), alerts=after.status.alerts,
    )  # fmt: skip


def _models(status: ApplianceStatus) -> tuple[ModelUsage, ...]:
    return tuple(
        ModelUsage(
            name=model.name, state=model.state, running=model.engine.running, waiting=model.engine.waiting,
            kv_used=1 - model.engine.free_blocks / model.engine.num_blocks if model.engine.num_blocks else None,
            num_blocks=model.engine.num_blocks, restarts=model.engine.restarts + model.text.restarts,
        )
        for model in status.models
    )  # fmt: skip


def _tenant(before: TenantStatus | None, after: TenantStatus, seconds: float) -> TenantUsage:
    def rate(name: str) -> float | None:
        now: int | None = getattr(after, name)
        if now is None:
            return None
        # A tenant that is new to the policy begins at nothing; a count that fell began anew.
        then: int = (getattr(before, name) or 0) if before is not None else now
        return max(0, now - then) / seconds if seconds > 0 else 0.0

    return TenantUsage(
        id=after.id, isolation_class=after.isolation_class, in_flight=after.in_flight,
        max_in_flight=after.max_in_flight, tokens_per_s=rate("tokens"), requests_per_s=rate("requests"),
        refused_per_s=rate("refused"), tokens=after.tokens,
    )  # fmt: skip
