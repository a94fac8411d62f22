"""Opening compiled kernels: what fits is used, what does not is a reason, and the engine runs all the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from appliance.common.errors import ConfigError
from appliance.operator import kernels as builder
from engine.backends.native import library
from engine.backends.native.library import LIBRARY, MANIFEST, UnusableKernelsError, open_library
from engine.config import EngineConfig
from engine.core.offline import generate
from engine.startup.load import load_engine
from tests.engine.support import model_config, save_model, submit


def copy(folder: Path, tmp_path: Path) -> Path:
    """A kernel directory to spoil."""
    target = tmp_path / "kernels"
    shutil.copytree(folder, target)
    return target


def edit(folder: Path, name: str, value: str) -> None:
    """Change one line of the manifest."""
    lines = (folder / MANIFEST).read_text().splitlines()
    kept = [line for line in lines if not line.startswith(name + " ")]
    (folder / MANIFEST).write_text("\n".join([*kept, f"{name} {value}"]) + "\n")


def test_kernels_open_with_what_the_machine_can_do(kernel_dir: Callable[[str], Path]) -> None:
    """A fresh build opens, says its instructions, and a second opening finds the threads of the first."""
    opened = open_library(str(kernel_dir("native")), 2)
    assert opened.threads == 2
    assert opened.description.startswith("compiled kernels with ")
    with pytest.raises(UnusableKernelsError, match="3 threads cannot be had"):
        open_library(str(kernel_dir("native")), 3)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("sources", "0" * 64, "other sources"),
        ("library", "0" * 64, "not the file"),
        ("features", "avx2 avx512_tomorrow", "avx512_tomorrow"),
    ],
)
def test_kernels_of_another_build_are_refused(
    kernel_dir: Callable[[str], Path], tmp_path: Path, name: str, value: str, reason: str
) -> None:
    """Other sources, another file or another processor: each is told."""
    folder = copy(kernel_dir("native"), tmp_path)
    edit(folder, name, value)
    with pytest.raises(UnusableKernelsError, match=reason):
        open_library(str(folder), 2)


def test_damage_is_a_reason(kernel_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """Missing, empty, truncated and enormous files are told, never loaded."""
    with pytest.raises(UnusableKernelsError, match="cannot be read"):
        open_library(str(tmp_path / "none"), 2)
    folder = copy(kernel_dir("native"), tmp_path)
    whole = (folder / LIBRARY).read_bytes()
    (folder / LIBRARY).write_bytes(whole[:1_000])
    with pytest.raises(UnusableKernelsError, match="not the file"):
        open_library(str(folder), 2)
    (folder / MANIFEST).write_bytes(b"\xff" * (library.MAX_MANIFEST_BYTES + 1))
    with pytest.raises(UnusableKernelsError, match="larger than"):
        open_library(str(folder), 2)
    (folder / MANIFEST).write_bytes(b"")
    with pytest.raises(UnusableKernelsError, match="other sources"):
        open_library(str(folder), 2)


def test_an_engine_without_usable_kernels_says_so_and_answers_the_same(
    kernel_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    """Good kernels, stale ones and none: the same greedy tokens; what computes, and why, is told."""
    save_model(tmp_path, model_config())
    stale = copy(kernel_dir("native"), tmp_path)
    edit(stale, "sources", "0" * 64)
    answers, backends = [], []
    for folder in (str(kernel_dir("native")), str(stale), ""):
        engine = load_engine(
            EngineConfig(model_dir=str(tmp_path), model_digest="00", threads=2, kv_bytes=1 << 20, kernels=folder)
        )
        answers.append(generate(engine, [submit(1, range(30), 20), submit(2, range(40, 50), 20)]))
        backends.append(engine.runner.description)
    assert answers[0] == answers[1] == answers[2]
    assert backends[0].startswith("compiled kernels")
    assert "other sources" in backends[1]
    assert backends[2] == "plain operations; no compiled kernels: none were given"
    torch.set_num_threads(1)


def test_a_dtype_that_the_kernels_lack_takes_the_plain_path(kernel_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """float16 has no kernels; the engine says so."""
    save_model(tmp_path, model_config())
    config = EngineConfig(
        model_dir=str(tmp_path), model_digest="00", dtype="float16", kv_bytes=1 << 20, kernels=str(kernel_dir("native"))
    )
    assert "they have no float16" in load_engine(config, warm=False).runner.description


def test_a_builder_without_a_compiler_or_with_broken_flags_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler is an error with its mend, a compiler that objects is shown; nothing is left behind."""
    if builder.find_compiler() is not None:
        with pytest.raises(ConfigError, match="cannot be compiled"):
            builder.build(tmp_path / "k", extra_flags=("-march=none-such",))
        assert list((tmp_path / "k").iterdir()) == []
    monkeypatch.setattr(builder, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ConfigError, match="no C compiler is on PATH"):
        builder.build(tmp_path / "k")
