"""Whatever bytes come where somebody else's bytes are read: a value or the typed error, never anything else."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.fuzz.mutate import made_from
from bench.fuzz.targets import TARGETS, Target

EXAMPLES = 60
SLOW = {"tokenizer.json": 25, "template": 40}
"""Examples where one costs more: the library builds a tokenizer, a template is compiled."""

RELEASE_FACTOR = 200


def fuzz(name: str, examples: int) -> tuple[int, int]:
    """Feed a target with made inputs and with noise; how many it took and refused."""
    target: Target = TARGETS[name]
    counts = [0, 0]

    @given(st.sampled_from(target.seeds), st.integers(0, 2**63), st.one_of(st.none(), st.binary(max_size=300)))
    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def feed(seed: bytes, number: int, noise: bytes | None) -> None:
        data = made_from(seed, random.Random(number)) if noise is None or number % 4 else noise
        counts[target(data)] += 1

    feed()
    return counts[True], counts[False]


@pytest.mark.parametrize("name", TARGETS)
def test_bytes_give_a_value_or_the_typed_error(name: str) -> None:
    """Changed and random inputs never crash, hang or raise something else; the control: the seeds are taken, and some
    inputs are refused."""
    assert all(TARGETS[name](seed) for seed in TARGETS[name].seeds)
    _, refused = fuzz(name, SLOW.get(name, EXAMPLES))
    assert refused > 0


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("name", TARGETS)
def test_the_same_at_release_counts(name: str) -> None:
    """Twelve thousand inputs each, five thousand where one is slow."""
    taken, refused = fuzz(name, RELEASE_FACTOR * SLOW.get(name, EXAMPLES))
    assert taken > 0
    assert refused > 0


def test_a_finding_would_be_seen() -> None:
    """The target lets every other exception through."""
    broken = Target(lambda data: {}[data], (ValueError,), (b"",))  # type: ignore[index]
    with pytest.raises(KeyError):
        broken(b"x")
