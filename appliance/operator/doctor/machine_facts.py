"""Looks at the machine: files of /proc and /sys, two trial programs. Changes nothing, leaves nothing."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from appliance.common.model_memory import machine_memory
from appliance.operator.doctor.facts import Cgroups, Clock, Gpu, Machine, ProcessLimits, Runsc, UserNamespaces
from appliance.operator.install.rendering import GATEWAY_UNIT
from appliance.operator.install.system import systemd_runs
from isolation.errors import GpuError, ProcessError, RuntimeNotFoundError
from isolation.gpu.card_memory import with_memory
from isolation.gpu.gpu_facts import look_at_gpus
from isolation.gpu.listed_drivers import listed_drivers
from isolation.gvisor.runsc import default_candidates, find_runsc
from isolation.host.cgroup import CONTROLLERS
from isolation.host.cgroup_tree import own_directory, parse_mountinfo, parse_own_groups
from isolation.host.process import run

TRIAL_S = 20.0
"""Longest that a trial program may take; each takes a fifth of a second."""

STA_UNSYNC = 0x40
"""Bit of adjtimex(2)'s status: the clock is not synchronised."""

_TIMEX_BYTES, _MAX_ERROR_AT, _STATUS_AT = 208, 24, 40
"""Size of ``struct timex`` on 64-bit Linux, and where two of its fields lie."""

UNIT_PLACES = ("etc", "run", "usr/local/lib", "usr/lib", "lib")
"""Folders of system units, below the root."""


def look_at_machine(runsc: str = "", *, sandboxed: bool = True) -> Machine:
    """Gather the facts about the machine; ``runsc`` is the configured path, if any."""
    return Machine(
        root=os.geteuid() == 0,
        cores=len(os.sched_getaffinity(0)),
        kernel=f"Linux {platform.release()} {platform.machine()}",
        memory=machine_memory(),
        gpu=_gpu(runsc, sandboxed=sandboxed),
        runsc=_runsc(runsc) if sandboxed else Runsc(),
        namespaces=_namespaces() if sandboxed else UserNamespaces(),
        cgroups=_cgroups(),
        limits=_limits(),
        clock=_clock(),
    )


def units_installed() -> bool:
    """Whether systemd runs here and has our units."""
    return systemd_runs() and any(Path("/", place, "systemd/system", GATEWAY_UNIT).exists() for place in UNIT_PLACES)


def _gpu(runsc: str, *, sandboxed: bool) -> Gpu:
    found = with_memory(look_at_gpus())
    gpu = Gpu(names=found.models, driver=found.driver, found=found)
    if not found.driver or not sandboxed:
        return gpu
    try:
        return replace(gpu, known=listed_drivers(find_runsc(_candidates(runsc)).path))
    except RuntimeNotFoundError:
        return gpu  # the finding about runsc says so
    except GpuError as error:
        return replace(gpu, list_problem=str(error))


def _candidates(runsc: str) -> tuple[Path, ...]:
    return (Path(runsc),) if runsc else default_candidates()


def _runsc(wanted: str) -> Runsc:
    """Find it and run a trial sandbox with this machine's platform: the only proof that one can."""
    try:
        found = find_runsc(_candidates(wanted))
    except RuntimeNotFoundError as error:
        return Runsc(problem=str(error).partition("\n")[0])
    with tempfile.TemporaryDirectory(prefix="athanor-doctor-", ignore_cleanup_errors=True) as root:
        flags = [f"--root={root}", "--platform=systrap", "--network=none", "--ignore-cgroups"]
        # As the supervisor has it: with root the sandbox is another user, who has to reach runsc's programs.
        flags.append("--directfs=false" if os.geteuid() == 0 else "--rootless")
        problem = ""
        try:
            done = run([str(found.path), *flags, "do", "/bin/true"], timeout_s=TRIAL_S, check=False)
            if done.returncode != 0:
                problem = _last_words(done.stderr) or f"status {done.returncode}"
        except ProcessError as error:
            problem = _last_words(str(error))
    return Runsc(path=str(found.path), version=found.version, platform_problem=problem)


def _namespaces() -> UserNamespaces:
    """Whether a child gets one; the process that asks cannot leave it again."""
    code = (
        "import sys\nfrom isolation.host import userns\nfrom isolation.errors import UserNamespaceError\n"
        "try:\n    userns.enter()\n"
        "except UserNamespaceError as error:\n    print(f'{error.args[0]}; {error.hint}')\n"
    )
    try:
        done = run([sys.executable, "-c", code], timeout_s=TRIAL_S, cwd=Path(__file__).parents[3])
    except ProcessError as error:
        return UserNamespaces(problem=_last_words(str(error)))
    return UserNamespaces(problem=done.stdout.strip())


def _cgroups() -> Cgroups:
    """Cgroup in which a supervisor started from here would make its groups; makes none."""
    mounts, own = parse_mountinfo(_read("/proc/self/mountinfo")), parse_own_groups(_read("/proc/self/cgroup"))
    directories = {name: directory for name in ("", *CONTROLLERS) if (directory := own_directory(mounts, own, name))}
    unified = directories.pop("", None)
    if unified is not None:
        present = _read(unified / "cgroup.controllers").split()
        if "memory" in present:
            names = tuple(name for name in CONTROLLERS if name in present)
            return Cgroups(version=2, controllers=names, directory=str(unified), writable=os.access(unified, os.W_OK))
    if not directories:
        return Cgroups(version=0, controllers=(), directory="", writable=False)
    writable = all(os.access(path, os.W_OK) for path in directories.values())
    first = str(next(iter(directories.values())))
    return Cgroups(version=1, controllers=tuple(directories), directory=first, writable=writable)


def _limits() -> ProcessLimits:
    def soft(kind: int) -> int:
        value = resource.getrlimit(kind)[0]
        return -1 if value == resource.RLIM_INFINITY else value

    return ProcessLimits(
        nofile=soft(resource.RLIMIT_NOFILE),
        memlock=soft(resource.RLIMIT_MEMLOCK),
        pids=soft(resource.RLIMIT_NPROC),
        under_systemd=units_installed(),
    )


def _clock() -> Clock:
    """Ask the kernel without changing anything (modes = 0), adjtimex(2)."""
    block = (ctypes.c_char * _TIMEX_BYTES)()
    if ctypes.CDLL(None).adjtimex(ctypes.byref(block)) < 0:
        return Clock(now=time.time(), synchronised=None)
    data = memoryview(block).cast("B")
    status = int.from_bytes(data[_STATUS_AT : _STATUS_AT + 4], "little")
    error_us = int.from_bytes(data[_MAX_ERROR_AT : _MAX_ERROR_AT + 8], "little", signed=True)
    return Clock(now=time.time(), synchronised=not status & STA_UNSYNC, max_error_s=max(0, error_us) / 1e6)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
