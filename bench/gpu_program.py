"""The real engine program on a card: system calls collected under load, then its list enforced under the same load.

``python bench/gpu_program.py [--model DIR] [--kernels DIR] [--out FILE]``, from the repository's root, with torch,
Triton and numpy; at most two minutes. It starts ``python -m engine`` behind its real socket, with ``backend: device``,
up to four times:

* ``collect``: calls outside of the list are reported and made; all others keep their speed;
* ``enforced and more``: the kill filter, with what was found allowed beside the list: is that all?
* ``enforced``: the kill filter as it is served: does the engine live?
* ``used``: every call is reported, in a short run: which entries of the list are used.

The model is a tiny Llama with random weights, or ``--model``; ``--eight`` makes one of 8B's shape, in memory's file
system unless ``--model`` names a folder for it. ``--only`` without a name writes the model and ends, so that kernels
can be compiled for it. With ``--kernels`` the engine has kernels that were compiled ahead for this model and these
rows; without, Triton compiles what warm-up meets, and a form that warm-up did not meet shows as files that are opened.
``--rehearse`` runs all of it on a CPU.

``--minutes N`` puts mixed load on the program under its list for N minutes instead, beside other work if need be
(``bench/gpu_minutes.py``); ``--small`` has heads as wide as those of large models, and 230 MB of weights.

Exit status 0: nothing was outside of the list and the engine lived under it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from appliance.operator.calls.report import lines, table
from appliance.operator.calls.session import Mode, Trial, TrialOutcome, run
from bench.gpu_engines import EIGHT_B, SMALL, TINY, build_model, save
from bench.gpu_minutes import EVERY_S, begin_minutes, run_minutes
from engine.config import EngineConfig
from isolation.gpu.bundle_additions import ENVIRONMENT

BUDGET_S = 115.0
"""Seconds of a call; what does not fit in is left out and told."""

LATE_S = 5.0
"""Seconds after the budget when whatever still runs is ended."""

LEAST_S = 20.0
"""Seconds below which no further engine is started."""

SHARES = {"collect": 1.0, "enforced and more": 0.6, "enforced": 0.6, "used": 0.3}
"""Seconds of each run's load, over those of the first."""

TINY_HEADS = {"head_dim": 64, "hidden_size": 256}
"""On a card the tiny model has a width that kernels were written for."""


def main() -> int:
    """Run the trials; gives 0 when nothing was outside of the list and the engine lived under it."""
    options = _options()
    options.out.unlink(missing_ok=True)
    if not options.rehearse and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; --rehearse runs everything on the CPU")
    deadline = time.monotonic() + options.budget
    # An engine that stands still is ended by this, and told: runs look at the time themselves.
    state = begin_minutes(options) if options.minutes else None
    if state is None:
        signal.signal(signal.SIGALRM, _out_of_time)
        signal.setitimer(signal.ITIMER_REAL, options.budget + LATE_S)
    _put(options.out, "machine", torch=torch.__version__, kernel=os.uname().release, card=_card(options.rehearse))
    with _model(options) as folder:
        if state is not None:
            return run_minutes(state, options, _config(options, folder), program_environment())
        if not options.only:
            return 0
        outcomes = trials(options, _config(options, folder), deadline)
    found = outcomes["collect"].outside if "collect" in outcomes else {"engine": []}
    lived = "enforced" in outcomes and outcomes["enforced"].lived
    verdict = {"outside": sum(len(rows) for rows in found.values()), "enforced_lived": lived}
    _put(options.out, "verdict", **verdict, runs=list(outcomes))
    print(f"verdict: {verdict}")
    return 0 if lived and not found and outcomes["collect"].lived else 1


