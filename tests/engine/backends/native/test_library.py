"""Opening compiled kernels: what fits is used, what does not is a reason, and the engine runs all the same."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from appliance.common.errors import ConfigError
from appliance.operator import kernels as builder
from engine.backends.native import library
from engine.backends.native.library import UnusableKernelsError, open_libraries, open_library
from engine.backends.native.manifest import MANIFEST, Variant, processor_features, variants_of
from engine.config import EngineConfig
from engine.core.offline import generate
from engine.startup.load import load_engine
from tests.engine.support import model_config, save_model, submit


def copy(folder: Path, tmp_path: Path) -> Path:
    """A kernel directory to spoil."""
    target = tmp_path / "kernels"
    shutil.copytree(folder, target)
    return target


def edit(folder: Path, old: str, new: str) -> None:
    """Change the manifest."""
    text = (folder / MANIFEST).read_text()
    assert old in text
    (folder / MANIFEST).write_text(text.replace(old, new))


def test_kernels_open_with_what_the_machine_can_do(kernel_dir: Callable[..., Path]) -> None:
    """A fresh build opens and says its instructions; a second opening may want more threads, and never fewer."""
    opened = open_library(str(kernel_dir()), 2)
    assert opened.threads == 2
    assert opened.description.startswith("compiled kernels ")
    with pytest.raises(UnusableKernelsError, match="1 threads cannot be had"):
        open_library(str(kernel_dir()), 1)


def test_every_variant_is_there_and_the_best_that_runs_is_taken(kernel_dir: Callable[..., Path]) -> None:
    """One folder holds the libraries of every processor of the architecture; those that this one does not run are left
    out without a signal, and the order is that of the table."""
    known = variants_of(platform.machine())
    assert all((kernel_dir() / one.library).is_file() for one in known)
    runnable = [one.name for one in known if set(one.features) <= processor_features()]
    opened = [one.variant for one in open_libraries(str(kernel_dir()))]
    assert opened == runnable
    assert open_library(str(kernel_dir()), 2).variant == runnable[0]


def test_instructions_that_the_features_hide_are_tried(
    kernel_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a processor that claims all that a sandbox may hide, the libraries' own trials decide: none ends the
    process, and what opens is what really runs."""
    known = variants_of(platform.machine())
    real = [one.name for one in known if set(one.features) <= processor_features()]
    names = {name for one in known for name in one.features if name.startswith(library.HIDDEN_FEATURES)}
    claimed = processor_features() | names
    monkeypatch.setattr(library, "processor_features", lambda: claimed)
    assert [one.variant for one in open_libraries(str(kernel_dir()))] == real


