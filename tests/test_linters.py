"""Style, types, import contracts, shell: the tools' verdicts as tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def run(root: Path, *argv: str) -> None:
    """Run a tool; its output is the message when it is not content."""
    done = subprocess.run([str(BIN / argv[0]), *argv[1:]], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_ruff_finds_nothing(root: Path) -> None:
    """Style, imports, docstrings, complexity and banned names are as pyproject.toml asks."""
    run(root, "ruff", "check", ".")


@pytest.mark.timeout(300)
def test_mypy_finds_nothing(root: Path) -> None:
    """All four packages type-check strictly."""
    run(root, "mypy")


def test_import_contracts_hold(root: Path) -> None:
    """Who may import whom: the walls between the packages."""
    run(root, "lint-imports", "--no-cache")


BREACHES = {
    "Four packages, one direction": ("policy/match.py", "import appliance.common.errors"),
    "The appliance has floors; gateway and supervisor never import each other": (
        "appliance/gateway/process.py",
        "import appliance.supervisor.service",
    ),
    "Nothing shipped imports tests or measurements": ("engine/serve.py", "import bench.engine"),
    "The host knows the engine only by its configuration, and what compiled kernels are known by": (
        "appliance/gateway/process.py",
        "import engine.serve",
    ),
    "The sandboxes know the host only by the wire": ("engine/serve.py", "import isolation.errors"),
    "The sandboxes never listen": ("engine/serve.py", "import isolation.ipc.listener"),
    "The wire stands alone": ("isolation/ipc/ring.py", "import numpy"),
    "Decisions are pure": ("policy/evaluate.py", "import time"),
    "Leases of a fleet's keys are pure": ("appliance/supervisor/fleet_keys/leases.py", "import time"),
    "No network, no secrets, no second program in the sandboxes' own modules": ("engine/serve.py", "import socket"),
    "The gateway is built in floors": (
        "appliance/gateway/sandboxes/link.py",
        "import appliance.gateway.request.suspects",
    ),
    "Tenants are served without a web framework": ("appliance/gateway/http/sse.py", "import starlette.requests"),
    "The engine's core has no tensors and knows no backend": ("engine/core/scheduler/plan.py", "import torch"),
    "The engine's core is built in floors": ("engine/core/kv/layout.py", "import engine.core.engine"),
    "The mechanics of the scheduler know tenants by four questions": (
        "engine/core/scheduler/planner.py",
        "import engine.core.fairness.prices",
    ),
    "The engine has floors": ("engine/model/layers/blocks.py", "import engine.backends.common.storage"),
    "A backend imports no other backend": ("engine/backends/native/program.py", "import engine.backends.plain.tiles"),
    "The device backend loads kernels over its runtime": (
        "engine/backends/cuda/runtime/runner.py",
        "import engine.backends.cuda.kernels.norm",
    ),
    "The downloader has no tenant's keys, no sandboxes and no program to start": (
        "appliance/fetch/download.py",
        "import isolation.host.process",
    ),
    "The carrier has no keys, no sandboxes and no program to start": (
        "appliance/carrier/store.py",
        "import isolation.keys.seal",
    ),
    "Only the downloader speaks to stores": ("appliance/operator/fetch_client.py", "import obstore"),
    "Only programs of their own load NVIDIA's management library": (
        "appliance/supervisor/cards/watch.py",
        "import pynvml",
    ),
    "Only isolation.keys seals, signs and reads certificates and tokens": (
        "appliance/gateway/front/tokens.py",
        "import jwt",
    ),
    "Only the GPU's kernels know Triton": ("engine/serve.py", "import triton"),
    "The engine parses no text": ("engine/serve.py", "import jinja2"),
    "The host has no tensors and no tokenizers": ("appliance/gateway/process.py", "import numpy"),
    "Only isolation.host.process starts programs": ("isolation/gvisor/runsc.py", "import subprocess"),
    "A measurement stands outside of what it measures": (
        "appliance/operator/bench/run.py",
        "import appliance.gateway.process",
    ),
    "What serves compiles nothing": ("appliance/gateway/process.py", "import appliance.operator.kernels"),
    "What serves leaves no lock-down out": (
        "appliance/supervisor/service.py",
        "import appliance.operator.calls.session",
    ),
    "Only telemetry speaks OpenTelemetry": ("appliance/gateway/process.py", "import prometheus_client"),
}
"""For each import contract a line that breaks it, and the module that it is added to."""


@pytest.fixture(scope="module")
def broken_contracts(root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tool's verdict on one copy of the tree with every breach in it."""
    copy = tmp_path_factory.mktemp("breaches")
    for name in ("appliance", "bench", "engine", "isolation", "policy"):
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", copy)
    for module, line in BREACHES.values():
        assert (copy / module).exists(), module
        with (copy / module).open("a") as file:
            file.write(f"\n{line}\n")
    done = subprocess.run(
        [str(BIN / "lint-imports"), "--no-cache"], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    return " ".join(done.stdout.split())  # long names are wrapped


def test_every_contract_has_a_breach(root: Path) -> None:
    """No import contract is without its positive control."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == set(BREACHES)


@pytest.mark.parametrize("contract", BREACHES)
def test_import_contracts_can_break(contract: str, broken_contracts: str) -> None:
    """Positive control: with a forbidden import added, the tool names the contract as broken."""
    assert f"{contract} BROKEN" in broken_contracts


def test_shell_scripts_are_sound(root: Path) -> None:
    """Every tracked shell script passes shellcheck."""
    listed = subprocess.run(
        ["git", "ls-files", "*.sh", ".ci/run"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    assert ".ci/run" in listed
    run(root, "shellcheck", *listed)
