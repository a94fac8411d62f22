"""Memory for open charges, as the gateway asks for it and tells that it has none."""

from __future__ import annotations

import asyncio
import os

import pytest
from structlog.testing import capture_logs

from appliance.common.control import Control
from appliance.common.control_charges import KeepCharges
from appliance.common.usage.open_charges import OpenCharges, create_memory
from appliance.gateway.sandboxes import charge_memory
from appliance.gateway.sandboxes.charge_memory import NOTHING_CAME, ChargeMemory


async def test_memory_that_does_not_come_is_told_and_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer without descriptors has it asked for again; the log has one line, and the problem stands for the
    alert until memory has come (control)."""
    told: list[Control] = []
    monkeypatch.setattr(charge_memory, "AGAIN_S", 0.0)
    memory = ChargeMemory(told.append, OpenCharges(), wanted=True)
    assert memory.problem == ""
    with capture_logs() as lines:
        for _ in range(3):
            memory.take(())
    assert memory.problem == NOTHING_CAME
    assert len(lines) == 1
    await asyncio.sleep(0.01)
    assert told == [KeepCharges()] * 3
    reader, writer = os.pipe()
    memory.take((create_memory(), writer))
    assert memory.problem == ""
    os.close(reader)