def test_a_processor_without_any_variants_features_is_told(
    kernel_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variant names what it lacks; another kind of machine finds none."""
    monkeypatch.setattr(library, "processor_features", lambda: frozenset({"sse2"}))
    with pytest.raises(UnusableKernelsError, match="they need .*, which this processor lacks"):
        open_library(str(kernel_dir()), 2)
    monkeypatch.setattr(library.platform, "machine", lambda: "riscv64")
    with pytest.raises(UnusableKernelsError, match="none for riscv64"):
        open_library(str(kernel_dir()), 2)


def test_kernels_of_another_build_are_refused(kernel_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Other sources and another file are told; where one library is damaged the next best is taken."""
    folder = copy(kernel_dir(), tmp_path)
    runnable = [one.variant for one in open_libraries(str(folder))]
    path = folder / f"kernels-{runnable[0]}.so"
    path.unlink()  # the process has mapped it: what is written over would be read
    path.write_bytes(b"other")
    if runnable[1:]:
        assert [one.variant for one in open_libraries(str(folder))] == runnable[1:]
    with pytest.raises(UnusableKernelsError, match="not the file"):
        open_library(str(folder), 2, runnable[0])
    edit(folder, "sources ", "sources 0")
    with pytest.raises(UnusableKernelsError, match="other sources"):
        open_library(str(folder), 2)


def test_damage_is_a_reason(kernel_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Missing, truncated and enormous files are told, never loaded."""
    with pytest.raises(UnusableKernelsError, match="cannot be read"):
        open_library(str(tmp_path / "none"), 2)
    folder = copy(kernel_dir(), tmp_path)
    for path in folder.glob("*.so"):
        path.write_bytes(path.read_bytes()[:1_000])
    with pytest.raises(UnusableKernelsError, match="not the file"):
        open_library(str(folder), 2)
    (folder / MANIFEST).write_bytes(b"\xff" * (library.MAX_MANIFEST_BYTES + 1))
    with pytest.raises(UnusableKernelsError, match="larger than"):
        open_library(str(folder), 2)
    (folder / MANIFEST).write_bytes(b"")
    with pytest.raises(UnusableKernelsError, match="other sources"):
        open_library(str(folder), 2)


def test_an_engine_without_usable_kernels_says_so_and_answers_the_same(
    kernel_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Good kernels, stale ones and none: the same greedy tokens; what computes, and why, is told."""
    save_model(tmp_path, model_config())
    stale = copy(kernel_dir(), tmp_path)
    edit(stale, "sources ", "sources 0")
    answers, backends = [], []
    for folder in (str(kernel_dir()), str(stale), ""):
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


def test_a_dtype_that_the_kernels_lack_takes_the_plain_path(kernel_dir: Callable[..., Path], tmp_path: Path) -> None:
    """float16 has no kernels; the engine says so."""
    save_model(tmp_path, model_config())
    config = EngineConfig(
        model_dir=str(tmp_path), model_digest="00", dtype="float16", kv_bytes=1 << 20, kernels=str(kernel_dir())
    )
    assert "they have no float16" in load_engine(config, warm=False).runner.description


@pytest.mark.full
def test_a_builder_without_a_compiler_or_with_broken_flags_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that the compiler does not know is left out; when none is left the compiler's words are shown, and
    nothing is left behind. No compiler is an error with its mend. A small source stands for that of the kernels, which
    set-up compiles by the same function: what the compiler makes of it does not matter here."""
    small = tmp_path / "small.c"
    small.write_text("int small(void) { return 1; }\n")
    monkeypatch.setattr(builder, "source_files", lambda: [small])
    good = variants_of(platform.machine())[-1]
    broken = Variant("tomorrow", good.machine, ("-march=none-such",), ())
    if builder.find_compiler() is not None:
        with pytest.raises(ConfigError, match="cannot be compiled"):
            builder.build(tmp_path / "k", (broken,))
        assert list((tmp_path / "k").iterdir()) == []
        assert [one.variant for one in builder.build(tmp_path / "k", (broken, good))] == [good.name]
        assert sorted(path.name for path in (tmp_path / "k").iterdir()) == [good.library, MANIFEST]
        assert builder.is_current(tmp_path / "k")
    monkeypatch.setattr(builder, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ConfigError, match="no C compiler is on PATH"):
        builder.build(tmp_path / "k")


def test_the_program_that_compiles_needs_nothing_installed(root: Path, tmp_path: Path) -> None:
    """`make` compiles kernels while it installs packages: without those of the environment the program begins, and says
    why it cannot write. Control: without them the command cannot begin."""
    place = tmp_path / "file"
    place.write_text("")
    bare = [sys.executable, "-S", "-m"]
    compiling, command = (
        subprocess.run([*bare, *words], cwd=root, capture_output=True, text=True, timeout=60, check=False)
        for words in (("appliance.operator.kernels", str(place)), ("appliance.operator.cli.app", "--version"))
    )
    assert compiling.returncode == 1 and compiling.stderr.startswith("kernels: "), compiling.stderr
    assert str(place) in compiling.stderr
    assert command.returncode == 1 and "ModuleNotFoundError" in command.stderr
