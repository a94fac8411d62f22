"""What is wrong with the configured witnesses of the audit log, for all who tell it. Blocks."""

from __future__ import annotations

from appliance.common.audit.witnessing import read_states, stale
from appliance.common.config_places import AuditConfig
from appliance.common.errors import reason_of

MAX_TOLD = 1_000
"""Most characters that are told: a message to the gateway holds no more of it."""


def witness_problem(config: AuditConfig, now: float) -> str:
    """Return what is wrong with the configured witnesses; empty while they cosign."""
    if config.tiles is None or not config.witnesses:
        return ""
    try:
        states = read_states(config.tiles)
    except OSError as error:
        return f"what is known of the witnesses cannot be read: {reason_of(error)}"
    names = [one.name for one in config.witnesses]
    return "; ".join(stale(states, names, now, config.witness_age * 3_600))[:MAX_TOLD]
