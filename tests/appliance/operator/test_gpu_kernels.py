"""``athanor kernels gpu`` and ``athanor image build --variant``: what they say and how they end. The compilers
themselves are run in ``tests/engine/backends/cuda/kernels/test_ahead.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from appliance.common.errors import ConfigError
from appliance.operator import gpu_kernels
from appliance.operator.cli.app import for_line
from appliance.operator.gpu_kernels import BuiltKernels, GpuKernels, compile_launcher

MODEL = ["--model", "/srv/llama", "--architecture", "sm_90"]


def test_the_command_compiles_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options come to the builder as they were said, others as a model's configuration has them by default; the answer
    is a line, or JSON."""
    asked = []

    def build(directory: Path, wanted: GpuKernels) -> BuiltKernels:
        asked.append(wanted)
        return BuiltKernels(directory / "sm_90-x", 24, "ab")

    monkeypatch.setattr(gpu_kernels, "build", build)
    done = CliRunner().invoke(
        for_line(["kernels"]), ["kernels", "gpu", str(tmp_path), *MODEL, "--max-num-seqs", "64", "-o", "json"]
    )
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {"folder": str(tmp_path / "sm_90-x"), "kernels": 24, "digest": "ab"}
    done = CliRunner().invoke(for_line(["kernels"]), ["kernels", "gpu", str(tmp_path), *MODEL])
    assert done.stdout.split() == [str(tmp_path / "sm_90-x"), "(24", "kernels,", "ab)"]
    shape = {"architecture": "sm_90", "model": Path("/srv/llama"), "dtype": "bfloat16", "block_size": 16}
    assert asked == [GpuKernels(**shape, max_num_seqs=64), GpuKernels(**shape, max_num_seqs=256)]


@pytest.mark.parametrize("missing", ["find_compiler", "find_package"])
def test_without_a_compiler_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """No C compiler, or no Triton: an error with the mend, exit code 1, and an empty folder."""
    monkeypatch.setattr(gpu_kernels, missing, lambda *_: None)
    with pytest.raises(ConfigError, match="install"):
        compile_launcher(tmp_path)
    done = CliRunner().invoke(for_line(["kernels"]), ["kernels", "gpu", str(tmp_path / "out"), *MODEL])
    assert done.exit_code == 1 and "install" in done.output
    assert list((tmp_path / "out").iterdir()) == []


def test_a_variant_that_there_is_not(tmp_path: Path) -> None:
    """It is the command line that is wrong, and nothing is built."""
    done = CliRunner().invoke(for_line(["image"]), ["image", "build", str(tmp_path / "out"), "--variant", "rocm"])
    assert done.exit_code == 2 and "cpu and cuda" in done.output
    assert not (tmp_path / "out").exists()
