"""Compiles the engine's kernels, ahead of time: ``athanor kernels build DIR``.

The sources are part of the engine package. The compiler runs here, on the host, when the operator says so: nothing that
serves requests imports this module (an import contract), and no compiler is in any sandbox. One library is made for
each kind of processor of this machine's architecture, so that a package or an image works on another processor than
the one that built it; ``engine.backends.native.library`` takes the best that the processor runs.

As a program, ``python -m appliance.operator.kernels DIR``, it needs nothing but Python: `make` compiles so while it
installs what the command needs.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from appliance.common.errors import ConfigError
from engine.backends.native.manifest import (
    MANIFEST,
    Variant,
    libraries_of,
    processor_features,
    source_digest,
    source_files,
    variants_of,
)
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, run

COMPILERS = ("gcc", "cc", "clang")
"""Looked for in this order."""

FLAGS = ("-O3", "-mtune=generic", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=off")
"""One multiplication and addition are one rounding where the source says so, and nowhere else."""

COMPILE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class BuiltLibrary:
    """Compiled kernels."""

    variant: str
    library: Path
    library_bytes: int
    """Size of the library."""


def build(
    directory: Path,
    variants: tuple[Variant, ...] | None = None,
    reached: Callable[[int, int], None] = lambda done, total: None,
) -> list[BuiltLibrary]:
    """Compile into a directory; what was there is replaced at once or not at all. Gives the libraries, the best first.

    A variant that the compiler does not know is left out, as long as one is left.

    Args:
        directory: made when missing.
        variants: what to compile; by default all of this machine's architecture.
        reached: told the number of variants that are done, and of all.

    Raises:
        ConfigError: no compiler, no sources, or the compiler objects to each variant; the message says what to do.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError(f"no C compiler is on PATH ({', '.join(COMPILERS)}); install one, or do without kernels")
    if not source_files():
        raise ConfigError("the sources of the kernels are missing from the engine package; install it again")
    wanted = variants_of(platform.machine()) if variants is None else variants
    if not wanted:
        raise ConfigError(f"there are no kernels for {platform.machine()}; do without")
    directory.mkdir(parents=True, exist_ok=True)
    os.chmod(directory, 0o755)  # noqa: S103 - read by the sandbox, whose user owns nothing
    with tempfile.TemporaryDirectory(prefix=".build-", dir=directory) as scratch:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            problems = []
            for problem in pool.map(partial(_compile, compiler, Path(scratch)), wanted):
                problems.append(problem)
                reached(len(problems), len(wanted))
        made = [one for one, problem in zip(wanted, problems, strict=True) if not problem]
        if not made:
            raise ConfigError(f"the kernels cannot be compiled: {problems[0]}")
        return _install(Path(scratch), directory, made)


def _compile(compiler: str, folder: Path, variant: Variant) -> str:
    """Compile one library into a folder. Gives why it cannot be done; empty when it was."""
    units = [str(path) for path in source_files() if path.suffix == ".c"]
    library = str(folder / variant.library)
    try:
        run(
            [compiler, *FLAGS, *variant.flags, *units, "-o", library, "-lm", "-lpthread"],
            timeout_s=COMPILE_TIMEOUT_S,
            env={**MINIMAL_ENVIRONMENT, "TMPDIR": str(folder)},
        )
    except ProcessError as error:
        return str(error)
    return ""


def _install(scratch: Path, directory: Path, made: list[Variant]) -> list[BuiltLibrary]:
    """Move libraries and their manifest into the directory, the manifest last."""
    lines, built = [f"sources {source_digest()}"], []
    for variant in made:
        content = (scratch / variant.library).read_bytes()
        lines.append(f"library {variant.name} {hashlib.sha256(content).hexdigest()}")
        built.append(BuiltLibrary(variant.name, directory / variant.library, len(content)))
    (scratch / MANIFEST).write_text("\n".join(lines) + "\n")
    for name in (*(variant.library for variant in made), MANIFEST):
        (scratch / name).chmod(0o644)
        (scratch / name).replace(directory / name)
    return built


def is_current(directory: Path) -> bool:
    """Whether a directory holds kernels of the present sources; says nothing about the processor."""
    lines = _manifest(directory)
    names = libraries_of(lines)
    files = [directory / one.library for one in variants_of(platform.machine()) if one.name in names]
    return f"sources {source_digest()}" in lines and bool(files) and all(path.is_file() for path in files)


def is_there(directory: Path) -> bool:
    """Whether a directory holds kernels of any version."""
    return (directory / MANIFEST).is_file()


def best_for(directory: Path) -> str:
    """Name of the best variant in a directory for this machine's processor; empty where it runs none."""
    names = libraries_of(_manifest(directory))
    return next((one for one in _runnable(processor_features()) if one in names), "")


def features_here() -> frozenset[str]:
    """Features of this machine's processor; empty where the system does not tell."""
    return processor_features()


def best_variant(features: frozenset[str]) -> str:
    """Name of the best variant for a processor with these features, compiled or not; empty where it runs none."""
    return next(_runnable(features), "")


def telling_features(features: frozenset[str]) -> dict[str, bool]:
    """Features that a variant for this architecture needs, and whether they are among the given ones."""
    return {name: name in features for one in variants_of(platform.machine()) for name in one.features}


def _runnable(features: frozenset[str]) -> Iterator[str]:
    """Names of the variants that a processor with these features runs, the best first."""
    return (one.name for one in variants_of(platform.machine()) if features.issuperset(one.features))


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


def main() -> int:
    """Compile into the folder that the only argument names, and name the libraries; gives the program's status."""
    try:
        built = build(Path(sys.argv[1]))
    except (ConfigError, OSError) as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 1
    for one in built:
        print(f"{one.library} ({one.library_bytes // 1024} KiB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
