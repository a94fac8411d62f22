"""The shorter way to a top-k or a top-p alone: what it does where its estimates hold and where they do not, and that
the token is the specification's either way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.backends.common.rng import uniforms
from engine.backends.cuda.kernels import sampling_cut, sampling_floor
from engine.backends.cuda.kernels.sampler import LEAN_FORM, STRETCH, Chosen, SamplerForm, sample
from engine.backends.cuda.kernels.sampling_figures import SUM
from engine.backends.cuda.kernels.triton_common import EMULATED
from tests.engine.backends.cuda.kernels.sampling_reference import draw
from tests.engine.backends.cuda.kernels.support import PLACE, noise
from tests.engine.backends.cuda.kernels.test_gpu_sampler import ALTERNATIVES, SURE, Row, sampled, state_of
from tests.native import ON_CARD

pytestmark = pytest.mark.usefixtures("place")

VOCAB = 2_000
"""One stretch, all of which a sample meets: the list's limit is that of the specification's shares."""

WIDE_VOCAB = 20_000
"""A sample meets two in five ids of it."""

DRAWS = 2
"""Draws of each row of scores."""

PATHS = ("narrowed", "list_all", "cut_row")
"""Steps of the way: a list is shortened to a window; all scores are listed, since a window missed; the longer way."""

AGAIN = "listed again"
"""The list of all scores that the longer way makes where it was given none."""


def mixed(count: int, low: float, high: float) -> Tensor:
    """Evenly spread scores in an order that tells nothing, so that the first of them stand for all."""
    return torch.linspace(low, high, count)[torch.arange(count) * 977 % count]


def listed(*list_: Tensor) -> Tensor:
    """Scores that are a list in this order, and further ones below its limit: 0.85 of what a top-p drops, which is 0.08
    for a list of 446 and 0.14 for one of 538."""
    return torch.cat([*list_, mixed(VOCAB - sum(map(len, list_)), -0.02, -0.015)])


def below_the_floor() -> Tensor:
    """The first 128 of a list are low, and nearly half of all others lie among them: more than a search holds."""
    return listed(mixed(128, -0.01, -0.007), mixed(130, -0.01, -0.0063), torch.linspace(-0.0069, 0, 188))


def short_below_the_floor() -> Tensor:
    """The first 240 of a list are low, and no others are."""
    return listed(mixed(240, -0.01, -0.007), torch.linspace(-0.003, 0, 298))


def above_the_floor() -> Tensor:
    """The first 128 of a list are its highest."""
    return listed(mixed(128, -0.003, 0), mixed(318, -0.01, -0.007))


def one_far_above() -> Tensor:
    """One score has more weight than an estimate takes a score's to be."""
    scores = mixed(VOCAB, -4.5, -4)
    scores[1_500] = 0.0
    return scores


def few_values() -> Tensor:
    """Scores of which a hundred are equal each."""
    return torch.arange(VOCAB) % 20 * 0.25


def unseen() -> Tensor:
    """What the sample does not meet is less likely than it says."""
    scores = mixed(WIDE_VOCAB, -0.02, 0) - 1
    stride, piece = WIDE_VOCAB // 64 // 16 * 16, 128
    met = (torch.arange(64) * stride)[:, None] + torch.arange(piece)
    scores[met.flatten()] += 1
    return scores


@dataclass(frozen=True)
class Case:
    """Scores under a top-k or a top-p, and the steps that lead to their floor."""

    scores: Callable[[], Tensor]
    path: tuple[int, int, int]
    """How often each of ``PATHS`` is taken for one row."""
    top_p: float = 1.0
    top_k: int = 0
    together: int = 128
    """Scores of a list that a search holds."""
    temperature: float = 1.0


def even() -> Tensor:
    """Equal scores: no limit, and no window."""
    return torch.zeros(VOCAB)


def spread() -> Tensor:
    """Scores over one unit."""
    return mixed(VOCAB, -1.0, 0.0)


def narrow() -> Tensor:
    """Nearly equal scores."""
    return mixed(VOCAB, -0.02, 0.0)


