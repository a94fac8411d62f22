"""Looks at what is known of the audit log's witnesses, which a command asks: the supervisor has no network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from appliance.common.config_places import AuditConfig
from appliance.common.witness_problem import witness_problem

PERIOD_S = 60.0
"""Seconds between two looks: what is told is hours old."""


async def watch_witnesses(config: AuditConfig, note: Callable[[str], None]) -> None:
    """Tell what is wrong with the witnesses, until cancelled."""
    while True:
        note(await asyncio.to_thread(witness_problem, config, time.time()))
        await asyncio.sleep(PERIOD_S)
