"""State of the appliance, built in one place for status, top, readiness, alerts and the console. Reads, never changes;
what it keeps is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from appliance.common.status import Alert, ApplianceStatus, Latency, ModelView, Point, Readiness
from appliance.common.version import VERSION
from appliance.gateway.console.alerts import Facts, alerts
from appliance.gateway.console.latency import latency
from appliance.gateway.console.look import MAX_OWN_SANDBOXES, MAX_TRACE_ROWS, Look, Question, Requests
from appliance.gateway.policy_file import PolicyFile
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes.attached import Sandboxes
from appliance.gateway.telemetry.store import MAX_TRACES, TraceList, TraceStore, TraceSummary
from appliance.gateway.watch.disks import Disks
from appliance.gateway.watch.engine_states import EngineStates, running, waiting
from appliance.gateway.watch.history import History
from appliance.gateway.watch.tenant_states import TenantStates
from policy.evaluate import visible_models
from policy.model import PolicySet

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
        clock: Callable[[], float] = time.time,
        certificate: tuple[float, float] | None = None,
        disks: Disks | None = None,
    ) -> None:
        """``certificate``: Unix times between which the one that is served with is valid; ``disks``: what the
        supervisor tells of them."""
        self._service, self._sandboxes, self._policy, self._traces = service, sandboxes, policy, traces
        self._clock, self._certificate, self._disks = clock, certificate, disks or Disks()
        self._started_at = clock()
        self._history = History()
        self._engines = EngineStates(sandboxes, service.ledger)
        self._tenants = TenantStates(service.ledger, service.tenant_counts, self._history, self._engines)
        self._users: tuple[str, dict[str, int]] = ("", {})

    def note(self) -> None:
        """Keep a point of the history, and now and then the tenants' counts."""
        now, engines = self._clock(), self._engines.engines
        for model in self._sandboxes.every:
            self._engines.tokens.look(model)
        blocks = sum(engine.ready.num_blocks for engine in engines)
        held = blocks - sum(engine.stats.free_blocks for engine in engines)
        self._history.add(
            Point(
                at=now,
                tokens=self._engines.tokens.total,
                running=sum(map(running, engines)),
                waiting=sum(map(waiting, engines)),
                kv_held=held / blocks if blocks else 0.0,
                restarts=sum(one.restarts for model in self._sandboxes.every for one in model.records.values()),
            )
        )
        self._tenants.mark(now)

    def readiness(self) -> Readiness:
        """Return whether a request would be taken now."""
        models = self._service.model_sandboxes
        missing = [name for name, model in models.items() if not model.ready]
        if any(model.draining for model in models.values()):
            return Readiness(ready=False, reason="draining")
        if missing:
            return Readiness(ready=False, reason=f"sandboxes of {', '.join(missing)} are not up")
        hanging = [name for name, model in models.items() if model.engine is not None and model.engine.progress.hangs]
        if hanging:
            return Readiness(ready=False, reason=f"engines of {', '.join(hanging)} have work and compute nothing")
        return Readiness(ready=True)

    def status(self) -> ApplianceStatus:
        """Return the whole state without pages, for ``athanor status`` and ``athanor top``."""
        service, attachment, now = self._service, self._sandboxes.attachment, self._clock()
        policy = service.ledger.policy
        return ApplianceStatus(
            version=VERSION,
            started_at=self._started_at,
            sandbox=attachment.sandbox,
            cgroup=attachment.limits,
            models=tuple(map(self._engines.status, service.model_sandboxes.values())),
            own=tuple(map(self._engines.status, service.tenant_sandboxes.resident)),
            public=tuple(service.publications.views()),
            tenants=tuple(self._tenants.status(tenant, now) for tenant in policy.tenants.values()),
            policy=self._policy.status(policy),
            rates_over_s=self._history.marked_s(now),
            alerts=self.alerts(),
        )

    def look(self, question: Question, page: str) -> Look:
        """Return what the console's page shows; ``page`` is the digest of the page's files."""
        now, service, attachment = self._clock(), self._service, self._sandboxes.attachment
        newest = self._traces.newest(MAX_TRACES)
        times = latency(newest.traces, now)
        models, own = self._views()
        mark = f"{newest.recorded}/{question.outcome}"
        return Look(
            now=now,
            version=VERSION,
            page=page,
            started_at=self._started_at,
            ready=all(model.ready for model in service.model_sandboxes.values()),
            sandbox=attachment.sandbox,
            limits=attachment.limits,
            tokens=self._engines.tokens.total,
            alerts=alerts(self._facts(now, models, own, times, newest.traces)),
            models=models,
            own=own,
            own_total=len(service.tenant_sandboxes.resident),
            tenants=self._tenants.page(question, now),
            latency=times,
            policy=self._policy.status(service.ledger.policy),
            period_s=PERIOD_S,
            points=self._history.after(question.after),
            requests=None if mark == question.seen else _requests(mark, newest, question.outcome),
        )

    def alerts(self) -> tuple[Alert, ...]:
        """Return what the operator should know now, the worst first."""
        now, newest = self._clock(), self._traces.newest(MAX_TRACES).traces
        return alerts(self._facts(now, *self._views(), latency(newest, now), newest))

    def _views(self) -> tuple[tuple[ModelView, ...], tuple[ModelView, ...]]:
        """Return the models' shared sandboxes, and some of single tenants."""
        resident = self._service.tenant_sandboxes.resident[:MAX_OWN_SANDBOXES]
        shared = self._service.model_sandboxes.values()
        return tuple(map(self._engines.view, shared)), tuple(map(self._engines.view, resident))

    def _facts(
        self,
        now: float,
        models: tuple[ModelView, ...],
        own: tuple[ModelView, ...],
        times: Latency,
        newest: tuple[TraceSummary, ...],
    ) -> Facts:
        service, attachment = self._service, self._sandboxes.attachment
        policy = service.ledger.policy
        return Facts(
            now=now,
            attached=attachment.attached,
            draining=any(model.draining for model in service.model_sandboxes.values()),
            sandbox=attachment.sandbox if attachment.attached else "",
            models=models,
            own=own,
            users=self._num_users(policy),
            num_tenants=len(policy.tenants),
            policy=self._policy.status(policy),
            audit_problem=service.audit.problem,
            audit_refuses=service.audit.refuses,
            integrity_failures=service.integrity_failures,
            silence_s={one.name: one.engine.progress.silence_s for one in self._sandboxes.every if one.engine},
            defects=sum(engine.stats.defects for engine in self._engines.engines),
            points=self._history.points,
            latency=times,
            newest=newest,
            certificate=self._certificate,
            disks=self._disks.spaces,
        )

    def _num_users(self, policy: PolicySet) -> dict[str, int]:
        """Count the tenants that may use each model, once for each policy."""
        if self._users[0] != policy.digest:
            models = self._service.model_sandboxes
            counts = dict.fromkeys(models, 0)
            for tenant in policy.tenants:
                for model in visible_models(policy, tenant, models):
                    counts[model] += 1
            self._users = policy.digest, counts
        return self._users[1]


def _requests(mark: str, newest: TraceList, outcome: str) -> Requests:
    wanted = [one for one in newest.traces if not outcome or one.outcome == outcome]
    rows = tuple(wanted[:MAX_TRACE_ROWS])
    return Requests(mark=mark, recorded=newest.recorded, kept=len(newest.traces), rows=rows)
