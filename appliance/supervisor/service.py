"""The supervisor process: no network, the only one that starts programs; two keepers a model, one control socket."""

from __future__ import annotations

import asyncio
import signal

import structlog

from appliance import notify
from appliance.catalog import read_model
from appliance.config import ApplianceConfig
from appliance.control import CONTROL_VERSION, Fault, Welcome
from appliance.errors import StartError
from appliance.supervisor.boot import plan_boots
from appliance.supervisor.control_server import ControlServer
from appliance.supervisor.keeper import Keeper
from appliance.supervisor.machine import check_image, choose_runtime
from appliance.supervisor.paths import CONTROL_SOCKET

log = structlog.get_logger()

async def supervise(config: ApplianceConfig) -> None:
    """Keep every model's sandboxes alive until SIGTERM or SIGINT; leaves nothing behind.

    Raises:
        StartError: no runtime, an unusable model, or no sandbox that would start at all.
    """
    check_image(config)
    runtime = choose_runtime(config)
    models = [read_model(model.name, model.path) for model in config.models]
    config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
    keepers: list[Keeper] = []
    server = ControlServer(
        config.run_dir / CONTROL_SOCKET,
        Welcome(CONTROL_VERSION, runtime.label, runtime.cgroups.describe(), [model.name for model in config.models]),
        on_attach=lambda: _offer(keepers),
        on_leave=lambda: _gateway_left(keepers),
        on_fault=lambda fault: _fault(keepers, fault),
    )
    for model, files in zip(config.models, models, strict=True):
        for plan in plan_boots(config, model, files, runtime):
            keepers.append(Keeper(plan, runtime, server.publish))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        server.open()
    except OSError as error:
        raise StartError(f"cannot listen on {config.run_dir / CONTROL_SOCKET}: {error.strerror or error}") from error
    tasks = [asyncio.create_task(keeper.run()) for keeper in keepers]
    for task in tasks:
        task.add_done_callback(lambda _done: stop.set())
    try:
        await _first_boots(keepers, stop)
        notify.ready(f"{len(keepers)} sandboxes, {runtime.label}")
        await _serve(stop, tasks)
    finally:
        notify.stopping()
        for keeper in keepers:
            keeper.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.close()
        await asyncio.to_thread(runtime.close)


def _offer(keepers: list[Keeper]) -> None:
    for keeper in keepers:
        keeper.offer()


def _gateway_left(keepers: list[Keeper]) -> None:
    for keeper in keepers:
        keeper.gateway_left()


def _fault(keepers: list[Keeper], fault: Fault) -> None:
    for keeper in keepers:
        if (keeper.plan.model, keeper.plan.role_name) == (fault.model, fault.role):
            keeper.fault(fault.generation, fault.reason)


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


async def _serve(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Until the stop, which a keeper that ends gives as well.

    Raises:
        StartError: a keeper gave up, which is a defect; a supervisor started afresh serves better than this one.
    """
    interval = notify.watchdog_interval_s()
    while not stop.is_set():
        try:
            async with asyncio.timeout(interval):
                await stop.wait()
        except TimeoutError:
            notify.watchdog()
    for task in tasks:
        if task.done() and (error := task.exception()) is not None:
            raise StartError(f"a keeper of sandboxes failed: {error!r}") from error

