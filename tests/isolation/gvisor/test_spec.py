"""Specs are checked once, when they are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from isolation.errors import IsolationError
from isolation.gvisor.environment import guest_environment
from isolation.gvisor.spec import MIN_PIDS, Limits, Mount, Rootfs, SandboxSpec, is_normal

ROOTFS = Rootfs(python="/opt/python/bin/python3", python_path=("/opt/athanor",), mounts=())
SPEC = SandboxSpec("a", ROOTFS.argv("engine"), (), ROOTFS, (), Limits(1 << 30))


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a//b", "/a/", "/a\0b", ""])
def test_paths_inside_are_absolute_and_normal(path):
    """A path with a way out or two spellings is refused."""
    assert not is_normal(path)
    with pytest.raises(IsolationError):
        Mount(Path("/srv"), path)


@pytest.mark.parametrize("target", ["/", "/proc/x", "/sys", "/dev/shm", "/tmp/x"])
def test_the_sandboxs_own_directories_are_no_mount_targets(target):
    """Nothing of the host goes where gVisor makes its own files, nor over the root."""
    with pytest.raises(IsolationError):
        Mount(Path("/srv"), target)


def test_relative_source_is_refused():
    """A mount's source does not depend on the working directory."""
    with pytest.raises(IsolationError, match="not absolute"):
        Mount(Path("srv"), "/srv")


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a/b", "..", "a" * 49])
def test_names_fit_files_groups_and_sockets(name):
    """A name is what a directory, a cgroup and a socket path can hold."""
    with pytest.raises(IsolationError, match="name"):
        replace(SPEC, name=name)


def test_two_mounts_on_one_target_are_refused():
    """The second would hide the first."""
    mounts = (Mount(Path("/srv/a"), "/model"), Mount(Path("/srv/b"), "/model"))
    with pytest.raises(IsolationError, match="two mounts"):
        replace(SPEC, mounts=mounts)


@pytest.mark.parametrize(
    "values",
    [{"memory_bytes": 0}, {"memory_bytes": 1, "cpu_quota_cores": 0.0}, {"memory_bytes": 1, "pids": MIN_PIDS - 1}],
)
def test_limits_that_cannot_work_are_refused(values):
    """No memory, no time or too few host threads would be a sandbox that dies without a word."""
    with pytest.raises(IsolationError):
        Limits(**values)


def test_a_negative_processor_is_refused():
    """Processors are numbered from 0."""
    with pytest.raises(IsolationError, match="negative"):
        replace(SPEC, cpus=(0, -1))


@pytest.mark.parametrize("folder", ["/", "model", "/model/", "/a/b", "/tmp", "/srv"])
def test_folders_are_places_of_their_own(folder):
    """A folder lies below the root, in none of gVisor's directories and on no mount. Control: another one is taken."""
    with pytest.raises(IsolationError):
        replace(SPEC, mounts=(Mount(Path("/srv"), "/srv"),), folders=(folder,))
    assert replace(SPEC, folders=("/model",)).without_content() == replace(SPEC, folders=("/model",))


def test_argv_runs_a_module_and_nothing_of_the_sites():
    """No site-packages, no user site, no current directory on the path."""
    assert ROOTFS.argv("engine.text", "--x") == (
        "/opt/python/bin/python3",
        "-s",
        "-S",
        "-P",
        "-m",
        "engine.text",
        "--x",
    )


def test_environment_is_sorted_and_extra_wins():
    """The environment is a value that can be compared; every pool has the stated size."""
    values = guest_environment(threads=3, extra=(("LANG", "C"), ("A", "b")))
    assert list(values) == sorted(values)
    table = dict(values)
    assert (table["LANG"], table["A"], table["OMP_NUM_THREADS"]) == ("C", "b", "3")
    with pytest.raises(ValueError, match="threads"):
        guest_environment(threads=0)
