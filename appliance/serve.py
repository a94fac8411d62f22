"""``athanor serve``: the real thing. Both host processes from one command, or one under its own systemd unit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from appliance import child
from appliance.config import load_config
from appliance.errors import ConfigError
from appliance.launcher import Addresses, Launcher
from appliance.lock import exclusive
from isolation.environment import WIPING, WIPING_LATER

LOCK = "launcher.lock"
"""Name of the lock in the run directory."""

ROLES = ("both", "supervisor", "gateway")


def run(config_path: Path, role: str = "both") -> int:
    """Serve until SIGTERM; gives the exit status.

    Raises:
        ApplianceError: it cannot start.
    """
    if role not in ROLES:
        raise ConfigError(f"role {role!r} is not one of {', '.join(ROLES)}")
    config_path = config_path.resolve()
    if role != "both":
        return child.main([role, str(config_path)])
    return launch(config_path, _say_ready)


def launch(config_path: Path, on_ready: Callable[[Addresses], None]) -> int:
    """Run both processes; ``on_ready`` is called with the ``Addresses`` once."""
    config = load_config(config_path)
    try:
        config.run_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        with exclusive(config.run_dir / LOCK, f"the run directory {config.run_dir}"):
            environments = {"supervisor": WIPING, "gateway": WIPING_LATER} if config.wipe_memory else {}
            asyncio.run(Launcher(config_path, config.run_dir, on_ready, environments=environments).run())
    except OSError as error:
        raise ConfigError(f"cannot use the run directory {config.run_dir}: {error.strerror or error}") from error
    return 0


def _say_ready(addresses: Addresses) -> None:
    line = {
        "http": addresses.http, "grpc": addresses.grpc, "admin": addresses.admin,
        "models": addresses.models, "sandbox": addresses.sandbox,
    }
    print(json.dumps(line), flush=True)
