"""What the engine's modules load, seen in a fresh interpreter and in their source."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

BANNED = {"subprocess", "multiprocessing", "pickle", "socket", "asyncio", "ctypes", "safetensors", "transformers"}
ALLOWED = {
    "sandbox/allowed_calls_gpu.py": {"ctypes"},
    "sandbox/attach.py": {"socket"},
    "sandbox/lockdown.py": {"ctypes"},
    "sandbox/shared_pipe.py": {"ctypes"},
    "sandbox/weights_mapping.py": {"ctypes"},
    "startup/load.py": {"ctypes"},
    "backends/native/abi.py": {"ctypes"},
    "backends/native/adapting.py": {"ctypes"},
    "backends/native/library.py": {"ctypes"},
    "backends/native/program.py": {"ctypes"},
    "backends/native/trial.py": {"ctypes"},
}
"""Modules that may use one of them: to attach to the host, open kernels, lock down, map memory, trim the heap."""
JSON_READERS = {
    "config.py",
    "model/checkpoint/config.py",
    "model/checkpoint/safetensors.py",
    "convert/__main__.py",
    "convert/compare.py",
    "convert/compress.py",
    "convert/output.py",
    "convert/quantise.py",
    "convert/to_gguf.py",
    "backends/cuda/runtime/launch_digest.py",
    "backends/cuda/kernels/cache.py",
    "backends/cuda/kernels/folder.py",
    "startup/enumerate_kernels.py",
}
"""Modules that read JSON written by others, or write one text of many values."""


def loaded_by(root: Path, modules: list[str]) -> set[str]:
    """Modules that a fresh interpreter has after importing these."""
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_the_core_needs_no_tensors(root: Path) -> None:
    """Every module of ``engine.core`` loads the standard library, the wire's messages, and the engine's configuration
    and errors only."""
    core = [".".join(path.relative_to(root).with_suffix("").parts) for path in (root / "engine/core").rglob("[!_]*.py")]
    assert len(core) > 30
    loaded = loaded_by(root, core)
    assert set(core) <= loaded
    tops = {name.partition(".")[0] for name in loaded} - {"__main__", "_virtualenv", "__mp_main__"}
    foreign = {name for name in tops - set(sys.stdlib_module_names) if not name.startswith("_")}
    assert foreign == {"engine", "isolation"}
    ours = {name for name in loaded if name.startswith("engine.") and not name.startswith("engine.core")}
    assert ours <= {"engine.config", "engine.errors"}
    wire = {name for name in loaded if name.startswith("isolation.")}
    assert all(name.startswith("isolation.ipc") for name in wire)
    assert not wire & {"isolation.ipc.channel", "isolation.ipc.listener", "isolation.ipc.segment"}


ENGINE_WITHOUT_TENSORS = """
import sys
sys.path.insert(0, {root!r})
for name in ("torch", "numpy", "triton"):
    sys.modules[name] = None  # Importing it fails.
from array import array
from engine.core.fairness.tenancy import Fairness
from engine.core.engine import Engine
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.layout import KvLayout, uniform_layers
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.offline import generate
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.scheduler import Scheduler
from {module} import {backend} as backend
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling
limits = SchedulerLimits(
    max_num_seqs=4, max_num_batched_tokens=16, max_waiting=9, max_context=64, block_size=4, vocab_size=99
)
layout = KvLayout(layers=uniform_layers(1, 1, 4), block_size=4, dtype="float32", num_blocks=32)
pool = BlockPool(32)
cache = PrefixCache(pool, root=bytes(16), block_size=4)
engine = Engine(Scheduler(limits, pool, cache, Fairness(limits, pool)), backend(limits, layout))
submits = [Submit(n, bytes(32), array("I", [1] * 9), 8, Sampling(), ignore_eos=True) for n in (1, 2)]
print(*[len(answer.token_ids) for answer in generate(engine, submits).values()])
"""


def run_without_tensors(root: Path, module: str, backend: str) -> subprocess.CompletedProcess[str]:
    """Serve two requests with a backend in a process where no tensor library can be imported."""
    code = ENGINE_WITHOUT_TENSORS.format(root=str(root), module=module, backend=backend)
    return subprocess.run([sys.executable, "-I", "-c", code], check=False, capture_output=True, text=True)


def test_an_engine_serves_where_no_tensor_library_can_be_imported(root: Path) -> None:
    """A whole engine with the null backend answers without torch, triton and numpy; control: the plain backend cannot
    be imported there."""
    done = run_without_tensors(root, "engine.backends.null", "NullRunner")
    assert (done.stdout.split(), done.returncode) == (["8", "8"], 0), done.stderr[-2000:]
    plain = run_without_tensors(root, "engine.backends.plain.forward", "PlainForward")
    assert plain.returncode != 0
    assert "ModuleNotFoundError: import of" in plain.stderr or "ImportError" in plain.stderr


def test_the_core_has_no_import_circle(root: Path) -> None:
    """Modules of ``engine.core`` import each other in one direction; control: one import more makes a circle."""
    graph: dict[str, set[str]] = {}
    for path in (root / "engine/core").rglob("*.py"):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        graph[name] = {node.module for node in nodes if node.module and node.module.startswith("engine.core.")}
    TopologicalSorter(graph).prepare()
    graph["engine.core.kv.quota"].add("engine.core.request")
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


STAGES = """
import sys
sys.path.insert(0, {root!r})
import engine.backends.plain.forward
print(*sys.modules)
import engine.startup.load, engine.serve, engine.__main__
print(*sys.modules)
import torch
from engine.model.checkpoint.fields import Fields
from engine.model.checkpoint.registry import FAMILIES, describe_model
from tests.engine.model.families.published_moe import *
from tests.engine.support import model_config
few = {{**DEEPSEEK_V3, "num_hidden_layers": 4}}
before = set(sys.modules)
describe_model(model_config())
for one in (GPT_OSS_20B, LLAMA4_SCOUT, MIXTRAL_8X7B, few):
    describe_model(FAMILIES[one["architectures"][0]].read(Fields("config.json", one)))
