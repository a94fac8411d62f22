"""Forms of prefill attention on a card, each checked and timed beside torch's own: ``python bench/gpu_prefill.py``.

Four prompts of 4,096 tokens, 32 heads and 8 of keys and values, 128 wide, bfloat16. Each form runs in a process of its
own, since one that never ends would take the card with it: it is ended when its answer does not come in time, and left
out. All compile at once; then one after the other is timed. A form is right if it is within rounding of float64 for
prompts of many lengths over memory whose other slots are no numbers, if it gives the same bits again and again, and if
it gives them however a prompt is cut. Takes less than a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

READY_S = 40.0
"""For all processes together to start, to compile and to check."""

TIMED_S = 8.0
"""For one to be timed."""

BOUND = 2.0**-6
"""Of the error, relative to the largest value: weights and results are rounded to bfloat16."""

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300, 1_000, 4_097)
CUTS = (37, 128, 1_000)
"""Tokens of the pieces in which a prompt is computed again."""

AGAIN = 20
MIXES = {"4 x 4096": [4_096] * 4, "16 x 512": [512] * 16, "mixed": [100, 300, 2_000, 1_600]}
LIBRARY = "library"


def forms() -> dict[str, Callable[[Any], Any]]:
    """Each form as a change of a row of ``tile_sizes``."""
    from engine.backends.cuda.kernels.prefill_attention import PrefillShape
    from engine.backends.cuda.kernels.prefill_pipelined import PipelinedShape
    from engine.backends.cuda.kernels.triton_common import Threads

    def plain(*shape: int) -> Callable[[Any], Any]:
        lines, tile, warps, stages = shape
        return lambda row: replace(row, prefill=PrefillShape(lines, tile, Threads(warps, stages)), pipelined=None)

    def pipelined(**fields: Any) -> Callable[[Any], Any]:
        return lambda row: replace(row, pipelined=PipelinedShape(**fields))

    return {
        "plain, as it is": lambda row: replace(row, pipelined=None),
        "plain, 128 lines, 64 tokens, 8 warps": plain(128, 64, 8, 3),
        "plain, 128 lines, 128 tokens, 8 warps": plain(128, 128, 8, 2),
        "pipelined": pipelined(),
        "pipelined, by turns": pipelined(ordered=True),
        "pipelined, 3 stages": pipelined(stages=3),
        "pipelined, 3 stages, by turns": pipelined(stages=3, ordered=True),
    }


def say(**facts: object) -> None:
    """One line for the process that asks."""
    print(json.dumps(facts), flush=True)


class Trial:
    """One form in this process."""

    def __init__(self, name: str) -> None:
        import torch

        from bench.gpu_report import Report
        from engine.backends.cuda.kernels.tile_sizes import configuration

        self.report = Report(Path("/dev/null"), False, torch.device("cuda"))
        self.report.deadline = time.monotonic() + 60
        major, minor = torch.cuda.get_device_capability()
        self.row = forms()[name](configuration(f"sm_{major}{minor}", 128))
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def case(self, lengths: list[int]) -> Any:
        """Prompts in a paged cache in which every slot that holds no token is no number."""
        import torch

        from bench.gpu_engines import Shape
        from bench.gpu_kernels import Case
        from engine.backends.cuda.kernels.operations import KernelOperations

        case = Case(self.report, lengths, Shape(32, 8, 128), dtype=torch.bfloat16)
        case.kernels = KernelOperations((32, 8), 1, self.row, self.processors)
        for memory in (case.layer.keys, case.layer.values):
            memory[0] = memory[-1] = torch.nan
            for row, length in enumerate(lengths):
                memory[case.tables[row, (length - 1) // 16], (length - 1) % 16 + 1 :] = torch.nan
        return case

    def errors(self) -> float:
        """Largest relative error at the ends and in the middle of prompts."""
        import torch

        lengths = list(LENGTHS)
        case = self.case(lengths)
        q = case.queries(sum(lengths))
        found = case.prefill(q)()
        begins = list(itertools.accumulate(lengths, initial=0))
        places = [(row, place) for row, length in enumerate(lengths) for place in {0, length // 2, length - 1}]
        wanted = torch.stack([case.reference(q[begins[row] + place], row, place) for row, place in places])
        lines = found[[begins[row] + place for row, place in places]].double()
        error = (lines - wanted).abs().max() / wanted.abs().max()
        return float(error) if found.isfinite().all() else float("nan")

    def differing(self) -> int:
        """Of some runs, how many gave other bits: again, and with a prompt that is cut."""
        import torch

        from engine.backends.cuda.runtime.operations import Chunks

        length = 2_500
        case = self.case([length])
        q = case.queries(length)
        whole = case.prefill(q)
        first = whole()
        count = sum(not torch.equal(first, whole()) for _ in range(AGAIN))
        for size in CUTS:
            parts = []
            for start in range(0, length, size):
                tokens = min(size, length - start)
                begin, taken, at = (torch.tensor([number], device="cuda") for number in (0, tokens, start))
                attend = case.kernels.prefilling(Chunks(begin, taken, at, (case.tables,), ((0, tokens),)))
                parts.append(attend(q[start : start + tokens], case.layer, case.rule))
            count += not torch.equal(first, torch.cat(parts))
        return count

    def seconds(self) -> dict[str, float]:
        """Of each mix."""
        from bench.gpu_report import seconds_of

        found = {}
        for name, lengths in MIXES.items():
            case = self.case(lengths)
            found[name] = seconds_of(case.prefill(case.queries(sum(lengths))), self.report)
        return found


def library_seconds() -> dict[str, float]:
    """Torch's own, over keys that lie one behind the other."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from bench.gpu_report import Report, seconds_of

    report = Report(Path("/dev/null"), False, torch.device("cuda"))
    report.deadline = time.monotonic() + 60
    q, k, v = (torch.randn(4, 32, 4_096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    found = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with suppress(RuntimeError), sdpa_kernel(backend):
            found[backend.name] = seconds_of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), report)
    return found


