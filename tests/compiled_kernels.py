"""Compiled kernels for tests: made once for the present sources and compiler, and kept between runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from appliance.operator import kernels
from engine.backends.native import manifest
from engine.backends.native.manifest import MANIFEST, source_digest


def compiled(config: pytest.Config, folders: pytest.TempPathFactory) -> Path:
    """The folder of kernels in every variant of this architecture; the test is skipped without a compiler.

    They are those that `make` installed, where it would not build them anew. Otherwise they lie in pytest's cache; two
    workers that need them at once wait for one another.
    """
    installed = kernels.installed()
    if installed is not None and is_newer(installed / MANIFEST):
        return installed
    compiler = kernels.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler on PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    said = "\n".join((source_digest(), version, *kernels.FLAGS))
    kept = (
        config.cache.mkdir("kernels") if config.pluginmanager.hasplugin("cacheprovider") else folders.mktemp("kernels")
    )
    folder = Path(kept) / hashlib.sha256(said.encode()).hexdigest()[:16]
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kernels.is_current(folder):
            with tempfile.TemporaryDirectory(dir=kept) as scratch:
                kernels.build(Path(scratch) / "made")
                os.rename(Path(scratch) / "made", folder)
    return folder


def is_newer(made: Path) -> bool:
    """Whether a manifest is younger than the modules that say how kernels are compiled: the rule of the Makefile."""
    modules = (kernels, manifest)
    return all(made.stat().st_mtime >= os.stat(str(module.__file__)).st_mtime for module in modules)
