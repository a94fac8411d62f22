"""Compiled kernels for the tests; and one thread for those whose models are tiny."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.backends.native.library import Library, UnusableKernelsError, open_library
from engine.backends.native.manifest import MANIFEST, VARIANTS
from tests.compiled_kernels import compiled
from tests.engine.backends.native.emulated import EmulatedLibrary, build


@pytest.fixture(scope="session")
def kernel_dir(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Directory of compiled kernels, with all variants or with the named one; skips where there is no compiler, or by
    name what this processor does not run."""

    @cache
    def get(variant: str = "") -> Path:
        whole = compiled(pytestconfig, tmp_path_factory)
        if not variant:
            return whole
        _open(whole, variant)
        folder = tmp_path_factory.mktemp("kernels")
        shutil.copy(whole / f"kernels-{variant}.so", folder)
        lines = (whole / MANIFEST).read_text().splitlines(keepends=True)
        wanted = (line for line in lines if line.startswith("sources ") or line.split()[1] == variant)
        (folder / MANIFEST).write_text("".join(wanted))
        return folder

    return get


def _open(folder: Path, variant: str) -> Library:
    try:
        return open_library(str(folder), 2, variant)
    except UnusableKernelsError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def open_kernels(
    kernel_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Library | EmulatedLibrary]:
    """Opened libraries by variant, with two threads each; one for another kind of machine is emulated. Skips, by name,
    those that this processor does not run."""
    emulated = {one.name: one for one in VARIANTS if one.machine != platform.machine()}

    @cache
    def get(variant: str = "") -> Library | EmulatedLibrary:
        if variant in emulated:
            return build(emulated[variant], tmp_path_factory.mktemp("emulated"), _open(kernel_dir(), ""))
        return _open(kernel_dir(), variant)

    return get


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensor operations on one thread, for tiny models: two would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
