"""Engines of several ranks: planned for this machine, refused with numbers, and in real sandboxes without a network."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from appliance.common.catalog import embedded_model, read_model
from appliance.common.config import ApplianceConfig, ModelConfig, SandboxConfig
from appliance.common.control import RESTORED
from appliance.common.errors import StartError
from appliance.common.model_memory import ENGINE_BYTES, RANK_BYTES, again_bytes, model_need
from appliance.common.model_rules import MOST_RANKS
from appliance.common.model_shape import parse_shape
from appliance.selftest import intruder
from appliance.supervisor import layout
from appliance.supervisor.boot import Booted, boot, end, plan_boot
from appliance.supervisor.ranks import cores_problem, shape_problem
from appliance.supervisor.templates import starts
from appliance.supervisor.threads import plan_threads
from appliance.supervisor.warm import open_warm_starts
from engine.config import EngineConfig
from engine.core.offline import generate
from engine.sandbox import rank_memory
from engine.startup.load import load_engine
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import container_id
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.host.cores import Cores, Cpu
from isolation.ipc.engine import StepOutput, Submit
from isolation.ipc.messages import Role
from tests.engine.model.families.table import save_reference
from tests.engine.support import submit

GONE_S = 1.0
"""Seconds after which a rank's death is the engine's."""

SHAPE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def cores(count: int) -> Cores:
    """A machine of so many cores without hyper-threads."""
    return Cores(tuple(Cpu(number, number, 0) for number in range(count)), count, None)


def configure(folder: Path, ranks: int = 2, model: Path | None = None, **layout: int) -> ApplianceConfig:
    """An appliance of the embedded model, or of another one, on so many ranks, or in another layout."""
    model = model or embedded_model()
    layout = layout or {"tensor_parallel": ranks}
    run_dir = folder / "run"
    run_dir.mkdir(parents=True, exist_ok=True)
    run_dir.chmod(0o755)
    return ApplianceConfig(
        models=(ModelConfig(name="athanor-mini", path=model, kv_bytes=32 << 20, dtype="float32", **layout),),
        policy=model,
        credentials=model,
        pepper=model,
        run_dir=run_dir,
        sandbox=SandboxConfig(checkpoints=folder / "saved"),
    )


@pytest.mark.parametrize(
    ("count", "ranks", "threads"), [(1, 2, 1), (2, 2, 1), (3, 2, 1), (4, 2, 1), (5, 2, 2), (9, 2, 4), (16, 4, 3)]
)
def test_ranks_divide_the_threads(count: int, ranks: int, threads: int) -> None:
    """Each rank has its part of the cores, one being left free; with fewer cores than ranks the reason has both
    numbers."""
    plan = plan_threads(cores(count), ranks=ranks)
    assert (plan.count, plan.ranks) == (threads, ranks)
    problem = cores_problem(entry(tensor_parallel=ranks), plan)
    assert bool(problem) == (count < ranks)
    if problem:
        assert f"tensor_parallel {ranks}" in problem and f"may use {count} core" in problem


def entry(**fields: object) -> ModelConfig:
    """An entry of ``models``."""
    return ModelConfig(name="m", path=Path("/m"), **fields)


MIXTURE = {"num_experts_per_tok": 2, "num_local_experts": 3}


@pytest.mark.parametrize(
    ("change", "fields", "said"),
    [
        ({}, {"tensor_parallel": 2}, ""),
        ({}, {"tensor_parallel": 3}, "8 attention heads cannot be dealt evenly to 3 ranks"),
        (
            {"num_key_value_heads": 3, "num_attention_heads": 6},
            {"tensor_parallel": 2},
            "3 key-value heads cannot be dealt evenly to 2 ranks",
        ),
        ({"num_key_value_heads": 1}, {"tensor_parallel": 2}, ""),
        ({"intermediate_size": 1}, {"tensor_parallel": 2}, "an MLP's inner width of 1 cannot be dealt to 2 ranks"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, {"pipeline_parallel": 2}, ""),
        ({}, {"pipeline_parallel": 3}, "2 layers cannot be cut into 3 stages"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, **MIXTURE}, {"expert_parallel": 2}, ""),
        ({}, {"expert_parallel": 2}, "the model has no experts"),
        (MIXTURE, {"expert_parallel": 4}, "3 experts cannot be dealt to 4 ranks"),
    ],
)
def test_a_shape_that_cannot_be_dealt_is_told_with_numbers(
    change: dict[str, int], fields: dict[str, int], said: str
) -> None:
    """The host tells it before a sandbox is started; what it cannot read it leaves to the engine."""
    model = entry(**fields)
    found = shape_problem(model, parse_shape({**SHAPE, **change}))
    assert found.startswith(f"m has {model.rank_words}, and") if said else not found
    assert said in found
    assert shape_problem(model, None) == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"runner": "embed"}, "runner: embed"),
        ({"gpu": "auto"}, "gpu"),
        ({"weights": "int8"}, "weights: int8"),
        ({"adapters": ({"name": "a", "path": "/a", "digest": "0" * 64},)}, "adapters"),
        ({"tensor_parallel": 9}, "less than or equal to 8"),
        ({"tensor_parallel": 4, "pipeline_parallel": 4}, "are 16 processes, and an engine has 8 at the most"),
        ({"tensor_parallel": 2, "expert_parallel": 4}, "one of the two is 1, or both are alike"),
        ({"tensor_parallel": 1, "expert_parallel": 2, "gpu": "auto"}, "expert_parallel 2 is not computed with gpu"),
        ({"tensor_parallel": 1, "pipeline_parallel": 2, "runner": "null"}, "pipeline_parallel 2 is not computed with"),
    ],
)
def test_what_ranks_do_not_compute_is_no_configuration(fields: dict[str, object], said: str) -> None:
    """The loader names the other key; control: ranks alone."""
    values = {"name": "m", "path": Path("/m"), "tensor_parallel": 2}
    assert ModelConfig(**values).ranks == 2
    assert ModelConfig(**{**values, "pipeline_parallel": 3}).ranks == 6
    assert MOST_RANKS == rank_memory.MOST_RANKS
    with pytest.raises(ValidationError, match=said):
        ModelConfig(**{**values, **fields})


def test_memory_counts_what_further_ranks_hold_again(tmp_path: Path) -> None:
    """Where experts alone are dealt, each rank has all of the rest; where layers are cut, the last stage has the
    embedding again that is its head; ranks that share layers hold nothing twice."""
    shape = {**SHAPE, **MIXTURE, "dtype": "float32", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    experts = 2 * 3 * 3 * 64 * 96 * 4
    model = replace_path(tmp_path)
    assert again_bytes(model(tensor_parallel=2), experts + 1000) == 0
    assert again_bytes(model(expert_parallel=2), experts + 1000) == 1000
    assert again_bytes(model(expert_parallel=4), experts + 1000) == 3000
    assert again_bytes(model(pipeline_parallel=2), experts + 1000) == 100 * 64 * 4
    mixed = model(expert_parallel=2, pipeline_parallel=2)  # Each rank of the last stage has all of the head.
    assert again_bytes(mixed, experts + 1000) == 1000 + 2 * 100 * 64 * 4
    both = model(tensor_parallel=2, expert_parallel=2, pipeline_parallel=2)
    assert again_bytes(both, experts + 1000) == 100 * 64 * 4
    assert again_bytes(ModelConfig(name="m", path=tmp_path / "none", expert_parallel=2), 1000) == 0


def replace_path(folder: Path) -> Callable[..., ModelConfig]:
    """Entries of a model in a folder."""
    return lambda **fields: ModelConfig(name="m", path=folder, **fields)


def test_the_plan_starts_the_program_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program gets the number of ranks, the engine the same number, and memory counts each process; on one core
    the plan is refused, and one rank is what it was."""
    config = configure(tmp_path)
    files = read_model("athanor-mini", embedded_model())
    runtime = UnsafeRuntime(tmp_path)
    monkeypatch.setattr(layout, "read_cores", lambda: cores(2))
    plan = plan_boot(config, config.models[0], files, runtime, Role.ENGINE)
    assert plan.spec.argv[-3:] == ("engine.ranks", "/ipc/host.sock", "2")
    told = json.loads(plan.configuration)
    assert (told["tensor_parallel"], told["threads"], told["spill"]) == (2, 1, False)
    staged = ModelConfig(**{**dict(config.models[0]), "pipeline_parallel": 2, "tensor_parallel": 1})
    plan = plan_boot(config, staged, files, runtime, Role.ENGINE)
    assert plan.spec.argv[-3:] == ("engine.ranks", "/ipc/host.sock", "2")
    told = json.loads(plan.configuration)
    assert (told["tensor_parallel"], told["pipeline_parallel"], told["expert_parallel"]) == (1, 2, 1)
    need = model_need(config.models[0], files.engine)
    assert need.engine == ENGINE_BYTES + RANK_BYTES
    assert plan.ranks == 2
    monkeypatch.setattr(layout, "read_cores", lambda: cores(1))
    with pytest.raises(StartError, match="tensor_parallel 2, which are 2 processes, and its sandbox may use 1 core"):
        plan_boot(config, config.models[0], files, runtime, Role.ENGINE)
    alone = configure(tmp_path, 1)
    plain = plan_boot(alone, alone.models[0], files, runtime, Role.ENGINE)
    assert plain.spec.argv[-2:] == ("engine", "/ipc/host.sock")
    assert plain.ranks == 1
    assert model_need(alone.models[0], files.engine).engine == ENGINE_BYTES


