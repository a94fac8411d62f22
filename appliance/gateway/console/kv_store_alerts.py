"""Alert about the store outside of this machine for sealed KV. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.kv_store_state import KvStoreState
from appliance.common.status import Alert

_PROBLEMS = {
    KvStoreState.CARRIER_AWAY: (
        "The carrier of sealed KV does not answer",
        "Start it; its log says why it ended.",
        "systemctl status athanor-carrier",
    ),
    KvStoreState.STORE_AWAY: (
        "The store of sealed KV does not answer the carrier",
        "See that it runs and that this host reaches it; the carrier's log has its words.",
        "journalctl -u athanor-carrier -n 20",
    ),
    KvStoreState.REFUSES: (
        "The store of sealed KV refuses blocks",
        "Give it more memory, or its user the commands SET, GET and UNLINK; the carrier's log has its words.",
        "journalctl -u athanor-carrier -n 20",
    ),
}
"""State of the store to what is wrong, what is to be done, and the command."""


def kv_store_alerts(state: KvStoreState) -> Iterator[Alert]:
    """Yield an alert where the store does not serve."""
    if state in _PROBLEMS:
        what, do, command = _PROBLEMS[state]
        yield Alert(
            key="kv store",
            level="degraded",
            what=what,
            who="Tenants with kv_export: requests go on, and compute the blocks that do not come back.",
            do=do,
            command=command,
        )
