"""Real sandboxes for the tests of this folder: a runtime in a private run directory, a root, a way to build specs."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from isolation.gvisor.environment import guest_environment
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import find_runsc
from isolation.gvisor.spec import Limits, Rootfs, SandboxSpec
from isolation.image.python_rootfs import python_rootfs

PROBE = Path(__file__).with_name("gvisor") / "guest_probe.py"
MIB = 1 << 20


@pytest.fixture
def run_dir():
    """A run directory with a short path: a control socket's path has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="ath-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def runtime(runsc_path, run_dir):
    """gVisor under the profile for root, in a run directory that must be empty again at the end."""
    if os.geteuid() != 0:
        pytest.skip("the profile for root needs root")
    runtime = GvisorRuntime(find_runsc([runsc_path]), run_dir)
    yield runtime
    runtime.cleanup_stale()
    runtime.close()


@pytest.fixture(scope="session")
def text_root() -> Rootfs:
    """The root of a text sandbox, made from the Python that runs the tests."""
    return python_rootfs("text")


@pytest.fixture(scope="session")
def make_spec(text_root):
    """Build the spec of a sandbox that runs Python code."""

    def build(name: str, code: str, *arguments: str, mounts=(), memory_mib: int = 512, **limits) -> SandboxSpec:
        return SandboxSpec(
            name=name,
            argv=(text_root.python, "-s", "-S", "-P", "-c", code, *arguments),
            env=guest_environment(threads=1),
            rootfs=text_root,
            mounts=tuple(mounts),
            limits=Limits(memory_mib * MIB, **limits),
            tmpfs_bytes=16 * MIB,
        )

    return build


@pytest.fixture(scope="session")
def probe_code() -> str:
    """A program that says as JSON what it can see and do."""
    return PROBE.read_text()
