"""What a decoding step starts on a device, counted: launches of kernels, and tensor operations that are no views."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_OF_A_LAYER, MOST_OUTSIDE = 6, 12


@pytest.mark.timeout(120)
@pytest.mark.full
def test_a_decoding_step_starts_few_launches(root: Path) -> None:
    """A Llama of bfloat16: few rows start no more than six launches a layer and twelve outside of layers; many rows
    have products, norms and gates by themselves. Control: with nothing fused the same count finds many more."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.backends.cuda.kernels.launch_probe"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    fused, many, separate = found["fused"], found["many rows"], found["separate"]
    assert fused["of_layer"] == {"_few_rows": 4, "_rope": 1, "_decode_joined": 1}
    assert fused["layer"] <= MOST_OF_A_LAYER
    assert "zeros" not in fused["of_step"], "nothing is cleared with each step"
    assert fused["outside"] <= MOST_OUTSIDE
    assert many["layer"] == separate["layer"] == 10 and many["outside"] <= MOST_OUTSIDE
    assert separate["outside"] > 60
