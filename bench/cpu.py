"""The engine on a CPU: share of the memory roofline, and beside ``transformers`` with the same weights, in one run.

A round measures, one after the other: how fast memory can be read (the best of several probes, over one core and over
all of them), our engine on compiled kernels, our engine on plain operations, and ``transformers``. The order turns
around from round to round. Reported are medians over the rounds, the best round, and ratios.

* ``half-b``: a Llama of 0.5 billion weights (24 layers, hidden 896, 14/2 heads of 64, inner 4864, vocabulary 151,936,
  tied), bfloat16, normal random weights; 1, 4 and 16 streams of 32 prompt tokens; against continuous batching
  (its manager) at 16 streams and ``generate`` at 1.
* ``stories``: the trained stories260K in float32 (``--data``, skipped where absent), 1 and 16 streams, against
  ``generate`` at batch 1 and 16.

A decode step must read every weight once (of a tied embedding the head's use only) and the keys and values of its
context: share = those bytes / time of a step / best probe of the same round; ``own memory`` is the same with a probe
that reads the packed weights themselves, where they lie. Compiled kernels hold bfloat16 weights in three quarters of
their bytes: the share counts the bytes of the checkpoint, and so may pass 1.

Times are wall times; on a machine that others use, ``--cpu-time`` takes processor time instead, which other processes
disturb less. Then everything computes with one thread, the probe too.

``--forms`` measures something else: whether the engine chooses the fastest form of each model (``bench/forms.py``), at
1, 4, 16 and 64 streams, for ``stories``, ``mini`` (the embedded model) and ``half-b``.

Run: ``python bench/cpu.py [--rounds 3] [--threads N] [--weights stored|int8] [--json FILE] [--forms]
[--only half-b|stories|mini]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.operator import kernels
from bench import forms
from bench.cpu_cases import PROMPT, Case, Clock, Ours, half_b, mini, stories
from bench.probe import Probe
from engine.backends.native.manifest import variants_of
from engine.core.engine import Engine

ROOT = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class Series:
    """What one measured thing gave, a figure a round."""

    name: str
    streams: int
    seconds: list[float] = field(default_factory=list)
    """Of one decode step, the median of a round."""
    shares: list[float] = field(default_factory=list)
    """Of that round's best probe, from the median step; empty where it is not asked."""
    best_share: float = 0.0
    """The same from the fastest step of any round: as the probe, which is a best time too."""
    own_shares: list[float] = field(default_factory=list)
    """As ``shares``, of how fast the memory that holds this engine's weights is read; of compiled kernels."""

    @property
    def step_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds)

    @property
    def tokens_s(self) -> float:
        """Tokens a second."""
        return self.streams / self.step_s


