"""Guests that do their worst on the wire, against the gateway's own link."""

from __future__ import annotations

import pytest

from appliance.selftest import hostile_guest
from appliance.selftest.redteam.wire import WAYS
from isolation.gvisor.gvisor_runtime import GvisorRuntime

FRAMES = 20_000


def test_every_way_has_its_judgement() -> None:
    """No way of the hostile program is left without somebody who looks what becomes of it."""
    assert {*hostile_guest.ENDED, *hostile_guest.BORNE, "half", "mutate"} == WAYS.keys()


@pytest.mark.parametrize("way", hostile_guest.ENDED)
def test_a_breach_ends_the_sandbox(way: str) -> None:
    """Impossible cursors and lengths, forged ids, too many tokens, messages out of turn: the link says whose fault."""
    seen = hostile_guest.one_way(way, None)
    assert seen.at_fault, seen
    assert seen.reason.startswith("broke the protocol: ")


@pytest.mark.parametrize("way", hostile_guest.BORNE)
def test_a_flood_is_borne(way: str) -> None:
    """Frames or bells without end break no rule: the link stays, and the event loop goes on turning."""
    seen = hostile_guest.one_way(way, None)
    assert seen.reason == ""
    assert seen.turns >= hostile_guest.LEAST_TURNS


def test_death_in_the_middle_of_a_frame_is_an_end() -> None:
    """A guest that dies while it writes is gone, whatever lies in the ring; nothing hangs."""
    assert hostile_guest.one_way("half", None).reason


def test_memory_that_changes_while_it_is_read_gives_messages_or_the_protocol_s_error() -> None:
    """Lengths, kinds and counts change between and during reads (a double fetch); the control: one who looks twice
    at a length sees two."""
    changed = hostile_guest.read_while_it_changes(FRAMES, None)
    assert changed.whole + changed.refused == FRAMES
    assert changed.whole > 0
    assert changed.refused > 0
    assert changed.fooled > 0


@pytest.mark.runsc
def test_a_breach_from_inside_a_real_sandbox_is_seen_alike(gvisor: GvisorRuntime) -> None:
    """Over gVisor's border it is the same memory: a length of four gigabytes, and changing frames."""
    assert hostile_guest.one_way("oversized", gvisor).at_fault
    changed = hostile_guest.read_while_it_changes(FRAMES // 4, gvisor)
    assert changed.whole + changed.refused == FRAMES // 4
    assert changed.fooled > 0
