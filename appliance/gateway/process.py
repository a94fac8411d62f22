"""The gateway process: front ends, admin listener, sessions. It can be reached from the network, so it holds no root
key, starts no program and reads no model file."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import structlog

from appliance import held_sockets, notify
from appliance.api.auth import Resolver
from appliance.api.keys import KeyTable
from appliance.api.servers import FrontEnds, FrontEndSettings, TlsFiles, serve_front_ends
from appliance.certificate_dates import read_validity
from appliance.config import ApplianceConfig, ListenConfig, split_address
from appliance.errors import ConfigError, StartError
from appliance.gateway.admin_listener import serve_admin
from appliance.gateway.console_feed import ConsoleFeed
from appliance.gateway.first_start import FirstStart
from appliance.gateway.forgetting import keep_forgetting, unforgettable, wiping_problem
from appliance.gateway.gauges import Gauges
from appliance.gateway.house import House
from appliance.gateway.kv_shares import account_names, shown
from appliance.gateway.ledger import Ledger
from appliance.gateway.policy_file import PolicyFile
from appliance.gateway.report import Report
from appliance.gateway.rooms import ModelRooms
from appliance.gateway.sandboxes import SUPERVISOR_GONE, Sandboxes
from appliance.gateway.service import GatewayService
from appliance.gateway_words import ADDRESSES_KEY
from appliance.status import ReloadOutcome
from appliance.supervisor.paths import CONTROL_SOCKET
from appliance.telemetry import names
from appliance.telemetry.tracer import OtelTelemetry, TelemetrySettings, open_telemetry
from appliance.version import VERSION
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

FIRST_LOOK_S = 0.25
"""How often a gateway that started by itself looks whether its supervisor is there."""

GAUGE_PERIOD_S = 2.0
"""How often gauges follow the engines' counts, and engines are asked for progress."""

YOUNG_OBJECTS = 20_000
"""Container objects that may be made before the collector looks at them, in place of 700: a request makes some hundred,
nearly all of which are freed by counting, and each look costs about a millisecond when hundreds of streams are open."""


@dataclass(slots=True)
class _Keys:
    """The key table in force."""

    table: KeyTable


