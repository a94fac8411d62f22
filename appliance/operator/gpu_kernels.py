"""Compiles a model's GPU kernels ahead of time, without a GPU: ``athanor kernels gpu DIR --model MODEL``.

Two compilers run, here on the host, when the operator says so: the machine's C compiler, for the modules by which
Triton reaches the driver and (before Triton 3.7) starts kernels, and Triton's own, in processes of their own
(``engine.startup.enumerate_kernels``), which share the kernels between them. No sandbox holds either, and nothing that
serves requests imports this module (an import contract).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.common.errors import ConfigError
from appliance.operator.kernels import find_compiler
from engine.backends.cuda.kernels.folder import Asked, seal
from engine.errors import ConfigurationError
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, Completed, run
from isolation.image.python_rootfs import find_package

PROGRAM = "engine.startup.enumerate_kernels"

COMPILE_TIMEOUT_S = 3_600.0
"""Seconds for all kernels of a model: some twenty variants of a few seconds each, on a machine that may be busy."""

MODULE_TIMEOUT_S = 120.0

MOST_COMPILERS = 16
"""Processes that compile kernels at the same time. Each takes about 1 GiB of memory and some seconds to begin, and a
model has some dozens of kernels."""

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
    weights: str = "stored"


@dataclass(frozen=True, slots=True)
class BuiltKernels:
    """A folder of compiled kernels."""

    folder: Path
    kernels: int
    """Forms of them."""
    digest: str
    """Digest of all files."""


def build(directory: Path, wanted: GpuKernels, compilers: int = 1) -> BuiltKernels:
    """Compile into a folder of its own below a directory; one of that name is replaced at once or not at all.

    Args:
        directory: of all such folders.
        wanted: what to compile.
        compilers: processes that compile kernels at the same time, ``MOST_COMPILERS`` at the most. More than one gives
            names that an engine does not find: Triton's name of a kernel depends on which were named before it.

    Raises:
        ConfigError: a compiler is missing or objects, or the device backend does not serve such a model.
    """
    directory.mkdir(parents=True, exist_ok=True)
    os.chmod(directory, 0o755)  # noqa: S103 - read by the sandbox, whose user owns nothing
    number = min(compilers, MOST_COMPILERS)
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=directory) as temporary:
        scratch = Path(temporary)
        folder, claims = scratch / "kernels", scratch / "claims"
        folder.mkdir()
        claims.mkdir()
        compile_launcher(scratch)
        asked = {**asdict(wanted), "into": str(folder.absolute()), "claims": str(claims.absolute())}
        asked |= {"model_dir": str(asked.pop("model").absolute())}
        told = _compile_kernels(asked, scratch, number)
        _compile_modules(folder, scratch)
        module = _module_in(scratch)
        shutil.copyfile(module, folder / module.name)
        try:
            digest = seal(folder, told[0]["known"], Asked(**told[0]["asked"]))
        except ConfigurationError as error:
            raise ConfigError(f"the kernels cannot be compiled: {error}") from error
        target = directory / told[0]["folder"]
        if target.exists():
            os.rename(target, scratch / "old")
        os.rename(folder, target)
    return BuiltKernels(target, sum(one["kernels"] for one in told), digest)


def _compile_kernels(asked: dict[str, Any], scratch: Path, number: int) -> list[dict[str, Any]]:
    """Run so many of Triton's compilers side by side; gives what each has to say."""
    environment = {
        **MINIMAL_ENVIRONMENT,
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
    }
    command = [sys.executable, "-P", "-m", PROGRAM, json.dumps(asked)]

    def compile_some(_: int) -> Completed:
        return run(command, timeout_s=COMPILE_TIMEOUT_S, check=False, env=environment)

    try:
        with ThreadPoolExecutor(number) as pool:
            ended = list(pool.map(compile_some, range(number)))
    except ProcessError as error:
        raise ConfigError(f"the kernels cannot be compiled: {error}") from error
    for done in ended:
        if done.returncode != 0:
            said = done.stderr.strip().splitlines() or [f"the compiler ended with status {done.returncode}"]
            raise ConfigError(f"the kernels cannot be compiled: {said[-1]}")
    return [json.loads(done.stdout.splitlines()[-1]) for done in ended]


def _compile_modules(folder: Path, scratch: Path) -> None:
    """Compile the sources in C that Triton's compilers have left, each to a module beside it."""
    triton, compiler = find_package("triton", sys.path), find_compiler()
    assert triton is not None, "the launcher was compiled from its sources"
    assert compiler is not None, "the launcher was compiled with it"

    def compile_one(source: Path) -> None:
        _compile_module(compiler, source, _module_in(source.parent, source.stem), (scratch, triton))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, sorted(folder.rglob("*.c"))))


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
    headers = _headers()
    if not (headers / "Python.h").is_file():
        raise ConfigError(f"Python's headers are not in {headers}; install the package that has them (python3-dev)")
    target = _module_in(scratch)
    empty = scratch / "driver.c"
    empty.touch()
    try:
        run(
            [compiler, "-shared", f"-Wl,-soname,{DRIVER}", str(empty), "-o", str(scratch / DRIVER)],
            timeout_s=MODULE_TIMEOUT_S,
            env={**MINIMAL_ENVIRONMENT, "TMPDIR": str(scratch)},
        )
    except ProcessError as error:
        raise ConfigError(f"a module by which Triton reaches the driver cannot be compiled: {error}") from error
    _compile_module(compiler, triton / "backends" / "nvidia" / "driver.c", target, (scratch, triton))
    return target


def _headers() -> Path:
    """Where Python's own headers are: not where Debian would put those of packages."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def _module_in(place: Path, name: str = MODULE) -> Path:
    return place / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _compile_module(compiler: str, source: Path, target: Path, places: tuple[Path, Path]) -> None:
    """Compile one of Triton's modules in C; ``places``: a stand-in for the driver's library, and Triton.

    Raises:
        ConfigError: the compiler objects.
    """
    scratch, triton = places
    backend, headers = triton / "backends" / "nvidia", _headers()
    try:
        run(
            [
                compiler,
                *FLAGS,
                f"-ffile-prefix-map={source.parent}=source",
                f"-ffile-prefix-map={backend}=triton",
                f"-ffile-prefix-map={headers}=python",
                f"-I{backend / 'include'}",
                f"-I{headers}",
                str(source),
                f"-L{scratch}",
                f"-l:{DRIVER}",
                "-o",
                str(target),
            ],
            timeout_s=MODULE_TIMEOUT_S,
            env={**MINIMAL_ENVIRONMENT, "TMPDIR": str(scratch)},
        )
    except ProcessError as error:
        raise ConfigError(f"a module by which Triton reaches the driver cannot be compiled: {error}") from error
