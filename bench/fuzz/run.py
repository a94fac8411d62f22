"""Coverage-guided fuzzing with atheris, one target at a time: what a new branch needs is found and kept.

    pip install --require-hashes -r requirements/fuzz.lock
    python bench/fuzz/run.py chat --runs 200000 --corpus DIR
    python bench/fuzz/run.py all --seconds 60

Ends with 0 when no input broke a promise; a finding is written to ``crash-*`` in the corpus's folder and its traceback
is shown. Python's own code and the C parts that are built for it are watched; the libraries are not.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

WATCHED = ("appliance", "engine", "isolation", "policy")
"""Packages whose branches count."""

MAX_INPUT_BYTES = 1 << 14
"""Or twice the longest good input."""


def main() -> int:
    """One target, or each in a process of its own."""
    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing of one reader of foreign bytes.")
    parser.add_argument("target", help="a name of bench/fuzz/targets.py, or all")
    parser.add_argument("--runs", type=int, default=0, help="inputs; 0: until the time is over")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", type=Path, default=None, help="where inputs are kept from run to run")
    arguments = parser.parse_args()
    if arguments.target != "all":
        return fuzz(arguments.target, arguments.runs, arguments.seconds, arguments.corpus)
    from bench.fuzz.targets import TARGETS

    worst = 0
    for name in TARGETS:
        argv = [sys.executable, __file__, name, f"--runs={arguments.runs}", f"--seconds={arguments.seconds}"]
        argv += [f"--corpus={arguments.corpus / name}"] if arguments.corpus is not None else []
        print(f"== {name}", flush=True)
        worst = max(worst, subprocess.run(argv, check=False).returncode)
    return worst


def fuzz(name: str, runs: int, seconds: int, corpus: Path | None) -> int:
    """Fuzz until the runs or the time are over; libFuzzer ends the process itself."""
    try:
        import atheris
    except ImportError:
        print("atheris is not installed: pip install --require-hashes -r requirements/fuzz.lock", file=sys.stderr)
        return 2
    with atheris.instrument_imports(include=list(WATCHED)):
        from bench.fuzz.mutate import made_from
        from bench.fuzz.targets import TARGETS
    target = TARGETS[name]

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < 0.5:
            return bytes(made_from(data or target.seeds[0], draw)[:max_size])
        return bytes(atheris.Mutate(data, max_size))

    longest = max(MAX_INPUT_BYTES, *(2 * len(seed) for seed in target.seeds))
    argv = [sys.argv[0], f"-max_total_time={seconds}", f"-max_len={longest}", "-timeout=20"]
    argv += [f"-runs={runs}"] if runs else []
    if corpus is not None:
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(target.seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        argv += [f"-artifact_prefix={corpus}{os.sep}", str(corpus)]

    def feed(data: bytes) -> None:
        target(data)

    atheris.Setup(argv, feed, custom_mutator=mutator)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
