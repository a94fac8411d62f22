"""Gauges and counts that follow what engines and the supervisor tell, read every other second."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.gateway.engine_link import EngineLink
from appliance.gateway.kv_shares import named
from appliance.gateway.rooms import ModelRooms
from appliance.gateway.sandboxes import Sandboxes
from appliance.gateway.service import GatewayService
from appliance.telemetry import names
from appliance.telemetry.tracer import OtelTelemetry

GAUGE_PERIOD_S = 2.0
"""How often gauges follow the engines' counts, and engines are asked for progress."""


class Restarts:
    """Turns the supervisor's counts of restarts into what has been added; a new supervisor counts from nothing."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], int] = {}

    def since(self, sandbox: tuple[str, ...], total: int) -> int:
        """Restarts since the last call."""
        before, self._seen[sandbox] = self._seen.get(sandbox, 0), total
        return total - before if total >= before else total


class Gauges:
    """All gauges of a gateway's models, sandboxes and accounts."""

    def __init__(
        self,
        service: GatewayService,
        sandboxes: Sandboxes,
        telemetry: OtelTelemetry,
        rooms: Mapping[str, ModelRooms],
    ) -> None:
        self._service = service
        self._sandboxes = sandboxes
        self._telemetry = telemetry
        self._rooms = rooms
        self._restarts = Restarts()
        self._gauged: dict[str, set[str]] = {}
        """Of each model the accounts of KV that gauges were set for last."""

    def refresh(self) -> None:
        """Set every gauge to what is known now, and count what was added since the last call."""
        self._count_starts()
        for name, rooms in self._rooms.items():
            if rooms.engine is not None:
                self._show_engine(name, rooms.engine)
                self.show_accounts(name, rooms.engine)
            self._show_public(name)
            self._show_sandboxes(name, rooms)
        self._sandboxes.spill.tell(self._telemetry.gauge, self._telemetry.count)

    def _count_starts(self) -> None:
        for sandbox, record in self._sandboxes.records.items():
            if more := self._restarts.since(sandbox, record.restarts):
                self._telemetry.count(names.SANDBOX_RESTARTS, more, model=sandbox[0], role=sandbox[1])
            for start in record.take_starts():
                self._telemetry.count(names.SANDBOX_STARTS, model=sandbox[0], role=sandbox[1], outcome=start)

    def _show_engine(self, model: str, engine: EngineLink) -> None:
        stats = engine.stats
        for gauge, value in (
            (names.RUNNING, stats.running),
            (names.WAITING, stats.waiting),
            (names.KV_FREE_BLOCKS, stats.free_blocks),
            (names.ENGINE_DEFECTS, stats.defects),
            (names.KV_BLOCKS, engine.ready.num_blocks),
        ):
            self._telemetry.gauge(gauge, value, model=model)

    def show_accounts(self, model: str, engine: EngineLink) -> None:
        """What each account has of an engine's KV; one that the engine tells of no more has nothing."""
        views = named(engine.kv, self._service.ledger.namespaces)
        gone = self._gauged.get(model, set()) - {view.account for view in views}
        self._gauged[model] = {view.account for view in views}
        for account in gone:
            for gauge in (names.KV_RESIDENT, names.KV_RESERVED, names.KV_BORROWED):
                self._telemetry.gauge(gauge, 0, tenant=account, model=model)
        for view in views:
            use = view.use
            for gauge, value in (
                (names.KV_RESIDENT, use.resident),
                (names.KV_RESERVED, use.reserved),
                (names.KV_BORROWED, max(0, use.resident - use.reserved)),
                (names.KV_LOST, use.lost),
                (names.KV_PREEMPTED, use.preempted),
                (names.KV_WAITED, use.waited),
            ):
                self._telemetry.gauge(gauge, value, tenant=view.account, model=model)

    def _show_public(self, model: str) -> None:
        for one in self._service.publications.views(model):
            tenant = f"public/{one.id}"
            self._telemetry.gauge(names.KV_PUBLIC_BLOCKS, one.num_blocks, tenant=tenant, model=model)
            self._telemetry.gauge(names.KV_PUBLIC_HITS, one.hits, tenant=tenant, model=model)

    def _show_sandboxes(self, model: str, rooms: ModelRooms) -> None:
        own = [one for one in self._service.house.rooms if one.name == model]
        for role, link, count in (
            ("engine", rooms.engine, sum(one.engine is not None for one in own)),
            ("text", rooms.text, sum(one.text is not None for one in own)),
        ):
            self._telemetry.gauge(names.SANDBOX_READY, int(link is not None), model=model, role=role)
            self._telemetry.gauge(names.OWN_SANDBOXES, count, model=model, role=role)
