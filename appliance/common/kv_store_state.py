"""State of the store outside of this machine for sealed KV, as the supervisor tells it to the gateway."""

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
