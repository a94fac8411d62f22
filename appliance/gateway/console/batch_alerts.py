"""Alerts about files and batches: what stands still and why, and what is nearly full. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.common.batch_status import REASONS, REMEDIES, BatchQueue, BatchView, Obstacle
from appliance.common.figures import counted, size
from appliance.common.status import Alert

FULL_SHARE = 0.9
"""Share of ``batches: max_bytes`` from which on room is made before tenants are refused."""

SHOWN = 3
"""Stuck batches of which each has an alert."""


def batch_alerts(queue: BatchQueue | None, now: float) -> Iterator[Alert]:
    """Yield alerts about files and batches; ``now`` is Unix time."""
    if queue is None:
        return
    yield from (_stuck(one, now) for one in [row for row in queue.rows if row.stuck][:SHOWN])
    if queue.max_bytes and queue.stored_bytes >= FULL_SHARE * queue.max_bytes:
        full = queue.stored_bytes >= queue.max_bytes
        yield Alert(
            key="batch storage",
            level="degraded",
            what=f"Files and responses take {size(queue.stored_bytes)} of {size(queue.max_bytes)}",
            who="Every tenant's uploads are refused." if full else "Every tenant that uploads, once it is full.",
            do="Raise batches: max_bytes in athanor.yaml, or lower max_stored_bytes of tenants in the policy.",
            command="athanor status",
        )


def _stuck(one: BatchView, now: float) -> Alert:
    obstacle = Obstacle(one.obstacle)
    do, command = REMEDIES[obstacle]
    model = f" ({one.model})" if one.model and obstacle in (Obstacle.MODEL, Obstacle.BUSY) else ""
    return Alert(
        key=f"batch/{one.id}",
        level="note" if obstacle in (Obstacle.TURN, Obstacle.ENDING) else "degraded",
        what=f"No line of batch {one.id} ends: {REASONS[obstacle]}{model}",
        since=now - one.still_s,
        who=f"Only tenant {one.tenant}: {counted(one.total - one.ended, 'line')} left",
        do=do,
        command=command,
    )
