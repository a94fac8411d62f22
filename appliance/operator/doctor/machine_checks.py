"""Pure: facts about the machine to findings."""

from __future__ import annotations

from appliance.common.figures import counted, size
from appliance.operator.doctor.facts import Cgroups, Clock, Machine, ProcessLimits, Runsc, UserNamespaces
from appliance.operator.doctor.finding import Area, Finding, Severity, Subject
from appliance.operator.doctor.gpu_checks import check_gpu

MIN_NOFILE = 4_096
"""Descriptors of a gateway: one a connection, and some hundred of its own."""

MIN_PIDS = 1_024
"""Processes and threads: a sandbox has some hundred, and ends silently when it gets no more."""

MAX_CLOCK_ERROR_S = 1.0
"""Beyond this the order of log lines and spans of two machines cannot be told."""

EARLIEST = 1_767_225_600.0
"""2026-01-01: no clock is right that is before the program's own year."""

WANTED_CONTROLLERS = ("memory", "cpu", "pids")


def check_machine(machine: Machine, *, unsafe: bool = False, limits_in_force: str = "") -> tuple[Finding, ...]:
    """Findings about the machine.

    Args:
        machine: the machine.
        unsafe: the configuration asks for no sandboxes.
        limits_in_force: what a running appliance says of its sandboxes' cgroups; empty: none runs.
    """
    return (
        _machine(machine),
        *check_gpu(machine.gpu, machine.runsc.version),
        check_clock(machine.clock),
        check_limits(machine.limits),
        *(() if unsafe else check_runsc(machine.runsc)),
        *(() if unsafe else (check_namespaces(machine.namespaces, root=machine.root),)),
        check_cgroups_in_force(limits_in_force, version=machine.cgroups.version)
        if limits_in_force
        else check_cgroups(machine.cgroups, under_systemd=machine.limits.under_systemd),
    )


def _machine(machine: Machine) -> Finding:
    memory = machine.memory
    memory_free = f"{size(memory.available)} of {size(memory.total)} memory free"
    what = f"{counted(machine.cores, 'core')}, {memory_free}, {machine.kernel}"
    if machine.cores >= 2:
        return Subject(Area.MACHINE, "processor").ok(what)
    return Subject(Area.MACHINE, "processor").warning(
        what,
        means="engine, sandbox and gateway take turns on one core: first tokens come late",
        mend="give the machine two cores or more",
    )


def check_clock(clock: Clock) -> Finding:
    """Whether times in certificates, keys, logs and spans can be believed."""
    mend = "timedatectl set-ntp true"
    if clock.now < EARLIEST:
        return Subject(Area.MACHINE, "clock").problem(
            "the clock is years behind", means="certificates and keys seem not valid yet", mend=mend
        )
    if clock.synchronised is None:
        return Subject(Area.MACHINE, "clock").note("the kernel does not say if it is synchronised")
    if not clock.synchronised:
        return Subject(Area.MACHINE, "clock").warning(
            "not synchronised",
            means="expiry of keys and certificates, logs and spans go by a clock that drifts",
            mend=mend,
        )
    if clock.max_error_s > MAX_CLOCK_ERROR_S:
        return Subject(Area.MACHINE, "clock").warning(
            f"synchronised to {clock.max_error_s:.1f} s only",
            means="spans of two machines cannot be put in order",
            mend="timedatectl timesync-status",
        )
    return Subject(Area.MACHINE, "clock").ok(f"synchronised to {clock.max_error_s * 1000:.0f} ms")


def check_limits(limits: ProcessLimits) -> Finding:
    """Descriptors, locked memory, processes."""
    descriptors, processes = (_number(value) for value in (limits.nofile, limits.pids))
    what = f"descriptors {descriptors}, locked memory {_bytes(limits.memlock)}, processes {processes}"
    if limits.under_systemd:
        return Subject(Area.MACHINE, "limits").ok("set by the units")
    if 0 <= limits.pids < MIN_PIDS:
        return Subject(Area.MACHINE, "limits").problem(
            what, means="a sandbox that gets no more processes ends without a word", mend=f"ulimit -u {4 * MIN_PIDS}"
        )
    if 0 <= limits.nofile < MIN_NOFILE:
        return Subject(Area.MACHINE, "limits").warning(
            what,
            means=f"about {counted(max(0, limits.nofile - 200), 'connection')} at once, then none",
            mend=f"ulimit -n {16 * MIN_NOFILE}",
        )
    return Subject(Area.MACHINE, "limits").ok(what)


