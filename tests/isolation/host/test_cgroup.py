"""Limits as files; parsing of the kernel's tables; a real group where this machine lets us make one."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest

from isolation.errors import IsolationError
from isolation.gvisor.spec import Limits
from isolation.host.cgroup import Cgroup, CgroupSupport, _describe, cpu_quota, limit_files, remove_group
from isolation.host.cgroup_tree import CgroupTree, own_directory, parse_mountinfo, parse_own_groups
from isolation.host.process import spawn

LIMITS = Limits(memory_bytes=256 << 20, cpu_quota_cores=1.5, pids=2048)

HYBRID = """\
30 25 0:26 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 30 0:30 /box /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
"""


def test_limits_of_version_2():
    """One file a limit, and the whole sandbox dies of memory shortage instead of a part of it."""
    files = {name: value for name, value, _ in limit_files(LIMITS, 2)}
    assert files == {
        "memory.max": "268435456",
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cpu.max": "15000 10000",
        "pids.max": "2048",
    }
    assert ("cpu.max", "max 10000", True) in limit_files(Limits(1), 2)


def test_limits_of_version_1():
    """The same limits under their older names."""
    files = {name: value for name, value, _ in limit_files(LIMITS, 1)}
    assert files["memory.limit_in_bytes"] == files["memory.memsw.limit_in_bytes"] == "268435456"
    assert (files["cpu.cfs_period_us"], files["cpu.cfs_quota_us"]) == ("10000", "15000")
    assert ("cpu.cfs_quota_us", "-1", True) in limit_files(Limits(1), 1)


@pytest.mark.parametrize(
    ("cores", "period_us", "quota_us"),
    [
        (None, 10_000, None),
        (0.5, 10_000, 5_000),
        (2.0, 10_000, 20_000),
        (0.05, 20_000, 1_000),
        (0.0001, 1_000_000, 1_000),
    ],
)
def test_a_quota_is_short(cores, period_us, quota_us):
    """A group may use its quota up in one go, so its period is short; the kernel takes no quota below a millisecond and
    no period above a second."""
    assert cpu_quota(cores) == (period_us, quota_us)


def test_tables_of_the_kernel():
    """Mount points are found by controller, the unified hierarchy under the empty name."""
    mounts = parse_mountinfo(HYBRID)
    assert mounts["memory"] == ("/box", Path("/sys/fs/cgroup/memory"))
    assert mounts["cpuacct"] == ("/", Path("/sys/fs/cgroup/cpu,cpuacct"))
    assert mounts[""] == ("/", Path("/sys/fs/cgroup/unified"))
    groups = parse_own_groups("4:memory:/box/a:b\n2:cpu,cpuacct:/\n0::/user.slice\n")
    assert groups == {"memory": "/box/a:b", "cpu": "/", "cpuacct": "/", "": "/user.slice"}


@pytest.mark.parametrize(
    ("support", "line"),
    [
        (CgroupSupport(2, ("memory", "cpu", "pids")), "cgroup v2: memory, cpu, pids"),
        (CgroupSupport(1, ("memory",), "cpu (x)"), "cgroup v1: memory; not enforced: cpu (x)"),
        (CgroupSupport(0, (), "no sandbox"), "no limits enforced: no sandbox"),
    ],
)
def test_support_in_one_line(support, line):
    """Status can say what holds and why something does not."""
    assert support.describe() == line


def test_nothing_is_enforced_quietly():
    """Where nothing can be enforced, groups are made of nothing and cost nothing."""
    group = CgroupTree.nothing("not allowed").create("x", LIMITS)
    group.add([os.getpid()])
    assert (group.members(), group.oom_kills()) == (frozenset(), 0)
    group.delete()


@pytest.fixture
def tree():
    """A parent group on this machine."""
    tree = CgroupTree.detect(f"athanor-test-{os.getpid()}")
    if not tree.support.enforced:
        pytest.skip(tree.support.describe())
    yield tree
    tree.cleanup()
    tree.close()


def test_real_group_holds_limits_and_processes(tree):
    """Limits stand in the kernel's files, a process is moved in, and deletion ends it and removes the group."""
    group = tree.create("real", LIMITS)
    directory = next(iter(group._by_controller.values()))
    with spawn(["sleep", "60"]) as child:
        group.add([child.pid, 2**22 - 1])
        assert group.members() == {child.pid}
        assert group.oom_kills() == 0
        group.delete()
        group.delete()
        assert child.wait(10) == -9
    assert not directory.exists()


SPIN = "while True: pass"


