"""Which sandboxes get a GPU and which one: the engine of a model that asks for it, nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.common.card_table import CardUse
from appliance.common.catalog import embedded_model, read_model
from appliance.common.config import ApplianceConfig
from appliance.common.errors import StartError
from appliance.supervisor import gpu as gpu_module
from appliance.supervisor import layout as layout_module
from appliance.supervisor.boot import plan_boot, plan_boots
from appliance.supervisor.gpu import GUEST_GPU_KERNELS, Cards, gpu_kernels, with_gpu
from appliance.supervisor.model_changes import read_models
from isolation.gpu.gpu_facts import GpuFacts
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import Runsc
from isolation.gvisor.runtime import Runtime
from isolation.gvisor.spec import Limits, Rootfs, SandboxSpec
from isolation.gvisor.unsafe_runtime import UnsafeRuntime, host_environment
from isolation.host.cores import Cores, Cpu
from isolation.ipc.messages import Role
from tests.appliance.common.cards import machine, make_8b
from tests.isolation.gpu.gpu_machine import FACTS, RUNSC

FILES = read_model("m", embedded_model())


def appliance(tmp_path: Path, *models: dict[str, object], **sandbox: object) -> ApplianceConfig:
    """A configuration whose models are the embedded one, with a folder of compiled kernels."""
    (tmp_path / "kernels/sm_90-triton").mkdir(parents=True, exist_ok=True)
    return ApplianceConfig(
        models=[{"path": str(embedded_model()), **model} for model in models],
        policy="p",
        credentials="c",
        pepper="x",
        run_dir=str(tmp_path),
        sandbox={"gpu_kernels": str(tmp_path / "kernels"), **sandbox},
    )


@pytest.fixture
def gvisor(runsc_path: Path) -> GvisorRuntime:
    """A runtime with the real runsc, which is asked for its drivers and boots nothing."""
    runtime = object.__new__(GvisorRuntime)
    runtime.runsc = Runsc(runsc_path, RUNSC)
    return runtime


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[UnsafeRuntime]:
    """A runtime without a wall."""
    runtime = UnsafeRuntime(tmp_path / "unsafe")
    yield runtime
    runtime.close()


def seen(monkeypatch: pytest.MonkeyPatch, facts: GpuFacts) -> None:
    """Have the machine look like this."""
    monkeypatch.setattr(gpu_module, "look_at_gpus", lambda: facts)
    monkeypatch.setattr(gpu_module, "with_memory", lambda found: found)


def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: GpuFacts, runtime: Runtime, **model: object):
    """The configuration, and the engine's and the text sandbox's plan of a model, on a machine with these facts."""
    seen(monkeypatch, facts)
    config = appliance(tmp_path, {"name": "m", **model})
    return config, plan_boots(config, config.models[0], FILES, runtime)


def test_the_engine_gets_it_and_the_text_sandbox_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gvisor: GvisorRuntime
) -> None:
    """Devices, kernels and the backend go to the engine, a tenant's own too; the text sandbox has nothing of it."""
    config, (engine, text) = plans(tmp_path, monkeypatch, FACTS, gvisor, gpu="auto", gpu_share=40)
    own = plan_boot(config, config.models[0], FILES, gvisor, Role.ENGINE, "tenant")
    own_text = plan_boot(config, config.models[0], FILES, gvisor, Role.TEXT, "tenant")
    for plan in (engine, own):
        assert plan.spec.gpu is not None
        assert [one.path for one in plan.spec.gpu.devices] == ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]
        told = json.loads(plan.configuration)
        assert (told["backend"], told["gpu_kernels"], told["gpu_share"]) == ("auto", GUEST_GPU_KERNELS, 40)
        assert GUEST_GPU_KERNELS in {mount.target for mount in plan.spec.mounts}
        assert plan.card is not None and (plan.card.card, plan.card.percent) == (0, 40)
    for plan in (text, own_text):
        assert (plan.spec.gpu, plan.card) == (None, None)
        assert not [mount for mount in plan.spec.all_mounts() if "nvidia" in mount.target or "gpu" in mount.target]


def test_name_path_and_auto_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gvisor: GvisorRuntime) -> None:
    """An 8B model on 80 GB: the engine is told the plan's share, rows, budget and context. Without a card the
    processor's numbers are told, and so they are where the card's memory is not known."""
    folder = make_8b(tmp_path / "8b")
    files = replace(FILES, folder=folder, engine=(("model.safetensors", folder / "model.safetensors"),))
    config = appliance(tmp_path, {"name": "llama", "path": str(folder), "gpu": "auto"})
    found = {}
    for name, facts in {"80 GB": machine(1), "unknown": machine(1, total=0), "none": GpuFacts()}.items():
        seen(monkeypatch, facts)
        told = json.loads(plan_boot(config, config.models[0], files, gvisor, Role.ENGINE).configuration)
        found[name] = [
            told[key] for key in ("gpu_share", "max_num_seqs", "max_num_batched_tokens", "max_context", "block_size")
        ]
    assert found == {
        "80 GB": [90, 256, 2_048, 131_072, 16],
        "unknown": [90, 128, 512, 32_768, 16],
        "none": [90, 128, 512, 32_768, 16],
    }


