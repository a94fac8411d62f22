"""The supervisor process: two keepers for each model, keepers for single tenants' sandboxes, one control socket.

It has no network, and no other process of the appliance starts programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import structlog

from appliance.common import notify
from appliance.common.aligned_sleep import aligned_sleep
from appliance.common.audit.entry import entry
from appliance.common.audit.log import open_log
from appliance.common.config import ApplianceConfig
from appliance.common.control import (
    CONTROL_VERSION,
    Attest,
    DiskState,
    Fault,
    Freeze,
    HandedOver,
    Release,
    SpillState,
    Want,
    Welcome,
)
from appliance.common.control_checkpoints import CheckpointState
from appliance.common.control_usage import OverviewQuery, UsageQuery, UsageTableQuery
from appliance.common.errors import StartError
from appliance.common.figures import counted
from appliance.common.form_cache import open_form_cache
from appliance.common.image.check import check, resolve
from appliance.common.log import report_callbacks
from appliance.common.paths import CONTROL_SOCKET, MEND_S, OPERATOR_SOCKET
from appliance.common.policy_history import PolicyHistory
from appliance.common.schema import check as check_state
from appliance.supervisor.answering import Answering, Lanes
from appliance.supervisor.attested_models import ServedModel, served_models
from appliance.supervisor.attesting import Attesting, ServedFacts
from appliance.supervisor.audit import Recorder, watching
from appliance.supervisor.batches.port import StorePort, open_port
from appliance.supervisor.cards.placement import CardPlacement
from appliance.supervisor.cards.watch import watch_cards
from appliance.supervisor.checkpoint_state import checkpoint_state
from appliance.supervisor.control_server import ControlServer
from appliance.supervisor.disks import space, watched
from appliance.supervisor.forms import Forms
from appliance.supervisor.keeper import Keeper, Publish
from appliance.supervisor.key_uses import KeyUseKeeper
from appliance.supervisor.machine import choose_runtime
from appliance.supervisor.metering import Metering, open_metering, read_boot_id
from appliance.supervisor.model_changes import ModelChanges, Reread, read_models
from appliance.supervisor.model_keepers import ModelKeepers
from appliance.supervisor.open_charges import ChargeKeeper
from appliance.supervisor.operator_socket import OperatorSocket
from appliance.supervisor.planner import Planner
from appliance.supervisor.policy_keeper import PolicyKeeper
from appliance.supervisor.policy_reader import DeclaredTenants, accounts_of, classes_of
from appliance.supervisor.residents import Residents
from appliance.supervisor.spill_service import Vault, open_vault
from appliance.supervisor.unlinking import Unlinking
from appliance.supervisor.usage_answers import UsageAnswers
from appliance.supervisor.usage_tables import UsageTables
from appliance.supervisor.warm import WarmStarts, open_warm_starts
from appliance.supervisor.witness_watch import watch_witnesses
from isolation.gvisor.runtime import Runtime

log = structlog.get_logger()

SPILL_PERIOD_S = 5.0
"""Seconds between two reports of spill figures to the gateway."""

DISK_PERIOD_S = 5.0
"""Seconds between two reports of the space on disks; a gateway that has just come knows it that late."""


async def supervise(config: ApplianceConfig, reread: Reread | None = None) -> None:
    """Keep every model's sandboxes alive until SIGTERM or SIGINT; leaves nothing behind. ``reread`` reads the
    configuration again, for models that come and go.

    Raises:
        StartError: no runtime, an unusable model, or no sandbox that would start at all.
        ConfigError, ImageError: state of an unknown version, or another image than the pinned one.
    """
    config = _checked(config)
    runtime = choose_runtime(config)
    planned = await asyncio.to_thread(lambda: list(read_models(config, runtime)))
    recorder, metering = await _open_account(config, lambda *sent: server.publish(*sent))
    server = ControlServer(
        config.run_dir / CONTROL_SOCKET,
        Welcome(CONTROL_VERSION, runtime.label, runtime.cgroups.describe(), []),
        on_attach=lambda: _attached(server, models, residents, recorder, last),
        on_leave=lambda: _gateway_left(models, residents, metering, answering, port, charges, last=last.is_set()),
        on_wish=lambda wish: _wish(models, residents, wish),
        on_audited=recorder.take,
        on_keys=lambda count: recorder.record(entry("keys", what="namespace keys given to the gateway", count=count)),
    )
    vault = open_vault(config, server.namespace, recorder.record)
    warm = await asyncio.to_thread(open_warm_starts, config, runtime)
    port = await asyncio.to_thread(open_port, config, vault, recorder, server.publish)
    charges = _connect(server, vault, port, recorder)
    (stop, last), forms = _stop_signals(), Forms(open_form_cache(config.sandbox.form_cache), runtime.label)
    placement = CardPlacement(lambda plan, out: planner.replan(plan, out), recorder.record)
    models = ModelKeepers(lambda plan: Keeper(plan, runtime, publish, vault, warm, forms, placement), stop.set)
    image = config.sandbox.image_digest
    answering = _answering(config, server, recorder, runtime, lambda: served_models(models.staying, residents.plans))
    cards = watch_cards(lambda: [*models.keepers, *residents.keepers], server.publish, placement=placement)
    publish = cards.explaining(watching(server.publish, recorder.record, models.digests, models.signers, image))
    residents, planner = _residents(config, models, runtime, publish, forms, placement)
    operator = _operator_socket(config, vault, server, recorder, Unlinking(recorder, residents, port), metering)
    changes = ModelChanges(config, models, runtime, server.publish, recorder.record, reread)
    changes.residents, changes.warm, changes.out = residents, _beside(models, warm, forms), planner.out
    changes.turn, server.on_models = placement.turn, changes.take
    server.models = lambda: models.names
    for one in planned:
        models.add(one)
    await _listen(server, operator, config.run_dir)
    writing = asyncio.create_task(recorder.run(), name="audit log")
    told = (_tell_spill(config, vault, server.publish), _tell_disks(config, warm, server.publish), cards.run())
    account = _keep_account(config, server, metering, recorder)
    asides = (residents.run(), *told, account, answering.run(), _keep_sockets(server, operator), _keep_store(port))
    tasks = [asyncio.create_task(work) for work in asides]
    for task in (*tasks, writing):
        task.add_done_callback(lambda _done: stop.set())
    keepers = _start(models)
    try:
        await _first_boots(keepers, stop)
        notify.ready(f"{counted(len(keepers), 'sandbox', 'sandboxes')}, {runtime.label}")
        await _serve(stop, lambda: [*tasks, writing, *models.ended], warm)
    finally:
        notify.stopping()
        await _end_models(models, changes, residents, tasks)
        server.close()
        await operator.close()
        await _close(vault, recorder, metering, writing, port, charges)
        await asyncio.to_thread(runtime.close)


def _start(models: ModelKeepers) -> list[Keeper]:
    """Boot all models that do not begin asleep; returns their keepers."""
    keepers = models.starting
    for name in models.names:
        models.start(name)
    return keepers


async def _end_models(
    models: ModelKeepers, changes: ModelChanges, residents: Residents, tasks: list[asyncio.Task[None]]
) -> None:
    """End all sandboxes, and what works beside them."""
    for keeper in models.keepers:
        keeper.stop()
    for task in tasks:
        task.cancel()
    await changes.close()
    await residents.close()
    await models.close()
    await asyncio.gather(*tasks, return_exceptions=True)


def _connect(server: ControlServer, vault: Vault | None, port: StorePort | None, recorder: Recorder) -> ChargeKeeper:
    """Give what the gateway says of kept data and charges to what keeps them; returns what keeps its charges."""
    charges = ChargeKeeper(server.publish, recorder.record)
    recorder.on_taken, server.on_charges = charges.note, charges.open
    if vault is not None:
        server.on_retention, vault.on_export = vault.take_retention, recorder.record
        vault.publish = server.publish
        vault.start()
    if port is not None:
        server.on_store = port.open
    return charges


def _stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Event that SIGTERM and SIGINT set, and the one that SIGUSR1 sets: no gateway comes after the one that is there,
    by the launcher's word. One that comes all the same clears it. What fails in the event loop is logged from now
    on."""
    stop, last, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()
    report_callbacks(loop)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, last.set)
    return stop, last


