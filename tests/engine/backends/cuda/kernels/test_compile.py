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
    "sampling, lean",
    "guards",
    "steps",
    "device",
    "device windows",
    "device latent",
)
QUICK = ((90, "guards"), (90, "rows"), (90, "pipelined"), (90, "palette direct"))
"""Compiled in every run; the last two because no interpreter knows their language."""

QUICK_LAUNCHES = tuple(launch for _, launch in QUICK)

CONTROL = "unknown"
"""As ``compile_probe`` calls a launch for an architecture that no compiler knows."""

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory that one program may take on an A100 and on an H100 or H200 (CUDA C++ Programming Guide, table of
technical specifications)."""

SPILLED_BYTES = 1_024
"""Of a thread: more would say that a tile does not fit the registers at all."""

PRODUCTS = {"_decode", "_prefill", "_product", "_few_rows", "_prefill_pipelined", "_several_rows", "_direct", "_shrink"}
"""Kernels whose products have to run on tensor cores."""


OLDER = Path(sys.prefix) / "share/triton"
"""Triton 3.6, which comes with torch 2.11: by itself, for the torch that is here."""


def compile_in(
    root: Path, cache: Path, *arguments: str, triton: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The probe, with a cache of its own and none of Triton's switches of this process; ``triton``: the folder of
    another one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    if triton is not None:
        environment["PYTHONPATH"] = os.fspath(triton)
    return subprocess.run(
        [sys.executable, "-m", "tests.engine.backends.cuda.kernels.compile_probe", *arguments],
        cwd=root,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def quick(root: Path, tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The launches of every run, compiled by one process: each would load torch and Triton first."""
    return compile_in(root, tmp_path_factory.mktemp("quick"), "90", CONTROL, *QUICK_LAUNCHES)


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
def test_launches_compile_for_gpus(
    root: Path, tmp_path: Path, capability: int, launch: str, request: pytest.FixtureRequest
) -> None:
    """Machine code comes out, shared memory suffices, registers nearly do, and products are those of tensor cores. The
    launches have memory without contents: that they start at all shows that no grid depends on a length."""
    shared = (capability, launch) in QUICK
    done = request.getfixturevalue("quick") if shared else compile_in(root, tmp_path, str(capability), launch)
    check(done, capability, launch)


@pytest.mark.parametrize(
    "launches",
    [QUICK_LAUNCHES, pytest.param(LAUNCHES, marks=[pytest.mark.full, pytest.mark.timeout(3_600)])],
    ids=["quick", "all"],
)
@pytest.mark.timeout(300)
def test_launches_compile_with_the_older_triton(
    root: Path, tmp_path: Path, launches: tuple[str, ...], quick: subprocess.CompletedProcess[str]
) -> None:
    """For an H100 the same comes out of Triton 3.6. Control: the probe says which Triton it was, and this environment's
    own is another."""
    if not OLDER.exists():
        pytest.skip("no Triton 3.6 here: `make triton` gets it")
    done = compile_in(root, tmp_path, "90", *launches, triton=OLDER)
    for launch in launches:
        check(done, 90, launch)
    assert "triton 3.6." in done.stderr
    assert quick.stderr.startswith("triton ") and "triton 3.6." not in quick.stderr


def check(done: subprocess.CompletedProcess[str], capability: int, launch: str) -> None:
    """What came out of a launch fits the card."""
    assert done.returncode == 0, done.stderr[-3_000:]
    built = [one for one in map(json.loads, done.stdout.splitlines()) if one["launch"] == launch]
    assert built
    for one in built:
        assert one["bytes"] > 0 and one["shared"] <= SHARED_BYTES[capability], one
        assert one["spilled"] <= SPILLED_BYTES, one
        assert one["mma"] > 0 or one["kernel"] not in PRODUCTS, one
        assert one["kernel"] != "_prefill_pipelined" or (one["bulk"] > 0 and one["warps"] == 12), one


def test_what_does_not_compile_is_noticed(quick: subprocess.CompletedProcess[str]) -> None:
    """Positive control: an architecture that no compiler knows ends with an error."""
    (found,) = (one for one in map(json.loads, quick.stdout.splitlines()) if one["launch"] == CONTROL)
    assert found["status"] != 0
    assert "sm_1" in quick.stderr
