"""Every family and variant against ``transformers``: logits and greedy ids of random tiny models.

Every model is written by ``transformers`` and read by our own loader, so configuration and weights take the real path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.backends.native.library import UnusableKernelsError
from engine.backends.native.plain_form import check_supported
from engine.model.checkpoint.registry import FAMILIES as REGISTERED
from tests.engine.model.families.harness import TOLERANCE, Recorder, load_runner, random_tokens, run_mixed, whole_line
from tests.engine.model.families.table import (
    EVERY_CASE,
    EVERY_PARAM,
    FAMILIES,
    RANK_CASES,
    VOCAB,
    WITH_VISION,
    marks,
    save_reference,
)

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = {0: 5, 1: 1, 2: 47, 3: 21}
OUTPUT = 24
"""Ids of each row: the longest rows go past every window and chunk of the variants."""

FULL_OUTPUT = 64


def compare(
    reference: torch.nn.Module, recorder: Recorder, tokens: dict[int, list[int]], lengths: dict[int, int]
) -> None:
    """Logits agree, and each chosen id is the reference's likeliest."""
    seen = 0
    for row, length in lengths.items():
        line = whole_line(recorder, tokens[row], row, length)
        with torch.no_grad():
            expected = reference(torch.tensor([line])).logits[0]
        for position in range(len(tokens[row]), length + 1):
            difference = (recorder.logits[row, position] - expected[position - 1]).abs().max()
            assert difference < TOLERANCE, (row, position)
            assert recorder.chosen[row, position] == int(expected[position - 1].argmax()), (row, position)
            seen += 1
        assert expected.std() > 0.1
    assert seen == len(recorder.logits)


def run_and_compare(reference: torch.nn.Module, folder: Path, chunk: int, output: int, kernels: str) -> None:
    """Prompts in chunks of so many beside decoding rows, then so many ids each."""
    tokens = random_tokens(PROMPTS, VOCAB)
    lengths = {row: prompt + output - 1 for row, prompt in PROMPTS.items()}
    runner, recorder = load_runner(folder, kernels=kernels)
    run_mixed(runner.execute, tokens, PROMPTS, chunk, lengths)
    assert len(recorder.logits) == output * len(PROMPTS)
    compare(reference, recorder, tokens, lengths)


LATER = set(EVERY_CASE) - set(RANK_CASES)
"""Cases of the full counts. Those of ranks, which differ most, are compared in every run, and so are all that the
compiled kernels take, below: positions, heads and biases of every kind among them."""


@pytest.mark.parametrize(("family", "case"), [pytest.param(*case, marks=marks(case, LATER)) for case in EVERY_CASE])
def test_logits_and_ids_agree_with_transformers(family: str, case: str, tmp_path: Path) -> None:
    """Greedy ids of four rows of different lengths, prompts in chunks of 7 beside decoding rows, and once more in one
    piece: logits to 1e-4 and every id."""
    reference = save_reference(tmp_path, family, **FAMILIES[family].cases[case])
    run_and_compare(reference, tmp_path, 7, OUTPUT, "")
    run_and_compare(reference, tmp_path, 64, 4, "")


@pytest.mark.parametrize(
    ("family", "case"), [(family, case) for family, row in FAMILIES.items() for case in row.compiled]
)
def test_compiled_logits_and_ids_agree_with_transformers(
    family: str, case: str, kernel_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """The same on compiled kernels, for the families and variants that they take."""
    reference = save_reference(tmp_path, family, **FAMILIES[family].cases[case])
    run_and_compare(reference, tmp_path, 7, OUTPUT, str(kernel_dir()))


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_long_outputs_agree_with_transformers(family: str, kernel_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Sixty-four ids of each row, in every variant of a family, and on compiled kernels where they take it."""
    for number, (case, changes) in enumerate(FAMILIES[family].cases.items()):
        folder = tmp_path / str(number)
        reference = save_reference(folder, family, **changes)
        for kernels in ("", str(kernel_dir()))[: 1 + (case in FAMILIES[family].compiled)]:
            run_and_compare(reference, folder, 7, FULL_OUTPUT, kernels)


@pytest.mark.parametrize(("family", "case"), EVERY_PARAM)
def test_compiled_kernels_refuse_what_they_do_not_compute(family: str, case: str, tmp_path: Path) -> None:
    """A window shorter than the context, latent attention, sinks and experts are refused with their reason; the plain
    form is not."""
    save_reference(tmp_path, family, **FAMILIES[family].cases[case])
    runner, _ = load_runner(tmp_path)
    if case in FAMILIES[family].compiled:
        assert len(check_supported(runner.model, runner.limits.max_context)) == len(runner.model.layers)
    else:
        with pytest.raises(UnusableKernelsError, match="window|chunk|one width|SwiGLU|sinks|pre-norm|scale|rotary"):
            check_supported(runner.model, runner.limits.max_context)


def test_every_registered_architecture_has_its_row() -> None:
    """The registry and this table name the same families, each with at least five variants."""
    named = {row.architecture for row in FAMILIES.values()}
    assert named | set(WITH_VISION) == set(REGISTERED)
    assert all(len(row.cases) >= 5 for row in FAMILIES.values())
    assert all(set(row.compiled) | set(row.ranks) <= set(row.cases) for row in FAMILIES.values())


def test_the_page_of_models_names_every_architecture(root: Path) -> None:
    """``docs/models.md`` has a row for each registered architecture, and no other."""
    rows = [line.split("|")[1] for line in (root / "docs" / "models.md").read_text().splitlines() if line[:3] == "| `"]
    named = {word for row in rows for word in row.split("`") if word.startswith(tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))}
    assert named == set(REGISTERED)
