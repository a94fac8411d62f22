"""One host process, supervisor, gateway, downloader, carrier or operator's API: for ``serve --role``, and as the
launcher's child.

The launcher starts ``python -m appliance.operator.child ROLE CONFIG PARENT DESCRIPTOR``. The configuration comes
resolved through the descriptor, so that no child starts with another than the launcher read. CONFIG names the process
in lists of processes, and is the file that the gateway reads with a reload, under the launcher's variables and options.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.operator.cli import exits

if TYPE_CHECKING:
    from appliance.common.config import ApplianceConfig
    from appliance.common.config_loader import Resolved

WANTED_DESCRIPTORS = 65_536
"""Open files of the process, as the units allow (``LimitNOFILE``); a shell's 1,024 would be all connections."""

RETURNED_BYTES = 128 << 10
"""Pieces of memory that the gateway returns to the system as soon as they are freed are so large, or larger: the C
library's own bound (mallopt(3), M_MMAP_THRESHOLD), which it raises to the size of whatever is freed unless told not to.
A TLS connection takes 256 KiB in one piece; in the heap, what is freed between smaller pieces would stay."""

M_MMAP_THRESHOLD = -3
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38


def run_gateway(load: Callable[[], ApplianceConfig], reread: Callable[[], ApplianceConfig], *, alone: bool) -> None:
    """Run the gateway in this process until SIGTERM.

    Args:
        load: gives the configuration, once.
        reread: reads it again from its file, for each reload.
        alone: without a launcher beside it.

    Raises:
        ApplianceError: it cannot start.
        PolicyError: the policy is wrong.
    """
    import uvloop

    from appliance.gateway.process import Gateway
    from appliance.operator.precedence import Precedence

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The memory holds prompts and keys: no other process may read it, neither in life nor in a core file.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return_large_pieces()
    config = load()
    precedence = Precedence()
    precedence.take()

    async def main() -> None:
        following = asyncio.create_task(precedence.follow(), name="precedence")
        try:
            await Gateway(config, alone=alone, reread=reread).run()
        finally:
            following.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def run_supervisor(load: Callable[[], ApplianceConfig], reread: Callable[[], Resolved] | None) -> None:
    """Run the supervisor in this process until SIGTERM.

    Args:
        load: gives the configuration, once.
        reread: reads it again from its file, for models that come and go.

    Raises:
        ApplianceError: it cannot start.
        IsolationError: the machine cannot hold sandboxes.
    """
    from appliance.supervisor.machine import enter_confinement
    from appliance.supervisor.service import supervise

    config = load()
    enter_confinement(config)
    asyncio.run(supervise(config, reread))


def run_fetch(load: Callable[[], ApplianceConfig]) -> None:
    """Run the downloader in this process until SIGTERM. ``load`` gives the configuration, each time anew.

    Raises:
        ApplianceError: it cannot start.
    """
    from appliance.fetch.service import run_service

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The memory holds credentials of sources.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    asyncio.run(run_service(load))


def run_carrier(load: Callable[[], ApplianceConfig]) -> None:
    """Run the carrier of sealed KV in this process until SIGTERM. ``load`` gives the configuration, once.

    Raises:
        ApplianceError: it cannot start.
    """
    from appliance.carrier.service import run_service

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The memory holds the store's password.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    run_service(load)


def run_operator(load: Callable[[], ApplianceConfig], config_path: Path) -> None:
    """Run the operator's API in this process until SIGTERM.

    Args:
        load: gives the configuration, once.
        config_path: the file that commands read for every call.

    Raises:
        ApplianceError: it cannot start.
    """
    from appliance.operator.api.service import run_service

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The memory holds keys while they are made.
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    asyncio.run(run_service(config_path, load))


def return_large_pieces() -> None:
    """Have the C library return each piece of ``RETURNED_BYTES`` or more to the system when it is freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc's alone
        mallopt(M_MMAP_THRESHOLD, RETURNED_BYTES)


def raise_descriptors() -> None:
    """Allow this process as many open files as it may have, ``WANTED_DESCRIPTORS`` at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def run_role(
    role: str,
    load: Callable[[], ApplianceConfig],
    parent: int | None = None,
    reread: Callable[[], Resolved] | None = None,
    config_path: Path | None = None,
) -> int:
    """Run one role; gives the exit status.

    Args:
        role: supervisor, gateway, fetch, carrier or operator.
        load: gives the configuration.
        parent: process of the launcher, whose end ends this one; None without a launcher.
        reread: reads the configuration again, with the place of each value; None: ``load`` can be called again.
        config_path: the configuration's file, for the operator's API.
    """
    libc = ctypes.CDLL(None)
    # The parent may have ended before this call, so it is looked at afterwards.
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        return 0
    raise_descriptors()
    # No core files: prompts and keys would be in them. (PR_SET_DUMPABLE is the roles' own step.)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A reload that comes before the gateway handles SIGHUP must not end it. SIG_IGN would be inherited by its children.
    # Nor may the launcher's word that no other gateway comes (SIGUSR1) end a supervisor that has just begun.
    for number in (signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    from appliance.common import notify
    from appliance.common.errors import ApplianceError
    from appliance.common.log import LogStyle, configure
    from isolation.errors import IsolationError
    from policy.errors import PolicyError

    # The journal takes the priority from before each line: `journalctl -p warning` works.
    configure(style=LogStyle.JOURNAL if notify.logs_to_journal() else LogStyle.AUTO)
    try:
        again = load if reread is None else lambda: reread().config
        if role == "gateway":
            run_gateway(load, again, alone=parent is None)
        elif role == "operator" and config_path is not None:
            run_operator(load, config_path)
        elif role == "fetch":
            load()  # the launcher's descriptor says with what the file is read again
            run_fetch(again)
        elif role == "carrier":
            run_carrier(load)
        else:
            run_supervisor(load, reread)
    except (ApplianceError, IsolationError, PolicyError) as error:
        print(f"athanor {role}: {error}", file=sys.stderr)
        return exits.CANNOT_START
    return 0


def main(argv: list[str]) -> int:
    """Run the launcher's child: ``ROLE CONFIG PARENT DESCRIPTOR``; gives the exit status."""
    from appliance.common.log_import import import_structlog
    from appliance.common.quick_dataclasses import quicken_dataclasses

    quicken_dataclasses()
    import_structlog()
    from appliance.common.config_handover import Handover, unsealed
    from appliance.common.config_loader import resolve
    from appliance.common.errors import ConfigError

    role, config, parent, descriptor = argv
    given: list[Handover] = []

    def load() -> ApplianceConfig:
        given.append(unsealed(int(descriptor)))
        handed = given[0].config
        if role != "supervisor":
            return handed
        try:
            # Models may have come and gone since the launcher read them; all else is as it was handed over.
            return handed.model_copy(update={"models": reread().config.models})
        except ConfigError:
            return handed

    def reread() -> Resolved:
        return resolve(Path(config), given[0].options, given[0].environment)

    return run_role(role, load, int(parent), reread, Path(config))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
