"""The checks of G3 and G7 in small counts: the claims hold, and the controls see what the claims exclude."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from appliance.selftest import g3_noninterference, g7_wire
from appliance.selftest.co_batches import MODELS, reckless
from appliance.selftest.wire_capture import PROMPTS, capture_all


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """Whatever a check makes of the number of threads is undone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("model", MODELS)
def test_co_batches_move_no_bit_of_a_strict_answer(model: str) -> None:
    """Dense and with experts: cancels, preemptions, masks and penalties beside a request change nothing of it."""
    with reckless():
        seen = g3_noninterference.co_batches(model, g3_noninterference.ROUNDS, strict=True)
    assert (seen.batches, seen.mismatches) == (g3_noninterference.ROUNDS, 0)
    assert seen.answers >= 20
    assert seen.preempted


def test_without_the_class_they_do() -> None:
    """Control: the same loads change ordinary answers of the plain path."""
    with reckless():
        seen = g3_noninterference.co_batches("dense", 2, strict=False)
    assert seen.mismatches


def test_captures_of_padded_answers_have_one_shape() -> None:
    """Over a real socket: every prompt's stream has the same sizes in the same order, and nobody can tell by sizes."""
    padded = asyncio.run(capture_all(padded=True, repetitions=1, at_once=PROMPTS))
    whole = asyncio.run(capture_all(padded=True, repetitions=1, at_once=PROMPTS, stream=False))
    row = g7_wire.sizes_row(padded, whole)
    assert row.verdict == "pass", row
    plain = asyncio.run(capture_all(padded=False, repetitions=2, at_once=10))
    assert g7_wire.sizes_row(plain, whole).verdict == "fail"
    control = {row.id: row for row in g7_wire.observer_rows("G7.control", plain, 3.0)}
    assert control["G7.fingerprint.control"].verdict == "pass", control


def test_the_observer_counts_right() -> None:
    """Where captures of one prompt are alike it names all, where all are alike it guesses, and precision by chance is
    the share of a topic."""
    prompts = np.repeat(np.arange(PROMPTS), 2)
    told = g7_wire.distances(np.stack([np.array([float(prompt), 0.0]) for prompt in prompts]))
    assert g7_wire.right(told, prompts) == 1.0
    alike = g7_wire.distances(np.zeros((len(prompts), 3)))
    assert g7_wire.right(alike, prompts) == pytest.approx(1 / (len(prompts) - 1))
    score, positive = np.zeros(10), np.arange(10) < 3
    assert g7_wire.average_precision(score, positive) == pytest.approx(0.3)
    assert g7_wire.average_precision(positive.astype(float), positive) == 1.0


@pytest.mark.full
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("check", [g3_noninterference, g7_wire], ids=["G3", "G7"])
def test_the_release_counts(check: object) -> None:
    """All rows of the full form pass."""
    rows = check.run(True)  # type: ignore[attr-defined]
    assert [row for row in rows if row.verdict != "pass"] == []