def child(name: str) -> None:
    """Compile and check; then, when a line comes, time."""
    if name == LIBRARY:
        say(ready=True)
        sys.stdin.readline()
        say(seconds=library_seconds())
        return
    trial = Trial(name)
    error, differing = trial.errors(), trial.differing()
    say(ready=error <= BOUND and differing == 0, error=error, differing=differing)
    sys.stdin.readline()
    say(seconds=trial.seconds())


def answers(processes: dict[str, subprocess.Popen[str]], seconds: float) -> dict[str, dict[str, Any]]:
    """One line of each that writes one in time; a process that has ended writes none."""
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        for name, process in processes.items():
            assert process.stdout is not None
            waiting.register(process.stdout, selectors.EVENT_READ, name)
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                line = processes[key.data].stdout.readline()  # type: ignore[union-attr]
                waiting.unregister(key.fileobj)
                if line:
                    found[key.data] = json.loads(line)
    return found


def compare(commands: dict[str, list[str]], ready_s: float, timed_s: float) -> dict[str, dict[str, Any]]:
    """What is found about each: right or not, and seconds; a reason in words where there is none."""
    processes = {
        name: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    try:
        found: dict[str, dict[str, Any]] = {name: {"failed": "no answer in time, or an error"} for name in commands}
        found.update(answers(processes, ready_s))
        for name, process in processes.items():
            if not found[name].get("ready"):
                process.kill()
        for name, process in processes.items():
            if found[name].get("ready"):
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.write("\n")
                    process.stdin.flush()
                timed = answers({name: process}, timed_s).get(name, {"failed": "not timed in time"})
                found[name] |= timed
                process.kill()
        return found
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


def main() -> int:
    """Compare all forms, or those that are named; gives 0 when one is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of forms")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return 0
    wanted = [LIBRARY, *(options.only or forms())]
    found = compare({name: [sys.executable, __file__, "--child", name] for name in wanted}, READY_S, TIMED_S)
    best = min(found[LIBRARY].get("seconds", {}).values(), default=float("nan"))
    work = 2 * 4 * 32 * 4_096**2 * 128
    for name, facts in found.items():
        own = facts.get("seconds", {}).get("4 x 4096")
        shares = {} if own is None else {"flop_per_s": work / own, "of_library": best / own}
        say(form=name, **facts, **shares)
    return 0 if any(facts.get("seconds") for name, facts in found.items() if name != LIBRARY) else 1


if __name__ == "__main__":
    sys.exit(main())
