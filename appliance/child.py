"""Entry of one host process: ``python -m appliance.child ROLE CONFIG [PARENT]``; for the launcher and ``serve --role``.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

EXIT_CANNOT_START = 4
"""As documented in ``appliance.cli.exits``."""

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38


def run_gateway(config_path: Path, *, alone: bool) -> None:
    """Run the gateway in this process until it is told to stop; ``alone`` where no launcher looks after both.

    Raises:
        ApplianceError: it cannot start.
        PolicyError: the policy is wrong.
    """
    import uvloop

    from appliance.config import load_config
    from appliance.gateway.process import Gateway

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Nobody may read our memory, in life or in a core file: prompts and keys are in it.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    config = load_config(config_path)

    async def main() -> None:
        await Gateway(config, alone=alone).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def run_supervisor(config_path: Path) -> None:
    """Run the supervisor in this process until it is told to stop.

    Raises:
        ApplianceError: it cannot start.
        IsolationError: the machine cannot hold sandboxes.
    """
    from appliance.config import load_config
    from appliance.supervisor.machine import enter_confinement
    from appliance.supervisor.service import supervise

    config = load_config(config_path)
    enter_confinement(config)
    asyncio.run(supervise(config))


def main(argv: list[str]) -> int:
    """Run the role; gives the exit status. ``PARENT`` is the process that must not be outlived."""
    role, config, *parent = argv
    libc = ctypes.CDLL(None)
    # Whoever started us shall not leave us behind. It may have ended before we could say so.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if parent and os.getppid() != int(parent[0]):
        return 0
    # No core files: prompts and keys would be in them. (That nobody may look into our memory is the roles' own step.)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A reload that comes before anybody listens for it shall not end us. A handler, since to ignore is inherited.
    signal.signal(signal.SIGHUP, lambda *_: None)
    from appliance import notify
    from appliance.errors import ApplianceError
    from appliance.telemetry.log import LogStyle, configure
    from isolation.errors import IsolationError
    from policy.errors import PolicyError

    # The journal takes the priority from before each line: `journalctl -p warning` works.
    configure(style=LogStyle.JOURNAL if notify.logs_to_journal() else LogStyle.AUTO)
    try:
        if role == "gateway":
            run_gateway(Path(config), alone=not parent)
        else:
            run_supervisor(Path(config))
    except (ApplianceError, IsolationError, PolicyError) as error:
        print(f"athanor {role}: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
