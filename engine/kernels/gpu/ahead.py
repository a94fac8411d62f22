"""Compiles every kernel that serving a model can launch, for a GPU that need not be there: a program of its own.

    python -m engine.kernels.gpu.ahead '{"root": ..., "model_dir": ..., "architecture": "sm_90", ...}'

It is run where the compilers are, by ``athanor kernels gpu``, and never beside anything that serves. Triton is told of
a GPU of that architecture, launches are rehearsed (``engine.rehearsal``), and each is compiled instead of started: so
Triton itself decides on forms and names, as it will when it looks for them. Of the model only its ``config.json`` is
read. One line a kernel on standard output, then one of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.config import EngineConfig
from engine.device.configuration import launch_configuration
from engine.errors import ConfigurationError, EngineError
from engine.kernels.gpu.cache import architecture_number, folder_name, mark_launches, seal
from engine.kernels.gpu.folder import Asked, description_digest
from engine.kernels.gpu.operations import kernel_operations
from engine.model.registry import load_model_config
from engine.model.weights import DTYPE_NAMES
from engine.rehearsal import rehearse

EXIT_REFUSED = 3
"""What was asked for cannot be compiled; the reason is on standard error."""

WARP_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to compile."""

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
    """Of all files."""


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


def build(request: Request) -> Compiled:
    """Compile into a new folder below the root, which takes the place of one of its name when it is whole.

    Raises:
        ConfigurationError, ModelLoadError: the model or a number cannot be served by the device backend.
        OSError: the root cannot be written to.
    """
    if request.dtype not in DTYPE_NAMES:
        raise ConfigurationError(f"dtype must be one of: {', '.join(DTYPE_NAMES)}")
    architecture_number(request.architecture)
    dtype = DTYPE_NAMES[request.dtype]
    config = EngineConfig(
        model_dir=request.model_dir, model_digest="00", dtype=request.dtype, block_size=request.block_size,
        max_num_seqs=request.max_num_seqs, max_num_batched_tokens=request.max_num_seqs, backend="device",
    )  # fmt: skip
    description = load_model_config(request.model_dir)
    layer = description.kv_layers[0]
    operations = kernel_operations(
        (description.num_heads, layer.heads), max(layer.key_dim, layer.value_dim), description.vocab_size,
        torch.device("meta"), request.architecture,
    )  # fmt: skip
    known = launch_configuration(description, dtype, request.block_size, request.max_num_seqs)
    target = Path(request.root) / folder_name(request.architecture, known)
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=request.root) as scratch:
        folder = Path(scratch) / target.name
        folder.mkdir()
        with _filling(folder), compiling_only(request.architecture) as names:
            rehearse(config, description, dtype, operations)
        shutil.copyfile(request.launcher, folder / request.launcher_name)
        asked = Asked(
            description_digest(Path(request.model_dir)), request.dtype, request.block_size, request.max_num_seqs
        )
        digest = seal(folder, request.architecture, known, asked)
        if target.exists():
            os.rename(target, Path(scratch) / "old")
        os.rename(folder, target)
    return Compiled(target.name, len(names), digest)


def _read(said: str) -> Request:
    kinds = {field.name: {"str": str, "int": int}[str(field.type)] for field in fields(Request)}
    try:
        values = json.loads(said)
    except ValueError as error:
        raise ConfigurationError("the request is not JSON") from error
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise ConfigurationError("the request has unknown or missing keys")
    if any(type(values[name]) is not kind for name, kind in kinds.items()):
        raise ConfigurationError("the request has values of another type")
    return Request(**values)


def main(argv: list[str]) -> int:
    """Compile what the one argument asks for; gives the exit status."""
    try:
        done = build(_read(argv[0]))
    except EngineError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_REFUSED
    print(json.dumps(asdict(done)))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
