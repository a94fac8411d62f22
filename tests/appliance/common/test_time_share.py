"""Shares of time: bursts pass, floods pause."""

from __future__ import annotations

import pytest

from appliance.common.time_share import TimeShare

SHARE, BURST_S = 0.25, 0.05


def test_bursts_pass_and_floods_are_paced() -> None:
    """Work within the share never waits; work all the time waits until its share is earned."""
    pace = TimeShare(0.0, SHARE, BURST_S)
    assert all(pace.spend(0.01, now / 10) == 0 for now in range(1, 100))
    pause = pace.spend(BURST_S + 0.1, 10.0)
    assert pause == pytest.approx(0.1 / SHARE, rel=0.1)
    assert pace.spend(0.0, 10.0 + pause + 0.01) == 0.0


def test_pieces_of_no_length_cost_their_overhead() -> None:
    """Work that takes no measurable time without end is paced by what each piece costs beside: of a second spent in
    such pieces, all but burst and share are pauses."""
    pace = TimeShare(0.0, SHARE, BURST_S, overhead_s=0.001)
    now = worked = 0.0
    while now < 1.0:
        now += 0.001
        worked += 0.001
        now += pace.spend(0.0, now)
    assert worked <= BURST_S + SHARE * now + 0.002
