"""What is read of a machine's processors and quota, on made-up machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isolation.host.cores import Cores, Cpu, format_cpu_list, parse_cpu_list, read_cores, read_quota

V2 = "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = (
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
CONTAINER = "32 31 0:29 /docker/ab /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A root folder with these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def processors(siblings: dict[int, str], nodes: dict[int, str], name: str = "core_cpus_list") -> dict[str, str]:
    """Files of sysfs for these processors and nodes."""
    files = {f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": f"{text}\n" for cpu, text in siblings.items()}
    files |= {f"sys/devices/system/node/node{node}/cpulist": f"{text}\n" for node, text in nodes.items()}
    return files | {"sys/devices/system/cpu/online": f"0-{max(siblings)}\n"}


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_hyper_threads_and_nodes_are_read(tmp_path: Path, name: str) -> None:
    """Two nodes with two cores of two threads each, under the present and the older name of the list; a node of memory
    alone is no node of processors."""
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    root = tree(tmp_path, processors(siblings, {0: "0-1,4-5", 1: "2-3,6-7", 2: ""}, name))
    found = read_cores(root, range(8))
    assert [cpu.core for cpu in found.cpus] == [0, 1, 2, 3] * 2
    assert [cpu.node for cpu in found.cpus] == [0, 0, 1, 1] * 2
    assert (found.online, found.quota) == (8, None)


def test_only_allowed_processors_are_read(tmp_path: Path) -> None:
    """A core keeps its name when its first thread is not allowed; the others count as the machine's."""
    root = tree(tmp_path, processors({cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}, {0: "0-7"}))
    assert read_cores(root, {1, 5, 6}) == Cores((Cpu(1, 1, 0), Cpu(5, 1, 0), Cpu(6, 2, 0)), 8)


def test_without_files_each_processor_is_a_core_of_one_node(tmp_path: Path) -> None:
    """A container without sysfs: nothing is known, nothing fails."""
    assert read_cores(tmp_path, {2, 0}) == Cores((Cpu(0, 0, 0), Cpu(2, 2, 0)), 2)


@pytest.mark.parametrize("junk", ["", "\n", "x", "3-1", "1-", "-1", "0,,1", "0-99999999999999", "5", "0-\xb2"])
def test_malformed_lists_say_nothing(tmp_path: Path, junk: str) -> None:
    """Whatever stands in the files, each processor is a core of its own on node 0; 5 is another processor's core."""
    root = tree(tmp_path, {**processors({0: junk, 1: junk}, {1: junk}), "sys/devices/system/cpu/online": junk})
    found = read_cores(root, {0, 1})
    assert found.cpus == (Cpu(0, 0, 0), Cpu(1, 1, 0))
    assert found.online in (2, 3)


def test_lists_are_written_as_they_are_read() -> None:
    """Numbers, ranges and nothing, there and back."""
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert format_cpu_list({11, 10, 8, 3, 2, 1, 0}) == "0-3,8,10-11"
    assert (format_cpu_list(()), parse_cpu_list("")) == ("", frozenset())


def test_the_smallest_quota_of_version_2_counts(tmp_path: Path) -> None:
    """A group without a quota below one of 1.5 cores below one of 4: 1.5. Groups beside ours do not count."""
    files = {
        "proc/self/mountinfo": V2,
        "proc/self/cgroup": "0::/top/middle/own\n",
        "sys/fs/cgroup/top/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/top/middle/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/top/middle/own/cpu.max": "max 100000\n",
        "sys/fs/cgroup/top/beside/cpu.max": "1000 100000\n",
        "sys/fs/cpu.max": "1000 100000\n",
    }
    assert read_quota(tree(tmp_path, files)) == 1.5
    assert read_cores(tmp_path, {0}).quota == 1.5


def test_a_container_of_version_2_has_its_quota_at_the_mount(tmp_path: Path) -> None:
    """In a namespace of its own, a container's group is the root of the hierarchy that it sees."""
    files = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}
    assert read_quota(tree(tmp_path, files)) == 0.5


def test_the_quota_of_version_1_counts(tmp_path: Path) -> None:
    """A quota of the parent holds for the group; -1 is none; the period need not be the usual one."""
    group = "sys/fs/cgroup/cpu,cpuacct"
    files = {
        "proc/self/mountinfo": V1,
        "proc/self/cgroup": "8:memory:/m\n1:cpu,cpuacct:/a/b\n",
        f"{group}/cpu.cfs_quota_us": "-1\n",
        f"{group}/cpu.cfs_period_us": "100000\n",
        f"{group}/a/cpu.cfs_quota_us": "125000\n",
        f"{group}/a/cpu.cfs_period_us": "50000\n",
        f"{group}/a/b/cpu.cfs_quota_us": "-1\n",
        f"{group}/a/b/cpu.cfs_period_us": "100000\n",
    }
    assert read_quota(tree(tmp_path, files)) == 2.5


def test_a_container_of_version_1_has_its_quota_at_the_mount(tmp_path: Path) -> None:
    """The mount shows the container's own group, whose path from outside stands in both files."""
    files = {
        "proc/self/mountinfo": CONTAINER,
        "proc/self/cgroup": "1:cpu:/docker/ab\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert read_quota(tree(tmp_path, files)) == 3.0


@pytest.mark.parametrize(
    "junk", ["", "max", "max 100000", "x y", "0 100000", "100000 0", "-5 100000", "1.5 1", "1 2 3"]
)
def test_a_malformed_quota_is_none(tmp_path: Path, junk: str) -> None:
    """Nothing that is no pair of positive numbers counts, in either version."""
    first, _, second = junk.partition(" ")
    files = {
        "proc/self/mountinfo": V1 + V2,
        "proc/self/cgroup": "1:cpu,cpuacct:/\n0::/\n",
        "sys/fs/cgroup/cpu.max": junk,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": first,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": second,
    }
    assert read_quota(tree(tmp_path, files)) is None


@pytest.mark.parametrize(
    ("mounts", "own"),
    [
        ("", ""),
        (V2, "nonsense\n"),
        ("nonsense\n", "0::/\n"),
        ("1 2 - cgroup2 x rw\n", "0::/\n"),
        ("30 25 0:26 / cgroup rw - cgroup2 cgroup2 rw\n", "0::/\n"),
        (V2, "0::/../elsewhere\n"),
        (V2, "0::/gone\n"),
    ],
)
def test_malformed_mounts_say_nothing(tmp_path: Path, mounts: str, own: str) -> None:
    """Files of /proc that make no sense, a group outside of what is mounted, a group that is gone: no quota."""
    files = {"proc/self/mountinfo": mounts, "proc/self/cgroup": own, "sys/fs/cgroup/cpu.max": "50000 100000"}
    assert read_quota(tree(tmp_path, files)) is None


def test_this_machine_is_read() -> None:
    """The processors are those of the affinity, each on a core that this machine has."""
    found = read_cores()
    assert {cpu.number for cpu in found.cpus} == os.sched_getaffinity(0)
    assert found.online >= len(found.cpus) >= len({cpu.core for cpu in found.cpus}) >= 1