async def _listen(server: ControlServer, operator: OperatorSocket, run_dir: Path) -> None:
    """Open both sockets of the run directory.

    Raises:
        StartError: one cannot be opened.
    """
    try:
        server.open()
        await operator.open()
    except OSError as error:
        raise StartError(f"cannot listen in {run_dir}: {error.strerror or error}") from error


async def _close(
    vault: Vault | None,
    recorder: Recorder,
    metering: Metering | None,
    writing: asyncio.Task[None],
    port: StorePort | None,
    charges: ChargeKeeper,
) -> None:
    """Close the stores, then write the rest of the audit log and count it."""
    charges.close()
    if port is not None:
        await port.close()
    if vault is not None:
        await asyncio.to_thread(vault.close)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    await recorder.close()
    if metering is not None:
        await asyncio.to_thread(metering.close)


def _residents(
    config: ApplianceConfig,
    models: ModelKeepers,
    runtime: Runtime,
    publish: Publish,
    forms: Forms,
    placement: CardPlacement,
) -> tuple[Residents, Planner]:
    """Keepers of single tenants' sandboxes, and what plans one beside all others."""
    declared = DeclaredTenants(config.policy, config.policy_keys)
    planner = Planner(models, runtime, declared.read)
    limits = config.sandbox.residents
    residents = Residents(limits, planner.plan, runtime, publish, declared.read, forms, placement)
    residents.looks = models.looks
    residents.is_external = planner.is_external
    planner.others, planner.out = lambda: residents.plans, lambda: placement.out
    return residents, planner


