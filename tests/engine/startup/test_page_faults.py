"""After warm-up a decode step touches no fresh page: in a sandbox each would cost two faults."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isolation.gvisor.environment import guest_environment
from tests.engine.support import model_config, save_model

STEPS = 60

PROBE = f"""
import json, mmap, resource, sys
sys.path.insert(0, sys.argv[1])
from array import array
from engine.config import EngineConfig
from engine.startup.load import load_engine
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

engine = load_engine(EngineConfig(
    model_dir=sys.argv[2], model_digest="00", kernels=sys.argv[3], kv_bytes=8 << 20, max_num_seqs=8,
    max_num_batched_tokens=64, max_context=256, prefix_caching=False))
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def serve(first):
    for number in range(first, first + 8):
        engine.add(Submit(number, bytes([number]) * 32, array("I", range(8)), {STEPS} + 20,
                          Sampling(temperature=0.8 * (number % 2), seed=number), ignore_eos=True))
    for _ in range(10):
        engine.step()
    before = faults()
    for _ in range({STEPS}):
        engine.step()
    count = faults() - before
    while engine.has_work:
        engine.step()
    return count
counts = [serve(1), serve(20)]
before = faults()
fresh = mmap.mmap(-1, 8 << 20)
fresh.write(bytes(8 << 20))
print(json.dumps({{"counts": counts, "control": faults() - before, "backend": engine.runner.description}}))
"""


@pytest.mark.full
@pytest.mark.parametrize("backend", ["plain", "compiled"])
def test_decoding_faults_no_pages(backend: str, kernel_dir: Callable[..., Path], root: Path, tmp_path: Path) -> None:
    """With the sandbox's environment: 60 steps of 8 sequences take next to no minor fault, first service
    after the warm-up included; control: fresh memory in the same process faults."""
    save_model(tmp_path, model_config(vocab_size=20_000, hidden_size=64))
    kernels = str(kernel_dir()) if backend == "compiled" else ""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(root), str(tmp_path), kernels],
        env=dict(guest_environment(threads=1)),
        check=True,
        capture_output=True,
        text=True,
    )
    seen = json.loads(done.stdout)
    assert max(seen["counts"]) < STEPS // 3, seen
    assert backend in seen["backend"] or backend == "plain"
    assert seen["control"] > 1_000
