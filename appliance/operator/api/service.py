"""The process of the operator's API: what `athanor` may do on this machine, for callers of a Unix socket, and where the
configuration has an address for them for operators on other machines.

It is neither the gateway, which tenants reach and which may write no policy, nor the supervisor, which holds root keys
and parses no protobuf. It keeps nothing between two calls: policy, keys and configuration are files, and what runs is
asked through the admin listener and the supervisor's operator socket, as the commands do.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from appliance.common import notify
from appliance.common.account_roles import Roles
from appliance.common.config import ApplianceConfig
from appliance.common.errors import StartError
from appliance.common.paths import OPERATOR_API_SOCKET
from appliance.operator.api.front import OperatorFront
from appliance.operator.api.remote import serving_remote
from appliance.operator.api.server import serving

GRACE_S = 20.0
"""Seconds that calls have which change something, when the process is to end."""

log = structlog.get_logger()


def api_socket(config: ApplianceConfig) -> Path:
    """Return the socket of the operator's API."""
    named = None if config.operator_api is None else config.operator_api.socket
    return config.run_dir / OPERATOR_API_SOCKET if named is None else named


async def run_service(config_path: Path, load: Callable[[], ApplianceConfig]) -> None:
    """Serve until SIGTERM. Without a section in the configuration there is nothing to do, and the service ends at once.

    Args:
        config_path: the file that the commands read.
        load: gives the configuration at the start.

    Raises:
        ApplianceError: it cannot start, or what it needs has failed while it served.
    """
    config = load()
    if config.operator_api is None:
        notify.ready("the configuration has no operator_api: nothing to do")
        return
    roles = Roles.of(config.operator_api)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    path, front = api_socket(config), OperatorFront(config_path)
    ends: list[str] = []

    def failed(why: str) -> None:
        ends.append(why)
        stop.set()

    async with (
        serving(path, front, roles, GRACE_S, failed),
        serving_remote(front, config, config_path, failed) as address,
    ):
        notify.ready(f"the operator's API is at {path}{address and f' and at {address}'}")
        log.info("the operator's API takes calls", socket=str(path), address=address)
        interval = notify.watchdog_interval_s()
        while not stop.is_set():
            notify.watchdog()
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), interval)
        notify.stopping()
    if ends:
        raise StartError(f"the operator's API ends, and is to be started again: {ends[0]}")
