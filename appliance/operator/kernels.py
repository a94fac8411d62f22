"""Compiles the engine's kernels for this machine, ahead of time: ``athanor kernels build DIR``.

The sources are part of the engine package. The compiler runs here, on the host, when the operator says so: nothing that
serves requests imports this module (an import contract), and no compiler is in any sandbox. The result fits every
model, and this processor only: ``engine.backends.native.library`` checks it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from appliance.common.errors import ConfigError
from engine.backends.native.manifest import LIBRARY, MANIFEST, processor_features, source_digest, source_files
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, run

COMPILERS = ("gcc", "cc", "clang")
"""Looked for in this order."""

FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=off")
"""One multiplication and addition are one rounding where the source says so, and nowhere else."""

COMPILE_TIMEOUT_S = 300.0

FEATURES = frozenset(
    "sse4_1 sse4_2 ssse3 popcnt movbe avx f16c fma bmi1 bmi2 avx2 avx_vnni avx512f avx512bw avx512cd avx512dq avx512vl "
    "avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg avx512_vpopcntdq avx512ifma avx512_bf16 avx512_fp16 "
    "amx_tile amx_bf16 amx_int8 asimd asimddp asimdhp bf16 i8mm sve sve2".split()
)
"""What a compiler that is told to use everything may use, by the kernel's names."""


@dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """Compiled kernels."""

    library: Path
    library_bytes: int
    """Size of the library."""


def build(directory: Path, *, extra_flags: tuple[str, ...] = ()) -> BuiltLibrary:
    """Compile into a directory; what was there is replaced at once or not at all.

    Raises:
        ConfigError: no compiler, no sources, or the compiler objects; the message says what to do.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(f"no C compiler is on PATH ({', '.join(COMPILERS)}); install one, or do without kernels")
    sources = source_files()
    if not sources:
        raise ConfigError("the sources of the kernels are missing from the engine package; install it again")
    directory.mkdir(parents=True, exist_ok=True)
    os.chmod(directory, 0o755)  # noqa: S103 - read by the sandbox, whose user owns nothing
    with tempfile.TemporaryDirectory(prefix=".build-", dir=directory) as scratch:
        library = Path(scratch) / LIBRARY
        units = [str(path) for path in sources if path.suffix == ".c"]
        environment = {**MINIMAL_ENVIRONMENT, "TMPDIR": scratch}
        try:
            run(
                [compiler, *FLAGS, *extra_flags, *units, "-o", str(library), "-lm", "-lpthread"],
                timeout_s=COMPILE_TIMEOUT_S,
                env=environment,
            )
        except ProcessError as error:
            raise ConfigError(f"the kernels cannot be compiled: {error}") from error
        content = library.read_bytes()
        manifest = Path(scratch) / MANIFEST
        manifest.write_text(
            f"sources {source_digest()}\n"
            f"library {hashlib.sha256(content).hexdigest()}\n"
            f"features {' '.join(sorted(FEATURES & processor_features()))}\n"
        )
        for path in (library, manifest):
            path.chmod(0o644)
            path.replace(directory / path.name)
    return BuiltLibrary(directory / LIBRARY, len(content))


def is_current(directory: Path) -> bool:
    """Whether a directory holds kernels of the present sources; says nothing about the processor."""
    return f"sources {source_digest()}" in _manifest(directory) and (directory / LIBRARY).is_file()


def missing_features(directory: Path) -> tuple[str, ...]:
    """What the kernels in a directory use and this machine's processor lacks; an engine would do without them."""
    used = next((line.split()[1:] for line in _manifest(directory) if line.startswith("features ")), [])
    return tuple(sorted(set(used) - processor_features()))


def _manifest(directory: Path) -> list[str]:
    """Lines of the manifest; none where it cannot be read."""
    try:
        return (directory / MANIFEST).read_text().splitlines()
    except OSError:
        return []


def installed() -> Path | None:
    """The kernels that `make run` compiled beside the packages, when they are of the present sources; else None."""
    folder = Path(sys.prefix) / "share" / "athanor" / "kernels"
    return folder if is_current(folder) else None


def find_compiler() -> str | None:
    """A C compiler, or None."""
    found = (shutil.which(name, path=MINIMAL_ENVIRONMENT["PATH"]) for name in COMPILERS)
    return next((path for path in found if path), None)
