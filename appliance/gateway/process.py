"""The gateway process: front ends, admin listener, sessions. It can be reached from the network, so it holds no root
key, starts no program and reads no model file."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import structlog

from appliance.common import notify
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.control import (
    AuditState,
    Control,
    Frozen,
    Namespaces,
    SpendReserved,
    Spent,
    SpillState,
    StoreState,
    StoreUp,
    Welcome,
)
from appliance.common.control_cards import CardState
from appliance.common.control_charges import ChargesUp
from appliance.common.control_models import ModelRest
from appliance.common.errors import ConfigError, StartError
from appliance.common.kept_tasks import kept_task, log_failure
from appliance.common.kv_shares import account_names, shown
from appliance.common.log import report_callbacks
from appliance.common.paths import CONTROL_SOCKET
from appliance.common.status import ReloadOutcome
from appliance.common.version import VERSION
from appliance.gateway.batches.wiring import Batches
from appliance.gateway.config_file import ConfigFile, Reread
from appliance.gateway.console.fleet import ConsoleFleet
from appliance.gateway.external.attach import ExternalModels
from appliance.gateway.fleet.sharing import Sharing, open_sharing
from appliance.gateway.fleet.split import Split
from appliance.gateway.forgetting import keep_forgetting, unforgettable, wiping_problem
from appliance.gateway.free_memory import keep_giving_back
from appliance.gateway.front.credentials import Credentials
from appliance.gateway.front.tls_files import CertificateDates
from appliance.gateway.model_table import ModelTable, ServedNames, shared_sandboxes
from appliance.gateway.policy_file import PolicyFile
from appliance.gateway.request.audit_feed import AuditFeed, NoAuditFeed
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.service import GatewayService
from appliance.gateway.request.spend import Spends
from appliance.gateway.sandboxes.attached import Sandboxes, TakeFds
from appliance.gateway.sandboxes.charge_memory import ChargeMemory
from appliance.gateway.sandboxes.freezer import Freezer
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes, first_ready
from appliance.gateway.sandboxes.namespace_keys import NamespaceKeys, retention_of
from appliance.gateway.sandboxes.publications import published_for
from appliance.gateway.sandboxes.questions import SupervisorQuestions
from appliance.gateway.sandboxes.sleep_control import SleepControl
from appliance.gateway.sandboxes.sleep_decisions import TURNED_AWAY, WOKEN, SleepDecisions
from appliance.gateway.sandboxes.spend_records import SpendRecords, spending, unaccountable
from appliance.gateway.sandboxes.supervisor_link import SupervisorLink
from appliance.gateway.sandboxes.tenant_sandboxes import TenantSandboxes
from appliance.gateway.servers import FrontEnds, FrontEndSettings, serve_front_ends
from appliance.gateway.shared_runs import SharedRuns
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.tracer import OtelTelemetry, TelemetrySettings, open_telemetry
from appliance.gateway.watch.admin_listener import routes_of, serve_admin
from appliance.gateway.watch.disks import Disks
from appliance.gateway.watch.fleet_state import fleet_status
from appliance.gateway.watch.gauges import DoorGauges, Gauges, SpillGauges, watch_engines
from appliance.gateway.watch.metrics_listener import serve_metrics
from appliance.gateway.watch.picker_page import picker_page
from appliance.gateway.watch.remote_admin import Observers
from appliance.gateway.watch.state import ApplianceState
from appliance.gateway.watch.store_gauges import StoreGauges
from policy.model import PolicySet, Retention

log = structlog.get_logger()

T = TypeVar("T")

DRAIN_S = 20.0
"""How long running requests may take to end after SIGTERM."""

FIRST_READY_S = 600.0
"""How long the first boot of all models may take: large weights are read from slow disks."""

KEPT_WAIT_S = 30.0
"""How long connections wait, at a socket that was kept over a restart, for a model to answer; then they are taken and
told what is the matter."""

YOUNG_OBJECTS = 20_000
"""Container objects that may be made before the collector looks at them, in place of 700: a request makes some hundred,
nearly all of which are freed by counting, and each look costs about a millisecond when hundreds of streams are open."""


class Gateway:
    """One gateway process: wires its parts, then runs them until it is told to stop."""

    def __init__(self, config: ApplianceConfig, *, alone: bool = False, reread: Reread | None = None) -> None:
        """Make all parts.

        Args:
            config: the configuration.
            alone: no launcher started a supervisor with it and would notice that supervisor's end.
            reread: reads the configuration again, for a reload.
        """
        self._config, self._config_file = config, ConfigFile(config, reread)
        self._alone, self._hopeless = alone, ""
        self._gauges: Gauges | None = None
        self._models = shared_sandboxes(config)
        names = ServedNames(self._models)
        hosts = 1 if config.fleet is None else len(config.fleet.hosts)
        self._file = PolicyFile(config.policy, config.credentials, config.pepper, names, config.policy_keys, hosts)
        policy = self._file.load()
        self._wiping_problem = wiping_problem(wanted=config.wipe_memory)
        if found := self._unusable(policy):
            raise ConfigError("\n".join(found))
        self._telemetry: OtelTelemetry = open_telemetry(TelemetrySettings(version=VERSION))
        supervisor = SupervisorLink(config.run_dir / CONTROL_SOCKET)
        tenant_sandboxes = TenantSandboxes(config.sandbox.residents, supervisor.tell)
        tenant_sandboxes.reconsider(policy)
        self._audit = AuditFeed(supervisor.report) if config.audit is not None else NoAuditFeed()
        ledger = Ledger(policy, {}, spends=(spends := Spends()), region=config.region)
        self._spend = SpendRecords(supervisor.tell, spends.take, spends.lower, spends.held)
        questions = SupervisorQuestions.to(supervisor.tell)
        self._credentials = Credentials(self._file.key_file, supervisor.offer, config.tokens)
        self._service = GatewayService(
            self._models, ledger, self._telemetry, self._audit, tenant_sandboxes, self._spend.reserve, questions
        )
        self._sharing = open_sharing(config, self._service.ledger, spends, self._audit, self._spend.reserve)
        self._sleep = _sleep_control(config, self._service, supervisor, lambda: self._sandboxes.attachment.attached)
        self._service.shadows.use(self._file.shadow)
        self._namespaces = NamespaceKeys(supervisor.tell, self._service.use_namespaces)
        self._spill, self._disks, wanted = SpillGauges(), Disks(), config.batches is not None
        self._batches = Batches(self._service, supervisor.tell, lambda: self._file.keys, wanted=wanted)
        self._stored = StoreGauges(self._batches.queue)
        self._split = Split(config.split, self._service, self._telemetry, lambda: self._spill.fleet_state).open()
        self._freezer = Freezer(supervisor.tell, config.sandbox.freeze_after_s, partial(_count_thaw, self._telemetry))
        self._freezer.apply(policy, self._models)
        self._table = ModelTable(
            self._service, supervisor.tell, lambda: self._sandboxes.attachment.attached, self._models_changed
        )
        self._charges = ChargeMemory(supervisor.tell, self._audit.charges, wanted=config.audit is not None)
        fd_takers: dict[type[Control], TakeFds] = {StoreUp: self._batches.link.take, ChargesUp: self._charges.take}
        served = self._models, tenant_sandboxes, self._service
        self._sandboxes = Sandboxes(supervisor, *served, self._takers(questions), fd_takers)
        self._certificate = CertificateDates(config.listen.tls)
        watched = self._service, self._sandboxes, self._file, self._telemetry.store
        state = self._state = ApplianceState(*watched, certificate=self._certificate, disks=self._disks)
        state.batches, state.hosts = self._stored.batches, ConsoleFleet(state.status, config.listen.fleet_hosts)
        state.charges, state.kv_store = lambda: self._charges.problem, lambda: self._spill.store_state
        self._stop, self._announced, self._reloads = asyncio.Event(), False, SharedRuns(self._reload)
        self.reload = self._reloads.run

    def _takers(self, questions: SupervisorQuestions) -> dict[type[Control], Callable[[Any], None]]:
        return {
            Welcome: self._welcome,
            Spent: self._spend.take_spent,
            SpendReserved: self._spend.take_reserved,
            **questions.takers,
            **self._table.takers,
            ModelRest: self._sleep.take,
            Namespaces: self._namespaces.take,
            AuditState: self._audit.take,
            SpillState: self._spill.take,
            **self._disks.takers,
            CardState: lambda told: self._state.cards.take(told),
            StoreState: self._stored.take,
            Frozen: self._freezer.take,
        }

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain.

        Raises:
            StartError: no supervisor comes before anything is served, or a part has failed that the gateway needs.
        """
        await self._run()
        if self._hopeless:
            raise StartError(self._hopeless)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        report_callbacks(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        # Handled from the first moment on: unhandled it would end the process.
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        attach = self._keep(self._sandboxes.run(), "attaching to the supervisor")
        background: list[asyncio.Task[None]] = []
        if self._alone:
            background.append(self._keep(self._end_without_hope(), "first start"))
        try:
            policy = self._service.ledger.policy
            namespaces = await self._unless_stopped(self._namespaces.fetch(account_names(policy), FIRST_READY_S))
            if namespaces is None:
                return
            await self._unless_stopped(self._spend.fetch(spending(policy), FIRST_READY_S))
            if self._stop.is_set():
                return
            self._service.ledger.replace(policy, namespaces)
            await self._follow_policy()
            parts = (self._service, self._sandboxes, self._spill, self._telemetry)
            gauges = self._gauges = Gauges(*parts, self._certificate, self._disks, self._stored)
            idle = partial(_look_at_idle, self._sleep, self._freezer, self._sandboxes)
            watching = watch_engines(self._state, gauges, self._step_timeout_s, idle)
            gauges.store_problem = self._sharing.store_problem
            self._audit_policy("ok", policy.digest, "start")
            works = _works(self._service, self._credentials, self._telemetry, self._config_file, self._sharing)
            works += (watching, "watch over engines"), (self._batches.run(), "batches"), (self._split.run(), "split")
            background += [self._keep(*work) for work in (*works, (self._spend.run(self._audit.flush), "spend"))]
            # A prefix that cannot be published is no reason not to serve.
            publishing = asyncio.create_task(self._service.publications.run(), name="publishing")
            publishing.add_done_callback(log_failure)
            background.append(publishing)
            await self._serve(background, gauges)
        finally:
            self._audit.flush()
            self._credentials.uses.tell()
            for task in (attach, *background):
                task.cancel()
            self._table.close()
            await asyncio.wait((attach,))
            await asyncio.to_thread(self._telemetry.close)

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a task for the gateway's whole life; if it fails, the gateway ends."""
        return kept_task(work, name, self._fail)

    def _fail(self, why: str) -> None:
        """End the gateway, which is no use without what has failed."""
        self._hopeless = self._hopeless or f"the gateway's {why}"
        self._stop.set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of the work, or None when the stop came first."""
        task, stopped = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for one in (task, stopped):
                one.cancel()

    async def _end_without_hope(self) -> None:
        """End a start that no supervisor will complete."""
        if problem := await self._sandboxes.without_hope(lambda: self._announced):
            self._hopeless = problem
            self._stop.set()

    async def _serve(self, background: list[asyncio.Task[None]], gauges: Gauges) -> None:
        listen, render, drain = self._config.listen, self._telemetry.metrics.render, self._service.operator_drain
        keys, resolver = self._credentials.status, self._credentials.resolver(self._service)
        drain.notice_s, told = listen.drain_notice_s, (self._sharing.store_problem, self._spill)
        settings = FrontEndSettings.of(listen, self._certificate, lambda: drain.begun)
        self._state.fleet = fleet_status(self._config_file, settings.http.affinity, drain, *told)
        routes = routes_of(self._telemetry, self._state, gauges, self.reload, keys, self._sleep)
        access = self._config_file.operator_api, self._config_file.remote_operators
        async with (
            serve_front_ends(self._service, resolver, settings, self._state.ready, self._batches.work) as front,
            serve_admin(listen.admin, routes, Observers(self._audit, self._telemetry, self._fail), *access) as admin,
            serve_metrics(listen, render, gauges.refresh, self._state.readiness, picker_page(self._service)) as metrics,
        ):
            door = front.places, front.handshakes, front.starts, front.stranger_time
            gauges.door = DoorGauges(*door, front.background)
            announced = self._announce(front, {**front.addresses, **admin, **metrics})
            for work, name in ((announced, "announce"), (_accept(front, self._models), "accept")):
                task = asyncio.create_task(work, name=name)
                task.add_done_callback(log_failure)
                background.append(task)
            await self._stop.wait()
            await _leave(self._service, front, listen.drain_notice_s)

    async def _reload(self) -> ReloadOutcome:
        """Replace policy, keys and what of the configuration can change in a process that runs, or keep all of them."""
        if self._announced:
            notify.reloading()
        outcome = await self._reload_files()
        verdict = "ok" if outcome.ok else "failed"
        self._telemetry.count(names.POLICY_RELOADS, outcome=verdict)
        self._audit_policy(verdict, outcome.digest, self._reloads.asked)
        if outcome.ok:
            self._service.shadows.use(self._file.shadow)
            await self._follow_policy()
            await self._file.settle(self._service.ledger)
        if self._announced:
            notify.ready(outcome.summary)
        return outcome

    async def _reload_files(self) -> ReloadOutcome:
        before = self._config_file.running
        try:
            found = await self._config_file.look()
            models = self._table.difference(before.models, found.models)
            reviewed = await self._table.review(found.models) if models else ""
        except ConfigError as error:
            return self._file.refused(self._service.ledger.policy.digest, tuple(str(error).splitlines()))
        self._file.use(found.config.credentials, found.config.pepper, _names(found.models))
        prepare = partial(self._prepare, removed=models.removed)
        outcome = await self._file.reload(self._service.ledger, self._namespaces.fetch, prepare)
        if not outcome.ok:
            self._file.use(before.credentials, before.pepper, ServedNames(self._models))
            return outcome
        if reviewed:
            self._table.apply(reviewed)
        self._config_file.adopt(found)
        self._credentials.tokens.keep(found.tokens)
        self._freezer.after_s = found.config.sandbox.freeze_after_s
        applied = (*found.applied, *models.lines(before.models))
        if applied or found.restart:
            log.info("configuration reloaded", applied=applied, needs_a_restart=found.restart)
        warned = (*outcome.warnings, *self._service.publications.unchecked(self._service.ledger.policy))
        return replace(outcome, applied=applied, restart=found.restart, restart_command=found.command, warnings=warned)

    def _step_timeout_s(self) -> float:
        return self._config_file.running.sandbox.step_timeout_s

    async def _follow_policy(self) -> None:
        """Tell every part what the policy in force demands of it, one in a turn: each looks at every tenant."""
        policy = self._service.ledger.policy
        parts: tuple[Callable[[], None], ...] = (
            lambda: self._service.end_withdrawn(self._credentials.holding()),
            lambda: self._namespaces.set_retention(retention_of(policy)),
            lambda: self._service.tenant_sandboxes.reconsider(policy),
            lambda: self._freezer.apply(policy, self._models),
            lambda: self._sleep.decisions.uses.forget_others(policy.tenants),
            self._service.share_out,
            lambda: self._telemetry.metrics.know(tenants=map(shown, account_names(policy)), models=self._models),
        )
        for tell in parts:
            tell()
            await asyncio.sleep(0)
        await self._batches.follow(policy)

    def _models_changed(self, come: tuple[str, ...], gone: tuple[str, ...]) -> None:
        """Tell every part which models have come and gone."""
        self._freezer.apply(self._service.ledger.policy, self._models)
        self._telemetry.metrics.follow(come, gone)
        if self._gauges is not None:
            self._gauges.expect(come)
        if come and self._service.ledger.namespaces:
            self._service.share_out()

    def _welcome(self, welcome: Welcome) -> None:
        self._table.welcome(welcome)
        self._sleep.welcome()
        self._namespaces.attached(welcome)
        self._spend.attached(welcome)
        self._batches.link.attached(welcome)
        self._charges.attached(welcome)

    def _audit_policy(self, outcome: str, digest: str, by: str) -> None:
        count = len(self._service.ledger.policy.tenants)
        self._audit.add("policy", outcome=outcome, policy=digest, tenants=count, by=by)

    async def _prepare(self, policy: PolicySet, removed: Collection[str] = ()) -> list[str]:
        """Make what a new policy needs; returns what is wrong with it. ``removed``: models that go with it."""
        if found := [*self._unusable(policy), *published_for(policy, removed)]:
            return found
        # What was used is told first: the answer then has it.
        self._audit.flush()
        await self._spend.fetch(spending(policy))
        return await self._service.publications.prepare(policy)

    def _unusable(self, policy: PolicySet) -> list[str]:
        """Return what of a policy this appliance cannot keep."""
        return unforgettable(policy, self._wiping_problem) + unaccountable(
            policy, audited=self._config.audit is not None
        )

    def _hang_up(self) -> None:
        asyncio.ensure_future(self.reload("signal")).add_done_callback(log_failure)

    async def _announce(self, front: FrontEnds, addresses: dict[str, str]) -> None:
        """Say READY once every model answers. A model whose sandbox fails meanwhile does not hold up the others: it
        goes on being started, and status shows it."""
        until = time.monotonic() + FIRST_READY_S
        for model in tuple(self._models.values()):
            await model.wait_settled(until)
        await first_ready(self._models.values(), FIRST_READY_S)
        if self._stop.is_set():
            return  # the drain woke us: nothing is ready
        late = [name for name, model in self._models.items() if not model.ready and model.sleep_state.awake]
        if late:
            log.error("models that failed to start are not served yet", models=late)
        self._announced = True
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        front.refresh()
        _say_ready(addresses, front.own, list(self._models), self._service.sandbox)
        interval = notify.watchdog_interval_s()
        while interval is not None:
            await asyncio.sleep(interval)
            notify.watchdog()


def _works(
    service: GatewayService, credentials: Credentials, telemetry: OtelTelemetry, file: ConfigFile, sharing: Sharing
) -> tuple[tuple[Coroutine[Any, Any, None], str], ...]:
    """Return what runs as long as the gateway serves, with names."""
    return (
        (service.audit.run(), "audit feed"),
        (credentials.run(service.end_unproved), "watch over credentials"),
        (credentials.uses.run(), "last uses of keys"),
        (credentials.tokens.run(), "keys of token issuers"),
        (_external(service, telemetry, file), "external"),
        (keep_forgetting(lambda: file.running.batches is not None or _forgets(service.ledger.policy)), "forgetting"),
        (keep_giving_back(), "giving free memory back"),
        (sharing.run(service.count), "limits of the fleet"),
    )


def _sleep_control(
    config: ApplianceConfig, service: GatewayService, supervisor: SupervisorLink, attached: Callable[[], bool]
) -> SleepControl:
    """Make what puts models to sleep and wakes them, for the service's requests."""
    end_own, budget = service.tenant_sandboxes.end_model, config.sandbox.models_memory_bytes
    decisions = SleepDecisions(service.model_sandboxes, attached, partial(_count_sleep, service.count), budget=budget)
    decisions.live = lambda: Counter(life.model for life in service.live if life.admitted is not None)
    sleep = SleepControl(decisions, supervisor.tell, end_own)
    service.dependencies.sleep, service.routing.asleep = sleep, sleep.route_state
    return sleep


def _count_sleep(count: Callable[..., None], what: str, model: str, reason: str) -> None:
    """Count what happened to a model that sleeps or slept."""
    if what == TURNED_AWAY:
        count(names.MODEL_REFUSALS, model=model)
    else:
        count(names.MODEL_WAKES if what == WOKEN else names.MODEL_SLEEPS, model=model, reason=reason)


def _look_at_idle(sleep: SleepControl, freezer: Freezer, sandboxes: Sandboxes) -> None:
    """Put to sleep or freeze what nobody uses."""
    sleep.look()
    freezer.look(sandboxes.every)


def _count_thaw(telemetry: OtelTelemetry, model: str) -> None:
    telemetry.count(names.SANDBOX_THAWS, model=model)


async def _leave(service: GatewayService, front: FrontEnds, notice_s: float) -> None:
    """Stop serving: say so first, for as long as routers need to see it, then take no connection and drain."""
    notify.stopping()
    service.operator_drain.leaving = True
    front.refresh()
    if notice_s:
        log.info("about to drain: readiness says so, requests are taken", seconds=notice_s)
        await asyncio.sleep(notice_s)
    log.info("draining", seconds=DRAIN_S)
    service.begin_drain()
    await front.stop(DRAIN_S)


async def _accept(front: FrontEnds, models: dict[str, ModelSandboxes]) -> None:
    """Take connections at a kept socket once a model answers, or it takes too long."""
    await first_ready(models.values(), KEPT_WAIT_S)
    await front.accept()


async def _external(service: GatewayService, telemetry: OtelTelemetry, file: ConfigFile) -> None:
    """Serve external models until cancelled."""

    def count(model: str, outcome: str) -> None:
        telemetry.count(names.EXTERNAL_OUTPUTS, model=model, outcome=outcome)

    await ExternalModels(service.model_sandboxes, lambda: file.running.models, service.engine_ended, count).run()


def _names(models: Iterable[ModelConfig]) -> list[str]:
    """Return names of models, and whole names of their adapters."""
    return [name for model in models for name in (model.name, *model.adapter_digests)]


def _forgets(policy: PolicySet) -> bool:
    """Return whether a policy has a tenant with ``retention: none``."""
    return any(one.retention is Retention.NONE for one in policy.tenants.values())


def _say_ready(addresses: dict[str, str], own: dict[str, str], models: list[str], sandbox: str) -> None:
    """Tell whatever started this process that it serves, and log it; ``own`` are addresses of single tenants."""
    words = {**addresses, **({"own": own} if own else {}), "models": models, "sandbox": sandbox}
    status = f"STATUS=serving {', '.join(models)} in {sandbox}"
    notify.notify("READY=1", status, f"{notify.ADDRESSES_KEY}={json.dumps(words)}")
    log.info("ready", **words)
