"""Which sandboxes get a GPU: the engine of a model that asks for it, nobody else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.catalog import embedded_model, read_model
from appliance.common.config import ApplianceConfig
from appliance.common.errors import StartError
from appliance.supervisor import gpu as gpu_module
from appliance.supervisor import layout as layout_module
from appliance.supervisor.boot import plan_boot, plan_boots
from appliance.supervisor.gpu import GUEST_GPU_KERNELS, gpu_kernels, with_gpu
from isolation.gpu.gpu_facts import GpuFacts
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import Runsc
from isolation.gvisor.spec import Limits, Rootfs, SandboxSpec
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.host.cores import Cores, Cpu
from isolation.ipc.messages import Role
from tests.isolation.gpu.gpu_machine import FACTS, RUNSC

FILES = read_model("m", embedded_model())


def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: GpuFacts, kind=GvisorRuntime, **model: object):
    """The engine's and the text sandbox's plan of a model, on a machine with these facts."""
    monkeypatch.setattr(gpu_module, "look_at_gpus", lambda: facts)
    config = ApplianceConfig(
        models=[{"name": "m", "path": str(embedded_model()), **model}],
        policy="p",
        credentials="c",
        pepper="x",
        run_dir=str(tmp_path),
        sandbox={"gpu_kernels": str(tmp_path)},
    )
    runtime = object.__new__(kind)
    runtime.runsc = Runsc(Path("/r/runsc"), RUNSC)
    return config, runtime, plan_boots(config, config.models[0], FILES, runtime)


def test_the_engine_gets_it_and_the_text_sandbox_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices, kernels and the backend go to the engine, a tenant's own too; the text sandbox has nothing of it."""
    config, runtime, (engine, text) = plans(tmp_path, monkeypatch, FACTS, gpu="auto", gpu_share=40)
    own = plan_boot(config, config.models[0], FILES, runtime, Role.ENGINE, "tenant")
    own_text = plan_boot(config, config.models[0], FILES, runtime, Role.TEXT, "tenant")
    for plan in (engine, own):
        assert plan.spec.gpu is not None
        assert [one.path for one in plan.spec.gpu.devices] == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]
        told = json.loads(plan.configuration)
        assert (told["backend"], told["gpu_kernels"], told["gpu_share"]) == ("auto", GUEST_GPU_KERNELS, 40)
        assert GUEST_GPU_KERNELS in {mount.target for mount in plan.spec.mounts}
    for plan in (text, own_text):
        assert plan.spec.gpu is None
        assert not [mount for mount in plan.spec.all_mounts() if "nvidia" in mount.target or "gpu" in mount.target]


def test_an_engine_on_a_gpu_is_not_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two nodes an engine without a GPU is pinned to one; the card of an engine with one may be beside the other."""
    two_nodes = Cores(tuple(Cpu(number, number, number // 4) for number in range(8)), 8)
    monkeypatch.setattr(layout_module, "read_cores", lambda: two_nodes)
    _, _, (plain, _) = plans(tmp_path, monkeypatch, FACTS, gpu="off")
    _, _, (engine, _) = plans(tmp_path, monkeypatch, FACTS, gpu="auto")
    assert (plain.spec.cpus, engine.spec.cpus) == ((0, 1, 2, 3), ())


@pytest.mark.parametrize(("facts", "asked"), [(FACTS, "off"), (GpuFacts(), "auto")])
def test_without_one_nothing_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: GpuFacts, asked: str
) -> None:
    """A model that asks for none beside a card, and one that takes what there is where nothing is."""
    _, _, (engine, _) = plans(tmp_path, monkeypatch, facts, gpu=asked)
    assert engine.spec.gpu is None
    assert json.loads(engine.configuration)["gpu_kernels"] == ""


def test_a_machine_that_cannot_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is not there and a driver that runsc does not know end the start, with the model's name."""
    with pytest.raises(StartError, match=r"model m cannot have its GPU: there is no /dev/nvidia3"):
        plans(tmp_path, monkeypatch, FACTS, gpu=[3])
    with pytest.raises(StartError, match=r"driver 999\.1.*gpu: off"):
        plans(tmp_path, monkeypatch, replace(FACTS, driver="999.1"), gpu="auto")


def test_kernels_are_those_that_are_named_or_those_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder the image's is taken, if it has one; without either a sandbox with a GPU could compute nothing,
    and the start ends with the command that compiles them. Without a card nobody asks for kernels."""
    config, runtime, _ = plans(tmp_path, monkeypatch, FACTS, gpu="auto")
    assert gpu_kernels(config) == tmp_path
    image = tmp_path / "image"
    kernels = image / "engine/opt/triton"
    unnamed = config.model_copy(
        update={"sandbox": config.sandbox.model_copy(update={"gpu_kernels": None, "image": image})}
    )
    spec = SandboxSpec("e", ("/x",), (), Rootfs("/x", (), ()), (), Limits(1 << 30))
    model = config.models[0]
    with pytest.raises(StartError, match=r"model m is to have a GPU.*athanor kernels gpu.*gpu: off"):
        with_gpu(spec, unnamed, model, runtime, FACTS)
    assert with_gpu(spec, unnamed, model, runtime, GpuFacts()) == spec
    kernels.mkdir(parents=True)
    given = with_gpu(spec, unnamed, model, runtime, FACTS)
    assert [(mount.source, mount.target) for mount in given.mounts] == [(kernels, GUEST_GPU_KERNELS)]


def test_without_a_wall_nothing_is_passed_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain process sees the machine's GPUs by itself, and is told the backend all the same."""
    monkeypatch.setattr(UnsafeRuntime, "guest_path", lambda _self, _spec, target: target)
    _, _, (engine, _) = plans(tmp_path, monkeypatch, FACTS, UnsafeRuntime, gpu="auto")
    assert engine.spec.gpu is None
    assert json.loads(engine.configuration)["backend"] == "auto"
