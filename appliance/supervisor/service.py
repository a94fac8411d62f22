"""The supervisor process: no network, the only one that starts programs; two keepers a model and
those of single tenants, one control socket."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable

import structlog

from appliance import notify
from appliance.audit.entry import entry
from appliance.audit.log import open_log
from appliance.catalog import ModelFiles, read_model
from appliance.config import ApplianceConfig
from appliance.control import CONTROL_VERSION, AuditState, Fault, Release, SpillState, Want, Welcome
from appliance.errors import StartError
from appliance.image.check import check, resolve
from appliance.install.schema import check as check_state
from appliance.model_digests import DigestCache
from appliance.supervisor.audit import Recorder, watching
from appliance.supervisor.boot import plan_boot, plan_boots
from appliance.supervisor.control_server import ControlServer
from appliance.supervisor.declared import DeclaredTenants, accounts_of
from appliance.supervisor.keeper import Keeper
from appliance.supervisor.machine import choose_runtime
from appliance.supervisor.operator_socket import OperatorSocket
from appliance.supervisor.paths import CONTROL_SOCKET, MEND_S, OPERATOR_SOCKET
from appliance.supervisor.residents import Residents
from appliance.supervisor.vault import Vault, open_vault
from appliance.supervisor.warm import WarmStarts, open_warm_starts

log = structlog.get_logger()

SPILL_PERIOD_S = 5.0
"""Between two reports of spill: as often as somebody looks at a gauge."""


async def supervise(config: ApplianceConfig) -> None:
    """Keep every model's sandboxes alive until SIGTERM or SIGINT; leaves nothing behind.

    Raises:
        StartError: no runtime, an unusable model, or no sandbox that would start at all.
        ConfigError, ImageError: state of a form that this version does not know, or another image than the pinned one.
    """
    config = _checked(config)
    runtime = choose_runtime(config)
    models = await asyncio.to_thread(_read_models, config)
    keepers: list[Keeper] = []
    recorder = await _open_recorder(config, lambda state: server.publish(state, ()))
    server = ControlServer(
        config.run_dir / CONTROL_SOCKET,
        Welcome(CONTROL_VERSION, runtime.label, runtime.cgroups.describe(), [model.name for model in config.models]),
        on_attach=lambda: _attached(keepers, residents, recorder),
        on_leave=lambda: _gateway_left(keepers, residents),
        on_wish=lambda wish: _wish(keepers, residents, wish),
        on_audited=recorder.take,
        on_keys=lambda count: recorder.record(entry("keys", what="namespace keys given to the gateway", count=count)),
    )
    vault = open_vault(config, server.namespace)
    warm = await asyncio.to_thread(open_warm_starts, config, runtime)
    if vault is not None:
        server.on_retention = vault.set_retention
    operator = _operator_socket(config, vault, server, recorder)
    digests = {model.name: files.digest for model, files in zip(config.models, models, strict=True)}
    publish = watching(server.publish, recorder.record, digests, config.sandbox.image_digest)
    for model, files in zip(config.models, models, strict=True):
        keepers += [Keeper(plan, runtime, publish, vault, warm) for plan in plan_boots(config, model, files, runtime)]
    stop = asyncio.Event()
    served = {model.name: (model, files) for model, files in zip(config.models, models, strict=True)}
    residents = Residents(
        config.sandbox.residents,
        lambda name, tenant, role: plan_boot(config, *served[name], runtime, role, tenant),
        runtime, publish, DeclaredTenants(config.policy).read,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        server.open()
        await operator.open()
    except OSError as error:
        raise StartError(f"cannot listen on {config.run_dir / CONTROL_SOCKET}: {error.strerror or error}") from error
    writing = asyncio.create_task(recorder.run(), name="audit log")
    asides = (residents.run(), _tell_spill(vault, server.publish), _keep_sockets(server, operator))
    tasks = [asyncio.create_task(work) for work in (*asides, *(keeper.run() for keeper in keepers))]
    for task in (*tasks, writing):
        task.add_done_callback(lambda _done: stop.set())
    try:
        await _first_boots(keepers, stop)
        notify.ready(f"{len(keepers)} sandboxes, {runtime.label}")
        await _serve(stop, [*tasks, writing], warm)
    finally:
        notify.stopping()
        for keeper in keepers:
            keeper.stop()
        for task in tasks[: len(asides)]:
            task.cancel()
        await residents.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
        await operator.close()
        if vault is not None:
            await asyncio.to_thread(vault.close)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await recorder.close()
        await asyncio.to_thread(runtime.close)


def _operator_socket(
    config: ApplianceConfig, vault: Vault | None, server: ControlServer, recorder: Recorder
) -> OperatorSocket:
    policy = DeclaredTenants(config.policy)
    return OperatorSocket(
        config.run_dir / OPERATOR_SOCKET, vault, server.publish, recorder.record,
        lambda tenant: accounts_of(policy.read(), tenant),
    )  # fmt: skip


def _read_models(config: ApplianceConfig) -> list[ModelFiles]:
    """All models' files, hashed. Whether one is the one that is pinned is looked at when a sandbox is to get it."""
    cache = DigestCache.load(config.digest_cache)
    models = [read_model(model.name, model.path, cache) for model in config.models]
    cache.save()
    return models


