"""Compiles every kernel that serving a model can launch, for a GPU that need not be there.

``engine.startup.enumerate_kernels`` is the program: it brings the launches. Triton is told of a GPU of the wanted
architecture, and each form that a launch has is met once and compiled instead of started: so Triton itself decides on
forms and names, as it will when it looks for them. Only ``config.json`` of the model is read. One line for each kernel
goes to standard output.

Several processes may compile into one folder: each goes through all launches and compiles the forms that it is the
first to claim. Where Triton has a module of its own for each signature (before 3.7), the sources of these modules are
left in the folder, for the host to compile.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction

from engine.backends.cuda.kernels.cache import (
    LAUNCHER,
    architecture_number,
    folder_name,
    known_here,
    mark_launches,
    module_key,
    name_kernels,
)
from engine.backends.cuda.kernels.folder import Asked, description_digest
from engine.backends.cuda.kernels.operations import kernel_operations
from engine.backends.cuda.runtime.launch_digest import launch_configuration
from engine.backends.cuda.runtime.operations import Operations
from engine.backends.cuda.runtime.presence import check_architecture
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

    into: str
    """Folder that Triton fills; every process that compiles for it has the same."""
    claims: str
    """Folder with an empty file for each form that a process has claimed."""
    architecture: str
    """As ``sm_90``."""
    model_dir: str
    """With ``config.json``."""
    dtype: str
    """The engine's, and not ``auto``: no weight is looked at."""
    block_size: int
    max_num_seqs: int
    """Requests of one step at the most: where fewer tokens fit one step, as many as fit."""
    weights: str
    """``stored``, or ``fp8``: maps of layers are held in 8 bits."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one process has compiled."""

    folder: str
    """Name that the folder is to have."""
    kernels: int
    """Forms that this process has compiled."""
    known: dict[str, object]
    """What the folder is for, as its manifest says it."""
    asked: dict[str, object]


@dataclass(frozen=True, slots=True)
class LaunchForm:
    """A kernel in one form that a launch has."""

    kernel: str
    key: str
    """Types of arguments, and which numbers and addresses are fixed or multiples of 16, as Triton tells forms apart."""
    compile: Callable[[], Any]
    """Gives the compiled kernel, as Triton has it."""


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
def meeting_forms(architecture: str, meet: Callable[[LaunchForm], None]) -> Iterator[None]:
    """Whatever is launched inside is looked at for that architecture and not started; ``meet`` gets each form once."""
    run, do_compile = JITFunction.run, JITFunction._do_compile
    seen: dict[int, JITFunction] = {}

    def look_at(self: JITFunction, *args: object, grid: object, warmup: bool, **given: object) -> None:
        run(self, *args, grid=grid, warmup=True, **given)

    def note(self: JITFunction, key: str, signature: object, device: int, *others: object, warmup: bool = True) -> None:
        # Triton finds something for this form from now on.
        self.device_caches[device][0][key] = key
        seen[id(self)] = self
        meet(LaunchForm(self.fn.__name__, key, partial(do_compile, self, key, signature, device, *others)))

    triton.runtime.driver.set_active(AbsentGpu(architecture))
    JITFunction.run, JITFunction._do_compile = look_at, note
    try:
        yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile
        for function in seen.values():
            function.device_caches.clear()
        triton.runtime.driver._active = None


@contextmanager
def _filling(folder: Path) -> Iterator[None]:
    """Triton writes into this folder, and only what is kept. Its switches go into the process's environment and from
    there to every child, so they are put back, whatever happens."""
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(folder)
        triton.knobs.compilation.store_binary_only = True
        mark_launches()
        name_kernels()
        yield


def _claim(claims: Path, form: LaunchForm) -> bool:
    """Whether this process is the first to ask for the form."""
    name = hashlib.sha256(f"{form.kernel} {form.key}".encode()).hexdigest()
    try:
        os.close(os.open(claims / name, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def _leave_launcher(kernel: Any, folder: Path) -> None:
    """Write the source of the module that starts this kernel, where Triton has one for each signature."""
    make = getattr(nvidia, "make_launcher", None)
    if make is None:
        return
    described = getattr(kernel.metadata, "tensordesc_meta", None)
    source = make(kernel.src.constants, dict(kernel.src.signature), described)
    place = folder / module_key(source)
    place.mkdir(exist_ok=True)
    # Whole or not at all, for another process may write the same.
    own = place / f"{LAUNCHER}.{os.getpid()}"
    own.write_text(source)
    own.replace(place / f"{LAUNCHER}.c")


def build(request: CompileRequest, launches: Launches) -> Compiled:
    """Compile the forms that no other process has claimed.

    Args:
        request: what to compile.
        launches: starts each form of launch once.

    Raises:
        ConfigurationError, ModelLoadError: the model or a number cannot be served by the device backend.
        OSError: the folder cannot be written to.
    """
    if request.weights not in ("stored", "fp8"):
        raise ConfigurationError("weights must be stored or fp8")
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
        quantization="fp8" if request.weights == "fp8" else "none",
        backend="device",
    )
    description = load_model_config(request.model_dir)
    operations = absent_operations(description, request.architecture)
    scaled = request.weights == "fp8"
    if scaled:
        check_architecture(divmod(architecture_number(request.architecture), 10))
    rows = request.max_num_seqs
    configuration = launch_configuration(description, dtype, request.block_size, rows, scaled=scaled)
    folder, claims = Path(request.into), Path(request.claims)
    compiled = 0

    def meet(form: LaunchForm) -> None:
        nonlocal compiled
        if _claim(claims, form):
            _leave_launcher(form.compile(), folder)
            compiled += 1
            sys.stdout.write(f"{form.kernel}\n")
            sys.stdout.flush()

    with _filling(folder), meeting_forms(request.architecture, meet):
        launches(config, description, dtype, operations)
    digest = description_digest(Path(request.model_dir))
    asked = Asked(digest, request.dtype, request.block_size, rows, request.weights)
    return Compiled(
        folder_name(request.architecture, configuration),
        compiled,
        known_here(request.architecture, configuration),
        asdict(asked),
    )


def absent_operations(description: ModelConfig, architecture: str) -> Operations:
    """The operations of a model on a GPU that is not there, with memory that has no contents."""
    layer = description.kv_layers[0]
    heads, width = (description.num_heads, layer.heads), max(layer.key_dim, layer.value_dim)
    return kernel_operations(heads, width, description.vocab_size, torch.device("meta"), architecture)
