"""Times and checks the choice of tokens on a GPU: ``python bench/gpu_sampler.py [--toy] [--seconds S]``.

``--against DIR`` compares with another checkout instead: one process of each times the same cases in turn, the other
way round at each second case; told are both times, and bytes of logits over each.

Each case is recorded as a graph of several input sets and replayed; the median of one choice is told, with the bytes of
logits over it. Tokens are compared with ``PlainOperations``, and where they differ, with a draw in float64: a token is
wrong if it is not that of the specification although the point is further than rounding from a border. One line of JSON
a case, then a table; a case that fails tells its error in full. The same file runs in an older checkout, to compare.
``--toy`` runs it on a CPU under Triton's interpreter. ``--forms`` times the forms of ``SamplerForm`` beside each other
instead, the plain one as control, over 256 rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

if "--toy" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if "--root" in sys.argv:
    sys.path.insert(0, sys.argv[sys.argv.index("--root") + 1])

import numpy as np
import torch
import triton
from torch import Tensor

from engine.backends.common.rng import uniforms
from engine.backends.cuda.kernels import sampler
from engine.backends.cuda.kernels.operations import KernelOperations, kernel_operations
from engine.backends.cuda.kernels.tile_sizes import configuration
from engine.backends.cuda.runtime.operations import SamplingColumns
from engine.backends.cuda.runtime.rows import NO_LINE, NUM_FIELDS, Field, words_of
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES
from isolation.ipc.sampling import Sampling
from tests.engine.backends.cuda.kernels.sampling_reference import draw

ROOT = sys.path[0]
"""The checkout whose kernels are timed."""

VOCAB = 128_256
REPLAYS = 15
SURE = 1e-5
"""Margin, in probability, from which on a token has to be that of the specification."""

AGAINST = "greedy", "top-k 50", "top-p 0.9", "top-p 0.99", "both", "min-p 0.05", "top-p 0.9 flat", "equal", "peaked"
"""Kinds that are compared with another checkout's: those whose names begin like this."""

BAR_S = 1e-4
"""Of top-p over 256 rows, float32 or bfloat16."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What all rows of a case ask for, and how their logits are spread."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    penalties: bool = False
    masks: bool = False
    biases: int = 0
    logprobs: int = -1
    shape: str = "spread"

    @property
    def plain(self) -> bool:
        """Whether scores are the logits."""
        return not (self.penalties or self.masks or self.biases)


KINDS = (
    Kind("greedy", 0.0),
    Kind("draw"),
    Kind("top-k 50", top_k=50),
    Kind("top-p 0.9", top_p=0.9),
    Kind("both: top-k 50, top-p 0.9", top_k=50, top_p=0.9),
    Kind("top-p 0.9 peaked", top_p=0.9, shape="peaked"),
    Kind("top-p 0.9 skewed", top_p=0.9, shape="skewed"),
    Kind("top-p 0.9 flat", top_p=0.9, shape="flat"),
    Kind("min-p 0.05", min_p=0.05),
    Kind("typical-p 0.9", typical_p=0.9),
    Kind("penalties", penalties=True),
    Kind("masks", masks=True),
    Kind("300 biases", biases=300),
    Kind("greedy, logprobs 5", 0.0, logprobs=5),
    Kind("greedy, logprobs 20", 0.0, logprobs=20),
    Kind("penalties, masks, top-p", top_p=0.9, penalties=True, masks=True),
    Kind("top-p 0.99", top_p=0.99),
    Kind("equal logits, top-p 0.9", top_p=0.9, shape="equal"),
)


FORM_KINDS = "top-p 0.9", "greedy", "top-k 50", "top-p 0.9 peaked", "top-p 0.9 flat", "top-p 0.99", "penalties"
"""Kinds that forms are compared by, the bar's first."""