@pytest.fixture(scope="module")
def gvisor(runsc_path: Path) -> Iterator[GvisorRuntime]:
    """Real sandboxes, or a skip with the reason."""
    try:
        with intruder.gvisor() as runtime:
            yield runtime
    except intruder.CannotBeShownError as error:
        pytest.skip(str(error))


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(os.path.realpath(folder))


@pytest.fixture
def start(gvisor: GvisorRuntime, short: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Booted]]:
    """Boots engines of two ranks, or in another layout, as the supervisor does, to a real token under lock-down. With
    ``expert_parallel`` the model is a mixture with random weights."""
    monkeypatch.setattr(layout, "read_cores", lambda: cores(4))
    booted: list[Booted] = []

    def make(**ranks: int) -> Booted:
        while booted:
            end(booted.pop())
        model = model_of(ranks, short)
        config = configure(short, model=model, **ranks)
        plan = plan_boot(config, config.models[0], read_model("athanor-mini", model), gvisor, Role.ENGINE)
        booted.append(boot(plan, gvisor, threading.Event()))
        return booted[-1]

    yield make
    for one in booted:
        end(one)


def kill_inside(runtime: GvisorRuntime, booted: Booted, pid: int) -> None:
    """SIGKILL to one process of a sandbox, by its number there."""
    command = runtime._command
    flags = [str(command.runsc), f"--root={command.root}"]
    done = subprocess.run(
        [*flags, "kill", f"--pid={pid}", container_id(booted.sandbox.name), "KILL"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def check_death(runtime: GvisorRuntime, booted: Booted, pid: int) -> float:
    """Kill a process of a serving engine; gives the seconds from the kill until the sandbox has ended: those that
    runsc takes to start and to reach the sandbox are the test's own."""
    assert booted.channel is not None
    booted.channel.send(submit(9, range(1, 20), 400))
    while not any(isinstance(one, StepOutput) for one in booted.channel.receive(8)):
        booted.channel.wait(1.0)
    assert booted.sandbox.poll() is None
    kill_inside(runtime, booted, pid)
    begun = time.monotonic()
    assert booted.sandbox.wait(GONE_S + 5) is not None
    return time.monotonic() - begun


LAYOUTS = {
    "tensor and stages": ({"tensor_parallel": 2, "pipeline_parallel": 2}, "4 ranks in 2 stages"),
    "experts": ({"expert_parallel": 2}, "2 ranks of"),
    "tensor": ({"tensor_parallel": 2}, "2 ranks of"),
    "stages": ({"pipeline_parallel": 2}, "2 ranks in 2 stages"),
    "experts and stages": ({"expert_parallel": 2, "pipeline_parallel": 2}, "4 ranks in 2 stages"),
}
"""Keys of an entry, and what the engine says of itself."""

ALWAYS = ("tensor and stages",)
"""The one that no run of the tests leaves out. Expert parallelism makes no other calls between ranks than tensor
parallelism does, and tests of the engine compare its tokens."""


@pytest.mark.runsc
@pytest.mark.clock
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full, id=name) for name in LAYOUTS]
)
def test_ranks_in_one_sandbox_give_the_tokens_of_one_and_end_as_one(
    gvisor: GvisorRuntime, start: Callable[..., Booted], short: Path, name: str
) -> None:
    """In a sandbox without a network, under lock-down, ranks give the greedy tokens of one rank in float32, with
    requests that come and go; the death of the last rank is the sandbox's within a second. Control: another prompt
    gives other tokens."""
    layout, said = LAYOUTS[name]
    booted = start(**layout)
    assert said in booted.computes
    found = tokens_of(booted, PROMPTS)
    model = str(model_of(layout, short))
    config = EngineConfig(model_dir=model, model_digest="00", dtype="float32", threads=1, kv_bytes=32 << 20)
    answers = generate(load_engine(config, warm=False), requests(PROMPTS))
    assert found == {request: answer.token_ids for request, answer in answers.items()}
    assert len(set(map(tuple, found.values()))) > 1
    assert check_death(gvisor, booted, 1 + config_ranks(layout)) <= GONE_S


