"""Compiles every kernel that serving a model can launch, for a GPU that need not be there.

``engine.startup.enumerate_kernels`` is the program: it brings the launches. Triton is told of a GPU of the wanted
architecture, and each launch is compiled instead of started: so Triton itself decides on forms and names, as it will
when it looks for them. Only ``config.json`` of the model is read. One line for each kernel goes to standard output.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.backends.cuda.kernels.cache import architecture_number, folder_name, mark_launches, seal
from engine.backends.cuda.kernels.folder import Asked, description_digest
from engine.backends.cuda.kernels.operations import kernel_operations
from engine.backends.cuda.runtime.launch_digest import launch_configuration
from engine.backends.cuda.runtime.operations import Operations
from engine.config import EngineConfig
from engine.errors import ConfigurationError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.weights import DTYPE_NAMES

Launches = Callable[[EngineConfig, ModelConfig, torch.dtype, Operations], None]
"""Starts every form of launch that serving a model can start."""

WARP_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """Model, numbers and GPU that kernels are compiled for."""

    root: str
    """Folder of all caches."""
    architecture: str
    """As ``sm_90``."""
    model_dir: str
    """With ``config.json``."""
    dtype: str
    """The engine's, and not ``auto``: no weight is looked at."""
    block_size: int
    max_num_seqs: int
    """Requests of one step at the most: where fewer tokens fit one step, as many as fit."""
    launcher: str
    """File of the module by which Triton reaches the driver, compiled by the host."""
    launcher_name: str
    """As Triton looks for it."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A folder of kernels."""

    folder: str
    kernels: int
    """Forms."""
    digest: str
    """Digest of all files."""


class AbsentGpu:
    """What Triton asks of a driver before it starts a kernel, answered for a GPU that is not there."""

    def __init__(self, architecture: str) -> None:
        self._target = GPUTarget("cuda", architecture_number(architecture), WARP_SIZE)

    def get_current_target(self) -> GPUTarget:
        """Which GPU."""
        return self._target

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """None that anything is put into."""
        return 0


@contextmanager
def compiling_only(architecture: str) -> Iterator[list[str]]:
    """Whatever is launched inside is compiled for that architecture, once a form, and not started. Gives the names of
    kernels as they come."""
    names: list[str] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **given: object) -> None:
        cached = len(self.device_caches[0][0])
        run(self, *args, grid=grid, warmup=True, **given)
        if len(self.device_caches[0][0]) > cached:
            names.append(self.fn.__name__)
            sys.stdout.write(f"{self.fn.__name__}\n")
            sys.stdout.flush()

    triton.runtime.driver.set_active(AbsentGpu(architecture))
    JITFunction.run = compile_only
    try:
        yield names
    finally:
        JITFunction.run = run
        triton.runtime.driver._active = None


@contextmanager
def _filling(folder: Path) -> Iterator[None]:
    """Triton writes into this folder, and only what is kept. Its switches go into the process's environment and from
    there to every child, so they are put back, whatever happens."""
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(folder)
        triton.knobs.compilation.store_binary_only = True
        mark_launches()
        yield


def build(request: CompileRequest, launches: Launches) -> Compiled:
    """Compile into a new folder below the root, which takes the place of one of its name when it is whole.

    Args:
        request: what to compile.
        launches: starts each form of launch once.

    Raises:
        ConfigurationError, ModelLoadError: the model or a number cannot be served by the device backend.
        OSError: the root cannot be written to.
    """
    if request.dtype not in DTYPE_NAMES:
        raise ConfigurationError(f"dtype must be one of: {', '.join(DTYPE_NAMES)}")
    architecture_number(request.architecture)
    dtype = DTYPE_NAMES[request.dtype]
    config = EngineConfig(
        model_dir=request.model_dir,
        model_digest="00",
        dtype=request.dtype,
        block_size=request.block_size,
        max_num_seqs=request.max_num_seqs,
        max_num_batched_tokens=request.max_num_seqs,
        backend="device",
    )
    description = load_model_config(request.model_dir)
    layer = description.kv_layers[0]
    operations = kernel_operations(
        (description.num_heads, layer.heads),
        max(layer.key_dim, layer.value_dim),
        description.vocab_size,
        torch.device("meta"),
        request.architecture,
    )
    known = launch_configuration(description, dtype, request.block_size, request.max_num_seqs)
    target = Path(request.root) / folder_name(request.architecture, known)
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=request.root) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        with _filling(folder), compiling_only(request.architecture) as names:
            launches(config, description, dtype, operations)
        shutil.copyfile(request.launcher, folder / request.launcher_name)
        asked = Asked(
            description_digest(Path(request.model_dir)), request.dtype, request.block_size, request.max_num_seqs
        )
        digest = seal(folder, request.architecture, known, asked)
        if target.exists():
            os.rename(target, Path(scratch) / "old")
        os.rename(folder, target)
    return Compiled(target.name, len(names), digest)
