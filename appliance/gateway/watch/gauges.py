"""Engines, sandboxes and accounts as levels for the metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

import structlog

from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.control import LOSS_REASONS, SpillState
from appliance.common.kv_shares import named
from appliance.common.kv_store_state import FLEET_SHREDS, FLEET_STATE, STORE_STATE, FleetKeyState, KvStoreState
from appliance.common.sleep_rules import SLEEP_REASONS, SLEEP_STATES, WAKE_REASONS
from appliance.common.status import SERVING_STATES, serving_state
from appliance.gateway.front.connections import Places
from appliance.gateway.front.handshakes import Handshakes
from appliance.gateway.front.starts import Starts
from appliance.gateway.front.stranger_time import StrangerTime
from appliance.gateway.http.event_window import BackgroundRuns
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes.attached import Sandboxes
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.link import SandboxLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import Level
from appliance.gateway.telemetry.tracer import OtelTelemetry
from appliance.gateway.watch.cards import WatchedCards
from appliance.gateway.watch.definitions import kv_blocks, running, waiting
from appliance.gateway.watch.disks import Disks
from appliance.gateway.watch.engine_states import view_state
from appliance.gateway.watch.increases import Increases
from appliance.gateway.watch.state import PERIOD_S, ApplianceState
from appliance.gateway.watch.store_gauges import StoreGauges
from isolation.ipc.messages import weight_word
from policy.rates import TREATMENTS

log = structlog.get_logger()

TIERS = ("memory", "disk", "store")
STORE_OUTCOMES = ("stored", "store_restored", "store_lost", "store_away")
FLEET_OUTCOMES = (
    *("fleet_stored", "fleet_restored", "fleet_absent", "fleet_rejected"),
    *("fleet_left_out", "fleet_withdrawn"),
)
OWN_OUTCOMES = ("kept", "restored", "absent", "rejected_length", "rejected_seal", "evicted", "failed")
OUTCOMES = (*OWN_OUTCOMES, *STORE_OUTCOMES, *FLEET_OUTCOMES)
"""Outcomes of a block: all values of the label."""

KNOWN = frozenset(
    {
        *OUTCOMES,
        *(f"{tier}_{what}" for tier in TIERS for what in ("bytes", "objects")),
        *(STORE_STATE, FLEET_STATE, FLEET_SHREDS),
    }
)
STORE_PROBLEMS = {
    KvStoreState.CARRIER_AWAY: "carrier",
    KvStoreState.STORE_AWAY: "store",
    KvStoreState.REFUSES: "refused",
}
"""Values of the label ``reason``: what keeps the store outside from serving."""


ROLES = ("engine", "text")

REST_S = 10.0
"""Seconds between two looks at the levels of an appliance that serves nobody; a collector is sent them every 30 s."""


@dataclass(slots=True)
class SpillGauges:
    """Last state of KV outside of engines as the supervisor told it, and the part of it that was counted already."""

    state: dict[str, int] = field(default_factory=dict)
    """Figures by name; empty where nothing spills."""
    _counted: Increases = field(default_factory=lambda: Increases(ours=False))

    def take(self, message: SpillState) -> None:
        """Take a state that the supervisor sent.

        Raises:
            ValueError: no supervisor of this release sends it.
        """
        if message.figures.keys() != KNOWN or min(message.figures.values()) < 0:
            raise ValueError("figures of spill that no supervisor of this release gives")
        if message.figures[STORE_STATE] not in list(KvStoreState) or message.figures[FLEET_STATE] not in list(
            FleetKeyState
        ):
            raise ValueError("figures of spill that no supervisor of this release gives")
        self.state = dict(message.figures)

    @property
    def store_state(self) -> KvStoreState:
        """State of the store outside of this machine."""
        return KvStoreState(self.state.get(STORE_STATE, KvStoreState.NONE))

    @property
    def fleet_state(self) -> FleetKeyState:
        """Whether this host has the keys under which its fleet shares sealed KV."""
        return FleetKeyState(self.state.get(FLEET_STATE, FleetKeyState.NO_MEMBER))

    @property
    def fleet_shreds(self) -> int:
        """Shreds in the fleet that are not complete yet."""
        return self.state.get(FLEET_SHREDS, 0)

    def levels(self, count: Callable[..., None]) -> Iterator[Level]:
        """Yield the levels, and add to the counter."""
        if self.fleet_state is not FleetKeyState.NO_MEMBER:
            yield Level(names.FLEET_KEYS_HELD, int(self.fleet_state is FleetKeyState.HELD), {})
            yield Level(names.FLEET_SHREDS, self.fleet_shreds, {})
        for state, reason in STORE_PROBLEMS.items() if self.store_state else ():
            yield Level(names.KV_STORE_AWAY, int(self.store_state is state), {"reason": reason})
        for tier in TIERS if self.state else ():
            yield Level(names.SPILL_BYTES, self.state[f"{tier}_bytes"], {"tier": tier})
            yield Level(names.SPILL_OBJECTS, self.state[f"{tier}_objects"], {"tier": tier})
        for outcome in OUTCOMES if self.state else ():
            more = self._counted.since((outcome,), self.state[outcome])
            # Zero too, so that a series is there before the first block of its kind is.
            count(names.SPILL_BLOCKS, more, outcome=outcome)


@dataclass(slots=True)
class DoorGauges:
    """Connections of the tenants' listeners, and turns of what comes there."""

    places: Mapping[tuple[str, str], Places]
    """Front end (http, grpc) and the one tenant that a listener takes, empty for all -> its places."""
    handshakes: Handshakes
    starts: Starts
    stranger_time: StrangerTime
    background: BackgroundRuns
    """Responses that go on without their client."""
    _counted: Increases = field(default_factory=lambda: Increases(ours=True))

    def levels(self, count: Callable[..., None]) -> Iterator[Level]:
        """Yield the levels, and add to the counters."""
        for (front_end, listener), places in self.places.items():
            which = {"front_end": front_end, "listener": listener}
            for holder, held in (("known", places.held - places.strangers), ("stranger", places.strangers)):
                yield Level(names.CONNECTIONS, held, {**which, "holder": holder})
            evicted = self._counted.since(("evicted", front_end, listener), places.evicted)
            count(names.EVICTED_CONNECTIONS, evicted, **which)
        count(names.DELAYED_HANDSHAKES, self._counted.since(("delayed",), self.handshakes.delayed))
        yield Level(names.BACKGROUND_STREAMS, self.background.held, {})
        yield Level(names.BACKGROUND_BYTES, self.background.size, {})
        yield Level(names.WAITING_HANDSHAKES, self.handshakes.waiting, {})
        yield Level(names.WAITING_STRANGERS, len(self.starts.strangers), {"what": "request"})
        yield Level(names.WAITING_STRANGERS, self.stranger_time.waiting, {"what": "connection"})


