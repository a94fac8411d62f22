"""Kernels compiled ahead, found by an engine without compilers: on a card, in less than 90 seconds.

Run from the repository's root on a machine with a GPU: ``python bench/gpu_ahead.py``. Needs a C compiler and Python's
headers for the first part. Two models with random weights: a tiny one, and one of the shape of Llama 3.1 8B with fewer
layers (``--layers``; no form depends on their number). For each:

* ``build``: ``athanor kernels gpu``, both models at once, a process each;
* ``serve``: a process of its own with an empty ``PATH``, in which no program can be started, loads the engine with
  ``gpu_kernels`` set, warms it, and serves requests of every kind and prompts of many lengths.

What is told of ``serve``: kernels and modules that Triton has looked up, those that were missing (0 is the bar),
programs that were to be started (0), and seconds of each phase. A stage that fails prints its error whole, and the next
one runs. ``--toy`` runs all of it without a GPU: the kernels are compiled, and nothing is looked up.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from appliance.operator.gpu_kernels import GpuKernels, build
from appliance.operator.kernels import find_compiler
from bench.gpu_engines import BLOCK, EIGHT_B, TINY, build_model, published, save
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.offline import Answer, collect
from engine.core.scheduler.plan import RowMask
from engine.startup.load import load_engine
from engine.startup.warmup import warm_up
from isolation.ipc.engine import Submit
from isolation.ipc.sampling import Sampling

ROOT = Path(__file__).resolve().parents[1]
ROWS = 32
BUDGET = 512
"""Tokens of a step."""

CONTEXT = 2_048
GREEDY = Sampling(temperature=0.0)
LENGTHS = (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 129, 255, 257, 511, 513, 1_000)
"""Tokens of prompts that are served one after the other: every kind of number that a form could depend on."""

CHILD_S = 150.0
"""Seconds that a child may take at the most."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "draw": {"sampling": Sampling(seed=1)},
    "top-k": {"sampling": Sampling(top_k=3, seed=2)},
    "top-p": {"sampling": Sampling(top_p=0.9, seed=3)},
    "min-p, typical-p": {"sampling": Sampling(min_p=0.1, typical_p=0.9, seed=4)},
    "penalties": {
        "sampling": Sampling(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)
    },
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "mask": {"structured": True},
    "all together": {
        "sampling": Sampling(top_k=3, top_p=0.9, min_p=0.1, frequency_penalty=0.4),
        "structured": True,
        "logprobs": 20,
    },
    "choices": {"sampling": Sampling(seed=5), "choices": 2},
}


def tell(stage: str, **values: object) -> None:
    """Print one result."""
    print(json.dumps({"stage": stage, **values}), flush=True)


