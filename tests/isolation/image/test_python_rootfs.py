"""The binds of the running Python: enough to import, and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from isolation.errors import RootfsError
from isolation.gvisor.environment import guest_environment
from isolation.gvisor.spec import Limits, Mount, SandboxSpec
from isolation.image.python_rootfs import (
    ROLE_PACKAGES,
    check_readable,
    find_package,
    locate_packages,
    python_rootfs,
    running_python,
    tools_of,
)

FORBIDDEN = ("/etc", "/root/.ssh", "/home", "/var", "/proc", "/sys", "/dev", "/run", "/boot")
WHOLE = {"/", "/usr", "/lib", "/lib64", "/usr/lib", "/bin", "/usr/bin", "/opt", "/root"}


@pytest.mark.parametrize("role", sorted(ROLE_PACKAGES))
def test_only_what_is_needed_is_mounted(role):
    """No secret, no shell, no whole directory of the system; our packages without the host's half."""
    rootfs = python_rootfs(role)
    sources = [os.fspath(mount.source) for mount in rootfs.mounts]
    assert not [source for source in sources if source.startswith(FORBIDDEN) or source in WHOLE]
    assert not [source for source in sources if os.path.basename(source) in {"sh", "bash", "dash", "busybox"}]
    targets = {mount.target for mount in rootfs.mounts}
    assert {"/opt/athanor/engine", "/opt/athanor/isolation/ipc", "/opt/athanor/isolation/__init__.py"} <= targets
    assert "/opt/athanor/isolation" not in targets
    assert not [target for target in targets if target.startswith("/opt/athanor/appliance")]
    packages = {os.path.basename(target) for target in targets if target.startswith("/opt/packages/")}
    assert packages & {"tokenizers", "torch"} == ({"torch"} if role == "engine" else {"tokenizers"})
    assert not packages & {"pip", "setuptools", "requests", "grpc", "cryptography", "appliance"}


def test_packages_for_gpus_are_mounted_beside_a_torch_for_gpus_only(tmp_path):
    """Where Triton is installed for tests of kernels, no sandbox sees it; beside a torch for GPUs the engine has it and
    the libraries of CUDA, and its assemblers are masked."""
    for name in (*ROLE_PACKAGES["engine"], "triton"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    tools = tmp_path / "triton/backends/nvidia/bin"
    tools.mkdir(parents=True)
    (tmp_path / "nvidia/cublas/lib").mkdir(parents=True)  # a namespace package: no __init__
    install = replace(running_python(), path=(os.fspath(tmp_path),))
    assert not {"triton", "nvidia"} & {path.name for path in locate_packages("engine", install)}
    (tmp_path / "torch/lib").mkdir()
    (tmp_path / "torch/lib/libtorch_cuda.so").touch()
    packages = locate_packages("engine", install)
    assert {tmp_path / "triton", tmp_path / "nvidia"} <= set(packages)
    assert tools_of(packages) == ("/opt/packages/triton/backends/nvidia/bin",)


def test_path_of_the_interpreter_is_not_told():
    """Everything is at neutral paths: what the sandbox sees does not name the host's directories."""
    rootfs = python_rootfs("text")
    home = os.path.expanduser("~")
    assert not [mount.target for mount in rootfs.mounts if mount.target.startswith(home)]
    assert rootfs.python.startswith("/opt/python/bin/python3.")


def test_packages_are_found_without_importing_them(tmp_path):
    """Directories, single files and compiled modules are found; others give nothing."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "mod.py").write_text("raise SystemExit('imported')")
    path = (os.fspath(tmp_path),)
    assert find_package("pkg", path) == tmp_path / "pkg"
    assert find_package("mod", path) == tmp_path / "mod.py"
    assert find_package("none", path) is None


def test_missing_package_is_named():
    """A machine without a role's package is told which."""
    nowhere = replace(running_python(), path=())
    with pytest.raises(RootfsError, match=r"package tokenizers.*not installed"):
        locate_packages("text", nowhere)


def test_unreadable_package_is_refused(tmp_path):
    """A file that the sandbox's user cannot read is found before the boot, with its mend."""
    (tmp_path / "pkg").mkdir(mode=0o755)
    (tmp_path / "pkg/__init__.py").touch(mode=0o644)
    mount = Mount(tmp_path / "pkg", "/opt/packages/pkg")
    check_readable([mount])
    (tmp_path / "pkg/__init__.py").chmod(0o600)
    with pytest.raises(RootfsError, match=r"not readable for others.*chmod -R o\+rX"):
        check_readable([mount])


IMPORTS = {
    "engine": "import torch, numpy; assert float((torch.ones(64, 64) @ torch.ones(64, 64))[0, 0]) == 64",
    "text": "import tokenizers, jinja2.sandbox, markupsafe, llguidance",
}
REPORT = "\nimport json, sys\nprint(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"


@pytest.mark.runsc
@pytest.mark.parametrize("role", sorted(ROLE_PACKAGES))
def test_role_imports_what_it_needs_in_a_sandbox(runtime, role):
    """Each role's packages import and work in a real sandbox from nothing but the listed binds."""
    rootfs = python_rootfs(role)
    argv = (rootfs.python, "-s", "-S", "-P", "-c", IMPORTS[role] + REPORT)
    sandbox = runtime.boot(SandboxSpec(role, argv, guest_environment(threads=1), rootfs, (), Limits(2 << 30)))
    status = sandbox.wait(60)
    sandbox.delete()
    assert status == 0, sandbox.output_tail()
    assert set(json.loads(sandbox.output_tail()[-1])) >= set(ROLE_PACKAGES[role])


@pytest.mark.runsc
def test_system_python_works_too(run_dir, runsc_path):
    """A distribution's interpreter below /usr serves as well as one of pyenv; it is our version, for the wheels."""
    if os.geteuid() != 0:
        pytest.skip("the profile for root needs root")
    system = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
    if not system.exists() or Path(sys.base_prefix) == Path("/usr"):
        pytest.skip("no second interpreter of our version")
    root = Path(__file__).resolve().parents[3]
    places = [os.fspath(root), *(path for path in sys.path if path.endswith("site-packages"))]
    program = os.fspath(root / "tests/isolation/gvisor/supervisor_probe.py")
    code = "import sys, tokenizers, jinja2; print(sys.prefix, *sys.version_info[:2])"
    argv = [os.fspath(system), program, ":".join(places), os.fspath(runsc_path), os.fspath(run_dir / "r"), "once", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    ended = json.loads(done.stdout.splitlines()[1])
    assert ended == {"status": 0, "tail": [f"/opt/python {sys.version_info[0]} {sys.version_info[1]}"]}
