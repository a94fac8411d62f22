"""Whether the engine chooses the fastest form of a model: ``python bench/cpu.py --forms``.

A form is a variant of the compiled kernels alone (with weights as they are and, of bfloat16, compressed) or plain
operations; the engine's own choice is what it opens when it has a folder with all variants. In one run each form
decodes with 1, 4, 16 and 64 streams; the order turns around from round to round. The best form has the least median
over the rounds. Reported are the best form's time divided by that of the engine's own choice, as the median over the
rounds: 1 or more where the choice is right, and at least ``BAR`` where it is right within the machine's noise.

All forms of a model are in memory at the same time: eight times its weights, which is 10 GB for the 0.5B shape.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

from appliance.operator import kernels
from bench.cpu_cases import Case, Clock, Ours
from engine.backends.native import load as native
from engine.backends.native.library import UnusableKernelsError, open_libraries
from engine.backends.native.manifest import MANIFEST, PLAIN, Variant
from engine.backends.native.program import NativeModel
from engine.backends.native.trial import Candidate, Trial

STREAMS = (1, 4, 16, 64)

BAR = 0.95
"""Least share of the best form's speed that the engine's own choice should have."""

HOPELESS = 4.0
"""Times the own choice's step from which on a form is left out of larger numbers of streams. It could not be the best
there, and a step of 64 rows takes seconds where a large model has no compiled kernels."""

OWN = "own choice"


@dataclass(frozen=True, slots=True)
class Form:
    """A form of a model, loaded."""

    name: str
    engine: Ours
    threads: int
    """Threads of tensor operations: one beside compiled kernels, which have their own."""
    seconds: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in STREAMS})
    """Time of a decode step by number of streams, a figure a round."""

    @property
    def description(self) -> str:
        """What the engine says of its backend, its own trial of forms included."""
        return str(self.engine.engine.runner.description)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The engine's own choice beside the best form, at one number of streams."""

    streams: int
    best: str
    ratios: tuple[float, ...]
    """Time of the best form over that of the own choice, a figure a round."""

    @property
    def ratio(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.ratios)


def judge(seconds: dict[str, list[float]], streams: int) -> Verdict:
    """Compare the own choice with the best of the others; ``seconds`` has a figure a round for each that
    was measured. Pure."""
    best = min(
        (name for name in seconds if name != OWN and seconds[name]), key=lambda name: statistics.median(seconds[name])
    )
    ratios = (one / own for one, own in zip(seconds[best], seconds[OWN], strict=True))
    return Verdict(streams, best, tuple(ratios))


def folders_of(variants: tuple[Variant, ...], compiled: Path, folder: Path) -> dict[str, Path]:
    """Copy each compiled variant that this machine runs into a folder of its own."""
    lines = (compiled / MANIFEST).read_text().splitlines()
    found = {}
    for variant in variants:
        alone = folder / variant.name
        alone.mkdir()
        kept = [line for line in lines if line.split()[0] == "sources" or line.split()[1] == variant.name]
        (alone / MANIFEST).write_text("\n".join(kept) + "\n")
        if len(kept) > 1:
            shutil.copy(compiled / variant.library, alone)
        try:
            next(open_libraries(str(alone))).release()
        except UnusableKernelsError as error:
            print(f"  left out: {error}", file=sys.stderr)
        else:
            found[variant.name] = alone
    return found


@contextlib.contextmanager
def _without_trial(*, compressed: bool) -> Iterator[None]:
    """Have the first library opened computed with, in this form of the weights, for the time of the block. With a trial
    a form that loses against plain operations could not be measured."""

    def choose(libraries, *_layer, **_given):
        library = next(iter(libraries))
        return Trial({Candidate(library.variant, library, compressed): {1: 1.0}})

    with mock.patch.object(native, "try_forms", choose):
        yield


def load_forms(case: Case, options: argparse.Namespace, all_variants: Path, alone: dict[str, Path]) -> list[Form]:
    """Load every form of a model, the engine's own choice first."""
    most = max(STREAMS)
    own = Ours(case, options, all_variants, most_streams=most)
    compiled = isinstance(own.engine.runner.forward, NativeModel)
    forms = [
        Form(OWN, own, 1 if compiled else options.threads),
        Form(PLAIN, Ours(case, options, None, most_streams=most), options.threads),
    ]
    for name, folder in alone.items():
        for compressed in (False, True) if case.dtype == "bfloat16" else (False,):
            with _without_trial(compressed=compressed):
                ours = Ours(case, options, folder, most_streams=most, backend="native")
            # Compression changes nothing where a variant lacks the instructions, or weights the regularity.
            if ours.engine.runner.forward.compresses == compressed:
                forms.append(Form(f"{name} compressed" if compressed else name, ours, 1))
    return forms


def measure(case: Case, forms: list[Form], options: argparse.Namespace) -> list[Verdict]:
    """Measure all rounds of one model; fills the forms' times."""
    clock: Clock = time.process_time if options.cpu_time else time.perf_counter
    hopeless: set[tuple[int, str]] = set()
    for form in forms:  # the first steps of an engine are slower
        form.engine.step_seconds(1, case.tokens, clock)
    works = [(streams, form) for streams in STREAMS for form in forms]
    for turn in range(options.rounds):
        for streams, form in works if turn % 2 == 0 else works[::-1]:
            if (streams, form.name) in hopeless:
                continue
            torch.set_num_threads(form.threads)
            took = form.engine.step_seconds(streams, case.tokens, clock)
            form.seconds[streams].append(took)
            print(f"  {form.name} x{streams}: {took * 1e3:.3f} ms", file=sys.stderr)
            if turn == 0 and took > HOPELESS * forms[0].seconds[streams][0]:
                hopeless |= {(more, form.name) for more in STREAMS if more > streams}
    return [judge({form.name: form.seconds[streams] for form in forms}, streams) for streams in STREAMS]


def show(case: Case, forms: list[Form], verdicts: list[Verdict]) -> None:
    """Print the table of one model."""
    print(f"\n{case.name}, {case.dtype}: own choice is {forms[0].description}")
    print(f"  {'ms of a step, by streams':<30}" + "".join(f"{count:>10}" for count in STREAMS))
    for form in forms:
        print(
            f"  {form.name:<30}"
            + "".join(
                f"{statistics.median(times) * 1e3:>10.3f}" if times else f"{'-':>10}" for times in form.seconds.values()
            )
        )
    for one in verdicts:
        rounds = ", ".join(f"{ratio:.2f}" for ratio in one.ratios)
        verdict = "met" if one.ratio >= BAR else "NOT MET"
        print(
            f"  {one.streams:>3} streams: own choice has {one.ratio:.2f} of the speed of {one.best}; "
            f"bar {BAR}: {verdict} (rounds: {rounds})"
        )


def run(cases: list[Case], options: argparse.Namespace, variants: tuple[Variant, ...], folder: Path) -> dict:
    """Measure and print the models one after the other; gives the figures."""
    all_variants = folder / "all"
    kernels.build(all_variants, variants)
    alone = folders_of(variants, all_variants, folder)
    report = {}
    for case in cases:
        forms = load_forms(case, options, all_variants, alone)
        verdicts = measure(case, forms, options)
        show(case, forms, verdicts)
        report[case.name] = {
            "own_choice": forms[0].description,
            "step_s": {form.name: form.seconds for form in forms},
            "own_over_best": {one.streams: {"best": one.best, "ratio": one.ratio} for one in verdicts},
        }
    return report