CASES = {
    "short list": Case(spread, (0, 0, 0), top_p=1e-9, together=256),
    "window": Case(spread, (1, 0, 0), top_p=0.3, together=512),
    "window, cold": Case(lambda: spread() * 0.01, (1, 0, 0), top_p=0.3, together=512, temperature=0.01),
    "window, hot": Case(lambda: spread() * 100, (1, 0, 0), top_p=0.3, together=512, temperature=100.0),
    "window without end": Case(spread, (1, 0, 0), top_p=1e-9),
    "long window": Case(narrow, (1, 0, 1), top_p=0.15, together=256),
    "long window, one far above": Case(one_far_above, (1, 0, 1), top_p=0.05),
    "long window, equal scores": Case(even, (1, 0, 1), top_p=0.4999),
    "long window, few values": Case(few_values, (1, 0, 1), top_p=0.7),
    "missed, above": Case(above_the_floor, (1, 1, 1), top_p=0.0802),
    "missed, below": Case(short_below_the_floor, (1, 1, 1), top_p=0.14, together=256),
    "missed, below and long": Case(below_the_floor, (1, 1, 1), top_p=0.08),
    "top-k": Case(spread, (0, 0, 0), top_k=5),
    "top-k of one": Case(spread, (0, 0, 0), top_k=1),
    "top-k, equal scores": Case(even, (0, 0, 0), top_k=7, together=STRETCH),
    "top-k, long list": Case(spread, (0, 0, 1), top_k=5, together=16),
    "top-k of nearly all": Case(spread, (0, 0, 0), top_k=VOCAB - 1, together=STRETCH),
    "list too short": Case(unseen, (0, 0, 1), top_p=0.90001, together=4_096),
    "list too short, top-k": Case(unseen, (0, 0, 1), top_k=9_000, together=16_384),
}


FULL_CASES = {
    "window, cold",
    "window, hot",
    "long window, equal scores",
    "long window, few values",
    "missed, above",
    "missed, below and long",
    "list too short",
    "list too short, top-k",
    "top-k of nearly all",
}
"""Cases of the full counts under the interpreter; each goes the way of another case, which every run has."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the steps of kernels under the interpreter; ``AGAIN`` is the longer way's own list."""
    counted: Counter[str] = Counter()

    def count(module: ModuleType, name: str, shown: str) -> None:
        taken = getattr(module, name)

        def step(*given: object) -> object:
            counted[shown] += 1
            return taken(*given)

        monkeypatch.setattr(module, name, step)

    if EMULATED.value:
        for name in PATHS:
            count(sampling_floor, name, name)
        count(sampling_cut, "list_all", AGAIN)
    return counted


def rows_of(case: Case) -> list[Row]:
    """Rows that ask for the case's cut and differ in their seeds."""
    seeds = range(31, 31 + DRAWS)
    return [Row(case.temperature, case.top_k, case.top_p, 0.0, None, False, -1, seed, 5) for seed in seeds]


def tokens_of(case: Case, rows: list[Row]) -> list[int]:
    """Tokens of rows that have the case's scores."""
    scores = case.scores().float()
    form = replace(LEAN_FORM, together=case.together, passing=case.together // 2)
    state = state_of(rows, len(scores), torch.Generator().manual_seed(1))
    return sampled(scores.repeat(len(rows), 1), rows, state, form).tokens.tolist()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in FULL_CASES and not ON_CARD else ()) for name in CASES]
)
def test_an_estimate_costs_time_and_never_a_token(name: str, steps: Counter[str]) -> None:
    """Each way to a floor is taken by the scores that are made for it, and each gives the token of the specification;
    the draws are not too close to call. A list that a window has spoilt is made anew before the longer way begins,
    which needs no further one."""
    case = CASES[name]
    rows = rows_of(case)
    given = tokens_of(case, rows)
    scores, cut = case.scores().double(), (case.top_k, case.top_p, 0.0, 1.0)
    points = uniforms(np.array([row.seed for row in rows], np.uint64), np.array([row.position for row in rows]))
    found = [draw(scores, case.temperature, cut, point) for point in points]
    sure = [line for line, one in enumerate(found) if one.margin >= SURE]
    assert len(sure) >= DRAWS - 1
    assert [given[line] for line in sure] == [found[line].token for line in sure]
    if EMULATED.value:
        assert tuple(steps[step] for step in PATHS) == tuple(DRAWS * times for times in case.path)
        assert not steps[AGAIN] or not name.startswith("missed")
        assert steps[AGAIN] == DRAWS or name != "list too short", "control: a list that was never made is made there"


