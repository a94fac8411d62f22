"""Compiled kernels for the tests; and one thread for those whose models are tiny."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.backends.native.library import Library, open_library
from engine.backends.native.manifest import processor_features
from tests.compiled_kernels import compiled

VARIANTS = {"native": (), "no tiles": ("-mno-amx-tile",), "no dot products": ("-march=x86-64-v3",)}
"""Compiler flags that leave out what a machine, or its sandbox, may not have."""


@pytest.fixture(scope="session")
def kernel_dir(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of compiled kernels by variant; skips where there is no compiler."""
    made: dict[str, Path] = {}

    def get(variant: str = "native") -> Path:
        if "x86" in "".join(VARIANTS[variant]) and "avx2" not in processor_features():
            pytest.skip("not an x86-64-v3 machine")
        if variant not in made:
            made[variant] = compiled(pytestconfig, tmp_path_factory, VARIANTS[variant])
        return made[variant]

    return get


@pytest.fixture(scope="session")
def open_kernels(kernel_dir: Callable[[str], Path]) -> Callable[[str], Library]:
    """Opened libraries by variant, with two threads each."""
    opened: dict[str, Library] = {}

    def get(variant: str = "native") -> Library:
        if variant not in opened:
            opened[variant] = open_library(str(kernel_dir(variant)), 2)
        return opened[variant]

    return get


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensor operations on one thread, for tiny models: two would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
