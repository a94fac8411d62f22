"""Which requests are past their deadline, found without looking at those that are not."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from engine.core.request import Request, Status
from engine.core.specification import NEVER_NS

MAX_ENDED = 64
"""Entries of ended requests above which the heap is made anew (and half of its size, see ``add``)."""


class Deadlines:
    """A heap of the live requests that have a deadline, the next one first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, num_live: int) -> None:
        """Watch a request. ``num_live``: live requests now; ended ones are dropped when they are more than half."""
        if request.spec.deadline_ns == NEVER_NS:
            return
        heappush(self._heap, (request.spec.deadline_ns, request.spec.order, request))
        if len(self._heap) > 2 * num_live + MAX_ENDED:
            self._heap = [entry for entry in self._heap if entry[2].status is not Status.FINISHED]
            heapify(self._heap)

    @property
    def next_ns(self) -> int:
        """The next deadline of a live request; ``NEVER_NS`` when none has one."""
        heap = self._heap
        while heap and heap[0][2].status is Status.FINISHED:
            heappop(heap)
        return heap[0][0] if heap else NEVER_NS

    def expired(self, now_ns: int) -> list[Request]:
        """Take out the live requests whose deadline is at or before ``now_ns``."""
        heap = self._heap
        late = []
        while heap and (heap[0][0] <= now_ns or heap[0][2].status is Status.FINISHED):
            request = heappop(heap)[2]
            if request.status is not Status.FINISHED:
                late.append(request)
        return late