def _operator_socket(
    config: ApplianceConfig,
    vault: Vault | None,
    server: ControlServer,
    recorder: Recorder,
    unlinking: Unlinking,
    metering: Metering | None,
) -> OperatorSocket:
    policy = DeclaredTenants(config.policy, config.policy_keys)
    return OperatorSocket(
        config.run_dir / OPERATOR_SOCKET,
        vault,
        server.publish,
        recorder.record,
        lambda tenant: accounts_of(policy.read(), tenant),
        unlinking.unlink,
        None if metering is None else metering.release,
    )


def _checked(config: ApplianceConfig) -> ApplianceConfig:
    """Configuration with its image resolved, after the state's version and the image's pin were checked."""
    if config.state is not None:
        check_state(config.state)
    config = resolve(config)
    config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
    check(config, config.run_dir)
    return config


async def _open_account(config: ApplianceConfig, publish: Publish) -> tuple[Recorder, Metering | None]:
    """Open the audit log and its usage book; nothing is recorded where the configuration names no log.

    Raises:
        StartError: log or book cannot be used.
    """
    if config.audit is None:
        log.warning("no audit log is kept; name a folder for it in the configuration: audit.directory")
        return Recorder(None, lambda state: publish(state, ())), None
    folder, key = config.audit.directory, config.audit.key
    hides = config.audit.names == "pseudonyms"
    audit = await asyncio.to_thread(lambda: open_log(folder, key, pseudonyms=hides))
    log.info("audit log", folder=str(folder), key=audit.verifier.line(), entries=audit.size)
    metering = await asyncio.to_thread(open_metering, folder, audit.name, audit.size, publish, read_boot_id())
    refuses = config.audit.on_failure == "refuse"
    recorder = Recorder(audit, lambda state: publish(state, ()), refuses=refuses, metering=metering)
    metering.written = recorder.flush
    return recorder, metering


async def _tell_spill(
    config: ApplianceConfig, vault: Vault | None, publish: Callable[[SpillState, tuple[int, ...]], bool]
) -> None:
    """Send spill figures to the gateway every ``SPILL_PERIOD_S`` until cancelled, if there is spill."""
    while True:
        if vault is not None and config.sandbox.spill is not None:
            publish(SpillState(vault.figures), ())
        await aligned_sleep(SPILL_PERIOD_S)


async def _tell_disks(
    config: ApplianceConfig,
    warm: WarmStarts | None,
    publish: Callable[[DiskState | CheckpointState, tuple[int, ...]], bool],
) -> None:
    """Send the space on the disks that are written to, and which checkpoints there are, every ``DISK_PERIOD_S`` until
    cancelled."""
    folders = watched(config)
    while True:
        for told in await asyncio.to_thread(_on_disks, folders, warm):
            publish(told, ())
        await aligned_sleep(DISK_PERIOD_S)


def _on_disks(folders: dict[str, Path], warm: WarmStarts | None) -> list[DiskState | CheckpointState]:
    """Look at the disks, and at the checkpoints; blocks."""
    found: list[DiskState | CheckpointState] = [DiskState(space(folders))]
    if warm is not None:
        with contextlib.suppress(OSError):  # The state of the disk says why.
            found.append(checkpoint_state(warm))
    return found


async def _keep_account(
    config: ApplianceConfig, server: ControlServer, metering: Metering | None, recorder: Recorder
) -> None:
    """Take reservations of spend and questions about it, keep each policy and the last uses of API keys, until
    cancelled; where an audit log is kept."""
    if metering is None or config.audit is None:
        await asyncio.Event().wait()
        return
    keeper = PolicyKeeper(config.policy, PolicyHistory(config.audit.directory))
    recorder.on_report = keeper.note
    server.on_spend = metering.take
    uses = KeyUseKeeper(config.audit.directory)
    server.on_keys_used = uses.take
    witnesses = watch_witnesses(config.audit, recorder.note_witnesses)
    try:
        await asyncio.gather(metering.run(), keeper.run(), uses.run(), witnesses)
    finally:
        await asyncio.to_thread(uses.close)


