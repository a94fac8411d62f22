"""Compiles a model's GPU kernels ahead of time, without a GPU: ``athanor kernels gpu DIR --model MODEL``.

Two compilers run, here on the host, when the operator says so: the machine's C compiler, for the module by which Triton
reaches the driver, and Triton's own, in a process of its own (``engine.startup.enumerate_kernels``). No sandbox holds
either, and nothing that serves requests imports this module (an import contract).
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from appliance.common.errors import ConfigError
from appliance.operator.kernels import find_compiler
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, run
from isolation.image.python_rootfs import find_package

PROGRAM = "engine.startup.enumerate_kernels"

COMPILE_TIMEOUT_S = 3_600.0
"""Seconds for all kernels of a model: some twenty variants of a few seconds each, on a machine that may be busy."""

MODULE_TIMEOUT_S = 120.0

MODULE = "cuda_utils"
"""As Triton calls the module by which it reaches the driver."""

DRIVER = "libcuda.so.1"

FLAGS = ("-O2", "-shared", "-fPIC", "-s", "-Wno-psabi", "-Wl,--build-id=none", "-Wl,--no-as-needed")
"""Without symbols and identities of a build, so that two are the same bytes; and with the driver's library as a need,
whatever the linker thinks of it. Places of sources, which assertions would name, are replaced by short ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels:
    """What to compile, in the words of a model's configuration."""

    architecture: str
    model: Path
    """Folder of the model; only ``config.json`` is read."""
    dtype: str
    block_size: int
    max_num_seqs: int
    """Or ``max_num_batched_tokens``, where that is less."""


@dataclass(frozen=True, slots=True)
class BuiltKernels:
    """A folder of compiled kernels."""

    folder: Path
    kernels: int
    """Forms of them."""
    digest: str
    """Digest of all files."""


def build(directory: Path, wanted: GpuKernels) -> BuiltKernels:
    """Compile into a folder of its own below a directory; one of that name is replaced at once or not at all.

    Raises:
        ConfigError: a compiler is missing or objects, or the device backend does not serve such a model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    os.chmod(directory, 0o755)  # noqa: S103 - read by the sandbox, whose user owns nothing
    with tempfile.TemporaryDirectory(prefix=".launcher-", dir=directory) as scratch:
        launcher = compile_launcher(Path(scratch))
        asked = {**asdict(wanted), "root": str(directory.absolute()), "launcher": str(launcher)}
        asked |= {"model_dir": str(asked.pop("model").absolute()), "launcher_name": launcher.name}
        environment = {
            **MINIMAL_ENVIRONMENT,
            "HOME": scratch,
            "TMPDIR": scratch,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        try:
            done = run(
                [sys.executable, "-P", "-m", PROGRAM, json.dumps(asked)],
                timeout_s=COMPILE_TIMEOUT_S,
                check=False,
                env=environment,
            )
        except ProcessError as error:
            raise ConfigError(f"the kernels cannot be compiled: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"the compiler ended with status {done.returncode}"]
        raise ConfigError(f"the kernels cannot be compiled: {said[-1]}")
    told = json.loads(done.stdout.splitlines()[-1])
    return BuiltKernels(directory / told["folder"], told["kernels"], told["digest"])


def compile_launcher(scratch: Path) -> Path:
    """Compile the module by which Triton reaches the driver. The driver's own library need not be there: the module
    only says that it needs one of that name.

    Raises:
        ConfigError: no compiler, no Triton, no headers of Python, or the compiler objects.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError("no C compiler is on PATH (gcc, cc, clang); install one")
    triton = find_package("triton", sys.path)
    if triton is None:
        raise ConfigError("triton is not installed here; it comes with torch for GPUs, and with `make install`")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").is_file():
        raise ConfigError(f"Python's headers are not in {headers}; install the package that has them (python3-dev)")
    backend = triton / "backends" / "nvidia"
    target = scratch / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    empty = scratch / "driver.c"
    empty.touch()
    environment = {**MINIMAL_ENVIRONMENT, "TMPDIR": str(scratch)}
    try:
        run(
            [compiler, "-shared", f"-Wl,-soname,{DRIVER}", str(empty), "-o", str(scratch / DRIVER)],
            timeout_s=MODULE_TIMEOUT_S,
            env=environment,
        )
        run(
            [
                compiler,
                *FLAGS,
                f"-ffile-prefix-map={backend}=triton",
                f"-ffile-prefix-map={headers}=python",
                f"-I{backend / 'include'}",
                f"-I{headers}",
                str(backend / "driver.c"),
                f"-L{scratch}",
                f"-l:{DRIVER}",
                "-o",
                str(target),
            ],
            timeout_s=MODULE_TIMEOUT_S,
            env=environment,
        )
    except ProcessError as error:
        raise ConfigError(f"the module by which Triton reaches the driver cannot be compiled: {error}") from error
    return target
