"""Whether the engine chooses the fastest form of a model: ``python bench/cpu.py --forms``.

A form is a variant of the compiled kernels alone (with weights as they are and, of bfloat16, compressed) or plain
operations; the engine's own choice is what it opens when it has a folder with all variants. All forms decode the same
1, 4, 16 and 64 streams in turns of a few steps; the order turns around from turn to turn, so that what else happens on
the machine meets all of them. The best form has the least median over the turns. Reported are the best form's time
divided by that of the engine's own choice in the same turn, as the median over the turns: 1 or more where the choice is
right, and at least ``BAR`` where it is right within the machine's noise. The form that the engine chose is among the
others as well: its own ratio shows how much is noise. Small pages alone make 5 % of it, by where the weights come to
lie: with ``GLIBC_TUNABLES=glibc.malloc.hugetlb=1`` in the environment all forms have huge ones, and the two agree.

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

HOPELESS = 2.0
"""Times the own choice's turn from which on a form is left out of the other turns and of larger numbers of streams. It
could not be the best there, and a step of 64 rows takes seconds where a large model has no compiled kernels."""

TURNS = 4
"""Turns in a round."""

STEPS = 9
"""Part of a stream's tokens that are the steps of a turn: 24 tokens are 3 steps, 200 are 23."""

OWN = "own choice"


@dataclass(frozen=True, slots=True)
class Form:
    """A form of a model, loaded."""

    name: str
    engine: Ours
    threads: int
    """Threads of tensor operations: one beside compiled kernels, which have their own."""
    seconds: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in STREAMS})
    """Time of a decode step by number of streams, a figure a turn."""

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
    """Time of the best form over that of the own choice, a figure a turn."""

    @property
    def ratio(self) -> float:
        """Median over the turns."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Quarter and three quarters of the turns."""
        if len(self.ratios) < 2:
            return self.ratios[0], self.ratios[0]
        first, _, third = statistics.quantiles(self.ratios, n=4)
        return first, third


def judge(seconds: dict[str, list[float]], streams: int) -> Verdict:
    """Compare the own choice with the best of the others; ``seconds`` has a figure a turn for each that was measured in
    all of them. Pure."""
    turns = len(seconds[OWN])
    whole = [name for name in seconds if name != OWN and len(seconds[name]) == turns]
    best = min(whole, key=lambda name: statistics.median(seconds[name]), default=OWN)
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
    """Measure one model; fills the forms' times."""
    clock: Clock = time.process_time if options.cpu_time else time.perf_counter
    turns, steps = options.rounds * TURNS, max(1, case.tokens // STEPS)
    for form in forms:  # the first steps of an engine are slower
        form.engine.step_seconds(1, case.tokens, clock)
    left = forms
    for streams in STREAMS:
        numbers = {form.name: form.engine.start(streams, turns * (steps + 1)) for form in left}
        for turn in range(turns):
            for form in left if turn % 2 == 0 else left[::-1]:
                torch.set_num_threads(form.threads)
                # The step before has been another form's: the first one finds its weights and threads cold.
                times = form.engine.steps(steps + 1, clock)[1:]
                form.seconds[streams].append(statistics.median(times))
            if turn == 0:
                most = HOPELESS * forms[0].seconds[streams][0]
                for form in [form for form in left if form.seconds[streams][0] > most]:
                    form.engine.stop(numbers[form.name])
                left = [form for form in left if form.seconds[streams][0] <= most]
        for form in left:
            form.engine.stop(numbers[form.name])
        took = (f"{form.name} {statistics.median(form.seconds[streams]) * 1e3:.3f}" for form in left)
        print(f"  {streams} streams, ms of a step: {', '.join(took)}", file=sys.stderr)
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
        verdict = "met" if one.ratio >= BAR else "NOT MET"
        print(
            f"  {one.streams:>3} streams: own choice has {one.ratio:.3f} of the speed of {one.best} (half of "
            f"{len(one.ratios)} turns {one.spread[0]:.2f} to {one.spread[1]:.2f}); bar {BAR}: {verdict}"
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
