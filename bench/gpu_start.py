"""A process of its own with the engine on the device backend: its cold start, and what gVisor adds to that."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

import torch

from bench.gpu_engines import TINY, build_model, save
from bench.gpu_serving import GREEDY, ROOT, World
from engine.backends.cuda.runtime.launches import buckets
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.config import EngineConfig
from engine.startup.load import load_engine
from engine.startup.warmup import warm_up
from isolation.ipc.engine import Submit


def cold_start(world: World) -> None:
    """A process of its own from nothing to its first token, the weights in memory's file system."""
    report = world.report
    wanted = sum(tensor.nbytes for tensor in world.tensors.values())
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and shutil.disk_usage(shared).free > 1.2 * wanted else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        written = save(world.model, world.sizes, Path(folder))
        for turn in range(1 if report.toy else 2):
            report.check()
            command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--child", folder, "--began", str(time.time())]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=max(report.left(), 1), cwd=ROOT
            )
            if done.returncode != 0:
                raise RuntimeError(f"the child ended with {done.returncode}: {done.stderr.strip()[-400:]}")
            phases = json.loads(done.stdout.splitlines()[-1])
            report.put("cold start", turn=turn, bytes=written, in_memory=place is not None, **phases)
    report.figure("cold_start_s", phases["first_token_s"])


def child(folder: str, began: float) -> None:
    """What the cold process does; ``began``: when it was started, by the wall clock."""
    phases: dict[str, float] = {"imported_s": time.time() - began}
    gpu = torch.cuda.is_available()
    config = EngineConfig(
        model_dir=folder,
        model_digest="00",
        backend="device",
        kv_bytes=(2 << 30) if gpu else 1 << 22,
        max_context=1_024,
        max_num_seqs=16 if gpu else 4,
        max_num_batched_tokens=1_024 if gpu else 64,
    )
    engine = load_engine(config, warm=False)
    phases["loaded_s"] = time.time() - began
    runner = engine.runner
    assert isinstance(runner, DeviceRunner), "the configuration asks for the device backend"
    # Out of those that warm-up would have to record otherwise.
    phases["recorded_while_read"], phases["buckets"] = len(runner.recorded), len(buckets(config.max_num_seqs))
    engine.add(Submit(1, bytes(32), array("I", range(16)), 1, GREEDY, ignore_eos=True))
    while engine.has_work:
        output = engine.step()
        if output is not None and output.token_ids:
            phases["first_token_s"] = time.time() - began
    warm_up(engine)
    phases["warm_s"] = time.time() - began
    print(json.dumps(phases))


def isolation(world: World) -> None:
    """The cold process again inside gVisor, where runsc is there: what the walls cost a start and a step."""
    report = world.report
    runsc = shutil.which("runsc")
    if runsc is None:
        report.put("isolation", skipped="no runsc on PATH")
        return
    flags = ["--network=none", "--ignore-cgroups", *(["--nvproxy"] if report.device.type == "cuda" else [])]
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(TINY, torch.device("cpu"), torch.float32)
        save(model, TINY, Path(folder))
        inner = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--child", folder, "--began"]
        taken = {}
        for name, prefix in (("outside", []), ("inside", [runsc, *flags, "do"])):
            done = subprocess.run(
                [*prefix, *inner, str(time.time())],
                capture_output=True,
                text=True,
                check=False,
                timeout=max(report.left(), 1),
                cwd=ROOT,
            )
            if done.returncode != 0:
                raise RuntimeError(f"{name} gVisor the child ended with {done.returncode}: {done.stderr[-300:]}")
            taken[name] = json.loads(done.stdout.splitlines()[-1])
    report.put("isolation", **taken, ratio=taken["inside"]["warm_s"] / taken["outside"]["warm_s"])