@dataclass(slots=True)
class Stages:
    """What was done, and what went wrong."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """One stage: an error is printed whole, and the next stage runs."""
        began = time.monotonic()
        try:
            yield
        except Exception:  # noqa: BLE001 - the border of a stage
            traceback.print_exc()
            sys.stderr.flush()
            self.failed.append(name)
        self.seconds[name] = round(time.monotonic() - began, 2)


@dataclass(slots=True)
class Watch:
    """What the child's Triton looks up, and what it may not do."""

    found: int = 0
    modules: int = 0
    missing: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Count from now on; starting a program is an error."""
        cache = importlib.import_module("engine.backends.cuda.kernels.cache").ReadOnlyCache
        watch = self

        def watched(name: str, count: str) -> None:
            real = getattr(cache, name)

            def look(own: object, filename: str) -> object:
                try:
                    there = real(own, filename)
                except Exception:
                    watch.missing.append(filename)
                    raise
                setattr(watch, count, getattr(watch, count) + 1)
                return there

            setattr(cache, name, look)

        def no_program(_self: object, command: object, *_: object, **__: object) -> None:
            watch.programs.append(str(command)[:200])
            raise PermissionError("a program was to be started")

        watched("get_group", "found")
        watched("get_file", "modules")
        subprocess.Popen.__init__ = no_program  # type: ignore[method-assign]


def child(folder: str, kernels: str) -> int:
    """The process that serves; gives 0 when nothing failed."""
    stages, watch, gpu = Stages(), Watch(), torch.cuda.is_available()
    watch.begin()
    config = EngineConfig(
        model_dir=folder,
        model_digest="00",
        backend="device",
        kv_bytes=(4 << 30) if gpu else 1 << 26,
        block_size=BLOCK,
        max_context=CONTEXT,
        max_num_seqs=ROWS,
        max_num_batched_tokens=BUDGET,
        gpu_kernels=kernels,
    )
    engines: list[Engine] = []
    with stages.stage("load"):
        engines.append(load_engine(config, warm=False))
    if engines:
        engine = engines[0]
        with stages.stage("warm-up"):
            warm_up(engine)
        numbers = iter(range(1, 1 << 20, 8))
        for kind in KINDS:
            with stages.stage(f"request: {kind}"):
                serve(engine, numbers, [(kind, 40)])
        with stages.stage("prompts of many lengths"):
            for length in LENGTHS:
                serve(engine, numbers, [("greedy", length)], most=3)
        with stages.stage("all at once"):
            serve(engine, numbers, [(kind, length) for kind in KINDS for length in (1, 3, 40, 700)], most=40)
    tell(
        "served",
        looked_up=watch.found,
        modules=watch.modules,
        missing=len(watch.missing),
        missing_names=sorted(set(watch.missing)),
        programs=watch.programs,
        failed=stages.failed,
        seconds=stages.seconds,
    )
    sys.stdout.flush()
    # Without the interpreter's end: a card in an error state would hide what was told.
    os._exit(1 if stages.failed or watch.missing else 0)


def serve(engine: Engine, numbers: Iterator[int], asked: list[tuple[str, int]], most: int = 6) -> None:
    """Requests of these kinds and lengths of prompts together, to their end."""
    limits, draw = engine.runner.limits, random.Random(len(asked))
    every = RowMask(b"\xff" * (limits.vocab_size // 8 + 1), accepting=True)
    answers: dict[int, Answer] = {}
    structured, expected = [], 0
    for kind, length in asked:
        number = next(numbers)
        ids = array("I", [draw.randrange(limits.vocab_size) for _ in range(length)])
        fields = {"sampling": GREEDY, **KINDS[kind]}
        engine.add(Submit(number, bytes(32), ids, most, ignore_eos=True, **fields))
        expected += fields.get("choices", 1) * most
        if fields.get("structured"):
            structured.append(number)

    def guide() -> None:
        for number in structured:
            engine.scheduler.set_mask(number, len(answers[number].token_ids) if number in answers else 0, every)

    # A row that waits for a mask is no work.
    guide()
    while engine.has_work:
        collect(engine, answers)
        guide()
    failures = [str(one.failure) for one in answers.values() if one.failure]
    tokens = [token for one in answers.values() for token in one.token_ids]
    if failures or len(tokens) != expected:
        raise RuntimeError(f"{len(tokens)} tokens of {expected}, failures: {failures}")
    if not all(0 <= token < limits.vocab_size for token in tokens):
        raise RuntimeError("a token is none of the vocabulary")


def architecture() -> str:
    """Of the card that is here."""
    if not torch.cuda.is_available():
        return "sm_90"
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def versions() -> None:
    """What runs."""
    tell(
        "versions",
        python=sys.version.split()[0],
        torch=torch.__version__,
        triton=importlib.import_module("triton").__version__,
        card=torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        compiler=find_compiler(),
        processors=len(os.sched_getaffinity(0)),
    )


def main() -> int:
    """Run all stages; gives 0 when all of them came to their end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="without a GPU")
    parser.add_argument("--layers", type=int, default=4, help="of the 8B's 32")
    parser.add_argument("--only", choices=("tiny", "8B"), help="one of the models")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child)
    if not options.toy and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --toy runs everything without one")
    models = {"tiny": TINY, "8B": EIGHT_B | {"num_layers": options.layers}}
    if options.toy or options.only:
        models = {name: models[name] for name in models if name == (options.only or "tiny")}
    stages, began = Stages(), time.monotonic()
    with stages.stage("versions"):
        versions()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        places = {name: Path(scratch) / name for name in models}
        for name, place in places.items():
            (place / "kernels").mkdir(parents=True)
            (place / "config.json").write_text(json.dumps(published(models[name])))
        with ThreadPoolExecutor(len(models)) as pool:
            builds = {name: pool.submit(build_one, place) for name, place in places.items()}
            for name, sizes in models.items():
                with stages.stage(f"weights {name}"):
                    make_weights(sizes, places[name])
            for name, place in places.items():
                with stages.stage(f"build {name}"):
                    builds[name].result()
                with stages.stage(f"serve {name}"):
                    run_child(place)
    tell("end", failed=stages.failed, seconds=stages.seconds, all_s=round(time.monotonic() - began, 2))
    return 1 if stages.failed else 0


def build_one(place: Path) -> None:
    """Compile a model's kernels."""
    began = time.monotonic()
    wanted = GpuKernels(
        architecture=architecture(), model=place, dtype="bfloat16", block_size=BLOCK, max_num_seqs=min(ROWS, BUDGET)
    )
    built = build(place / "kernels", wanted)
    seconds = round(time.monotonic() - began, 2)
    tell("built", folder=built.folder.name, kernels=built.kernels, seconds=seconds)


def make_weights(sizes: dict[str, Any], place: Path) -> None:
    """Write random weights beside the description."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(sizes, device, torch.bfloat16)
    tell("weights", bytes=save(model, sizes, place))
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_child(place: Path) -> None:
    """An engine's process without a compiler; its output is shown as it comes."""
    empty = place / "empty"
    empty.mkdir()
    kept = {name: value for name, value in os.environ.items() if name.startswith(("LD_", "CUDA_", "NVIDIA_", "PYTHON"))}
    environment = {**kept, "PATH": str(empty), "HOME": str(empty), "TMPDIR": str(empty), "LANG": "C.UTF-8"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu_ahead.py"), "--child", str(place), str(place / "kernels")],
        env=environment,
        cwd=ROOT,
        check=False,
        timeout=CHILD_S,
    )
    tell("child", status=done.returncode, seconds=round(time.monotonic() - began, 2))
    if done.returncode:
        raise RuntimeError(f"the child ended with {done.returncode}")


if __name__ == "__main__":
    sys.exit(main())