def _out_of_time(*_: object) -> None:
    raise TimeoutError("the time of the whole call is over")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, in seconds")
    parser.add_argument("--out", type=Path, default=Path("gpu-program.jsonl"))
    parser.add_argument(
        "--model", type=Path, help="a checkpoint; where there is none, random weights are written there and kept"
    )
    parser.add_argument("--eight", action="store_true", help="random weights of an 8B model's shape")
    parser.add_argument("--small", action="store_true", help="random weights of 230 MB, heads of 128")
    parser.add_argument("--kernels", type=Path, help="kernels that were compiled ahead for this model and these rows")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", type=int, help="max_num_seqs")
    parser.add_argument("--context", type=int, help="max_context")
    parser.add_argument("--tokens", type=int, help="max_num_batched_tokens")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-bytes", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="of load in the first run")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of the whole call")
    parser.add_argument("--minutes", type=float, default=0.0, help="of mixed load under the list, and nothing else")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between two lines of those minutes")
    parser.add_argument("--only", nargs="*", choices=tuple(SHARES), default=tuple(SHARES))
    options = parser.parse_args()
    defaults = {"rows": 4, "context": 64, "tokens": 32, "kv_bytes": 1 << 22, "seconds": 1.0}
    if not options.rehearse:
        defaults = {"rows": 64, "context": 1_024, "tokens": 512, "kv_bytes": 1 << 30, "seconds": 10.0}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def program_environment() -> dict[str, str]:
    """A bundle's environment; the libraries of this machine stay where they are."""
    # Kernels that Triton compiled for other stages are found: a sandbox's home is elsewhere.
    compiled = {"TRITON_CACHE_DIR": str(Path.home() / ".triton" / "cache")}
    return {**compiled, **os.environ, **{name: value for name, value in ENVIRONMENT if "PATH" not in name}}


def trials(options: argparse.Namespace, config: EngineConfig, deadline: float) -> dict[str, TrialOutcome]:
    """One engine after the other, each told as soon as it has ended."""
    environment = program_environment()
    modes = {"collect": Mode.OUTSIDE, "enforced and more": Mode.ENFORCE, "enforced": Mode.ENFORCE, "used": Mode.COLLECT}
    outcomes: dict[str, TrialOutcome] = {}
    for name in options.only:
        left = deadline - time.monotonic()
        if left < (0 if options.rehearse else LEAST_S):
            print(f"== {name}: left out, {left:.0f} s are left")
            continue
        trial = Trial(
            config=config,
            mode=modes[name],
            seconds=min(options.seconds * SHARES[name], left / 2),
            environment=environment,
            ready_timeout_s=max(left - 5.0, LEAST_S),
        )
        if name == "enforced and more":
            found = outcomes["collect"].outside if "collect" in outcomes else {}
            if not found:
                continue
            trial = replace(trial, added=found)
        print(f"== {name}", flush=True)
        outcomes[name] = outcome = run(trial)
        _put(options.out, name, **asdict(outcome), killed=outcome.killed, lived=outcome.lived)
        print("\n".join((*lines(outcome, trial.mode), *_threads(outcome))), flush=True)
    return outcomes


def _threads(outcome: TrialOutcome) -> list[str]:
    """Threads and open files at lock-down."""
    result = []
    for program in outcome.programs:
        for what in ("threads", "files"):
            rows = [(str(count), name) for name, count in program[what].items()]
            result += [f"  {what} at lock-down:", *(f"    {line}" for line in table(("count", "name"), rows))]
    return result


def _config(options: argparse.Namespace, folder: Path) -> EngineConfig:
    return EngineConfig(
        model_dir=str(folder),
        model_digest="00",
        backend="device",
        threads=options.threads,
        block_size=options.block_size,
        kv_bytes=options.kv_bytes,
        max_context=options.context,
        max_num_seqs=options.rows,
        max_num_batched_tokens=options.tokens,
        gpu_kernels=str(options.kernels.resolve()) if options.kernels else "",
        spill=True,
    )


@contextlib.contextmanager
def _model(options: argparse.Namespace) -> Iterator[Path]:
    """The checkpoint: the given one, or random weights for as long as the block runs."""
    if options.model is not None and (options.model / "config.json").exists():
        yield options.model.resolve()
        return
    # Tiny weights are made on the CPU, so that this process holds nothing of the card.
    device = torch.device("cuda" if options.eight and not options.rehearse else "cpu")
    dtype = torch.float32 if options.rehearse else getattr(torch, options.dtype)
    sizes = TINY | ({} if options.rehearse else TINY_HEADS)
    if options.eight or options.small:
        sizes = EIGHT_B if options.eight else SMALL
    if options.model is not None:
        options.model.mkdir(parents=True, exist_ok=True)
        save(build_model(sizes, device, dtype), sizes, options.model)
        yield options.model.resolve()
        return
    shared = Path("/dev/shm")
    place = shared if shared.is_dir() and shutil.disk_usage(shared).free > (20 << 30) else None
    with tempfile.TemporaryDirectory(prefix="gpu-program-", dir=place) as name:
        folder = Path(name)
        # Read by the engine's process, which looks for the card itself: this one gives its memory back.
        save(build_model(sizes, device, dtype), sizes, folder)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        yield folder


def _card(rehearse: bool) -> str:
    return "CPU" if rehearse else torch.cuda.get_device_name()


def _put(path: Path, kind: str, **values: Any) -> None:
    """One line of results, at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **values}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