def logits_of(shape: str, rows: int, vocab: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Logits: normal and wide; with a few likely ids; with likely ids among the first; nearly even; equal."""
    device = generator.device
    noise = torch.randn(rows, vocab, generator=generator, device=device)
    if shape == "equal":
        return torch.full_like(noise, 0.5, dtype=dtype)
    if shape == "flat":
        return (0.7 * noise).to(dtype)
    if shape == "peaked":
        likely = torch.randint(0, vocab, (rows, 40), generator=generator, device=device)
        heads = 11 + 2 * torch.randn(rows, 40, generator=generator, device=device)
        return (2 * noise).scatter_(1, likely, heads).to(dtype)
    if shape == "skewed":
        place = torch.arange(vocab, device=device) / vocab
        return (2 * noise + 4 * torch.exp(-10 * place)).to(dtype)
    return (3 * noise).to(dtype)


def columns_of(kind: Kind, rows: int, vocab: int, generator: torch.Generator) -> SamplingColumns:
    """What the rows ask for; masks allow every other token, some ids occurred before."""
    device, own = generator.device, torch.arange(rows)
    numbers = Sampling(
        temperature=kind.temperature,
        top_k=kind.top_k,
        top_p=kind.top_p,
        min_p=kind.min_p,
        typical_p=kind.typical_p,
        repetition_penalty=1.2 if kind.penalties else 1.0,
        presence_penalty=0.3 if kind.penalties else 0.0,
    )
    words = torch.zeros(NUM_FIELDS, rows, dtype=torch.int64)
    words[Field.PENALTY_LINE] = own if kind.penalties else NO_LINE
    words[Field.MASK_LINE] = own if kind.masks else NO_LINE
    words[Field.LOGPROBS] = kind.logprobs
    words[Field.BIASES] = min(kind.biases, vocab)
    words[len(Field) :] = torch.tensor([words_of(replace(numbers, seed=977 * row)) for row in range(rows)]).T
    counts = torch.randint(0, 60, (rows, vocab), generator=generator, device=device, dtype=torch.int32)
    ids = torch.arange(MAX_LOGIT_BIASES, device=device, dtype=torch.int32) * max(1, vocab // MAX_LOGIT_BIASES)
    return SamplingColumns(
        words=words.to(device),
        counts=(counts - 57).clamp_(min=0),
        masks=torch.full((rows, -(-vocab // 32)), 0x55555555, dtype=torch.int32, device=device),
        bias_ids=ids.expand(rows, -1).contiguous(),
        biases=torch.randn(rows, MAX_LOGIT_BIASES, generator=generator, device=device),
    )


def seconds_of(calls: list[Callable[[], object]], device: torch.device) -> float:
    """Median time of one call: all are recorded in one graph, which is replayed."""
    if device.type != "cuda":
        begin = time.perf_counter()
        calls[0]()
        return time.perf_counter() - begin
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    taken = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(REPLAYS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1_000 / len(calls))
    return statistics.median(taken)


def launches_of(calls: list[Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Microseconds of each launch of one call, by its kernel's name, as CUPTI tells them; empty on a CPU."""
    if device.type != "cuda":
        return {}
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for call in calls:
            call()
        torch.cuda.synchronize()
    return {one.key: round(one.device_time, 1) for one in profile.key_averages() if one.key.startswith("_")}


def wrong_tokens(kind: Kind, logits: Tensor, found: list[int], wanted: list[int], positions: list[int]) -> int:
    """How many tokens that differ from the plain ones are not those of the specification either."""
    count = 0
    for row, (one, two) in enumerate(zip(found, wanted, strict=True)):
        if one == two:
            continue
        if not kind.plain or kind.temperature == 0:
            count += 1
            continue
        point = uniforms(np.array([977 * row], np.uint64), np.array([positions[row]]))[0]
        cut = kind.top_k, kind.top_p, kind.min_p, kind.typical_p
        told = draw(logits[row].double().cpu(), kind.temperature, cut, float(point))
        count += one != told.token and told.margin >= SURE
    return count


def forms() -> dict[str, sampler.SamplerForm]:
    """What ``--forms`` compares, the control first; where the last is slower than ``lean``, its reading of logits is
    what is gained. Asked for by name, since an older checkout has none."""
    lean, plain = sampler.LEAN_FORM, sampler.PLAIN_FORM
    return {"plain": plain, "lean": lean, "general cut": replace(lean, lean_floor=False)}


def operations_of(form: sampler.SamplerForm | None, vocab: int, device: torch.device) -> KernelOperations:
    """Operations whose choice of tokens has this form, or that of the device's row of tile sizes."""
    if form is None:
        return kernel_operations((32, 8), 128, vocab, device)
    row = configuration("sm_90" if device.type == "cuda" else "", 128)
    return KernelOperations((32, 8), vocab, replace(row, sampler=form), 132)


def case(
    kind: Kind, rows: int, vocab: int, dtype: torch.dtype, device: torch.device, form: sampler.SamplerForm | None = None
) -> dict[str, object]:
    """One line of results."""
    generator = torch.Generator(device).manual_seed(rows)
    sets = 1 if device.type != "cuda" else max(3, min(16, 1 + (200 << 20) // (rows * vocab * dtype.itemsize)))
    inputs = [logits_of(kind.shape, rows, vocab, dtype, generator) for _ in range(sets)]
    run, columns = operations_of(form, vocab, device), columns_of(kind, rows, vocab, generator)
    places, positions = torch.arange(rows, device=device), torch.arange(rows, device=device) + 7
    before = columns.counts.clone()
    found = run.sample(inputs[0], places, positions, columns)
    columns.counts.copy_(before)
    wanted = PlainOperations().sample(inputs[0], places, positions, columns)
    tokens, plain = found.tokens.tolist(), wanted.tokens.tolist()
    result: dict[str, object] = {
        "kind": kind.name,
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "same_as_plain": sum(one == two for one, two in zip(tokens, plain, strict=True)),
        "wrong": wrong_tokens(kind, inputs[0], tokens, plain, positions.tolist()),
    }
    if kind.logprobs > 0:
        result["same_alternatives"] = bool(torch.equal(found.top_ids, wanted.top_ids))
        result["alternatives_error"] = (found.top_logprobs - wanted.top_logprobs).abs().max().item()
    calls = [lambda one=one: run.sample(one, places, positions, columns) for one in inputs]
    result["us"] = round(1e6 * seconds_of(calls, device), 1)
    result["launches"] = launches_of(calls[:REPLAYS], device)
    result["gb_per_s"] = round(rows * vocab * dtype.itemsize / float(str(result["us"])) / 1e3)
    return result


def serve(device: torch.device, vocab: int) -> None:
    """Time one case for each line of standard input: name of the kind, rows, dtype."""
    print(json.dumps({"ready": ROOT}), flush=True)
    for line in sys.stdin:
        name, rows, dtype = json.loads(line)
        kind = next(one for one in KINDS if one.name == name)
        try:
            result = case(kind, rows, vocab, getattr(torch, dtype), device)
        except (RuntimeError, ValueError, AssertionError, triton.TritonError):
            result = {"error": traceback.format_exc()}
        print(json.dumps(result), flush=True)


def compare(other: Path, toy: bool, seconds: float) -> None:
    """Times of this checkout and another one's, in turn."""
    own = [sys.executable, __file__, "--serve", *(["--toy"] if toy else [])]
    with (
        subprocess.Popen([*own, "--root", str(other.resolve())], stdin=-1, stdout=-1, text=True) as before,
        subprocess.Popen([*own, "--root", ROOT], stdin=-1, stdout=-1, text=True) as now,
    ):
        both = {"before": before, "now": now}
        for name, one in both.items():
            assert one.stdout is not None
            print(name, one.stdout.readline().strip(), flush=True)
        end = time.monotonic() + seconds
        kinds = [one for one in KINDS if one.name.startswith(AGAINST)]
        sizes = ((2, "float32"),) if toy else ((256, "bfloat16"), (256, "float32"), (1, "bfloat16"), (32, "bfloat16"))
        print(f"{'kind':28}{'dtype':>10}{'rows':>6}{'before us':>11}{'GB/s':>7}{'now us':>9}{'GB/s':>7}{'wrong':>10}")
        for turn, ((rows, dtype), kind) in enumerate(itertools.product(sizes, kinds)):
            if time.monotonic() > end:
                print(json.dumps({"left_out": len(kinds) * len(sizes) - turn}), flush=True)
                break
            found = {}
            for name in sorted(both, reverse=turn % 2 == 0):
                asked, told = both[name].stdin, both[name].stdout
                assert asked is not None
                assert told is not None
                print(json.dumps([kind.name, rows, dtype]), file=asked, flush=True)
                found[name] = json.loads(told.readline() or '{"error": "the process has ended"}')
            if any("error" in one for one in found.values()):
                print(f"{kind.name} {rows} {dtype}: " + str({name: one.get("error") for name, one in found.items()}))
                continue
            old, new = found["before"], found["now"]
            times = f"{old['us']:>11}{old['gb_per_s']:>7}{new['us']:>9}{new['gb_per_s']:>7}"
            print(f"{kind.name:28}{dtype:>10}{rows:>6}{times}{old['wrong']:>6} {new['wrong']:>3}", flush=True)


def warm(toy: bool) -> None:
    """Compile all forms for both dtypes, each in a process of its own: compiled kernels are kept on disk."""
    argv = [sys.executable, __file__, *(["--toy"] if toy else []), "--warm"]
    wanted = [(name, dtype) for name in forms() for dtype in ("bfloat16", "float32")]
    ends = [subprocess.Popen([*argv, name, dtype], stdout=-3) for name, dtype in (wanted[:1] if toy else wanted)]
    for (name, dtype), one in zip(wanted, ends, strict=False):
        if one.wait() != 0:
            print(f"{name} {dtype} was not compiled", flush=True)


def compare_forms(toy: bool, seconds: float) -> None:
    """Times of all forms, kind by kind in turn, and how many of their tokens are wrong; the first is the control."""
    end, device = time.monotonic() + seconds, torch.device("cpu" if toy else "cuda")
    warm(toy)
    vocab, rows = (9_000, 2) if toy else (VOCAB, 256)
    kinds = [next(one for one in KINDS if one.name == name) for name in FORM_KINDS]
    cases = [(kind, dtype) for kind in kinds[:2] for dtype in (torch.bfloat16, torch.float32)]
    cases += [(kind, torch.bfloat16) for kind in kinds[2:]]
    print(f"{'kind':28}{'dtype':>10}" + "".join(f"{name:>15}" for name in forms()) + "   us, wrong tokens", flush=True)
    for kind, dtype in cases[: 2 if toy else None]:
        if time.monotonic() > end:
            print(json.dumps({"left_out": kind.name}), flush=True)
            continue
        line = ""
        for form in forms().values():
            try:
                found = case(kind, rows, vocab, dtype, device, form)
            except (RuntimeError, ValueError, AssertionError, triton.TritonError):
                print(f"{form} {kind.name} {dtype}\n{traceback.format_exc()}", flush=True)
                line += f"{'failed':>15}"
                continue
            line += f"{found['us']:>11}{found['wrong']:>4}"
            print(
                json.dumps({"kind": kind.name, "registers": form.looking_registers, "launches": found["launches"]}),
                flush=True,
            )
        print(f"{kind.name:28}{str(dtype).removeprefix('torch.'):>10}{line}", flush=True)


def main() -> None:
    """All cases, the rows and kinds of the bars first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--seconds", type=float, default=40.0, help="no case begins later than this")
    parser.add_argument("--forms", action="store_true", help="the forms of SamplerForm beside each other")
    parser.add_argument("--warm", nargs=2, metavar=("FORM", "DTYPE"), help="compile one form, for --forms")
    parser.add_argument("--against", type=Path, metavar="DIR", help="compare with the checkout there")
    parser.add_argument("--root", help="the checkout whose kernels are timed, this one if left out")
    parser.add_argument("--serve", action="store_true", help="time what standard input names, for --against")
    given = parser.parse_args()
    if given.serve:
        serve(torch.device("cpu" if given.toy else "cuda"), 9_000 if given.toy else VOCAB)
        return
    if given.against is not None:
        compare(given.against, given.toy, given.seconds)
        return
    if given.warm is not None:
        form, dtype = given.warm
        place, vocab = (torch.device("cpu"), 9_000) if given.toy else (torch.device("cuda"), VOCAB)
        run, kind = operations_of(forms()[form], vocab, place), KINDS[0]
        lines = torch.zeros(2 if given.toy else 256, vocab, dtype=getattr(torch, dtype), device=place)
        numbers = torch.arange(len(lines), device=place)
        run.sample(lines, numbers, numbers, columns_of(kind, len(lines), vocab, torch.Generator(place)))
        return
    if given.forms:
        compare_forms(given.toy, given.seconds)
        return
    device = torch.device("cpu" if given.toy else "cuda")
    vocab, many, end = (9_000, 2, 1e9) if given.toy else (VOCAB, 256, time.monotonic() + given.seconds)
    name = "cpu" if given.toy else torch.cuda.get_device_name()
    print(json.dumps({"device": name, "torch": torch.__version__, "triton": triton.__version__}), flush=True)
    cases = [(kind, many, torch.bfloat16) for kind in KINDS]
    if not given.toy:
        cases += [(kind, rows, torch.bfloat16) for rows in (1, 32) for kind in KINDS]
        cases += [(kind, many, torch.float32) for kind in KINDS[:8]]
    lines, failed = [], 0
    for kind, rows, dtype in cases:
        if time.monotonic() > end:
            print(json.dumps({"left_out": len(cases) - len(lines) - failed}), flush=True)
            break
        try:
            lines.append(case(kind, rows, vocab, dtype, device))
        except (RuntimeError, ValueError, AssertionError, triton.TritonError):
            failed += 1
            print(f"{kind} rows {rows} {dtype}\n{traceback.format_exc()}", flush=True)
            continue
        print(json.dumps(lines[-1]), flush=True)
    print(f"{'kind':28}{'dtype':>10}{'rows':>6}{'us':>10}{'GB/s':>7}{'as plain':>10}{'wrong':>7}")
    for one in lines:
        head = f"{one['kind']:28}{one['dtype']:>10}{one['rows']:>6}{one['us']:>10}{one['gb_per_s']:>7}"
        print(f"{head}{one['same_as_plain']:>10}{one['wrong']:>7}")
    tops = [one for one in lines if one["rows"] == 256 and one["kind"] == "top-p 0.9"]
    bar = all(float(str(one["us"])) <= BAR_S * 1e6 for one in tops) if tops else None
    print(json.dumps({"failed": failed, "wrong": sum(int(str(one["wrong"])) for one in lines), "top_p_bar": bar}))


if __name__ == "__main__":
    main()
