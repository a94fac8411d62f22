"""Where a rank stands among the stages of a pipeline and the ranks of its stage; standard library only.

Ranks are numbered stage by stage: those of the first stage come first. Rank 0 tells texts (plans, mostly) to the others
of its stage where they meet; every rank passes them on to its counterpart in the next stage. What rank 0 tells does not
wait for later stages: they may be computing what they were told before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from engine.sandbox.rank_link import RankLink
from engine.sandbox.rank_meeting import Meeting
from engine.sandbox.rank_queue import RankQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank's place, and its ends to the other ranks."""

    link: RankLink
    stages: int
    """Stages of the pipeline."""
    stage: int
    """This rank's."""
    meeting: Meeting
    """The ranks of this stage."""
    queue: RankQueue | None
    """From the stage before, and to the next one; None: there is one stage."""

    @classmethod
    def of(cls, link: RankLink, stages: int) -> Self:
        """Find the place of the rank at this end among so many stages, which divide the ranks evenly; to be called once
        by every rank."""
        width = link.size // stages
        stage = link.rank // width
        meeting = link.stage(tuple(range(stage * width, (stage + 1) * width)))
        queue = None
        if stages > 1:
            source = link.rank - width if stage else (stages - 1) * width if link.rank == 0 else None
            target = link.rank + width if stage < stages - 1 else 0 if link.rank == stage * width else None
            queue = link.queue(source, target)
        return cls(link=link, stages=stages, stage=stage, meeting=meeting, queue=queue)

    @property
    def answers(self) -> bool:
        """Whether this rank gives results of the last stage to rank 0."""
        return self.stages > 1 and self.stage == self.stages - 1 and self.meeting.rank == 0

    def tell(self, text: bytes | bytearray) -> None:
        """Give every other rank a text, from rank 0."""
        if self.meeting.size > 1:
            self.meeting.tell(text)
        if self.queue is not None:
            self.queue.send_text(text)

    def hear(self) -> bytearray:
        """Take what rank 0 tells, and pass it on: a copy, which the caller overwrites."""
        if self.stage == 0:
            text = self.meeting.hear()
        else:
            assert self.queue is not None, "later stages have one before them"
            text = self.queue.receive_text()
        if self.queue is not None and self.stage < self.stages - 1:
            self.queue.send_text(text)
        return text

    def meet(self) -> None:
        """Wait until all ranks have come so far."""
        self.link.everyone.meet(0)