def test_two_cards_get_two_models_and_a_third_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gvisor: GvisorRuntime
) -> None:
    """At the start each engine's sandbox has the node of its own card and no other; the third ends the start with the
    numbers of both."""
    seen(monkeypatch, machine(2))
    coming = read_models(appliance(tmp_path, *({"name": name, "gpu": "auto"} for name in "abc")), gvisor)
    for card in (0, 1):
        engine = next(coming).plans[0]
        assert engine.card is not None and engine.card.card == card
        assert engine.spec.gpu is not None
        assert [one.path for one in engine.spec.gpu.devices][2:] == [f"/dev/nvidia{card}"]
    with pytest.raises(StartError, match=r"of c: card 0 .*engine-a may hold 90 %, 5 % are left.*card 1 .*engine-b"):
        next(coming)


def test_engines_that_are_there_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gvisor: GvisorRuntime
) -> None:
    """A tenant's own engine gets the card that the shared one leaves, and is refused where there is none; a model that
    goes leaves its card to the one that comes."""
    seen(monkeypatch, machine(2))
    config = appliance(tmp_path, {"name": "m", "gpu": "auto"})
    model = config.models[0]
    held = CardUse("engine-m", 0, 90)
    own = plan_boot(config, model, FILES, gvisor, Role.ENGINE, "tenant", Cards([held]))
    assert own.card is not None and own.card.card == 1
    with pytest.raises(StartError, match="engine-m may hold 90 %"):
        plan_boot(config, model, FILES, gvisor, Role.ENGINE, "other", Cards([held, own.card]))
    coming = plan_boot(config, model, FILES, gvisor, Role.ENGINE, "new", Cards([held, own.card], going=["engine-m"]))
    assert coming.card is not None and coming.card.card == 0


def test_an_engine_on_a_gpu_is_not_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gvisor: GvisorRuntime
) -> None:
    """On two nodes an engine without a GPU is pinned to one; the card of an engine with one may be beside the other."""
    two_nodes = Cores(tuple(Cpu(number, number, number // 4) for number in range(8)), 8)
    monkeypatch.setattr(layout_module, "read_cores", lambda: two_nodes)
    _, (plain, _) = plans(tmp_path, monkeypatch, FACTS, gvisor, gpu="off")
    _, (engine, _) = plans(tmp_path, monkeypatch, FACTS, gvisor, gpu="auto")
    assert (plain.spec.cpus, engine.spec.cpus) == ((0, 1, 2, 3), ())


@pytest.mark.parametrize(("facts", "asked"), [(FACTS, "off"), (GpuFacts(), "auto")])
def test_without_one_nothing_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gvisor: GvisorRuntime, facts: GpuFacts, asked: str
) -> None:
    """A model that asks for none beside a card, and one that takes what there is where nothing is."""
    _, (engine, _) = plans(tmp_path, monkeypatch, facts, gvisor, gpu=asked)
    assert (engine.spec.gpu, engine.card) == (None, None)
    assert json.loads(engine.configuration)["gpu_kernels"] == ""


def test_a_machine_that_cannot_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gvisor: GvisorRuntime
) -> None:
    """A card that is not there, no driver, and a driver that runsc does not list end the start, with the model's name
    and the way to a current runsc."""
    with pytest.raises(StartError, match=r"model m cannot have its GPU: there is no /dev/nvidia3"):
        plans(tmp_path, monkeypatch, FACTS, gvisor, gpu=[0, 3])
    with pytest.raises(StartError, match=r"model m cannot have its GPU: no driver of NVIDIA's is loaded"):
        plans(tmp_path, monkeypatch, GpuFacts(), gvisor, gpu=[0])
    with pytest.raises(StartError, match=r"does not list the driver 999\.1.*images/runsc\.py.*gpu: off"):
        plans(tmp_path, monkeypatch, replace(FACTS, driver="999.1"), gvisor, gpu="auto")


def test_a_runsc_that_lists_the_driver_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gvisor: GvisorRuntime
) -> None:
    """The installed program's list comes before our table: with one that lists it, a driver of no row is passed on, and
    an answer that cannot be read ends the start and says so."""
    program = tmp_path / "runsc"
    newer = replace(FACTS, driver="999.1", libraries=tuple(replace(one, version="999.1") for one in FACTS.libraries))
    gvisor.runsc = Runsc(program, RUNSC)
    for answer in ("999.1", "no idea"):
        program.write_text(f"#!/bin/sh\necho {answer}\n")
        program.chmod(0o755)
        if answer == "999.1":
            _, (engine, _) = plans(tmp_path, monkeypatch, newer, gvisor, gpu="auto")
            assert engine.spec.gpu is not None and engine.spec.gpu.driver == "999.1"
    with pytest.raises(StartError, match=r"nvproxy list-supported-drivers` cannot be read: 'no idea' is no version"):
        plans(tmp_path, monkeypatch, newer, gvisor, gpu="auto")


