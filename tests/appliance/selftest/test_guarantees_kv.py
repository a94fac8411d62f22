"""The guarantees about KV and service hold in their short form; the release counts are the full one's."""

from __future__ import annotations

from types import ModuleType

import pytest

from appliance.selftest import g1_public, g1_reuse, g1_spill, g5_occupancy, g6_interference
from appliance.selftest.result import Result

PARTS = (g1_public, g1_reuse, g1_spill, g5_occupancy, g6_interference)


def failed(rows: list[Result]) -> list[Result]:
    """Rows that do not pass."""
    return [row for row in rows if row.verdict != "pass"]


SHORTER = 8
"""Part of the short form's count that `make test` takes where the count is a constant of the part's module."""

FEWER = {g5_occupancy: (20, 8), g6_interference: (600, 120)}
"""Counts of `make test` of parts that have two. All run on a simulated clock from fixed seeds, so what a count shows it
shows each time; with half as many requests the 99th percentile of G6 would be a single one."""

FEWER_PUBLIC = {"PAIRS": 600, "TRIALS": 8}
"""Counts of `make test` of published prefixes, by the constant of ``g1_public``."""


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__.rpartition(".")[2])
def test_the_short_form_passes_with_its_controls(part: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row passes, and at least one of them shows the effect where it must be seen."""
    if hasattr(part, "SHORT"):
        monkeypatch.setattr(part, "SHORT", part.SHORT // SHORTER)
    if part in FEWER:
        monkeypatch.setattr(part, "SHORT_COUNTS", FEWER[part])
    for name, count in FEWER_PUBLIC.items():
        monkeypatch.setattr(g1_public, name, (count, getattr(g1_public, name)[1]))
    rows = list(part.run(full=False))
    assert failed(rows) == []
    assert any(row.id.endswith("control") for row in rows)


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__.rpartition(".")[2])
def test_the_release_counts_pass(part: ModuleType) -> None:
    """The same with the counts of a release."""
    assert failed(list(part.run(full=True))) == []
