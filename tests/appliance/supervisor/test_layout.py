"""Sandboxes on a machine with two NUMA nodes: who is pinned where, and who is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from appliance.common.catalog import embedded_model, read_model
from appliance.common.config import ApplianceConfig
from appliance.supervisor import layout
from appliance.supervisor.boot import BootPlan, plan_boot
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.host.cores import Cores, Cpu
from isolation.ipc.messages import Role

TWO_NODES = Cores(tuple(Cpu(number, number, number // 4) for number in range(8)), 8)


@pytest.fixture
def boot_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Plan a sandbox of the first or second model on a machine with two nodes of four cores."""
    monkeypatch.setattr(layout, "read_cores", lambda: TWO_NODES)
    names = ("first", "second")
    config = ApplianceConfig(
        models=[{"name": name, "path": str(embedded_model())} for name in names],
        policy="p",
        credentials="c",
        pepper="x",
        run_dir=str(tmp_path),
    )

    def plan(index: int, role: Role, tenant: str = "") -> BootPlan:
        model = config.models[index]
        runtime = object.__new__(UnsafeRuntime)
        return plan_boot(config, model, read_model(model.name, model.path), runtime, role, tenant)

    return plan


def test_engines_are_pinned_in_turn(boot_plan) -> None:
    """Each model's engine has a node, a tenant's own engine the one after; number and reason are in its plan."""
    plans = [boot_plan(0, Role.ENGINE), boot_plan(1, Role.ENGINE), boot_plan(0, Role.ENGINE, "tenant")]
    assert [plan.spec.cpus for plan in plans] == [(0, 1, 2, 3), (4, 5, 6, 7), (4, 5, 6, 7)]
    for plan in plans:
        assert json.loads(plan.configuration)["threads"] == 3
        assert dict(plan.spec.env)["OMP_NUM_THREADS"] == "3"
        assert plan.threads.startswith("3 threads: 4 physical cores of NUMA node ")


def test_text_sandboxes_are_not_pinned(boot_plan) -> None:
    """A text sandbox has one thread, runs wherever a core is free, and has no reason to show."""
    plan = boot_plan(0, Role.TEXT)
    assert (plan.spec.cpus, plan.threads, dict(plan.spec.env)["OMP_NUM_THREADS"]) == ((), "", "1")