def test_kernels_are_those_that_are_named_or_those_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gvisor: GvisorRuntime
) -> None:
    """Without a folder the image's is taken, if it has one; without either an engine with a GPU could compute nothing,
    and the start ends with the whole command that compiles them, for the rows of the plan. Without a card nothing asks
    for kernels."""
    config, _ = plans(tmp_path, monkeypatch, machine(1), gvisor, gpu="auto")
    assert gpu_kernels(config) == tmp_path / "kernels"
    image = tmp_path / "image"
    kernels = image / "engine/opt/triton"
    unnamed = config.model_copy(
        update={"sandbox": config.sandbox.model_copy(update={"gpu_kernels": None, "image": image})}
    )
    spec = SandboxSpec("e", ("/x",), (), Rootfs("/x", (), ()), (), Limits(1 << 30))
    model = config.models[0]
    with pytest.raises(StartError) as caught:
        with_gpu(spec, unnamed, model, FILES, gvisor, Cards())
    assert (
        f"`athanor kernels gpu /etc/athanor/gpu-kernels --model {embedded_model()} --architecture sm_90 --dtype "
        "bfloat16 --block-size 16 --max-num-seqs 256`"
    ) in caught.value.message
    seen(monkeypatch, GpuFacts())
    bare = with_gpu(spec, unnamed, model, FILES, gvisor, Cards())
    assert (bare.spec, bare.use, bare.model.max_num_seqs) == (spec, None, 128)
    kernels.mkdir(parents=True)
    seen(monkeypatch, machine(1))
    with pytest.raises(StartError, match=rf"no compiled ones are in {kernels}"):
        with_gpu(spec, unnamed, model, FILES, gvisor, Cards())
    (kernels / "sm_90-triton").mkdir()
    seen(monkeypatch, machine(1))
    given = with_gpu(spec, unnamed, model, FILES, gvisor, Cards())
    assert [(mount.source, mount.target) for mount in given.spec.mounts] == [(kernels, GUEST_GPU_KERNELS)]


def test_without_a_wall_an_engine_is_told_its_card_and_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: UnsafeRuntime
) -> None:
    """A plain process sees the machine's GPUs by itself: it is told which one is its own, and the host's folder of
    compiled kernels. No runsc is asked, and a driver that none knows is good enough."""
    facts = replace(machine(2), driver="999.1")
    config, (engine, text) = plans(tmp_path, monkeypatch, facts, bare, gpu=[1])
    told = json.loads(engine.configuration)
    assert (told["backend"], told["gpu_kernels"], told["gpu_share"]) == ("auto", str(tmp_path / "kernels"), 90)
    assert engine.spec.gpu is None
    environment = host_environment(engine.spec)
    own = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_DISABLE_PTX_JIT": "1"}
    assert own.items() <= environment.items()
    assert environment.get("LD_LIBRARY_PATH") != "/nvidia"
    assert "CUDA_VISIBLE_DEVICES" not in host_environment(text.spec)
    unnamed = config.model_copy(update={"sandbox": config.sandbox.model_copy(update={"gpu_kernels": None})})
    with pytest.raises(StartError, match="athanor kernels gpu /etc/athanor/gpu-kernels --model"):
        plan_boot(unnamed, config.models[0], FILES, bare, Role.ENGINE)
    unknown = replace(facts, memory=())
    _, (engine, _) = plans(tmp_path, monkeypatch, unknown, bare, gpu=[1])
    assert host_environment(engine.spec)["CUDA_VISIBLE_DEVICES"] == "1"


def test_without_a_wall_and_without_a_card_the_processor_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: UnsafeRuntime
) -> None:
    """``auto`` gives nothing, and a list is refused as in a sandbox."""
    _, (engine, _) = plans(tmp_path, monkeypatch, GpuFacts(), bare, gpu="auto")
    assert json.loads(engine.configuration)["gpu_kernels"] == "" and engine.card is None
    with pytest.raises(StartError, match="no driver"):
        plans(tmp_path, monkeypatch, GpuFacts(), bare, gpu=[0])