class Theirs:
    """The same weights in ``transformers``."""

    def __init__(self, case: Case, threads: int) -> None:
        import transformers
        from transformers import AutoModelForCausalLM

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        dtype = getattr(torch, case.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=dtype).eval()
        self.vocab = self.model.config.vocab_size

    def _prompts(self, streams: int) -> torch.Tensor:
        rows = [[(row * 7 + place) % min(self.vocab, 500) for place in range(PROMPT)] for row in range(1, streams + 1)]
        return torch.tensor(rows)

    def generate(self, streams: int, tokens: int, clock: Clock) -> float:
        """Time of a step of ``generate``, prompts included once and taken off by a run of one token."""
        prompts, took = self._prompts(streams), {}
        for count in (1, tokens):
            start = clock()
            with torch.inference_mode():
                self.model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    pad_token_id=0,
                )
            took[count] = clock() - start
        return (took[tokens] - took[1]) / (tokens - 1)

    def continuous(self, streams: int, tokens: int, clock: Clock) -> float:
        """Time of a step of continuous batching: the manager is made and warmed before, and ended after, each round; a
        run of one token takes the prompts off."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        manager = self.model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1_024),
            ContinuousBatchingConfig(
                num_blocks=128,
                max_batch_tokens=512,
                max_requests_per_batch=32,
                allow_block_sharing=False,
                use_cuda_graph=False,
            ),
        )
        manager.start()
        prompts, took = self._prompts(streams).tolist(), {}
        try:
            for count in (2, 1, tokens):
                start = clock()
                left = len(manager.add_requests(prompts, max_new_tokens=count))
                while left:
                    result = manager.get_result(timeout=1)
                    if result is not None and result.is_finished():
                        left -= 1
                        if len(result.generated_tokens) != count:
                            sys.exit("continuous batching gave another number of tokens than asked for")
                    elif result is None and not manager.is_running():
                        sys.exit("continuous batching ended by itself")
                took[count] = clock() - start
        finally:
            manager.stop(block=True)
        return (took[tokens] - took[1]) / (tokens - 1)


def bytes_of_step(engine: Engine, case: Case, streams: int, *, int8: bool) -> float:
    """Bytes that a decode step has to read: every product's weight, and keys and values of the mean context."""
    config = engine.runner.model.config
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (width + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    size = torch.empty(0, dtype=getattr(torch, case.dtype)).element_size()
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    return weights * (1 if int8 else size) + streams * keys * (PROMPT + case.tokens / 2)


def measure(case: Case, options: argparse.Namespace, probe: Probe, kernel_folder: Path) -> tuple[list[Series], dict]:
    """All rounds of one model."""
    clock: Clock = time.process_time if options.cpu_time else time.perf_counter
    int8 = options.weights == "int8"
    compiled, plain = Ours(case, options, kernel_folder), Ours(case, options, None)
    theirs = Theirs(case, options.threads)
    series: dict[str, Series] = {}
    works: list[tuple[Series, Callable[[], float], Ours | None]] = []

    def add(name: str, streams: int, work: Callable[[int, int, Clock], float], ours: Ours | None = None) -> None:
        one = series[f"{name} x{streams}"] = Series(name, streams)
        works.append((one, lambda: work(streams, case.tokens, clock), ours))

    for streams in case.streams:
        add("compiled", streams, compiled.step_seconds, compiled)
        add("plain", streams, plain.step_seconds, plain)
        if streams in (1, 16):
            add("transformers generate", streams, theirs.generate)
    if case.name == "half-b":
        add("transformers continuous batching", 16, theirs.continuous)
    probes: dict[str, list[float]] = {"one core": [], "all cores": []}
    for turn in range(options.rounds):
        for one, work, ours in works if turn % 2 == 0 else works[::-1]:
            before = probe.best()
            torch.set_num_threads(options.threads)
            one.seconds.append(work())
            best = max(before, probe.best())
            took = one.seconds[-1] * 1e3
            print(f"  {one.name} x{one.streams}: {took:.2f} ms, {best / 1e9:.1f} GB/s", file=sys.stderr)
            probes["all cores"].append(best)
            if ours is not None:
                needed = bytes_of_step(ours.engine, case, one.streams, int8=int8)
                one.shares.append(needed / one.seconds[-1] / best)
                one.best_share = max(one.best_share, needed / ours.fastest_s / best)
                if stretches := ours.weights():
                    one.own_shares.append(needed / one.seconds[-1] / probe.of(stretches))
        probes["one core"].append(probe.best(1))
    figures = {
        "backends": [compiled.engine.runner.description, plain.engine.runner.description],
        "probe_gb_s": {name: max(values) / 1e9 for name, values in probes.items()},
    }
    return list(series.values()), figures


def show(case: Case, series: list[Series], figures: dict) -> None:
    """The table."""
    print(f"\n{case.name}, {case.dtype}: {figures['backends'][0]}")
    print("  " + ", ".join(f"{name} {value:.1f} GB/s" for name, value in figures["probe_gb_s"].items()))
    print(
        f"  {'what':<34}{'streams':>8}{'ms/step':>10}{'tokens/s':>11}{'roofline: median':>27}{'fastest step':>14}"
        f"{'own memory':>12}"
    )
    for one in series:
        share = f"{statistics.median(one.shares):>27.2f}{one.best_share:>14.2f}" if one.shares else ""
        share += f"{statistics.median(one.own_shares):>12.2f}" if one.own_shares else ""
        print(f"  {one.name:<34}{one.streams:>8}{one.step_s * 1e3:>10.2f}{one.tokens_s:>11.1f}{share}")
    by_key = {(one.name, one.streams): one for one in series}
    for one in series:
        ours = by_key.get(("compiled", one.streams))
        if ours is not None and one is not ours:
            ratios = [theirs / own for theirs, own in zip(one.seconds, ours.seconds, strict=True)]
            print(
                f"  compiled is {statistics.median(ratios):.2f}x {one.name} at {one.streams} "
                f"(rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})"
            )


def chosen_cases(options: argparse.Namespace, folder: Path) -> list[Case]:
    """Models that the options ask for, those that exist."""
    wanted = {options.only} if options.only else {"half-b", "stories"} | ({"mini"} if options.forms else set())
    cases = []
    if "half-b" in wanted:
        cases.append(half_b(folder, (1, 4, 16), options.tokens))
    if "stories" in wanted:
        cases += stories(options.data, (1, 16))
    if "mini" in wanted:
        cases.append(mini((1, 16)))
    return cases


def compare(cases: list[Case], options: argparse.Namespace, variants: tuple, folder: Path, cores: int) -> dict:
    """Measure the models beside the memory's speed and the others; gives the figures."""
    compiled = folder / "kernels"
    kernels.build(compiled, variants)
    probe = Probe(folder, cores, cpu_time=options.cpu_time)
    report = {}
    for case in cases:
        series, figures = measure(case, options, probe, compiled)
        show(case, series, figures)
        rows = [
            {
                "name": one.name,
                "streams": one.streams,
                "step_s": one.seconds,
                "shares": one.shares,
                "best_share": one.best_share,
                "own_shares": one.own_shares,
            }
            for one in series
        ]
        report[case.name] = {**figures, "series": rows}
    return report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--weights", choices=("stored", "int8"), default="stored")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each stream of the large model")
    parser.add_argument("--only", choices=("half-b", "stories", "mini"), help="mini: with --forms")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu-time", action="store_true")
    names = [variant.name for variant in variants_of(platform.machine())]
    parser.add_argument("--variant", choices=names, help="of the kernels; by default the best that the machine runs")
    parser.add_argument("--forms", action="store_true", help="the engine's own choice beside every form")
    options = parser.parse_args()
    if options.only == "mini" and not options.forms:
        parser.error("--only mini is for --forms")
    if options.cpu_time:
        options.threads = 1
    variants = tuple(one for one in variants_of(platform.machine()) if options.variant in (None, one.name))
    with tempfile.TemporaryDirectory(prefix="athanor-cpu-") as scratch:
        folder = Path(scratch)
        cases = chosen_cases(options, folder)
        if options.forms:
            report = forms.run(cases, options, variants, folder / "kernels")
        else:
            report = compare(cases, options, variants, folder, cores)
    if options.json is not None:
        options.json.write_text(json.dumps({"options": vars(options) | {"data": "", "json": ""}, **report}, indent=1))


if __name__ == "__main__":
    main()