class Gauges:
    """Levels read from the gateway's state; ``refresh`` is one look."""

    def __init__(
        self,
        service: GatewayService,
        sandboxes: Sandboxes,
        spill: SpillGauges,
        telemetry: OtelTelemetry,
        certificate: Callable[[], tuple[float, float] | None] = lambda: None,
        disks: Disks | None = None,
        stored: StoreGauges | None = None,
    ) -> None:
        """``certificate``: gives the Unix times between which the one in use is valid; ``disks``: what the
        supervisor tells of them; ``stored``: what it keeps of files and batches."""
        self._service = service
        self._certificate = certificate
        self._sandboxes = sandboxes
        self._spill, self._disks, self._stored = spill, disks or Disks(), stored or StoreGauges()
        self._telemetry = telemetry
        self.door: DoorGauges | None = None
        self.store_problem: Callable[[], str | None] = lambda: None
        """Why the fleet's store does not answer; None where there is none."""
        """Gauges of the tenants' ports; None before they are open."""
        self.cards = WatchedCards()
        """GPUs as the supervisor tells of them; ``watch_engines`` puts the appliance's in place."""
        self._restarts = Increases(ours=False)
        self._tokens = Increases(ours=True)
        self._refreshed, self._served = -inf, False
        """When it was refreshed last, and whether requests ran at the last look."""

    def begin(self) -> None:
        """Begin at 0 what is rarely counted, so that the first time is seen as an increase."""
        self.expect(tuple(self._service.model_sandboxes))
        metrics = self._telemetry.metrics
        metrics.expect(names.POLICY_RELOADS, outcome=("ok", "failed"))
        limits = tuple(TREATMENTS.values())
        metrics.expect(names.QUEUED_REQUESTS, rule=limits, outcome=names.QUEUE_OUTCOMES)
        metrics.expect(names.DOWNGRADED_REQUESTS, rule=limits)

    def expect(self, models: tuple[str, ...]) -> None:
        """Begin at 0 what is rarely counted of these models."""
        metrics = self._telemetry.metrics
        metrics.expect(names.SANDBOX_RESTARTS, model=models, role=ROLES)
        for counter in (names.SANDBOX_HANGS, names.HAND_OVER_CUTS):
            metrics.expect(counter, model=models, role=ROLES)
        metrics.expect(names.SANDBOX_LOSSES, model=models, role=ROLES, reason=LOSS_REASONS)
        for counter in (names.REPLAYS, names.INTEGRITY_FAILURES):
            metrics.expect(counter, model=models)
        for counter in (names.SANDBOX_THAWS, names.MODEL_REFUSALS):
            metrics.expect(counter, model=models)
        metrics.expect(names.MODEL_WAKES, model=models, reason=WAKE_REASONS)
        metrics.expect(names.MODEL_SLEEPS, model=models, reason=SLEEP_REASONS)

    def check_engines(self, step_timeout_s: float) -> None:
        """Count integrity failures, probe idle sandboxes, and end those that have answered nothing for so many seconds:
        engines no request, idle ones no probe."""
        for model in self._sandboxes.every:
            engine, text = model.engine, model.text
            if engine is not None:
                self._service.take_integrity(model, engine)
                engine.check_progress(step_timeout_s)
                self._follow(model, "engine", engine)
            if text is not None:
                text.check_alive(step_timeout_s)
                self._follow(model, "text", text)

    def _follow(self, model: ModelSandboxes, role: str, link: SandboxLink) -> None:
        """Count and log a sandbox that has begun to hang, and one that answers again."""
        record = model.record(role)
        if link.closed or bool(link.hang) is bool(record.hang):
            return
        which = {"model": model.name, "role": role, "tenant": model.tenant, "generation": link.generation}
        if link.hang:
            log.warning("sandbox hangs", why=link.hang, **which)
            self._telemetry.count(names.SANDBOX_HANGS, model=model.name, role=role)
        else:
            log.info("sandbox answers again", **which)
        record.hang = link.hang

    def keep_fresh(self) -> None:
        """Refresh what a collector is sent, which no scrape asks for: at each call while requests run and once more
        behind the last, else every ``REST_S``. To be called every few seconds."""
        served, self._served = self._served, bool(self._service.live)
        if served or self._served or time.monotonic() >= self._refreshed + REST_S:
            self.refresh()

    def refresh(self) -> None:
        """Tell every level, and count the tokens, restarts and starts that have been added: what a scrape then reads
        is of this moment."""
        self._refreshed = time.monotonic()
        for (tenant, model_name, kind), total in self._service.tenant_counts.moved().items():
            if more := self._tokens.since((tenant, model_name, kind), total):
                self._telemetry.count(names.TOKENS, more, token_type=kind, tenant=tenant, model=model_name)
        for model in self._sandboxes.every:
            for role, record in model.records.items():
                if more := self._restarts.since((model.name, role, model.tenant), record.restarts):
                    self._telemetry.count(names.SANDBOX_RESTARTS, more, model=model.name, role=role)
                for start in record.take_starts():
                    self._telemetry.count(names.SANDBOX_STARTS, model=model.name, role=role, outcome=start)
        self._telemetry.levels(self._all())

    def _all(self) -> Iterator[Level]:
        for model in self._sandboxes.every:
            if model.engine is not None:
                yield from _engine(model.name, model.engine)
                yield from self._accounts(model.name, model.engine)
        yield from self._weights()
        yield from self._states()
        for name, model in self._service.model_sandboxes.items():
            yield from self._readiness(name, model)
            for one in self._service.publications.views(name):
                labels = {"tenant": f"public/{one.id}", "model": name}
                yield Level(names.KV_PUBLIC_BLOCKS, one.num_blocks, labels)
                yield Level(names.KV_PUBLIC_HITS, one.hits, labels)
        yield from self._records()
        for name, (remembered, certain) in self._service.suspicion(time.monotonic()).items():
            yield Level(names.SUSPECTS, remembered, {"model": name})
            yield Level(names.QUARANTINED, certain, {"model": name})
        yield Level(names.WAITING_REQUESTS, len(self._service.ledger.lines), {})
        yield from self._spill.levels(self._telemetry.count)
        yield from self._disks.levels()
        yield from self.cards.levels(self._telemetry.count)
        yield from self._stored.levels()
        if self.door is not None:
            yield from self.door.levels(self._telemetry.count)
        yield Level(names.AUDIT_FAILING, int(bool(self._service.audit.problem)), {})
        yield Level(names.AUDIT_UNWITNESSED, int(bool(self._service.audit.witness)), {})
        if (problem := self.store_problem()) is not None:
            yield Level(names.FLEET_STORE_AWAY, int(bool(problem)), {})
        if (dates := self._certificate()) is not None:
            yield Level(names.CERTIFICATE_END, dates[1], {})

    def _weights(self) -> Iterator[Level]:
        engines = [(model.name, model.engine) for model in self._sandboxes.every]
        found = Counter((name, weight_word(one.ready.weights)) for name, one in engines if one is not None)
        for (name, form), number in found.items():
            if form:
                yield Level(names.MODEL_WEIGHTS, number, {"model": name, "form": form})

    def _states(self) -> Iterator[Level]:
        found = Counter(model_state(model) for model in self._service.model_sandboxes.values())
        for state in SERVING_STATES:
            yield Level(names.MODELS, found[state], {"state": state})

    def _readiness(self, name: str, model: ModelSandboxes) -> Iterator[Level]:
        own = [one for one in self._service.tenant_sandboxes.resident if one.name == name]
        for state in SLEEP_STATES:
            yield Level(names.MODEL_STATE, int(model.sleep_state.state == state), {"model": name, "state": state})
        if model.sleep_state.wake_s:
            yield Level(names.MODEL_WAKE_TIME, model.sleep_state.wake_s, {"model": name})
        for role, link in zip(ROLES, (model.engine, model.text), strict=True):
            labels = {"model": name, "role": role}
            if model.sleep_state.awake or link is not None:  # Else nothing is missing.
                yield Level(names.SANDBOX_READY, int(link is not None and not link.hang), labels)
            links = [one.engine if role == "engine" else one.text for one in own]
            there = sum(one is not None and not one.hang for one in links)
            yield Level(names.OWN_SANDBOXES, there, labels)

    def _records(self) -> Iterator[Level]:
        for model in self._sandboxes.every:
            for role, record in model.records.items():
                labels = {"model": model.name, "role": role}
                if record.state == "ready" and record.memory_limit_bytes:
                    yield Level(names.SANDBOX_MEMORY, record.memory_bytes, labels)
                    yield Level(names.SANDBOX_MEMORY_LIMIT, record.memory_limit_bytes, labels)
                if record.state == "ready" and role == "engine" and not model.tenant:
                    yield Level(names.MODEL_RANKS, record.ranks, {"model": model.name})
                if not model.tenant:
                    yield Level(names.SANDBOX_FROZEN, int(record.frozen), labels)
                if record.away_s is not None and not model.tenant:
                    yield Level(names.SANDBOX_AWAY, record.away_s, labels)

    def _accounts(self, model: str, engine: EngineLink) -> Iterator[Level]:
        """Yield the KV blocks of each account in an engine."""
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


