"""Whose line is next: batches that are open, the places of lines that run, and what holds a batch up."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from appliance.common.batch_status import BatchView, Obstacle
from appliance.common.batches.values import IN_PROGRESS, VALIDATING, StoredBatch
from appliance.gateway.batches.room import RUNNING_IN_ALL, Room
from appliance.gateway.batches.several_prompts import LineProgress


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch that is not over."""

    batch: StoredBatch
    cursor: int = 0
    """Line behind which the next ones are fetched."""
    exhausted: bool = False
    """Whether no line is behind the cursor."""
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    """Lines that may begin."""
    running: set[int] = field(default_factory=set)
    progress: dict[int, LineProgress] = field(default_factory=dict)
    """Answers to prompts of lines that run or are continued, by number."""
    not_before: float = 0.0
    """Monotonic time before which none begins: a limit, or a model that is away."""
    model: str = ""
    """Model that the last line asked for."""
    stored: int = 0
    """Bytes that the tenant keeps."""
    work: asyncio.Task[None] | None = None
    """Reading of its file, or its end."""
    ended: int = 0
    """Lines that ended here, beyond those that ``batch`` tells."""
    moved: float = field(default_factory=time.monotonic)
    """Monotonic time at which a line or prompt of it last ended; at first that of its coming."""

    @property
    def waits(self) -> bool:
        """Whether lines of it could begin if there were room."""
        return bool(self.lines) and self.work is None and self.not_before <= time.monotonic()

    def forget_lines(self) -> None:
        """Fetch lines from the first on again."""
        self.lines.clear()
        self.cursor, self.exhausted = 0, False


class BatchTurns:
    """Counts lines that run, and says whether another may begin; all methods run in one event loop."""

    def __init__(self, room: Room, batches: Callable[[], Iterable[OpenBatch]], freed: Callable[[], None]) -> None:
        """``batches`` gives those that are open; ``freed`` is called when a prompt of a line has ended."""
        self.running: Counter[str] = Counter()
        """Lines that run, by tenant; one of several prompts counts as often as prompts of it run."""
        self.working = 0
        """Batches whose files are read, or which end."""
        self.freed = freed
        self._room = room
        self._batches = batches

    @property
    def has_room(self) -> bool:
        """Whether fewer lines run than may."""
        return self.running.total() + self.working < RUNNING_IN_ALL

    def may_begin(self, one: OpenBatch) -> bool:
        """Return whether a line of a batch may begin, if there is room."""
        tenant = one.batch.tenant
        return self._may_keep(one) and self._room.may_begin(tenant, one.model, self.running[tenant])

    def may_go_on(self, one: OpenBatch) -> bool:
        """Return whether another prompt of a line that runs may begin: as a line may, and where no line of a tenant
        that has fewer waits for the place."""
        tenant = one.batch.tenant
        mine = self.running[tenant]
        if not self.has_room or one.not_before > time.monotonic():
            return False
        return self._room.may_begin(tenant, one.model, mine) and not any(
            self.running[other.batch.tenant] < mine and self.may_begin(other)
            for other in self._batches()
            if other.waits
        )

    def view(self, one: OpenBatch) -> BatchView:
        """Return what the operator sees of a batch."""
        batch, now = one.batch, time.monotonic()
        return BatchView(
            id=batch.id,
            tenant=batch.tenant,
            endpoint=batch.endpoint,
            status=batch.status,
            total=batch.total,
            ended=min(batch.total, batch.completed + batch.failed + one.ended),
            running=len(one.running),
            created_at=float(batch.created),
            still_s=now - one.moved,
            obstacle=self._obstacle(one, now),
            model=one.model,
        )

    def _obstacle(self, one: OpenBatch, now: float) -> Obstacle:
        """Return why no line of a batch begins."""
        if one.batch.status != IN_PROGRESS:
            return Obstacle.VALIDATING if one.batch.status == VALIDATING else Obstacle.ENDING
        if one.not_before > now:
            return Obstacle.DELAYED
        if not self._may_keep(one):
            return Obstacle.STORAGE
        tenant = one.batch.tenant
        found = self._room.obstacle(tenant, one.model, self.running[tenant])
        if found is not Obstacle.NONE or one.running:
            return found
        return Obstacle.NONE if self.has_room and one.lines else Obstacle.TURN

    def _may_keep(self, one: OpenBatch) -> bool:
        """Whether the tenant may keep more results."""
        tenant = self._room.ledger.policy.tenants.get(one.batch.tenant)
        return tenant is None or one.stored < tenant.limits.max_stored_bytes


class LinePlaces:
    """Places of one line; see ``appliance.gateway.batches.several_prompts.PromptPlaces``."""

    def __init__(self, turns: BatchTurns, one: OpenBatch) -> None:
        self._turns, self._one = turns, one
        self._taken = 0
        self._note(1)

    def take(self) -> bool:
        """Take one more, where a line could begin now; returns whether it was taken."""
        may = self._turns.may_go_on(self._one)
        if may:
            self._note(1)
        return may

    def leave(self) -> None:
        """Give one back, as a prompt has ended."""
        self._one.moved = time.monotonic()
        self._note(-1)
        self._turns.freed()

    def leave_all(self) -> None:
        """Give all back."""
        self._note(-self._taken)

    def _note(self, change: int) -> None:
        self._taken += change
        self._turns.running[self._one.batch.tenant] += change
