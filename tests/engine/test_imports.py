"""What the engine's modules load, seen in a fresh interpreter and in their source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PURE = [
    "engine.config",
    "engine.errors",
    "engine.publishing",
    "engine.request",
    "engine.scheduler.plan",
    "engine.scheduler.limits",
    "engine.scheduler.budget",
    "engine.scheduler.account",
    "engine.scheduler.admission",
    "engine.scheduler.commit",
    "engine.scheduler.deadlines",
    "engine.scheduler.decoding",
    "engine.scheduler.fairness",
    "engine.scheduler.forecast",
    "engine.scheduler.live",
    "engine.scheduler.pace",
    "engine.scheduler.running",
    "engine.scheduler.sharing",
    "engine.scheduler.scheduler",
    "engine.kv.layout",
    "engine.kv.block_pool",
    "engine.kv.contents",
    "engine.kv.public",
    "engine.kv.rights",
    "engine.kv.prefix_cache",
]
"""Modules that decide and need no tensors."""

BANNED = {"subprocess", "multiprocessing", "pickle", "socket", "asyncio", "ctypes", "safetensors", "transformers"}
ALLOWED = {
    "allowed_calls_gpu.py": {"ctypes"},
    "attach.py": {"socket"},
    "heap.py": {"ctypes"},
    "lockdown.py": {"ctypes"},
    "kernels/abi.py": {"ctypes"},
    "kernels/library.py": {"ctypes"},
    "kernels/program.py": {"ctypes"},
}
"""Modules that may use one of them: to meet the host, to open kernels, and to forgo the rest of the system."""
JSON_READERS = {
    "config.py",
    "model/config.py",
    "model/safetensors.py",
    "convert/__main__.py",
    "convert/output.py",
    "device/configuration.py",
    "kernels/gpu/ahead.py",
    "kernels/gpu/cache.py",
    "kernels/gpu/folder.py",
}
"""Modules that read what somebody else may have written, or write one text of many values."""


def loaded_by(root: Path, modules: list[str]) -> set[str]:
    """Modules that a fresh interpreter has after importing these."""
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_scheduling_needs_no_tensors(root: Path) -> None:
    """Scheduler, pool, prefix cache, request and layout load the standard library and the wire's messages only."""
    loaded = loaded_by(root, PURE)
    assert set(PURE) <= loaded
    tops = {name.partition(".")[0] for name in loaded} - {"__main__", "_virtualenv", "__mp_main__"}
    foreign = {name for name in tops - set(sys.stdlib_module_names) if not name.startswith("_")}
    assert foreign == {"engine", "isolation"}
    assert {name for name in loaded if name.startswith("isolation")} == {
        "isolation",
        "isolation.ipc",
        "isolation.ipc.grammar_messages",
        "isolation.ipc.kv_messages",
        "isolation.ipc.messages",
        "isolation.ipc.public_messages",
        "isolation.ipc.spill_messages",
        "isolation.ipc.text_messages",
        "isolation.ipc.wiping",
    }


def test_the_runner_does_load_torch(root: Path) -> None:
    """Positive control: the same look finds torch where it is."""
    assert "torch" in loaded_by(root, ["engine.runner"])


def test_an_engine_of_one_rank_loads_no_process_group(root: Path) -> None:
    """The one module that moves tensors between ranks is not among what an engine loads; control: it can be."""
    assert "engine.model.process_group" not in loaded_by(root, ["engine.load", "engine.serve"])
    assert "torch.distributed.distributed_c10d" in loaded_by(root, ["engine.model.process_group"])
    users = [path.name for path in core_sources(root) if "torch.distributed" in path.read_text().partition("import")[2]]
    assert users == ["process_group.py"]


def test_an_engine_on_a_cpu_loads_no_triton(root: Path) -> None:
    """Nothing that serves on a CPU imports the GPU's kernels or their compiler; control: the kernels do."""
    assert "triton" not in loaded_by(root, ["engine.load", "engine.serve", "engine.__main__"])
    assert "triton" in loaded_by(root, ["engine.kernels.gpu.dialect"])


def test_describing_a_model_loads_nothing(root: Path) -> None:
    """What a model wants is listed on a device of no memory without torch's Python implementation of it: hundreds of
    modules, some of which make system calls when the process ends. Control: one operation there does load it."""
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); import engine.load, torch; "
        "from engine.model.registry import describe_model; from tests.engine.support import model_config; "
        "from engine.model.fields import Fields; from engine.model.registry import FAMILIES; "
        "from tests.engine.families.published_moe import *; few = {**DEEPSEEK_V3, 'num_hidden_layers': 4}; "
        "before = set(sys.modules); describe_model(model_config()); "
        "[describe_model(FAMILIES[one['architectures'][0]].read(Fields('config.json', one)))"
        " for one in (GPT_OSS_20B, LLAMA4_SCOUT, MIXTRAL_8X7B, few)]; "
        "print(len(set(sys.modules) - before)); "
        "torch.ones(2, device='meta')[:1] = -1; torch.cat((torch.ones(2, device='meta'),) * 2).cos(); "
        "print(len(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True)
    described, computed = map(int, done.stdout.split())
    assert described == 0
    assert computed > 100


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


def test_modules_are_short(root: Path) -> None:
    """A module can be read in one sitting."""
    lengths = {path.relative_to(root).as_posix(): len(path.read_text().splitlines()) for path in core_sources(root)}
    assert not {name: length for name, length in lengths.items() if length > 300}
