"""Families with experts in 16 bits, and with maps in 8: near the reference, and not the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.model.families.harness import load_runner, random_tokens, run_mixed
from tests.engine.model.families.table import FAMILIES, VOCAB, save_reference

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = [
    ("mixtral", "gqa 2"),
    ("qwen3_moe", "every second layer"),
    ("qwen2_moe", "gqa 2"),
    ("gpt_oss", "gqa 2, a window"),
    ("deepseek", "groups"),
    ("llama4", "chunks of 16"),
]

SOME = ("gpt_oss", "deepseek")

LIMITS = {"bfloat16": 0.05, "float16": 0.02, "int8": 0.1}
"""Middle error of logits relative to their spread. The mean says nothing: a token whose best experts are nearly tied
goes to others when a number is rounded."""


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("float16", marks=pytest.mark.full), "int8"])
@pytest.mark.parametrize(
    ("family", "case"), [pytest.param(*one, marks=() if one[0] in SOME else pytest.mark.full) for one in CASES]
)
def test_logits_in_few_bits_stay_near(family: str, case: str, kind: str, tmp_path: Path) -> None:
    """A prompt in chunks beside a decoding row: half of all rows are as near as the number's kind allows; rounding
    shows, so the kind was used."""
    reference = save_reference(tmp_path, family, **FAMILIES[family].cases[case])
    prompts, lengths = {0: 6, 1: 30}, {0: 45, 1: 60}
    tokens = random_tokens(lengths, VOCAB)
    expected = {row: [*line, 0] for row, line in tokens.items()}
    dtype = "auto" if kind == "int8" else kind
    runner, recorder = load_runner(tmp_path, expected, dtype, int8=kind == "int8")
    run_mixed(runner.execute, tokens, prompts, 7, lengths)
    errors = []
    for row, line in tokens.items():
        with torch.no_grad():
            exact = reference(torch.tensor([line])).logits[0]
        for position in range(prompts[row], lengths[row] + 1):
            wrong = recorder.logits[row, position] - exact[position - 1]
            errors.append(float(wrong.square().mean().sqrt() / exact.std()))
    middle = sorted(errors)[len(errors) // 2]
    assert 1e-5 < middle < LIMITS[kind]
