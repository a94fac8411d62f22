"""Threads of an engine: how many, on which processors, and why. Pure.

An engine computes with one thread for each physical core: hyper-threads share a core's arithmetic units, and threads
that meet at barriers wait for the slowest. One core is left free when there are several, because the sandbox's kernel
and the gateway must be quick; where there are two with hyper-threads, their second threads serve instead, since one
core of two is half of the machine. On a machine with several NUMA nodes an engine stays on one: memory belongs to the
node whose thread touches it first, so that weights and KV are then local to all threads that read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.common.figures import counted
from isolation.host.cores import Cores, Cpu


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """Threads of one program in a sandbox."""

    count: int
    """Compute threads, at least one."""
    cpus: tuple[int, ...] = ()
    """Processors that the sandbox is pinned to; empty: all that the supervisor may use."""
    reason: str = ""
    """Why the number is what it is, as one line for people; empty where there was no choice."""
    ranks: int = 1
    """Processes that have so many threads each."""
    cores: int = 1
    """Cores that the program may use."""


SINGLE_THREAD = ThreadPlan(1)
"""Plan of a program that computes in one thread, such as a text sandbox's."""


def plan_threads(machine: Cores, limit: float = 0.0, place: int = 0, ranks: int = 1) -> ThreadPlan:
    """Plan the threads of an engine.

    Args:
        machine: processors that the supervisor may use, and its quota.
        limit: most cores of the sandbox (``sandbox.cores``); 0: no limit.
        place: position of the engine among the engines, which take the nodes in turn.
        ranks: processes of the engine, which divide the threads; with fewer cores than ranks no engine is started
            (``appliance.supervisor.ranks``).
    """
    nodes = _by_node(machine.cpus)
    cpus = nodes[place % len(nodes)]
    cores = len({cpu.core for cpu in cpus})
    what = _describe(machine, cpus, cores, several=len(nodes) > 1)
    bounds = [(cores, what), *_limits(machine.quota, limit, what)]
    usable, why = min(bounds, key=lambda bound: bound[0])
    pinned = tuple(cpu.number for cpu in cpus) if len(nodes) > 1 else ()
    if ranks > 1:
        # Ranks wait for each other in every layer: none may share a core with another.
        count = max(1, (usable - 1) // ranks)
        reason = f"{ranks} ranks of {counted(count, 'thread')}: {why}"
        return ThreadPlan(count, pinned, reason, ranks, usable)
    if usable == 2 and cores == 2 and len(cpus) == 4:
        count, rest = 2, "their second threads are left for"
    else:
        count, rest = max(1, usable - 1), "one is left for" if usable > 1 else "shared with"
    reason = f"{counted(count, 'thread')}: {why}, {rest} the sandbox's kernel and the gateway"
    return ThreadPlan(count, pinned, reason)


def _by_node(cpus: tuple[Cpu, ...]) -> list[tuple[Cpu, ...]]:
    """Group processors by node; the node with the most physical cores first, then the one with the lower number."""
    nodes: dict[int, list[Cpu]] = defaultdict(list)
    for cpu in cpus:
        nodes[cpu.node].append(cpu)
    order = sorted(nodes, key=lambda node: (-len({cpu.core for cpu in nodes[node]}), node))
    return [tuple(nodes[node]) for node in order]


def _describe(machine: Cores, cpus: tuple[Cpu, ...], cores: int, *, several: bool) -> str:
    notes = []
    if len(cpus) > cores:
        notes.append(f"{len(cpus)} hyper-threads")
    if len(machine.cpus) < machine.online:
        notes.append(f"{len(machine.cpus)} of {counted(machine.online, 'processor')} are allowed")
    node = f" of NUMA node {cpus[0].node}" if several else ""
    return f"{counted(cores, 'physical core')}{node}" + (f" ({'; '.join(notes)})" if notes else "")


def _limits(quota: float | None, limit: float, what: str) -> Iterator[tuple[int, str]]:
    """Bounds beside the number of cores, each with its reason. A part of a core is none: a thread that gets half of one
    would keep all others waiting at each barrier."""
    if quota is not None:
        whole = max(1, int(quota))
        yield whole, f"a cgroup quota of {quota:g} cores allows {whole} of {what}"
    if limit:
        whole = max(1, int(limit))
        yield whole, f"sandbox.cores {limit:g} allows {whole} of {what}"
