"""G10, models: a changed byte is refused, by the check and by a whole appliance."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.selftest.g10_model import file_rows, start_rows


@pytest.mark.parametrize("count", [24, pytest.param(400, marks=pytest.mark.full)])
def test_no_flipped_bit_passes(count: int) -> None:
    """At a start and at a boot; the untouched folder passes without being read again."""
    rows = file_rows(count)
    assert {row.id: row.verdict for row in rows} == {"G10.model": "pass", "G10.model.control": "pass"}, rows


@pytest.mark.runsc
@pytest.mark.timeout(180)
def test_an_appliance_refuses_a_changed_model(demos_section: dict[str, Any]) -> None:
    """It does not start on one that is not pinned, with the reason; on the pinned one it serves."""
    rows = start_rows(demos_section)
    assert {row.id: row.verdict for row in rows} == {"G10.refusal": "pass", "G10.refusal.control": "pass"}, rows