print(*set(sys.modules) - before)
import engine.model.layers.process_group
print(*sys.modules)
import engine.backends.cuda.kernels.triton_common
print(*sys.modules)
before = set(sys.modules)
torch.ones(2, device="meta")[:1] = -1
torch.cat((torch.ones(2, device="meta"),) * 2).cos()
print(*set(sys.modules) - before)
"""
"""One interpreter that loads more and more, and tells what is there: torch takes seconds to load."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Modules that the interpreter has after each stage; of what is not imported by name, those that it brought."""

    forward: set[str]
    engine: set[str]
    described: set[str]
    ranks: set[str]
    kernels: set[str]
    computed: set[str]


@pytest.fixture(scope="module")
def stages(root: Path) -> Stages:
    """What is loaded as an interpreter goes through ``STAGES``."""
    code = STAGES.format(root=str(root))
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True)
    return Stages(*(set(line.split()) for line in done.stdout.splitlines()))


def test_the_runner_does_load_torch(stages: Stages) -> None:
    """Positive control: the same look finds torch where it is."""
    assert "torch" in stages.forward


def test_an_engine_of_one_rank_loads_no_process_group(root: Path, stages: Stages) -> None:
    """The one module that moves tensors between ranks is not among what an engine loads; control: it can be."""
    assert {"engine.startup.load", "engine.serve"} <= stages.engine
    assert "engine.model.layers.process_group" not in stages.engine
    assert {"engine.model.layers.process_group", "torch.distributed.distributed_c10d"} <= stages.ranks
    users = [path.name for path in core_sources(root) if "torch.distributed" in path.read_text().partition("import")[2]]
    assert users == ["process_group.py"]


def test_an_engine_on_a_cpu_loads_no_triton(stages: Stages) -> None:
    """Nothing that serves on a CPU imports the GPU's kernels or their compiler; control: the kernels do."""
    assert {"engine.startup.load", "engine.serve", "engine.__main__"} <= stages.engine
    assert "triton" not in stages.engine
    assert "triton" in stages.kernels


def test_describing_a_model_loads_nothing(stages: Stages) -> None:
    """What a model wants is listed on a device of no memory without torch's Python implementation of it: hundreds of
    modules, some of which make system calls when the process ends. Control: one operation there does load it."""
    assert stages.described == set()
    assert len(stages.computed) > 100


def core_sources(root: Path) -> list[Path]:
    """Every module of the engine core."""
    folder = root / "engine"
    return [path for path in sorted(folder.rglob("*.py")) if "text" not in path.relative_to(folder).parts]


def imports_of(path: Path) -> set[str]:
    """Top-level names that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def test_no_module_of_the_core_imports_what_a_sandbox_must_not_use(root: Path) -> None:
    """No sockets, programs, pickles or foreign loaders, and JSON only where untrusted files are checked."""
    sources = core_sources(root)
    assert len(sources) > 20
    for path in sources:
        name = path.relative_to(root / "engine").as_posix()
        found = imports_of(path)
        assert not found & (BANNED - ALLOWED.get(name, set())), name
        assert "json" not in found or name in JSON_READERS, name


def forks(path: Path) -> bool:
    """Whether a module starts a process."""
    names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    return bool(names & {"fork", "forkpty", "posix_spawn", "posix_spawnp", "execv", "execve", "system", "popen"})


def test_one_module_of_the_core_forks_and_loads_no_tensors(root: Path) -> None:
    """The program of several ranks alone starts processes, and at that moment no tensor library is there; control: the
    text sandbox's processes are found the same way, and the program of a rank has torch."""
    assert [path.name for path in core_sources(root) if forks(path)] == ["ranks.py"]
    assert any(forks(path) for path in (root / "engine/text").rglob("*.py"))
    assert not loaded_by(root, ["engine.ranks"]) & {"torch", "numpy", "triton", "socket", "json"}
    code = f"import sys; sys.path.insert(0, {str(root)!r}); sys.modules['torch'] = None; import engine.follow"
    refused = subprocess.run([sys.executable, "-I", "-c", code], check=False, capture_output=True, text=True)
    assert refused.returncode != 0 and "import of torch halted" in refused.stderr


def test_modules_are_short(root: Path) -> None:
    """A module is one thought, and can be read in one sitting."""
    lengths = {path.relative_to(root).as_posix(): len(path.read_text().splitlines()) for path in core_sources(root)}
    assert not {name: length for name, length in lengths.items() if length > 500}
