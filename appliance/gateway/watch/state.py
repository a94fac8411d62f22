"""State of the appliance, built in one place for status, top, readiness, alerts and the console. Reads, never changes;
what it keeps is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from appliance.common.batch_status import BatchQueue
from appliance.common.clocks import Clocks
from appliance.common.fleet_status import FleetStatus
from appliance.common.kv_store_state import KvStoreState
from appliance.common.shadow_status import ShadowStatus
from appliance.common.status import Alert, ApplianceLoad, ApplianceStatus, Latency, ModelView, Point, Readiness
from appliance.common.version import VERSION
from appliance.gateway.console.alerts import RECENT_S, Facts, alerts
from appliance.gateway.console.fleet import ConsoleFleet
from appliance.gateway.console.latency import WINDOW_S, latency
from appliance.gateway.console.look import MAX_OWN_SANDBOXES, MAX_TRACE_ROWS, Look, Question, Requests
from appliance.gateway.console.usage import ConsoleUsage
from appliance.gateway.policy_file import PolicyFile
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes.attached import Sandboxes
from appliance.gateway.sandboxes.model_leaving import Leaving
from appliance.gateway.telemetry.store import MAX_TRACES, Ended, TraceList, TraceStore
from appliance.gateway.watch.cards import WatchedCards
from appliance.gateway.watch.definitions import held_share, load
from appliance.gateway.watch.disks import Disks
from appliance.gateway.watch.engine_states import EngineStates
from appliance.gateway.watch.history import History, Samples
from appliance.gateway.watch.live_work import LiveWork
from appliance.gateway.watch.tenant_states import TenantStates
from policy.model import PolicySet
from policy.routes import reachable

PERIOD_S = 2.0
"""Seconds between two points of the history: the gateway looks at its engines that often in any case."""


class ApplianceState:
    """Builds the state. ``note`` is called every ``PERIOD_S``; all else answers one question."""

    def __init__(
        self,
        service: GatewayService,
        sandboxes: Sandboxes,
        policy: PolicyFile,
        traces: TraceStore,
        clocks: Clocks | None = None,
        certificate: Callable[[], tuple[float, float] | None] = lambda: None,
        disks: Disks | None = None,
    ) -> None:
        """``certificate``: gives the Unix times between which the one in use is valid; ``disks``: what the supervisor
        tells of them."""
        self._service, self._sandboxes, self._policy, self._traces = service, sandboxes, policy, traces
        self.batches: Callable[[], BatchQueue | None] = lambda: None
        """Batches that are not over, and what is kept; the process puts it in place."""
        self.charges: Callable[[], str] = lambda: ""
        """Why charges would not outlive the gateway, or nothing; the process puts it in place."""
        self._clocks, self._certificate, self._disks = clocks or Clocks(), certificate, disks or Disks()
        self.work = LiveWork(service)
        """Requests that run, for the operator."""
        self.fleet: Callable[[], FleetStatus] = FleetStatus
        """This host's part in a fleet; the process puts it in place once its listeners are known."""
        self.kv_store: Callable[[], KvStoreState] = lambda: KvStoreState.NONE
        """State of the store outside of this machine; the process puts it in place."""
        self.cards = WatchedCards()
        """What the supervisor tells of GPUs."""
        self._started_at, self._began = self._clocks.wall(), self._clocks.monotonic()
        self._history, self._samples = History(), Samples()
        self._engines = EngineStates(sandboxes, service.ledger, self._clocks)
        self._tenants = TenantStates(service.ledger, service.tenant_counts, self._samples, self._engines)
        self.usage = ConsoleUsage(service.questions, lambda: service.ledger.policy, service.ledger.spends.parts)
        """Answers the operator's page of usage."""
        self.hosts = ConsoleFleet(self.status)
        """Answers the operator's page of the fleet; the process puts one with the list of hosts in place."""
        self._users: tuple[str, tuple[str, ...], dict[str, int]] = ("", (), {})

    def note(self) -> None:
        """Keep a point of the history, and a sample of the counts."""
        models = self._every()
        now = self._load(models)
        self._history.add(
            Point(
                at=now.up_s,
                tokens=now.counts.output_tokens,
                running=now.running,
                waiting=now.waiting,
                kv_held=held_share(view.kv for view in models),
                restarts=now.restarts,
            )
        )

    def shadow(self) -> ShadowStatus:
        """Return what the shadow policy would have decided."""
        return self._policy.shadow_status(self._service.shadows.running)

    def readiness(self) -> Readiness:
        """Return whether a request would be taken now."""
        models = self._service.model_sandboxes
        missing = self._missing()
        if self._service.operator_drain.draining:
            return Readiness(ready=False, reason="drained by the operator")
        if self._service.operator_drain.leaving or any(model.draining for model in models.values()):
            return Readiness(ready=False, reason="draining")
        if missing:
            return Readiness(ready=False, reason=f"sandboxes of {', '.join(missing)} are not up")
        hangs = [f"{role} of {name} {why}" for name, one in models.items() for role, why in one.hangs.items()]
        if hangs:
            return Readiness(ready=False, reason=f"sandboxes hang: {', '.join(hangs)}")
        return Readiness(ready=True)

    def ready(self) -> bool:
        """Return whether a request would be taken now."""
        return self.readiness().ready

    def _missing(self) -> list[str]:
        """Return the models that ought to answer and are not there. One that sleeps is none of them, and one that has
        just come, or is being taken away, neither, as long as another answers."""
        models = [one for one in self._service.model_sandboxes.values() if one.leaving is Leaving.NO]
        away = [one.name for one in models if not one.ready and one.sleep_state.awake]
        late = {one.name for one in models if one.arriving}
        return [name for name in away if name not in late] or (away if len(away) == len(models) else [])

    def status(self) -> ApplianceStatus:
        """Return the whole state without pages, for ``athanor status`` and ``athanor top``."""
        service, attachment = self._service, self._sandboxes.attachment
        policy, now = service.ledger.policy, self._load(self._every())
        return ApplianceStatus(
            version=VERSION,
            started_at=self._started_at,
            sandbox=attachment.sandbox,
            cgroup=attachment.limits,
            models=tuple(map(self._engines.status, service.model_sandboxes.values())),
            own=tuple(map(self._engines.status, service.tenant_sandboxes.resident)),
            public=tuple(service.publications.views()),
            tenants=self._tenants.all(),
            policy=self._policy.status(policy, self._clocks),
            load=now,
            latency=latency(self._traces.ended(WINDOW_S)),
            alerts=self.alerts(),
            cards=self.cards.cards,
            batches=self.batches(),
            fleet=self.fleet(),
            checkpoints=self._disks.checkpoints.found,
        )

    def look(self, question: Question, page: str) -> Look:
        """Return what the console's page shows; ``page`` is the digest of the page's files."""
        service, attachment = self._service, self._sandboxes.attachment
        newest, ended = self._traces.newest(MAX_TRACES), self._traces.ended(WINDOW_S)
        times = latency(ended)
        models, own = self._views()
        now = self._load((*models, *own))
        mark = f"{newest.recorded}/{question.outcome}"
        return Look(
            now=self._clocks.wall(),
            version=VERSION,
            page=page,
            started_at=self._started_at,
            ready=not self._missing() and not any(one.hangs for one in service.model_sandboxes.values()),
            sandbox=attachment.sandbox,
            limits=attachment.limits,
            load=now,
            alerts=alerts(self._facts(models, own, times, ended)),
            models=models,
            cards=self.cards.cards,
            batches=self.batches(),
            own=own[:MAX_OWN_SANDBOXES],
            own_total=len(service.tenant_sandboxes.resident),
            tenants=self._tenants.page(question),
            latency=times,
            policy=self._policy.status(service.ledger.policy, self._clocks),
            period_s=PERIOD_S,
            points=self._history.after(question.after),
            requests=None if mark == question.seen else _requests(mark, newest, question.outcome),
        )

    def alerts(self) -> tuple[Alert, ...]:
        """Return what the operator should know now, the worst first."""
        ended = self._traces.ended(WINDOW_S)
        return alerts(self._facts(*self._views(), latency(ended), ended))

    def _views(self) -> tuple[tuple[ModelView, ...], tuple[ModelView, ...]]:
        """Return the models' shared sandboxes, and those of single tenants."""
        resident = self._service.tenant_sandboxes.resident
        shared = self._service.model_sandboxes.values()
        return tuple(map(self._engines.view, shared)), tuple(map(self._engines.view, resident))

    def _every(self) -> tuple[ModelView, ...]:
        """Return the sandboxes of all models, shared ones first."""
        shared, own = self._views()
        return (*shared, *own)

    def _load(self, models: tuple[ModelView, ...]) -> ApplianceLoad:
        """Return what the appliance does now, with a sample of the counts if the last is not of this moment."""
        self._samples.take(self._clocks.monotonic(), self._service.tenant_counts.now)
        _, total = self._service.tenant_counts.now()
        up_s = self._clocks.monotonic() - self._began
        return load(models, total, self._samples.rates, in_flight=self._tenants.in_flight, up_s=up_s)

    def _facts(
        self, models: tuple[ModelView, ...], own: tuple[ModelView, ...], times: Latency, ended: tuple[Ended, ...]
    ) -> Facts:
        service, attachment = self._service, self._sandboxes.attachment
        policy = service.ledger.policy
        return Facts(
            now=self._clocks.wall(),
            up_s=self._clocks.monotonic() - self._began,
            attached=attachment.attached,
            draining=any(model.draining for model in service.model_sandboxes.values()),
            sandbox=attachment.sandbox if attachment.attached else "",
            models=models,
            own=own[:MAX_OWN_SANDBOXES],
            users=self._num_users(policy),
            num_tenants=len(policy.tenants),
            policy=self._policy.status(policy, self._clocks),
            audit_problem=service.audit.problem,
            audit_refuses=service.audit.refuses,
            audit_witness=service.audit.witness,
            integrity_failures=service.integrity_failures,
            silence_s={one.name: one.engine.progress.silence_s for one in self._sandboxes.every if one.engine},
            defects=sum(engine.stats.defects for engine in self._engines.engines),
            points=self._history.points,
            latency=times,
            recent=tuple(one.summary for one in ended if one.age_s <= RECENT_S),
            certificate=self._certificate(),
            disks=self._disks.spaces,
            cards=self.cards.cards,
            cards_problem=self.cards.problem,
            batches=self.batches(),
            unplaced=frozenset(self.cards.unplaced),
            charges_problem=self.charges(),
            kv_store=self.kv_store(),
        )

    def _num_users(self, policy: PolicySet) -> dict[str, int]:
        """Count the tenants that may use each model, once for each policy and lists of models and adapters."""
        models = tuple(self._service.model_sandboxes)
        if self._users[:2] != (policy.digest, models):
            counts = dict.fromkeys(models, 0)
            lists = Counter((tenant.models, tenant.adapters) for tenant in policy.tenants.values())
            for (patterns, adapters), tenants in lists.items():
                for model in reachable(policy.routes, patterns, adapters, models):
                    counts[model] += tenants
            self._users = policy.digest, models, counts
        return self._users[2]


def _requests(mark: str, newest: TraceList, outcome: str) -> Requests:
    wanted = [one for one in newest.traces if not outcome or one.outcome == outcome]
    rows = tuple(wanted[:MAX_TRACE_ROWS])
    return Requests(mark=mark, recorded=newest.recorded, kept=len(newest.traces), rows=rows)
