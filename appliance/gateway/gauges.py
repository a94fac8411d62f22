"""What the gateway knows of its engines, sandboxes and accounts, as levels for the metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

from appliance.control import LOSS_REASONS
from appliance.gateway.engine_link import EngineLink
from appliance.gateway.kv_shares import named
from appliance.gateway.rooms import ModelRooms
from appliance.gateway.sandboxes import Sandboxes
from appliance.gateway.service import GatewayService
from appliance.telemetry import names
from appliance.telemetry.levels import Level
from appliance.telemetry.tracer import OtelTelemetry

ROLES = ("engine", "text")


class Restarts:
    """Turns the supervisor's counts of restarts into what has been added; a new supervisor counts from nothing."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], int] = {}

    def since(self, sandbox: tuple[str, ...], total: int) -> int:
        """Restarts since the last call."""
        before, self._seen[sandbox] = self._seen.get(sandbox, 0), total
        return total - before if total >= before else total


class Gauges:
    """Reads the gateway's state; ``refresh`` is one look."""

    def __init__(
        self,
        service: GatewayService,
        sandboxes: Sandboxes,
        telemetry: OtelTelemetry,
        certificate: tuple[float, float] | None = None,
    ) -> None:
        """``certificate``: Unix times between which the one that is served with is valid."""
        self._service = service
        self._certificate = certificate
        self._sandboxes = sandboxes
        self._telemetry = telemetry
        self._restarts = Restarts()

    def begin(self) -> None:
        """Begin at 0 what is rarely counted, so that the first time is seen as an increase."""
        metrics, models = self._telemetry.metrics, tuple(self._service.rooms)
        metrics.expect(names.SANDBOX_RESTARTS, model=models, role=ROLES)
        metrics.expect(names.SANDBOX_LOSSES, model=models, role=ROLES, reason=LOSS_REASONS)
        for counter in (names.REPLAYS, names.INTEGRITY_FAILURES):
            metrics.expect(counter, model=models)
        metrics.expect(names.POLICY_RELOADS, outcome=("ok", "failed"))

    def refresh(self) -> None:
        """Tell every level, and count the restarts and starts that have been added."""
        for sandbox, record in self._sandboxes.records.items():
            if more := self._restarts.since(sandbox, record.restarts):
                self._telemetry.count(names.SANDBOX_RESTARTS, more, model=sandbox[0], role=sandbox[1])
            for start in record.take_starts():
                self._telemetry.count(names.SANDBOX_STARTS, model=sandbox[0], role=sandbox[1], outcome=start)
        self._telemetry.levels(self._all())

    def _all(self) -> Iterator[Level]:
        for name, rooms in self._service.rooms.items():
            if rooms.engine is not None:
                yield from _engine(name, rooms.engine)
                yield from self._accounts(name, rooms.engine)
            yield from self._rooms(name, rooms)
            for one in self._service.publications.views(name):
                labels = {"tenant": f"public/{one.id}", "model": name}
                yield Level(names.KV_PUBLIC_BLOCKS, one.num_blocks, labels)
                yield Level(names.KV_PUBLIC_HITS, one.hits, labels)
        yield from self._records()
        for name, (remembered, certain) in self._service.suspicion(time.monotonic()).items():
            yield Level(names.SUSPECTS, remembered, {"model": name})
            yield Level(names.QUARANTINED, certain, {"model": name})
        told: list[Level] = []
        self._sandboxes.spill.tell(
            lambda name, value, **labels: told.append(Level(name, value, labels)), self._telemetry.count
        )
        yield from told
        audit = self._sandboxes.audit
        yield Level(names.AUDIT_FAILING, int(bool(audit.problem)), {})
        if self._certificate is not None:
            yield Level(names.CERTIFICATE_END, self._certificate[1], {})

    def _rooms(self, name: str, rooms: ModelRooms) -> Iterator[Level]:
        own = [one for one in self._service.house.rooms if one.name == name]
        for role, link in zip(ROLES, (rooms.engine, rooms.text), strict=True):
            labels = {"model": name, "role": role}
            yield Level(names.SANDBOX_READY, int(link is not None), labels)
            there = sum((one.engine if role == "engine" else one.text) is not None for one in own)
            yield Level(names.OWN_SANDBOXES, there, labels)

    def _records(self) -> Iterator[Level]:
        for (model, role, *tenant), record in self._sandboxes.records.items():
            labels = {"model": model, "role": role}
            if record.state == "ready" and record.memory_limit_bytes:
                yield Level(names.SANDBOX_MEMORY, record.memory_bytes, labels)
                yield Level(names.SANDBOX_MEMORY_LIMIT, record.memory_limit_bytes, labels)
            if record.away_s is not None and not tenant:
                yield Level(names.SANDBOX_AWAY, record.away_s, labels)

    def _accounts(self, model: str, engine: EngineLink) -> Iterator[Level]:
        """What each account has of an engine's KV."""
        for view in named(engine.kv, self._service.ledger.namespaces):
            use = view.use
            for gauge, value in (
                (names.KV_RESIDENT, use.resident),
                (names.KV_RESERVED, use.reserved),
                (names.KV_BORROWED, max(0, use.resident - use.reserved)),
                (names.KV_LOST, use.lost),
                (names.KV_PREEMPTED, use.preempted),
                (names.KV_WAITED, use.waited),
            ):
                yield Level(gauge, value, {"tenant": view.account, "model": model})


def _engine(name: str, engine: EngineLink) -> Iterator[Level]:
    stats = engine.stats
    for gauge, value in (
        (names.RUNNING, stats.running),
        (names.WAITING, stats.waiting),
        (names.KV_FREE_BLOCKS, stats.free_blocks),
        (names.ENGINE_DEFECTS, stats.defects),
        (names.KV_BLOCKS, engine.ready.num_blocks),
    ):
        yield Level(gauge, value, {"model": name})