def _checked(config: ApplianceConfig) -> ApplianceConfig:
    """The configuration with its image named, after state and image were held against what may be served from."""
    if config.state is not None:
        check_state(config.state)
    config = resolve(config)
    config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
    check(config, config.run_dir)
    return config


async def _open_recorder(config: ApplianceConfig, tell: Callable[[AuditState], object]) -> Recorder:
    """The audit log's recorder, or one that keeps nothing where the configuration names no log."""
    if config.audit is None:
        log.warning("no audit log is kept; name a folder for it in the configuration: audit.directory")
        return Recorder(None, tell)
    audit = await asyncio.to_thread(open_log, config.audit.directory, config.audit.key)
    log.info("audit log", folder=str(config.audit.directory), key=audit.verifier.line(), entries=audit.size)
    return Recorder(audit, tell, refuses=config.audit.on_failure == "refuse")


async def _tell_spill(vault: Vault | None, publish: Callable[[SpillState, tuple[int, ...]], bool]) -> None:
    """Tell the gateway what becomes of KV outside of engines, if any goes there, until cancelled."""
    while True:
        if vault is not None:
            publish(SpillState(vault.figures.told()), ())
        await asyncio.sleep(SPILL_PERIOD_S)


async def _keep_sockets(server: ControlServer, operator: OperatorSocket) -> None:
    """Until cancelled, see to it that both sockets can be found."""
    while True:
        await asyncio.sleep(MEND_S)
        server.mend()
        await operator.mend()


def _attached(keepers: list[Keeper], residents: Residents, recorder: Recorder) -> None:
    recorder.greet()
    residents.offer()
    for keeper in keepers:
        keeper.offer()


def _gateway_left(keepers: list[Keeper], residents: Residents) -> None:
    residents.gateway_left()
    for keeper in keepers:
        keeper.gateway_left()


def _wish(keepers: list[Keeper], residents: Residents, wish: Fault | Want | Release) -> None:
    """What the gateway asks for: a sandbox's end, or the coming and going of a tenant's own."""
    if isinstance(wish, Want):
        residents.want(wish)
    elif isinstance(wish, Release):
        residents.release(wish)
    elif wish.tenant:
        residents.fault(wish)
    for keeper in keepers:
        if isinstance(wish, Fault) and (keeper.plan.model, keeper.plan.role_name, "") == (
            wish.model, wish.role, wish.tenant,
        ):  # fmt: skip
            keeper.fault(wish.generation, wish.reason)


async def _first_boots(keepers: list[Keeper], stop: asyncio.Event) -> None:
    """Wait for every first boot; a machine on which no model at all comes up is a start that failed."""
    boots = asyncio.gather(*(keeper.first_boot for keeper in keepers))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((boots, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not boots.done():
        boots.cancel()
        return
    problems: dict[str, str] = {}
    for keeper, problem in zip(keepers, boots.result(), strict=True):
        if problem is not None:
            problems.setdefault(keeper.plan.model, f"{keeper.plan.name}: {problem}")
    for problem in problems.values():
        log.error("sandbox did not start", problem=problem)
    if len(problems) == len({keeper.plan.model for keeper in keepers}):
        raise StartError("no model could be started:\n  " + "\n  ".join(problems.values()))


@contextlib.asynccontextmanager
async def _making(warm: WarmStarts | None) -> AsyncIterator[None]:
    """Make checkpoints while the block runs; what is on its way then is given up and removed."""
    if warm is None:
        yield
        return
    making = asyncio.create_task(warm.run(), name="checkpoints")
    try:
        yield
    finally:
        warm.close()
        await making


async def _serve(stop: asyncio.Event, tasks: list[asyncio.Task[None]], warm: WarmStarts | None) -> None:
    """Until the stop, which a keeper that ends gives as well.

    Raises:
        StartError: a keeper gave up, which is a defect; a supervisor started afresh serves better than this one.
    """
    interval = notify.watchdog_interval_s()
    async with _making(warm):
        while not stop.is_set():
            try:
                async with asyncio.timeout(interval):
                    await stop.wait()
            except TimeoutError:
                notify.watchdog()
    for task in tasks:
        if task.done() and (error := task.exception()) is not None:
            raise StartError(f"a keeper of sandboxes, or of the audit log, failed: {error!r}") from error