def check_runsc(runsc: Runsc) -> tuple[Finding, ...]:
    """The program, and a trial of its platform."""
    if runsc.problem:
        return (
            Subject(Area.SANDBOXES, "runsc").problem(
                runsc.problem,
                means="nothing is served: every model runs in a gVisor sandbox",
                mend="python images/runsc.py --into .venv/bin    # or: apt install runsc",
            ),
        )
    found = Subject(Area.SANDBOXES, "runsc").ok(f"{runsc.version} at {runsc.path}")
    if not runsc.platform_problem:
        return (found, Subject(Area.SANDBOXES, "platform").ok("systrap: a trial sandbox ran"))
    return (
        found,
        Subject(Area.SANDBOXES, "platform").problem(
            f"a trial sandbox did not run: {runsc.platform_problem}",
            means="no model can be started",
            mend="sysctl kernel.yama.ptrace_scope    # 3 forbids it; so do seccomp profiles of containers",
        ),
    )


def check_namespaces(namespaces: UserNamespaces, *, root: bool) -> Finding:
    """What a supervisor without root needs; the units have one."""
    if not namespaces.problem:
        return Subject(Area.SANDBOXES, "user namespaces").ok("allowed")
    said, _, mend = namespaces.problem.partition("; ")
    return Finding(
        area=Area.SANDBOXES,
        check="user namespaces",
        level=Severity.WARNING if root else Severity.PROBLEM,
        what=said,
        means="a supervisor without root, as in the units, cannot start sandboxes",
        mend=mend,
    )


BOOT_V2 = "boot with systemd.unified_cgroup_hierarchy=1"
"""Mend where the cgroups are of version 1: of those, systemd gives no controller to a unit with a user of its own."""


def check_cgroups_in_force(said: str, *, version: int) -> Finding:
    """What bounds the sandboxes of the running appliance, in the words of its status: this process may be able to bound
    more, or less. ``version`` is that of the machine's cgroups."""
    subject = Subject(Area.SANDBOXES, "cgroups")
    if "not enforced" not in said and "no limits" not in said:
        return subject.ok(f"{said}; as the running appliance says")
    return subject.warning(
        said,
        means="sandboxes that run now have no such bound: one may starve the machine",
        mend=BOOT_V2
        if version == 1
        else "systemctl show athanor-supervisor -p Delegate    # needs cpu, cpuset, memory and pids; then restart it",
    )


def check_cgroups(cgroups: Cgroups, *, under_systemd: bool) -> Finding:
    """What bounds a sandbox's memory, processor time and processes."""
    missing = [name for name in WANTED_CONTROLLERS if name not in cgroups.controllers]
    what = f"v{cgroups.version}: {', '.join(cgroups.controllers) or 'no controllers'}" if cgroups.version else "none"
    if under_systemd and cgroups.version == 1:
        return Subject(Area.SANDBOXES, "cgroups").warning(
            what,
            means="systemd gives the unit's user no controller of version 1: one sandbox may starve the machine",
            mend=BOOT_V2,
        )
    if under_systemd and not missing:
        return Subject(Area.SANDBOXES, "cgroups").ok(f"{what}; the unit has its own")
    if missing or not cgroups.version:
        return Subject(Area.SANDBOXES, "cgroups").warning(
            what,
            means=f"sandboxes have no bound of {', '.join(missing or WANTED_CONTROLLERS)}: one may starve the machine",
            mend=f"{BOOT_V2}, or run the units: athanor install --systemd",
        )
    if not cgroups.writable:
        return Subject(Area.SANDBOXES, "cgroups").warning(
            f"{what}; {cgroups.directory} is not ours to change",
            means="sandboxes started from this shell have no bounds",
            mend="athanor install --systemd    # or: systemd-run --user --scope -p Delegate=yes athanor serve ...",
        )
    return Subject(Area.SANDBOXES, "cgroups").ok(f"{what}; ours to change")


def _number(value: int) -> str:
    return "unlimited" if value < 0 else f"{value:,}"


def _bytes(value: int) -> str:
    return "unlimited" if value < 0 else size(value)
