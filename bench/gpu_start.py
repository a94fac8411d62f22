"""A process of its own with the engine on the device backend: its cold start, and what gVisor adds to that."""

from __future__ import annotations

import json
import mmap
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu_child import told
from bench.gpu_engines import TINY, build_model, save
from bench.gpu_serving import GREEDY, ROOT, World
from engine.backends.cuda import load
from engine.backends.cuda.runtime.launches import buckets
from engine.backends.cuda.runtime.preparation import Fill, filling, release_locked
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.config import EngineConfig
from engine.model.checkpoint.registry import load_model_config
from engine.model.checkpoint.safetensors import SafetensorsFile
from engine.model.checkpoint.staging import RingTimes, Route
from engine.model.checkpoint.weights import UnreadModel, unread_model
from engine.startup.load import load_engine
from engine.startup.warmup import warm_up
from isolation.ipc.engine import Submit

GPU = str(ROOT / "bench" / "gpu.py")


def cold_start(world: World) -> None:
    """A process of its own from nothing to its first token, the weights in memory's file system; then the ways in
    which weights can get to a card beside each other."""
    report = world.report
    wanted = sum(tensor.nbytes for tensor in world.tensors.values())
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and shutil.disk_usage(shared).free > 1.2 * wanted else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        began = time.monotonic()
        written = save(world.model, world.sizes, Path(folder))
        report.put("cold start", wrote=written, seconds=time.monotonic() - began)
        for turn in range(1 if report.toy else 2):
            report.check()
            left = report.left()
            for phases in told([GPU, "--child", folder, "--began", str(time.time())], first_s=left, whole_s=left):
                report.put("cold start", turn=turn, bytes=written, in_memory=place is not None, **phases)
                if "first_token_s" in phases:
                    report.figure("cold_start_s", phases["first_token_s"])
        left = report.left()
        for row in told([GPU, "--child-routes", folder], first_s=left, whole_s=left):
            report.put("weights to the card", **row)


def child(folder: str, began: float) -> None:
    """What the cold process does; ``began``: when it was started, by the wall clock."""
    phases: dict[str, float] = {"imported_s": time.time() - began}
    gpu = torch.cuda.is_available()
    if gpu:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    phases["context_s"] = time.time() - began
    config = EngineConfig(
        model_dir=folder,
        model_digest="00",
        backend="device",
        kv_bytes=(2 << 30) if gpu else 1 << 22,
        max_context=1_024,
        max_num_seqs=16 if gpu else 4,
        max_num_batched_tokens=1_024 if gpu else 64,
    )
    _watch_parts(phases, began)
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
    print(json.dumps(phases), flush=True)
    warm_up(engine)
    print(json.dumps({"warm_s": time.time() - began}))


def _watch_parts(phases: dict[str, float], began: float) -> None:
    """Note when the parts of a load begin and end, all from the process's start, and what the reading waited for."""
    make, record, build_runner = load.filling, DeviceRunner.record, load.build

    def filling(unread: UnreadModel) -> Fill:
        phases["allocated_s"] = time.time() - began
        times: list[RingTimes] = []
        fill = make(unread, times=times)
        phases["locked_s"] = time.time() - began

        def run(stopped: Callable[[], bool]) -> None:
            fill(stopped)
            phases["read_s"] = time.time() - began
            for one in times:
                phases["waited_for_reads_s"], phases["waited_for_copies_s"] = one.read_s, one.copy_s

        return run

    def build(*given: Any) -> DeviceRunner:
        runner = build_runner(*given)
        phases["built_s"] = time.time() - began
        return runner

    def recording(runner: DeviceRunner, enough: Callable[[], bool]) -> None:
        record(runner, enough)
        phases["recording_ended_s"] = time.time() - began

    load.filling, load.build = filling, build
    DeviceRunner.record = recording  # type: ignore[method-assign]


ROUTES = {
    "one buffer of ordinary memory": Route(locked=False),
    "page-locked, 4 readers": Route(readers=4),
    "page-locked, 8 readers": Route(),
    "page-locked, 16 readers, 32 places": Route(readers=16, places=32),
    "page-locked, places of 16 MiB": Route(place_bytes=16 << 20),
    "page-locked, files mapped": Route(),
}
"""Ways of weights to a card. The first two runs also find pages of the card that are mapped for the first time."""


def routes(folder: str) -> None:
    """Read the weights by each way, and print a line each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    description = load_model_config(folder).within(1_024)
    with unread_model(folder, description, dtype="auto", device=device) as unread:
        size = sum(home.target.nbytes for piece in unread.checklist.pieces.values() for home in piece.homes)
        for name, route in ROUTES.items():
            mapped = _map_files(unread) if "mapped" in name else []
            times: list[RingTimes] = []
            began = time.perf_counter()
            fill = filling(unread, route, times)
            locked = time.perf_counter()
            fill(lambda: False)
            ended = time.perf_counter()
            release_locked(device)
            waited = {"waited_for_reads_s": times[0].read_s, "waited_for_copies_s": times[0].copy_s} if times else {}
            rate = {"locking_s": locked - began, "seconds": ended - locked, "bytes_per_s": size / (ended - locked)}
            print(json.dumps({"route": name, **rate, **waited}), flush=True)
            for file in mapped:
                del file._read_exactly


def _map_files(unread: UnreadModel) -> list[Any]:
    """Let the model's files be read by way of a map instead of calls."""
    files = {id(file): file for file in unread.homes.values() if isinstance(file, SafetensorsFile)}
    for file in files.values():
        content = np.frombuffer(mmap.mmap(file._fd, 0, prot=mmap.PROT_READ), dtype=np.uint8)

        def read(target: memoryview, offset: int, content: NDArray[np.uint8] = content) -> None:
            np.copyto(np.frombuffer(target, dtype=np.uint8), content[offset : offset + target.nbytes])

        file._read_exactly = read  # type: ignore[method-assign]
    return list(files.values())


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