PROMPTS = (3, 40, 17, 64, 9, 25)
"""Lengths of prompts."""
OUTPUT = 24


def model_of(layout: dict[str, int], folder: Path) -> Path:
    """The model's folder for a layout: the embedded one, or a small mixture of experts with random weights."""
    if "expert_parallel" not in layout:
        return embedded_model()
    model = folder / "mixture"
    if not model.exists():
        save_reference(model, "mixtral")
        (model / "tokenizer.json").write_text("{}")
        model.chmod(0o755)
    return model


def config_ranks(layout: dict[str, int]) -> int:
    """Processes of a layout."""
    return entry(**layout).ranks


def requests(lengths: tuple[int, ...]) -> list[Submit]:
    """Greedy requests with prompts of these lengths."""
    return [
        submit(number, [(number * 7 + place * 5) % 61 for place in range(length)], OUTPUT - number)
        for number, length in enumerate(lengths, 1)
    ]


def tokens_of(booted: Booted, lengths: tuple[int, ...]) -> dict[int, list[int]]:
    """What an engine answers to the requests, all sent at once."""
    channel, asked = booted.channel, requests(lengths)
    assert channel is not None
    for one in asked:
        channel.send(one)
    found: dict[int, list[int]] = {one.request: [] for one in asked}
    left = sum(one.max_tokens for one in asked)
    while left > 0:
        channel.wait(1.0)
        for message in channel.receive(8):
            assert isinstance(message, StepOutput) and not message.failures
            for request, token_id in zip(message.requests, message.token_ids, strict=True):
                found[request].append(token_id)
                left -= 1
    return found


