"""Warm starts of the embedded model in a folder of a test, and plans of its sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from appliance.common.catalog import embedded_model, read_model
from appliance.common.config import ApplianceConfig, ModelConfig, SandboxConfig
from appliance.supervisor.boot import BootPlan, plan_boot
from appliance.supervisor.warm import WarmStarts, open_warm_starts
from isolation.ipc.messages import Role


def configure(folder: Path, keep: str = "always", model: Path | None = None) -> ApplianceConfig:
    """An appliance of the embedded model, or a copy of it, whose checkpoints lie in this folder."""
    model = model or embedded_model()
    run_dir = folder / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    run_dir.chmod(0o755)
    return ApplianceConfig(
        models=(ModelConfig.model_validate({"name": "athanor-mini", "path": str(model), "keep": keep}),),
        policy=model,
        credentials=model,
        pepper=model,
        run_dir=run_dir,
        sandbox=SandboxConfig(checkpoints=folder / "saved"),
    )


def make(
    folder: Path, runtime: Any, role: Role = Role.TEXT, tenant: str = "", keep: str = "always"
) -> tuple[WarmStarts, BootPlan]:
    """Warm starts and the plan of one sandbox."""
    config = configure(folder, keep)
    warm = open_warm_starts(config, runtime)
    assert warm is not None
    files = read_model("athanor-mini", embedded_model())
    return warm, plan_boot(config, config.models[0], files, runtime, role, tenant)
