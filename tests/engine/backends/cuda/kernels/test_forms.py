"""No form of a kernel is missing: steps of any number of tokens and rows launch those that the rehearsal has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.engine.model.families.table import EVERY_CASE, FAMILIES

SAMPLE = (
    "fp8 llama/gqa 4",
    "gemma3/five to one",
    "torch mixtral/gqa 2",
    "gpt_oss/odd experts, tight clamps",
    "deepseek/odd widths, two shared",
)
"""A dense model in 8 bits, one with several tables, experts by torch and by kernels, and latent keys; the full count
has every variant, in the sample's ways too."""

WAYS = ("llama/gqa 4", "fp8 llama/gqa 4", "mixtral/gqa 2", "torch mixtral/gqa 2")
"""Models as they are, in 8 bits, and with experts by torch."""

SAMPLE_COUNTS = "1,2,9,16,17,65,385,1000"
"""Numbers of tokens at which a number becomes 1 or a multiple of 16, or is none of both."""

ALL_COUNTS = "1-8192"


def forms_of(root: Path, cases: str, counts: str, dtype: str = "bfloat16") -> list[dict[str, object]]:
    """What the probe says of each case."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    with tempfile.TemporaryDirectory() as folder:
        for place, case in enumerate(cases.split(";")):
            if case != "control":
                describe(case, Path(folder, str(place)))
        probe = "tests.engine.backends.cuda.kernels.forms_probe"
        done = subprocess.run(
            [sys.executable, "-m", probe, folder, cases, counts, dtype],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3_000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def describe(case: str, folder: Path) -> None:
    """Write the description of a variant as its publisher would."""
    family, _, variant = case.removeprefix("fp8 ").removeprefix("torch ").partition("/")
    row = FAMILIES[family]
    config = row.describe(row.cases[variant])
    config.architectures = [row.architecture]
    config.save_pretrained(folder)


def check(found: dict[str, object]) -> None:
    """All forms are rehearsed, there are many, and warm-up launches each: after it none can be loaded."""
    assert found["missing"] == found["cold"] == [], found
    assert min(found["rehearsed"], found["met"]) >= 15, found


def judge(found: dict[str, object]) -> None:
    """Check a case of the sample, whose experts torch may multiply."""
    if str(found["case"]).startswith("torch "):
        # Warm-up's steps are shorter; the largest step, which an engine runs before it serves, loads these.
        assert found["cold"] == ["_add_up", "_gather", "_places"], found
        found["cold"] = []
    check(found)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_sample_of_steps_has_no_form_of_its_own(root: Path) -> None:
    """A model of each kind, prompts of a dozen numbers of tokens in many divisions, every bucket of rows. Control: a
    kernel with an argument that is not marked has three forms by it (1, multiples of 16, others), and one by the
    argument that is marked."""
    control, *found = forms_of(root, ";".join(("control", *SAMPLE)), SAMPLE_COUNTS)
    assert control == {"case": "control", "marked": 1, "unmarked": 3}
    assert [one["case"] for one in found] == list(SAMPLE)
    for one in found:
        judge(one)
    with_torch = {str(one["case"]) for one in found if "_gather" in one["kernels"]}  # type: ignore[operator]
    assert with_torch == {"torch mixtral/gqa 2"}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_other_ways_have_no_form_of_their_own(root: Path) -> None:
    """The same models with and without 8 bits, and with and without experts by torch."""
    for one in forms_of(root, ";".join(WAYS), SAMPLE_COUNTS):
        judge(one)


@pytest.mark.full
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_has_no_form_of_its_own(root: Path, family: str) -> None:
    """Every variant of every family, in both dtypes, over the sample's numbers of tokens."""
    cases = ";".join(f"{one}/{case}" for one, case in EVERY_CASE if one == family)
    for dtype in ("bfloat16", "float32"):
        for one in forms_of(root, cases, SAMPLE_COUNTS, dtype):
            check(one)


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_tokens_has_no_form_of_its_own(root: Path, family: str) -> None:
    """A variant of every family, with prompts of 1 to 8,192 tokens."""
    case = next(iter(FAMILIES[family].cases))
    (found,) = forms_of(root, f"{family}/{case}", ALL_COUNTS)
    check(found)
