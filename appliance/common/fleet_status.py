"""A host as a member of a fleet (docs/fleet.md)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A host's part in a fleet: what must be equal on all hosts beside the policy, and whether it drains."""

    key: str = ""
    """Fingerprint of the fleet's key in hex; empty where it has none."""
    models: dict[str, str] = field(default_factory=dict)
    """Digest of each configured model's files as the configuration pins it, by name; empty where it is not pinned."""
    hosts: tuple[str, ...] = ()
    """Names of the hosts that share its limits; empty where these are its own."""
    store: str = ""
    """Why nothing is lent now by the fleet's store; empty while it answers, and where there is none."""
    role: str = "mixed"
    """Role in the split of prompts from answers: mixed, prefill or decode."""
    kv_keys: str = ""
    """Whether it has the keys under which hosts share sealed KV: ``held``, ``none``; empty where it is no member."""
    shreds: int = 0
    """Shreds ordered on it that are not complete on all hosts yet."""
    draining: bool = False
    """Whether it takes no requests, or soon will not: by the operator's word, or because it stops."""