def model_state(model: ModelSandboxes) -> str:
    """Return which of ``SERVING_STATES`` a model's shared sandboxes are in."""
    return serving_state(view_state(model, there=model.ready), [record.state for record in model.records.values()])


def _engine(name: str, engine: EngineLink) -> Iterator[Level]:
    pool = kv_blocks(engine)
    for gauge, value in (
        (names.RUNNING, running(engine)),
        (names.WAITING, waiting(engine)),
        (names.KV_FREE_BLOCKS, pool.free),
        (names.KV_CACHED_BLOCKS, pool.cached),
        (names.ENGINE_DEFECTS, engine.stats.defects),
        (names.KV_BLOCKS, pool.total),
    ):
        yield Level(gauge, value, {"model": name})


async def watch_engines(
    state: ApplianceState, gauges: Gauges, step_timeout_s: Callable[[], float], freeze: Callable[[], None]
) -> None:
    """Follow the engines until cancelled: history, gauges, which engine makes no progress, and which is idle. At the
    end a collector is sent what was counted since the last look."""
    gauges.cards = state.cards
    gauges.begin()
    try:
        while True:
            state.note()
            freeze()
            gauges.check_engines(step_timeout_s())
            gauges.keep_fresh()
            await aligned_sleep(PERIOD_S)
    except asyncio.CancelledError:
        gauges.refresh()
        raise