class Gateway:
    """Everything of one gateway process; ``run`` is its life."""

    def __init__(self, config: ApplianceConfig, *, alone: bool = False) -> None:
        """``alone``: nobody started a supervisor with it and would see that one end."""
        self._config = config
        self._alone = alone
        self._hopeless = ""
        self._file = PolicyFile(config.policy, config.credentials, config.pepper)
        policy, table = self._file.read()
        self._wiping_problem = wiping_problem(wanted=config.wipe_memory)
        if found := unforgettable(policy, self._wiping_problem):
            raise ConfigError("\n".join(found))
        self._keys = _Keys(table)
        self._rooms = {model.name: ModelRooms(model.name, model.runner, truncates=model.truncates)
            for model in config.models}
        self._telemetry: OtelTelemetry = open_telemetry(TelemetrySettings(version=VERSION))
        house = House(config.sandbox.residents)
        house.reconsider(policy)
        self._sandboxes = Sandboxes(
            config.run_dir / CONTROL_SOCKET, self._rooms, lambda: self._service.next_id(),
            lambda rooms, link: self._service.engine_ended(rooms, link), house,
        )  # fmt: skip
        self._sandboxes.on_names = self._use_names
        self._sandboxes.on_loss = self._lost
        self._audit = self._sandboxes.audit if config.audit is not None else None
        self._service = GatewayService(self._rooms, Ledger(policy, {}), self._telemetry, self._audit, house)
        self._certificate = certificate_dates(config.listen)
        self._console = ConsoleFeed(
            self._service, self._sandboxes, self._file, self._telemetry.store, certificate=self._certificate
        )
        self._report = Report(self._service, self._sandboxes, self._file, self._console.alerts)
        self._stop = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._announced = False

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain.

        Raises:
            StartError: nothing was served yet, and the supervisor is not coming; or what the gateway is no use without
                has failed, which is a defect: one started afresh serves better.
        """
        await self._run()
        if self._hopeless:
            raise StartError(self._hopeless)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        # Heard from the first moment on: unhandled it would end the process.
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        attach = self._keep(self._sandboxes.run(), "attaching to the supervisor")
        background: list[asyncio.Task[None]] = []
        if self._alone:
            background.append(asyncio.create_task(self._watch_first(), name="first start"))
        try:
            policy = self._service.ledger.policy
            namespaces = await self._unless_stopped(self._sandboxes.namespaces(account_names(policy), FIRST_READY_S))
            if namespaces is None:
                return
            self._service.ledger.replace(policy, namespaces)
            self._sandboxes.tell_retention(retention_of(policy))
            self._service.share_out()
            self._service.sandbox = self._sandboxes.attachment.sandbox
            self._telemetry.metrics.know(tenants=map(shown, account_names(policy)), models=self._rooms)
            looks = Gauges(self._service, self._sandboxes, self._telemetry, self._certificate)
            background.append(self._keep(self._watch(looks), "watch over engines"))
            if self._audit is not None:
                self._audit.add("policy", outcome="ok", policy=policy.digest, tenants=len(policy.tenants))
                background.append(self._keep(self._audit.run(), "audit feed"))
            # What cannot be published is no reason to serve nobody.
            publishing = asyncio.create_task(self._service.publications.run(), name="publishing")
            publishing.add_done_callback(_log_failure)
            background.append(publishing)
            background.append(self._keep(keep_forgetting(self._forgets), "forgetting"))
            await self._serve(background)
        finally:
            if self._audit is not None:
                self._audit.flush()
            for task in (attach, *background):
                task.cancel()
            await asyncio.wait((attach,))
            await asyncio.to_thread(self._telemetry.close)

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Have something done for the gateway's whole life; without it the gateway ends."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._note_failure)
        return task

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log_failure(task)
            self._hopeless = self._hopeless or f"the gateway's {task.get_name()} failed: {error!r}"
            self._stop.set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What the work gives, or None when the stop came first."""
        task, stopped = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() else None
        finally:
            for one in (task, stopped):
                one.cancel()

    async def _watch_first(self) -> None:
        """Until everything is announced: end a start that nobody will complete, with what is known of why."""
        first = FirstStart(time.monotonic())
        while not self._announced:
            await asyncio.sleep(FIRST_LOOK_S)
            problem = first.look(time.monotonic(), present=self._sandboxes.attachment.attached)
            if problem:
                causes = {one.cause for one in self._sandboxes.records.values()} - {"", SUPERVISOR_GONE}
                known = "; ".join(sorted(causes)) or "its own log says why: journalctl -u athanor-supervisor"
                self._hopeless = f"{problem}: {known}"
                self._stop.set()
                return

    async def _serve(self, background: list[asyncio.Task[None]]) -> None:
        listen = self._config.listen
        resolver = Resolver(self._service, lambda: self._keys.table)
        async with (
            serve_front_ends(self._service, resolver, front_end_settings(listen), self._is_ready) as front,
            serve_admin(listen.admin, self._telemetry, self._report, self.reload, self._console.look) as admin,
        ):
            addresses = {
                "http": _url(listen, front.http_port),
                "grpc": _target(listen, front.grpc_port),
                "admin": admin,
            }
            for work, name in ((self._announce(front, addresses), "announce"), (self._accept(front), "accept")):
                task = asyncio.create_task(work, name=name)
                task.add_done_callback(_log_failure)
                background.append(task)
            await self._stop.wait()
            notify.stopping()
            log.info("draining", seconds=DRAIN_S)
            self._service.begin_drain()
            await front.stop(DRAIN_S)

    async def reload(self) -> ReloadOutcome:
        """Replace policy and keys, or keep both. One at a time: the later call reads the later file."""
        async with self._reloading:
            return await self._reload()

    async def _reload(self) -> ReloadOutcome:
        if self._announced:
            notify.reloading()
        outcome = await self._file.reload(
            self._service.ledger, self._sandboxes.namespaces, self._use_keys, self._prepare
        )
        if outcome.ok:
            self._sandboxes.tell_retention(retention_of(self._service.ledger.policy))
        verdict = "ok" if outcome.ok else "failed"
        self._telemetry.count(names.POLICY_RELOADS, outcome=verdict)
        if self._audit is not None:
            tenants = len(self._service.ledger.policy.tenants)
            self._audit.add("policy", outcome=verdict, policy=outcome.digest, tenants=tenants)
        self._service.house.reconsider(self._service.ledger.policy)
        if outcome.ok:
            self._service.share_out()
        self._telemetry.metrics.know(tenants=map(shown, account_names(self._service.ledger.policy)))
        if self._announced:
            notify.ready(outcome.message)
        return outcome

    async def _prepare(self, policy: PolicySet) -> list[str]:
        """Make what a new policy needs; gives what is wrong with it."""
        return unforgettable(policy, self._wiping_problem) or await self._service.publications.prepare(policy)

    def _forgets(self) -> bool:
        """Whether the policy has a tenant of whom nothing may stay."""
        return any(one.retention is Retention.NONE for one in self._service.ledger.policy.tenants.values())

    def _use_names(self, namespaces: dict[str, bytes]) -> None:
        """Namespace keys have come: of a supervisor that came anew, or of a tenant whose key was destroyed."""
        policy = self._service.ledger.policy
        if all(tenant in namespaces for tenant in policy.tenants):
            self._service.ledger.replace(policy, namespaces)
            # Engines know accounts by these keys: under the old ones nobody's share would hold any more.
            self._service.share_out()

    def _use_keys(self, table: KeyTable) -> None:
        self._keys.table = table

    def _hang_up(self) -> None:
        task = asyncio.ensure_future(self.reload())
        task.add_done_callback(_log_failure)

    def _is_ready(self) -> bool:
        return self._report.readiness().ready

    async def _accept(self, front: FrontEnds) -> None:
        """Take connections at a kept socket once a model answers, or it takes too long."""
        await self._first_ready(KEPT_WAIT_S)
        await front.accept()

    async def _first_ready(self, longest_s: float) -> None:
        """Until a model answers, at most so long."""
        until = time.monotonic() + FIRST_READY_S
        firsts = [asyncio.ensure_future(rooms.wait_ready(until)) for rooms in self._rooms.values()]
        try:
            await asyncio.wait(firsts, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for first in firsts:
                first.cancel()
            await asyncio.gather(*firsts, return_exceptions=True)

    async def _announce(self, front: FrontEnds, addresses: dict[str, str]) -> None:
        """Say READY once every model answers. A model whose sandbox fails meanwhile does not hold up the others: it
        goes on being started, and status shows it."""
        until = time.monotonic() + FIRST_READY_S
        for rooms in self._rooms.values():
            await rooms.wait_settled(until)
        await self._first_ready(FIRST_READY_S)
        if self._stop.is_set():
            return  # the drain woke us: nothing is ready
        late = [name for name, rooms in self._rooms.items() if not rooms.ready]
        if late:
            log.error("models that failed to start are not served yet", models=late)
        self._announced = True
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        self._service.sandbox = self._sandboxes.attachment.sandbox
        await front.refresh()
        words = {**addresses, "models": list(self._rooms), "sandbox": self._service.sandbox}
        notify.notify(
            "READY=1",
            f"STATUS=serving {', '.join(self._rooms)} in {self._service.sandbox}",
            f"{ADDRESSES_KEY}={json.dumps(words)}",
        )
        log.info("ready", **words)
        interval = notify.watchdog_interval_s()
        while interval is not None:
            await asyncio.sleep(interval)
            notify.watchdog()

    async def _watch(self, gauges: Gauges) -> None:
        """Follow the engines: gauges, history, and who makes no progress."""
        gauges.begin()
        while True:
            self._console.note()
            for rooms in (*self._rooms.values(), *self._service.house.rooms):
                if rooms.engine is not None:
                    self._service.take_integrity(rooms, rooms.engine)
                    rooms.engine.check_progress(self._config.sandbox.step_timeout_s)
            gauges.refresh()
            await asyncio.sleep(GAUGE_PERIOD_S)

    def _lost(self, model: str, role: str, reason: str) -> None:
        """A sandbox has ended, as the supervisor says."""
        self._telemetry.count(names.SANDBOX_LOSSES, model=model, role=role, reason=reason)


def _log_failure(task: asyncio.Task[Any]) -> None:
    """A task that nobody awaits has failed: say so."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task of the gateway failed", task=task.get_name(), error=repr(error), exc_info=error)


def retention_of(policy: PolicySet) -> dict[str, int]:
    """Of each tenant whether its KV may live outside of an engine."""
    return {name: int(tenant.retention is Retention.STANDARD) for name, tenant in policy.tenants.items()}


def certificate_dates(listen: ListenConfig) -> tuple[float, float] | None:
    """When the certificate that is about to be served with begins and ends; None where there is none, or none that can
    be read: the front ends say why."""
    if listen.tls is None:
        return None
    try:
        return read_validity(listen.tls.certificate)
    except (OSError, ValueError):
        return None


def front_end_settings(listen: ListenConfig) -> FrontEndSettings:
    """The configuration's addresses and certificates as the front ends take them."""
    http_host, http_port = split_address(listen.http)
    grpc_host, grpc_port = split_address(listen.grpc)
    tls = None
    if listen.tls is not None:
        tls = TlsFiles(
            certificate=listen.tls.certificate, key=listen.tls.key, client_ca=listen.tls.client_ca
        )
    return FrontEndSettings(
        http_host=http_host, http_port=http_port, grpc_host=grpc_host, grpc_port=grpc_port, tls=tls,
        listen=partial(held_sockets.listen, "http"),
    )


def _url(listen: ListenConfig, port: int) -> str:
    scheme = "https" if listen.tls is not None else "http"
    return f"{scheme}://{_target_host(listen.http)}:{port}"


def _target(listen: ListenConfig, port: int) -> str:
    return f"{_target_host(listen.grpc)}:{port}"


def _target_host(address: str) -> str:
    host = split_address(address)[0]
    return f"[{host}]" if ":" in host else host