def test_a_bucket_may_have_room_for_more_rows() -> None:
    """Scratch of five rows for two lines: figures of one line are never taken for another's."""
    case = CASES["window"]
    rows = rows_of(case)[:2]
    scores = torch.stack([case.scores(), case.scores().flip(0) - 7])
    state = state_of(rows, VOCAB, torch.Generator().manual_seed(1))
    form = replace(LEAN_FORM, together=case.together, passing=case.together // 2)
    wanted, roomy = sampled(scores, rows, state, form), Chosen.empty(5, VOCAB, ALTERNATIVES, PLACE)
    for numbers in (roomy.scores, roomy.figures, roomy.limits):
        numbers.fill_(torch.nan)
    sample(scores, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5, 5]), state, roomy, form)
    assert roomy.tokens[:2].tolist() == wanted.tokens.tolist()


SPIKES = (0.0, 30.0, 50.0, 400.0)
"""How far a score that no sample meets lies above the others: 0, 43, 72 and 577 powers of two."""


def test_weights_of_a_stretch_hold_wherever_its_peak_lies() -> None:
    """Sums of weights that are computed relative to the sample's largest score: with stretches far below it and far
    above it, and one that has no score. Each is that of the specification relative to the stretch's own largest."""
    rows = [Row(1.0, 0, 0.9, 0.0, None, False, -1, 31, 5)] * len(SPIKES)
    generator = torch.Generator().manual_seed(2)
    logits = noise(generator, len(rows), WIDE_VOCAB)
    # Stretches of their own: far below, nearly so far, without a score, and above by an id that no sample meets.
    logits[:, STRETCH : 2 * STRETCH] -= 200
    logits[:, 2 * STRETCH : 3 * STRETCH] -= 35
    logits[:, 3 * STRETCH : 4 * STRETCH] = -torch.inf
    logits[:, 200] += torch.tensor(SPIKES)
    out = Chosen.empty(len(rows), WIDE_VOCAB, ALTERNATIVES, PLACE)
    state = state_of(rows, WIDE_VOCAB, generator)
    positions = torch.tensor([row.position for row in rows])
    sample(logits, torch.arange(len(rows), dtype=torch.int32), positions, state, out, LEAN_FORM)
    for line in range(len(rows)):
        for stretch, part in enumerate(logits[line].double().split(STRETCH)):
            peak = part.max()
            wanted = (part - peak).exp().sum() if peak > -torch.inf else peak.new_zeros(())
            torch.testing.assert_close(out.figures[line, SUM.value, stretch].double(), wanted, rtol=1e-5, atol=0)


FORMS_OF_A_LIST: dict[str, SamplerForm] = {
    "lists looked at in parts": replace(LEAN_FORM, lean_lists=False, together=128, passing=64)
}
"""Forms that no architecture has, whose parts have to fit all the same."""


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS_OF_A_LIST.values(), ids=FORMS_OF_A_LIST)
def test_a_window_is_known_to_the_plain_search(form: SamplerForm) -> None:
    """A list with an upper limit is searched by the plain functions as by the others: the same tokens."""
    rows = [Row(1.0, 0, top_p, 0.0, None, False, -1, 31, 5) for top_p in (0.08, 0.3, 0.6)]
    for scores in (narrow(), below_the_floor()):
        logits = scores.repeat(len(rows), 1)
        state = state_of(rows, VOCAB, torch.Generator().manual_seed(1))
        assert sampled(logits, rows, state, form).tokens.tolist() == sampled(logits, rows, state).tokens.tolist()


def test_each_way_to_a_floor_is_in_every_run() -> None:
    """No way is left to the full counts alone."""
    assert {CASES[name].path for name in FULL_CASES} <= {
        case.path for name, case in CASES.items() if name not in FULL_CASES
    }
    assert set(FULL_CASES) <= set(CASES)