def ticks(pid: int) -> int:
    """Processor time of a process so far."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def computes_on(pid: int, before: int, patience_s: float = 20.0) -> bool:
    """Whether a process gets more than ten ticks: at once on a free machine, later on one that others use."""
    deadline = time.monotonic() + patience_s
    while ticks(pid) <= before + 10:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_frozen_group_computes_nothing_and_ends_all_the_same(tree):
    """Its process stands still and goes on where it was; ended while frozen, also by ``cleanup``, it leaves nothing."""
    group = tree.create("frozen", LIMITS)
    with spawn([sys.executable, "-c", SPIN]) as child:
        group.add([child.pid])
        if not group.freeze():
            pytest.skip("no group can be frozen here")
        time.sleep(0.2)
        before = ticks(child.pid)
        time.sleep(0.3)
        assert ticks(child.pid) == before
        group.thaw()
        group.thaw()
        assert computes_on(child.pid, before), "the control: thawed it computes"
        assert group.freeze()
        time.sleep(0.1)
        group.delete()
        assert child.wait(10) == -9
    other = tree.create("other", LIMITS)
    with spawn([sys.executable, "-c", SPIN]) as child:
        other.add([child.pid])
        assert other.freeze()
        time.sleep(0.1)
        assert tree.cleanup() == ("other",)
        assert child.wait(10) == -9


def test_version_2_freezes_too():
    """The unified hierarchy beside those of version 1, where there is one: it has no limits there and freezes."""
    mounts, own = (Path(f"/proc/self/{name}").read_text() for name in ("mountinfo", "cgroup"))
    base = own_directory(parse_mountinfo(mounts), parse_own_groups(own), "")
    if base is None or not os.access(base, os.W_OK):
        pytest.skip("no unified hierarchy that is ours to change")
    directory = base / f"athanor-test-{os.getpid()}"
    directory.mkdir()
    group = Cgroup({"freezer": directory})
    with spawn([sys.executable, "-c", SPIN]) as child:
        group.add([child.pid])
        assert group.freeze()
        time.sleep(0.2)
        before = ticks(child.pid)
        time.sleep(0.3)
        assert ticks(child.pid) == before
        group.thaw()
        assert computes_on(child.pid, before), "the control: thawed it computes"
        assert group.freeze()
        group.delete()
        assert child.wait(10) == -9
    assert not directory.exists()


def test_what_cannot_be_frozen_says_so(tmp_path):
    """Without a group there is nothing to freeze, and nothing fails; each version's file is written as it wants."""
    assert not CgroupTree.nothing("not allowed").create("x", LIMITS).freeze()
    for name, frozen, thawed in (("freezer.state", "FROZEN", "THAWED"), ("cgroup.freeze", "1", "0")):
        folder = tmp_path / name
        folder.mkdir()
        group = Cgroup({"freezer": folder})
        assert not group.freeze(), "the control: a folder without such a file"
        (folder / name).touch()
        assert group.freeze() and (folder / name).read_text() == frozen
        group.thaw()
        assert (folder / name).read_text() == thawed


def test_weights_beside_programs_of_the_appliance_alone(tmp_path):
    """On version 1 sandboxes weigh less than the programs beside them, unless all programs of the machine are there."""
    for root, weight in ((False, "256"), (True, "1024")):
        base = tmp_path / str(root)
        (base / "athanor-x").mkdir(parents=True)
        (base / "athanor-x/cpu.shares").write_text("1024")
        if root:
            (base / "release_agent").touch()
        CgroupTree.make_v1({"cpu": base}, "athanor-x")
        assert (base / "athanor-x/cpu.shares").read_text() == weight


def test_sandboxes_weigh_the_same(tree):
    """Every sandbox's group has the same weight, and a small one: what hands over to and fro all the time in a group of
    the ordinary weight keeps others waiting on some kernels."""
    if "cpu" not in tree.support.enforced:
        pytest.skip("no limits of the processor here")
    found = set()
    for name in ("one", "two"):
        directory = tree.create(name, LIMITS)._by_controller["cpu"]
        files = [directory / one for one in ("cpu.weight", "cpu.shares")]
        found |= {(one.name, one.read_text().strip()) for one in files if one.exists()}
    assert found in ({("cpu.shares", "16")}, {("cpu.weight", "2")}), found


def test_a_group_counts_the_time_of_all_its_processes(tree):
    """What its processes spend grows the count, is no more than their cores had, and does not go when they end."""
    group = tree.create("count", LIMITS)
    if group.processor_s() is None:
        pytest.skip("no group counts processor time here")
    began, first = time.monotonic(), group.processor_s()
    with spawn([sys.executable, "-c", SPIN]) as child:
        group.add([child.pid])
        deadline = time.monotonic() + 20
        while group.processor_s() < first + 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    spent = group.processor_s()
    assert first + 0.2 <= spent <= (os.cpu_count() or 1) * (time.monotonic() - began)
    group.delete()
    assert group.processor_s() is None, "it is gone"


