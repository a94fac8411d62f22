"""Looks of the page of the fleet with fixed contents, and a source of them that a test may exchange."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from appliance.common.fleet_hosts import HostState
from appliance.common.fleet_status import FleetStatus
from appliance.gateway.console.fleet_look import FleetLook, fleet_look
from tests.appliance.admin_server import STATUS

SAME = "8f31c2d47a905be6c1f08824d6a1b3e7559d0cc2f4b8a6e91370d5c8ee42b19f"
OTHER = "0b77aa4c21f6d83e94c50be7a2f19d6638e1c4b05d7f92a8b36e014cc5d9e870"

HOSTS = ("host-a", "host-b", "host-c")

FLEET = FleetStatus(key="f00d", models={"athanor-mini": "a" * 64}, hosts=HOSTS, role="mixed", kv_keys="held")


def host(name: str, policy: str = SAME, running: int = 12, **fleet: Any) -> HostState:
    """A host that answers; ``fleet`` is what it tells otherwise of its part in the fleet."""
    status = replace(
        STATUS,
        policy=replace(STATUS.policy, digest=policy),
        load=replace(STATUS.load, running=running, waiting=0, kv_blocks=4_096, kv_free=2_458),
        fleet=replace(FLEET, **fleet),
    )
    return HostState(name=name, admin=f"https://{name}:8443", status=status)


def silent(name: str, problem: str = "connection refused") -> HostState:
    """A host that does not answer."""
    return HostState(name=name, admin=f"https://{name}:8443", problem=problem)


WELL = tuple(map(host, HOSTS))

TROUBLED = (
    host("host-a", role="prefill", running=31),
    host("host-b", role="decode", shreds=2),
    host("host-c", OTHER, store="connection refused", kv_keys="none"),
    host("host-d", draining=True, running=3),
    silent("host-e", "no answer within 3 s"),
)


class FakeFleet:
    """Answers the page of the fleet as the gateway would, by hosts that a test may exchange."""

    def __init__(self) -> None:
        self.asked = 0
        self.reset()

    def reset(self) -> None:
        """Three hosts, all well."""
        self.hosts: tuple[HostState, ...] = WELL
        self.listed, self.problem, self.asked = True, "", 0

    async def look(self, page: str) -> FleetLook:
        """A look as of now."""
        self.asked += 1
        if self.problem:
            return FleetLook(now=time.time(), version="0.1.0", page=page, listed=True, problem=self.problem)
        return replace(fleet_look(self.hosts, now=time.time(), version="0.1.0", listed=self.listed), page=page)
