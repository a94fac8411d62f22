"""Counts of uses: they fade with traffic, and bursts count once."""

from __future__ import annotations

import pytest

from appliance.common.model_uses import LEAST_GAP_S, ModelUses


def test_counts_fade_with_the_uses_of_others_and_not_with_time() -> None:
    """A count is halved after so many uses of other models; a day without any changes nothing."""
    uses = ModelUses(half_life=4.0)
    uses.note("a", 0.0)
    for number in range(4):
        uses.note(f"other-{number}", 10.0)
    assert uses.of("a") == pytest.approx(0.5)
    uses.note("b", 86_400.0)
    assert uses.of("a") == pytest.approx(0.5 ** (5 / 4))
    assert uses.of("nothing") == 0.0


def test_a_burst_counts_once() -> None:
    """A thousand uses within the gap are one, and as many at its distance (the control) are that many."""
    uses = ModelUses(half_life=1e9)
    for number in range(1_000):
        uses.note("burst", number * LEAST_GAP_S / 1_001)
        uses.note("steady", number * LEAST_GAP_S)
    assert uses.of("burst") == pytest.approx(1.0, rel=1e-3)
    assert uses.of("steady") == pytest.approx(1_000, rel=1e-3)


def test_models_that_are_gone_are_forgotten() -> None:
    """One that comes again under its name begins anew; the others keep their counts."""
    uses = ModelUses()
    for name in "ab":
        uses.note(name, 0.0)
    uses.keep({"b"})
    assert (uses.of("a"), uses.of("b")) == (0.0, 1.0)
