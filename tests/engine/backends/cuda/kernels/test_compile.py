"""Every kernel compiles to machine code of real GPUs, at the shapes of served models, on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHES = (
    "llama",
    "gemma",
    "gpt-oss",
    "deepseek",
    "rows",
    "pipelined",
    "few rows",
    "scaled",
    "palettes",
    "palette direct",
    "adapters",
    "experts",
    "sampling",
    "guards",
    "steps",
    "device",
    "device windows",
    "device latent",
)
QUICK = ((90, "guards"), (90, "rows"), (90, "pipelined"), (90, "palette direct"))
"""Compiled in every run; the last two because no interpreter knows their language."""

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory that one program may take on an A100 and on an H100 or H200 (CUDA C++ Programming Guide, table of
technical specifications)."""

SPILLED_BYTES = 1_024
"""Of a thread: more would say that a tile does not fit the registers at all."""

PRODUCTS = {"_decode", "_prefill", "_product", "_few_rows", "_prefill_pipelined", "_several_rows", "_direct", "_shrink"}
"""Kernels whose products have to run on tensor cores."""


def compile_in(root: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The probe, with a cache of its own and none of Triton's switches of this process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, "-m", "tests.engine.backends.cuda.kernels.compile_probe", *arguments],
        cwd=root,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("capability", "launch"),
    [
        pytest.param(capability, launch, marks=() if (capability, launch) in QUICK else full)
        for full in [[pytest.mark.full, pytest.mark.timeout(1_800)]]
        for capability in SHARED_BYTES
        for launch in LAUNCHES
        if (capability, launch) not in ((80, "pipelined"), (80, "scaled"))
    ],
)
@pytest.mark.timeout(300)
def test_launches_compile_for_gpus(root: Path, tmp_path: Path, capability: int, launch: str) -> None:
    """Machine code comes out, shared memory suffices, registers nearly do, and products are those of tensor cores. The
    launches have memory without contents: that they start at all shows that no grid depends on a length."""
    done = compile_in(root, tmp_path, str(capability), launch)
    assert done.returncode == 0, done.stderr[-3_000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert built
    for one in built:
        assert one["bytes"] > 0 and one["shared"] <= SHARED_BYTES[capability], one
        assert one["spilled"] <= SPILLED_BYTES, one
        assert one["mma"] > 0 or one["kernel"] not in PRODUCTS, one
        assert one["kernel"] != "_prefill_pipelined" or (one["bulk"] > 0 and one["warps"] == 12), one


def test_what_does_not_compile_is_noticed(root: Path, tmp_path: Path) -> None:
    """Positive control: an architecture that no compiler knows ends with an error."""
    done = compile_in(root, tmp_path, "1", "guards")
    assert done.returncode != 0
    assert "sm_1" in done.stderr
