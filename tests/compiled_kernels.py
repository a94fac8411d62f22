"""Compiled kernels for tests: made once for the present sources, compiler and processor, and kept between runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from appliance.operator import kernels
from engine.backends.native.manifest import processor_features, source_digest


def compiled(config: pytest.Config, folders: pytest.TempPathFactory, flags: tuple[str, ...] = ()) -> Path:
    """The folder of kernels compiled with these flags besides the usual ones; the test is skipped without a compiler.

    They lie in pytest's cache; two workers that need them at once wait for one another.
    """
    compiler = kernels.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler on PATH")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    said = "\n".join((source_digest(), version, *kernels.FLAGS, *flags, *sorted(processor_features())))
    kept = (
        config.cache.mkdir("kernels") if config.pluginmanager.hasplugin("cacheprovider") else folders.mktemp("kernels")
    )
    folder = Path(kept) / hashlib.sha256(said.encode()).hexdigest()[:16]
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kernels.is_current(folder):
            with tempfile.TemporaryDirectory(dir=kept) as scratch:
                made = kernels.build(Path(scratch) / "made", extra_flags=flags).library.parent
                os.rename(made, folder)
    return folder