@pytest.mark.runsc
@pytest.mark.clock
@pytest.mark.full
@pytest.mark.parametrize("pid", [1, 2, 3])
def test_any_process_is_the_engines_end_in_a_sandbox(
    gvisor: GvisorRuntime, start: Callable[[], Booted], pid: int
) -> None:
    """The keeper, the first rank and the second one: each one's death is the sandbox's, and another one starts."""
    assert check_death(gvisor, start(), pid) <= GONE_S
    assert start().sandbox.poll() is None


@pytest.mark.runsc
@pytest.mark.full
def test_ranks_begin_from_a_checkpoint(gvisor: GvisorRuntime, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template of three processes is saved where the first rank waits for its host; a copy serves."""
    monkeypatch.setattr(layout, "read_cores", lambda: cores(2))
    monkeypatch.setattr("appliance.supervisor.templates.TEMPLATE_CORES", 1.0)
    config = configure(short)
    warm = open_warm_starts(config, gvisor)
    assert warm is not None
    plan = plan_boot(config, config.models[0], read_model("athanor-mini", embedded_model()), gvisor, Role.ENGINE)
    assert warm.take(starts(plan)[-1], 1.0) is not None
    booted = warm.boot(plan, threading.Event())
    try:
        assert booted.start == RESTORED
        assert check_death(gvisor, booted, 2) <= GONE_S
    finally:
        end(booted)
