"""States of the store outside for sealed KV and of a fleet's keys, as the supervisor tells them to the gateway."""

from __future__ import annotations

from enum import IntEnum


class KvStoreState(IntEnum):
    """State of the store outside of this machine for sealed KV (``SpillState``)."""

    NONE = 0
    """There is none."""
    SERVES = 1
    CARRIER_AWAY = 2
    """athanor-carrier.service does not answer the supervisor."""
    STORE_AWAY = 3
    """The store does not answer the carrier, or not in the time for which an engine waits."""
    REFUSES = 4
    """The store has refused something within the last minute: it is full, or its user may not."""


STORE_STATE = "store_state"
"""Name of the figure of ``SpillState`` that has a ``KvStoreState``."""


class FleetKeyState(IntEnum):
    """Whether this host has the keys under which the hosts of its fleet share sealed KV (``SpillState``)."""

    NO_MEMBER = 0
    """It is a member of no fleet."""
    HELD = 1
    """It is the key server, or has a lease."""
    NONE_HELD = 2
    """It has no lease: the key server did not answer for as long as one lasts, or not yet."""


FLEET_STATE = "fleet_state"
"""Name of the figure of ``SpillState`` that has a ``FleetKeyState``."""

FLEET_SHREDS = "fleet_shreds"
"""Name of the figure of ``SpillState`` with the number of shreds in the fleet that are not complete yet."""
