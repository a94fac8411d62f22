"""``athanor serve``: both host processes from one command, or one of them under its own systemd unit."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.common.addresses import split_address
from appliance.common.config_handover import Handover, sealed
from appliance.common.config_loader import load_config, own_variables, resolve
from appliance.common.errors import ConfigError, StartError
from appliance.common.lock import exclusive
from appliance.operator import child
from appliance.operator.launcher import Addresses, Launcher
from isolation.gvisor.environment import WIPING, WIPING_LATER

if TYPE_CHECKING:
    from appliance.common.listen_config import ListenConfig

LOCK = "launcher.lock"
"""Name of the lock in the run directory."""

ROLES = ("both", "supervisor", "gateway", "fetch", "carrier", "operator")


def run(config_path: Path, role: str = "both", options: Sequence[str] = ()) -> int:
    """Serve until SIGTERM; gives the exit status. ``options``: keys set on the command line, ``KEY=VALUE``.

    Raises:
        ApplianceError: it cannot start.
    """
    if role not in ROLES:
        raise ConfigError(f"role {role!r} is not one of {', '.join(ROLES)}")
    # Links stay: where one is swapped, as in a ConfigMap's volume, a reload must read what it leads to then.
    config_path = config_path.absolute()
    if role != "both":
        reread = partial(resolve, config_path, options)
        load = partial(load_config, config_path, options)
        return child.run_role(role, load, reread=reread, config_path=config_path)
    return launch(config_path, _say_ready, options)


def launch(config_path: Path, on_ready: Callable[[Addresses], None], options: Sequence[str] = ()) -> int:
    """Run both processes with one configuration; ``on_ready`` is called once, with the addresses."""
    config = load_config(config_path, options)
    handed = Handover(config=config, options=tuple(options), environment=own_variables())
    environments = {"supervisor": WIPING, "gateway": WIPING_LATER} if config.wipe_memory else {}
    beside = ("fetch",) if config.model_cache is not None else ()
    if beside:
        from appliance.operator.fetch_client import own_environment

        environments["fetch"] = tuple(own_environment().items())
    if config.kv_store is not None and config.kv_store.socket is None:
        beside = (*beside, "carrier")
    if config.operator_api is not None:
        beside = (*beside, "operator")
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        with exclusive(config.run_dir / LOCK, f"the run directory {config.run_dir}"), sealed(handed) as resolved:
            # Under the lock: a second start must not hold the ports, even for a moment, when the first binds them.
            check_free(config.listen)
            launcher = Launcher(
                config_path, config.run_dir, on_ready, resolved, environments=environments, beside=beside
            )
            asyncio.run(launcher.run())
    except OSError as error:
        raise ConfigError(f"cannot use the run directory {config.run_dir}: {error.strerror or error}") from error
    return 0


def check_free(listen: ListenConfig) -> None:
    """Refuse ports that another process has, before anything is started: the gateway would find out seconds later, when
    sandboxes boot already. Whatever else keeps the gateway from an address is told by the gateway.

    Raises:
        StartError: a port is taken.
    """
    with ExitStack() as held:
        for name, address in listen.addresses():
            if address.startswith("unix:"):
                continue
            host, port = split_address(address)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                held.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise StartError(
                        f"cannot listen for {name} on {address}: the port is taken by another process; `athanor "
                        f"doctor` says by which one; `listen: {name}` in athanor.yaml, or the port's option of a demo, "
                        f"names another"
                    ) from error


def _say_ready(addresses: Addresses) -> None:
    print(json.dumps(asdict(addresses)), flush=True)