def test_each_versions_count_is_read_in_its_unit(tmp_path):
    """Nanoseconds of version 1, also where its folder has the file of version 2 for other figures; microseconds of
    version 2; nothing where neither is there, or no hierarchy counts."""
    group = Cgroup({"cpuacct": tmp_path})
    assert group.processor_s() is None
    (tmp_path / "cpu.stat").write_text("nr_periods 3\n")
    assert group.processor_s() is None
    (tmp_path / "cpuacct.usage").write_text("1500000000\n")
    assert group.processor_s() == 1.5
    (tmp_path / "cpuacct.usage").unlink()
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert group.processor_s() == 2.5
    assert Cgroup({"cpu": tmp_path}).processor_s() is None


def test_taken_name_and_cleanup(tree):
    """A name is taken once; cleanup removes all groups of a tree and names them."""
    tree.create("one", LIMITS)
    with pytest.raises(IsolationError, match="one"):
        tree.create("one", LIMITS)
    tree.create("two", LIMITS)
    assert tree.cleanup() == ("one", "two"), "the second try must not harm the first group"
    assert tree.cleanup() == ()


def test_a_name_comes_back_after_a_failed_removal(tree, monkeypatch):
    """What could not be removed in time is told, keeps its name taken while it lasts, and goes with the next start."""
    monkeypatch.setattr("isolation.host.cgroup._REMOVE_TIMEOUT_S", 0.05)
    group = tree.create("stuck", LIMITS)
    blocker = next(iter(group._by_controller.values())) / "blocker"
    blocker.mkdir()  # the kernel removes no group that has another in it
    for attempt in (group.delete, lambda: tree.create("stuck", LIMITS)):
        with pytest.raises(IsolationError, match="stuck cannot be removed: .*processes in it: none"):
            attempt()
    blocker.rmdir()
    tree.create("stuck", LIMITS).delete()


def test_a_process_that_stays_is_named():
    """The error of a group that cannot be removed says what its processes are and what they wait for."""
    assert re.fullmatch(rf"{os.getpid()} \(\S+, [A-Z] \(\w+\), waits in .+\)", _describe(os.getpid()))
    assert _describe(2**22 - 1).endswith("(gone)")


def test_group_of_the_unified_hierarchy():
    """Moving and ending processes works on a real version 2 hierarchy too, controllers or not."""
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    if "" not in mounts or not os.access(mounts[""][1], os.W_OK):
        pytest.skip("no writable version 2 hierarchy")
    directory = mounts[""][1] / f"athanor-test-{os.getpid()}"
    directory.mkdir()
    group = Cgroup({"memory": directory})
    try:
        with spawn(["sleep", "60"]) as child:
            group.add([child.pid])
            assert group.members() == {child.pid}
            group.delete()
            assert child.wait(10) == -9
    finally:
        remove_group(directory)
    assert not directory.exists()


class TestVersion2Layout:
    """The steps on version 2, on plain files: no machine of ours has its controllers there."""

    def base(self, tmp_path: Path, controllers: str) -> Path:
        """A group as the kernel shows it."""
        for group in (tmp_path, tmp_path / "athanor-x"):
            group.mkdir(exist_ok=True)
            (group / "cgroup.controllers").write_text(controllers)
            (group / "cgroup.procs").touch()
        return tmp_path

    def test_supervisor_moves_to_a_leaf_and_controllers_go_down(self, tmp_path):
        """Our process leaves the group that gets children; the controllers we need are switched on below."""
        base = self.base(tmp_path, "cpuset cpu io memory pids")
        CgroupTree.make_v2(base, "athanor-x")
        assert (base / "supervisor/cgroup.procs").read_text() == str(os.getpid())
        assert (base / "cgroup.subtree_control").read_text() == "+memory +cpu +pids"
        assert (base / "athanor-x/cgroup.subtree_control").read_text() == "+memory +cpu +pids"

    def test_sandboxes_weigh_less_than_the_supervisor(self, tmp_path):
        """The supervisor's leaf, beside the sandboxes' parent, keeps the ordinary weight."""
        base = self.base(tmp_path, "cpuset cpu io memory pids")
        (base / "athanor-x/cpu.weight").write_text("100")
        CgroupTree.make_v2(base, "athanor-x")
        assert (base / "athanor-x/cpu.weight").read_text() == "25"
        assert not (base / "supervisor/cpu.weight").exists()

    def test_foreign_processes_are_said(self, tmp_path):
        """When the kernel refuses since others live in our group, nothing is enforced and the reason is told."""
        base = self.base(tmp_path, "memory")
        (base / "cgroup.subtree_control").mkdir()
        support = CgroupTree.make_v2(base, "athanor-x").support
        assert support.enforced == ()
        assert "holds other processes" in support.problem
        assert (base / "cgroup.procs").read_text() == str(os.getpid())
