"""Threads of an engine: a table of machines, with the number, the processors and the reason of each."""

from __future__ import annotations

import pytest

from appliance.supervisor.threads import ThreadPlan, plan_threads
from isolation.host.cores import Cores, Cpu


def machine(
    cores: int, *, siblings: int = 1, nodes: int = 1, quota: float | None = None, allowed: set[int] | None = None
) -> Cores:
    """A machine of ``nodes`` times ``cores`` cores. As Linux numbers them on x86, the second thread of every core comes
    after the first threads of all cores."""
    total = cores * nodes
    cpus = [Cpu(number, number % total, number % total // cores) for number in range(total * siblings)]
    usable = tuple(cpu for cpu in cpus if allowed is None or cpu.number in allowed)
    return Cores(usable, len(cpus), quota)


LEFT = "one is left for the sandbox's kernel and the gateway"
SHARED = "shared with the sandbox's kernel and the gateway"

MACHINES = {
    "1 core": (machine(1), 0.0, 1, f"1 thread: 1 physical core, {SHARED}"),
    "2 cores": (machine(2), 0.0, 1, f"1 thread: 2 physical cores, {LEFT}"),
    "4 cores": (machine(4), 0.0, 3, f"3 threads: 4 physical cores, {LEFT}"),
    "16 cores": (machine(16), 0.0, 15, f"15 threads: 16 physical cores, {LEFT}"),
    "64 cores": (machine(64), 0.0, 63, f"63 threads: 64 physical cores, {LEFT}"),
    "quota of 1.5": (
        machine(16, quota=1.5),
        0.0,
        1,
        f"1 thread: a cgroup quota of 1.5 cores allows 1 of 16 physical cores, {SHARED}",
    ),
    "quota below a core": (
        machine(2, quota=0.25),
        0.0,
        1,
        f"1 thread: a cgroup quota of 0.25 cores allows 1 of 2 physical cores, {SHARED}",
    ),
    "quota above the machine": (machine(4, quota=8.0), 0.0, 3, f"3 threads: 4 physical cores, {LEFT}"),
    "hyper-threads": (machine(4, siblings=2), 0.0, 3, f"3 threads: 4 physical cores (8 hyper-threads), {LEFT}"),
    "2 cores with hyper-threads": (
        machine(2, siblings=2),
        0.0,
        2,
        "2 threads: 2 physical cores (4 hyper-threads), their second threads are left for the sandbox's kernel and the "
        "gateway",
    ),
    "two threads of one core": (
        machine(4, siblings=2, allowed={0, 4}),
        0.0,
        1,
        f"1 thread: 1 physical core (2 hyper-threads; 2 of 8 processors are allowed), {SHARED}",
    ),
    "3 of 8 processors": (
        machine(8, allowed={1, 4, 6}),
        0.0,
        2,
        f"2 threads: 3 physical cores (3 of 8 processors are allowed), {LEFT}",
    ),
    "sandbox.cores of 2.5": (machine(8), 2.5, 1, f"1 thread: sandbox.cores 2.5 allows 2 of 8 physical cores, {LEFT}"),
    "sandbox.cores of 4": (machine(8), 4.0, 3, f"3 threads: sandbox.cores 4 allows 4 of 8 physical cores, {LEFT}"),
    "sandbox.cores above the quota": (
        machine(8, quota=3.9),
        6.0,
        2,
        f"2 threads: a cgroup quota of 3.9 cores allows 3 of 8 physical cores, {LEFT}",
    ),
    "sandbox.cores above the machine": (machine(2), 64.0, 1, f"1 thread: 2 physical cores, {LEFT}"),
}
"""Name to: machine, ``sandbox.cores``, the number of threads, the whole reason."""


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_of_one_node_has_its_number_and_reason(name: str) -> None:
    """A thread a physical core within the smallest bound, one core left where there are several; nothing is pinned."""
    cores, limit, count, reason = MACHINES[name]
    assert plan_threads(cores, limit) == ThreadPlan(count, (), reason)


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 16, 64])
def test_a_plain_machine_is_planned_as_before(cores: int) -> None:
    """Without hyper-threads, nodes and a quota, the number is the cores less one, at least one."""
    assert plan_threads(machine(cores)).count == max(1, cores - 1)


def test_an_engine_stays_on_one_node() -> None:
    """Two nodes of eight cores with two threads each: seven threads, pinned to all threads of one node."""
    plan = plan_threads(machine(8, siblings=2, nodes=2))
    assert plan.count == 7
    assert plan.cpus == (*range(8), *range(16, 24))
    assert plan.reason == f"7 threads: 8 physical cores of NUMA node 0 (16 hyper-threads), {LEFT}"


def test_engines_take_nodes_in_turn() -> None:
    """The second engine is on the second node, the third on the first again."""
    two = machine(8, nodes=2)
    plans = [plan_threads(two, place=place) for place in range(3)]
    assert [plan.cpus for plan in plans] == [tuple(range(8)), tuple(range(8, 16)), tuple(range(8))]
    assert "node 1" in plans[1].reason


def test_the_larger_node_is_taken_first() -> None:
    """Where this process may use two cores of node 0 and all of node 1, the first engine is on node 1."""
    uneven = machine(8, nodes=2, allowed={0, 1, *range(8, 16)})
    assert plan_threads(uneven).cpus == tuple(range(8, 16))
    second = plan_threads(uneven, place=1)
    assert (second.count, second.cpus) == (1, (0, 1))


def test_an_affinity_within_one_node_pins_nothing() -> None:
    """A process that may use one node of two is on it already."""
    assert plan_threads(machine(8, nodes=2, allowed=set(range(8)))) == ThreadPlan(
        7, (), f"7 threads: 8 physical cores (8 of 16 processors are allowed), {LEFT}"
    )


def test_a_quota_holds_on_a_node_too() -> None:
    """A quota of 4.5 cores on two nodes of eight: three threads on one node."""
    plan = plan_threads(machine(8, nodes=2, quota=4.5))
    assert (plan.count, plan.cpus) == (3, tuple(range(8)))
    assert "quota of 4.5 cores allows 4 of 8 physical cores of NUMA node 0" in plan.reason