def _answering(
    config: ApplianceConfig,
    server: ControlServer,
    recorder: Recorder,
    runtime: Runtime,
    served: Callable[[], Sequence[ServedModel]],
) -> Lanes:
    """Answer what the gateway asks for its tenants, and what it asks for the operator's page."""
    declared = DeclaredTenants(config.policy, config.policy_keys)
    folder = config.audit.directory if config.audit is not None else None
    facts = ServedFacts(served, config.sandbox.image_digest, config.region)
    attesting = Attesting(recorder.audit, declared, runtime, facts)
    of_tenants = Answering(server.publish, {Attest: attesting, UsageQuery: UsageAnswers(folder)})
    # A reader of the policy of its own: each lane has a thread.
    classes = DeclaredTenants(config.policy, config.policy_keys)
    tables = UsageTables(folder, lambda: classes_of(classes.read()), config.host)
    recorder.on_renamed = tables.forget
    of_all = Answering(server.publish, {OverviewQuery: tables, UsageTableQuery: tables})
    found = Lanes(of_tenants, of_all)
    server.on_question = found.take
    return found


async def _keep_store(port: StorePort | None) -> None:
    """Do what the store of files and batches needs beside its calls, until cancelled."""
    await (asyncio.Event().wait() if port is None else port.run())


async def _keep_sockets(server: ControlServer, operator: OperatorSocket) -> None:
    """Make a removed socket file again, every ``MEND_S`` until cancelled."""
    while True:
        await aligned_sleep(MEND_S)
        server.mend()
        await operator.mend()


def _attached(
    server: ControlServer, models: ModelKeepers, residents: Residents, recorder: Recorder, last: asyncio.Event
) -> None:
    """Serve a gateway that has attached; one that comes although no other was expected has sandboxes behind it too."""
    last.clear()
    for told in models.told():
        server.publish(told, ())
    recorder.greet()
    residents.offer()
    models.offer()


def _gateway_left(
    models: ModelKeepers,
    residents: Residents,
    metering: Metering | None,
    answering: Lanes,
    port: StorePort | None,
    charges: ChargeKeeper,
    *,
    last: bool,
) -> None:
    """Let everything know that the gateway is gone; ``last``: no other one comes, so no sandbox is booted for it."""
    charges.gateway_left()
    if port is not None:
        port.gateway_left()
    if metering is not None:
        metering.gateway_left()
    answering.gateway_left()
    residents.gateway_left()
    models.gateway_left(last=last)


def _wish(models: ModelKeepers, residents: Residents, wish: Fault | Freeze | Want | Release | HandedOver) -> None:
    """Carry out a request of the gateway: end or freeze a sandbox, or boot or release a tenant's own sandboxes; or
    note what became of one that it was handed."""
    if isinstance(wish, Want):
        residents.want(wish)
    elif isinstance(wish, Release):
        residents.release(wish)
    elif isinstance(wish, Fault) and wish.tenant:
        residents.fault(wish)
    elif isinstance(wish, Freeze) and wish.tenant:
        residents.freeze(wish)
    elif isinstance(wish, HandedOver) and wish.tenant:
        residents.taken(wish)
    else:
        models.carry_out(wish)


async def _first_boots(keepers: list[Keeper], stop: asyncio.Event) -> None:
    """Wait for every first boot.

    Raises:
        StartError: no model came up at all.
    """
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
    if problems and len(problems) == len({keeper.plan.model for keeper in keepers}):
        raise StartError("no model could be started:\n  " + "\n  ".join(problems.values()))


def _beside(models: ModelKeepers, warm: WarmStarts | None, forms: Forms) -> WarmStarts | None:
    """Warm starts that leave memory to models that wake, and know what engines are told."""
    if warm is not None:
        warm.told, warm.reserved, models.on_wake = forms.told, lambda: models.reserved, warm.make_way_for_wake
        warm.plans = lambda: tuple(keeper.plan for keeper in models.keepers)
    return warm


@contextlib.asynccontextmanager
async def _making(warm: WarmStarts | None) -> AsyncIterator[None]:
    """Make checkpoints while the block runs; an unfinished one is removed at its end."""
    if warm is None:
        yield
        return
    making = asyncio.create_task(warm.run(), name="checkpoints")
    try:
        yield
    finally:
        warm.close()
        await making


async def _serve(stop: asyncio.Event, tasks: Callable[[], list[asyncio.Task[None]]], warm: WarmStarts | None) -> None:
    """Serve until ``stop``, which the end of a keeper sets as well.

    Raises:
        StartError: a keeper failed, which is a defect; the service manager starts the supervisor afresh.
    """
    interval = notify.watchdog_interval_s()
    async with _making(warm):
        while not stop.is_set():
            try:
                async with asyncio.timeout(interval):
                    await stop.wait()
            except TimeoutError:
                notify.watchdog()
    for task in tasks():
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise StartError(f"a keeper of sandboxes, or of the audit log, failed: {error!r}") from error
