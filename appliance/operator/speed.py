"""How many tokens a second a model can give at most on this machine, before it runs: a step reads all weights once, and
memory is read no faster than the machine's card says. Pure but for ``read_speed``.
"""

from __future__ import annotations

import json
from pathlib import Path

MACHINE_CARD = "machine-card.json"
"""File beside athanor.yaml that ``athanor bench --record`` writes."""

MAX_CARD_BYTES = 1 << 16
"""Largest card; one has some forty lines."""

HOW = "athanor bench --record FILE measures the memory's speed; put FILE beside athanor.yaml as machine-card.json"
"""What tells an operator without a card how to get one."""


def read_speed(card: Path) -> float | None:
    """Bytes a second at which this machine's cores together read memory, by its card; None where no card tells."""
    try:
        with card.open("rb") as file:
            value = json.loads(file.read(MAX_CARD_BYTES))["memory_read_gb_s_all_cores"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return value * 1e9 if type(value) in (int, float) and 0 < value < 1e6 else None


def most_tokens_per_s(weights: int, bytes_per_s: float | None, streams: int = 1) -> float | None:
    """Most tokens a second of so many streams together; None where the weights or the speed are not known.

    Reading KV, and computing, are left out: both lower it, the more the more streams there are.
    """
    return streams * bytes_per_s / weights if bytes_per_s and weights else None
