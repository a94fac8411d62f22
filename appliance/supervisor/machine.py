"""Choice of the sandbox runtime, and the supervisor's own confinement."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import structlog

from appliance.common.config import ApplianceConfig
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import default_candidates, find_runsc
from isolation.gvisor.runtime import Runtime
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.host import userns

log = structlog.get_logger()

CLONE_NEWNET = 0x4000_0000
PR_SET_DUMPABLE = 4


def enter_confinement(config: ApplianceConfig) -> None:
    """Give up what the supervisor does not need, before any thread exists: the network, and without root the host's
    user namespace. With ``unsafe_no_sandbox`` nothing is given up: there is nothing to keep apart.

    Raises:
        UserNamespaceError: without root, and the machine allows no user namespace.
    """
    if config.sandbox.unsafe_no_sandbox:
        return
    if userns.current_profile() is None:
        userns.enter()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        log.warning("the supervisor keeps the machine's network", reason=os.strerror(ctypes.get_errno()))
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def choose_runtime(config: ApplianceConfig) -> Runtime:
    """Runtime that boots every sandbox of this appliance.

    Raises:
        RuntimeNotFoundError: no usable runsc; the message says how to get one.
        IsolationError: another supervisor uses the run directory.
    """
    directory = config.run_dir / "sandboxes"
    runtime: Runtime
    if config.sandbox.unsafe_no_sandbox:
        log.error("NO SANDBOX: models and prompts are handled in plain processes of this machine; for development only")
        runtime = UnsafeRuntime(directory)
    else:
        wanted = (Path(config.sandbox.runsc),) if config.sandbox.runsc else default_candidates()
        runtime = GvisorRuntime(find_runsc(wanted), directory)
    stale = runtime.cleanup_stale()
    if stale:
        log.warning("sandboxes of an earlier run were removed", names=list(stale))
    return runtime
