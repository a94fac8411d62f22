"""Kernels compiled ahead are found by an engine without compiler and assembler, in a folder that it cannot change."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from engine.backends.cuda.kernels.cache import folder_name, open_cache, seal
from engine.backends.cuda.kernels.folder import MANIFEST
from engine.errors import ConfigurationError


class Answer(NamedTuple):
    """How a fork of the probe ended, and what it said."""

    status: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def probe(repository: Path) -> Iterator[Callable[[Path, str], Answer]]:
    """A program whose forks make or use kernels; gives the function that has one do so."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.engine.backends.cuda.kernels.cache_probe"],
        cwd=repository,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        orders, answers = program.stdin, program.stdout

        def ask(root: Path, what: str) -> Answer:
            orders.write(json.dumps([str(root), what]) + "\n")
            orders.flush()
            return Answer(*json.loads(answers.readline()))

        try:
            yield ask
        finally:
            program.kill()


@pytest.mark.timeout(120)
@pytest.mark.full
def test_kernels_come_out_of_a_folder_that_was_moved(root: Path, tmp_path: Path) -> None:
    """What was compiled in one place is used in another, without an assembler and without a file made or changed; a
    form that was not compiled is an error that names the kernel."""
    made, moved = tmp_path / "made", tmp_path / "moved"
    with probe(root) as ask:
        assert (built := ask(made, "make")).status == 0, built.stderr
        shutil.move(made, moved)
        before = sorted(moved.rglob("*"))
        alone = ask(moved, "alone")
        assert alone.status != 0
        assert "a program was to be started" in alone.stderr  # the control: Triton by itself would ask the assembler
        used = ask(moved, "use")
        assert used.status == 0, used.stderr
        assert used.stdout == built.stdout
        other = ask(moved, "other")
    assert other.status != 0
    assert "the kernel double is not among the compiled ones" in other.stderr
    assert sorted(moved.rglob("*")) == before


def test_kernels_for_something_else_are_refused(tmp_path: Path) -> None:
    """Another architecture, an empty root, a manifest that says otherwise or is not one: refused with the mend."""
    configuration = "c0" * 32
    with pytest.raises(ConfigurationError, match="there is none"):
        open_cache(tmp_path, "sm_90", configuration)
    folder = tmp_path / folder_name("sm_80", configuration)
    with pytest.raises(ConfigurationError, match="athanor kernels gpu"):
        seal(folder, "sm_80", configuration)
    (folder / "key").mkdir(parents=True)
    (folder / "key/kernel.cubin").write_text("x")
    (folder / "key/kernel.ptx").write_text("made here")
    seal(folder, "sm_80", configuration)
    assert sorted(path.name for path in folder.rglob("*")) == [MANIFEST, "kernel.cubin", "key"]
    with pytest.raises(ConfigurationError, match=r"sm_90-triton.* is needed, there is sm_80-triton"):
        open_cache(tmp_path, "sm_90", configuration)
    known = json.loads((folder / MANIFEST).read_text())
    for said in (known | {"triton": "0"}, known | {"kernels": "00"}, [], known | {"architecture": "sm_90"}):
        (folder / MANIFEST).write_text(json.dumps(said))
        with pytest.raises(ConfigurationError, match="made for something else"):
            open_cache(tmp_path, "sm_80", configuration)
    (folder / MANIFEST).write_text(json.dumps({name: value for name, value in known.items() if name != "assembler"}))
    with pytest.raises(ConfigurationError, match="lacks something"):
        open_cache(tmp_path, "sm_80", configuration)
    (folder / MANIFEST).write_text(json.dumps(known))
    (folder / "key/link").symlink_to("kernel.cubin")
    with pytest.raises(ConfigurationError, match="files only"):
        open_cache(tmp_path, "sm_80", configuration)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(ConfigurationError, match="no manifest"):
        open_cache(tmp_path, "sm_80", configuration)
