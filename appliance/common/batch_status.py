"""Batches as the operator sees them: how many wait, since when, what they take on disk, and what holds one up. Values
only; nothing of what tenants wrote is among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

STUCK_S = 900.0
"""Seconds without the end of a line after which a batch counts as stuck: a long line of a slow model ends before."""


class Obstacle(StrEnum):
    """Why no line of a batch begins."""

    NONE = ""
    """None: lines run, or are about to."""
    VALIDATING = "validating"
    ENDING = "ending"
    DRAINED = "drained"
    ENOUGH = "enough"
    LIMIT = "limit"
    STORAGE = "storage"
    MODEL = "model"
    BUSY = "busy"
    DELAYED = "delayed"
    TURN = "turn"


REASONS: Mapping[Obstacle, str] = {
    Obstacle.NONE: "lines run",
    Obstacle.VALIDATING: "its file is read",
    Obstacle.ENDING: "its running lines end",
    Obstacle.DRAINED: "the operator drained the appliance",
    Obstacle.ENOUGH: "as many lines run as may",
    Obstacle.LIMIT: "other requests of its tenant use half of a limit",
    Obstacle.STORAGE: "its tenant keeps as many bytes as it may",
    Obstacle.MODEL: "its model is not ready",
    Obstacle.BUSY: "other requests wait in the engine of its model",
    Obstacle.DELAYED: "its last line was refused for now",
    Obstacle.TURN: "other batches have their turn",
}
"""What is said of each."""

REMEDIES: Mapping[Obstacle, tuple[str, str]] = {
    Obstacle.NONE: ("Running lines end slowly: others go before them. See what the engines do.", "athanor top"),
    Obstacle.DRAINED: ("Have the appliance take requests again.", "athanor fleet drain HOST --resume"),
    Obstacle.ENOUGH: ("Running lines end slowly. See what the engines do.", "athanor top"),
    Obstacle.LIMIT: ("Raise its limits in the policy and reload, or wait until it asks less.", "athanor reload"),
    Obstacle.STORAGE: ("Have it delete files, or raise max_stored_bytes in the policy and reload.", "athanor reload"),
    Obstacle.MODEL: ("See why it is not; batches go on once it is.", "athanor status"),
    Obstacle.BUSY: ("Serve the model on more, or lower concurrency in the policy.", "athanor top"),
    Obstacle.DELAYED: ("The log says by which limit or model; lines are tried again.", "athanor logs --level warning"),
    Obstacle.TURN: ("See which batches are in front of it.", "athanor status"),
    Obstacle.VALIDATING: ("The log says whether the store fails.", "athanor logs --level warning"),
    Obstacle.ENDING: ("See what the engines do.", "athanor top"),
}
"""What to do about a batch that each holds up, and what to type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """One batch that is not over."""

    id: str
    tenant: str
    endpoint: str
    status: str
    total: int
    ended: int
    """Lines with a result, as the store told last."""
    running: int
    """Lines that run."""
    created_at: float
    """Unix time."""
    still_s: float
    """Seconds since the gateway last saw a line of it end, or since it knows the batch."""
    obstacle: str
    """One of ``Obstacle``."""
    model: str = ""
    """Model that its last line asked for; empty before the first."""

    @property
    def stuck(self) -> bool:
        """Whether no line of it has ended for long."""
        return self.still_s >= STUCK_S


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchQueue:
    """All batches that are not over, and what is kept."""

    open: int
    waiting_lines: int
    """Lines without a result."""
    running_lines: int
    """Lines that run, each prompt of several counted."""
    oldest_s: float
    """Seconds since the oldest was made; 0 where there is none."""
    files: int
    responses: int
    stored_bytes: int
    """Bytes of files, results and stored responses."""
    max_bytes: int
    """What they may have together."""
    stuck: int
    """Batches without the end of a line for ``STUCK_S``."""
    rows: tuple[BatchView, ...]
    """Those that have stood still longest, first."""
