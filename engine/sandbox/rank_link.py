"""Shared memory and bells between the ranks of one engine, made before they are forked; standard library only.

All ranks, or those of one stage of a pipeline, *meet* (``engine.sandbox.rank_meeting``); a rank passes what it computed
on to one other rank by a *queue* (``engine.sandbox.rank_queue``). This module has what both need: the memory and its
places, and how a rank waits.

A rank that waits looks again and again for a short while, then sleeps at a pipe; who has written what it waits for
rings. There is no time limit: a rank that ends is the engine's end (``engine.ranks``), and one that computes for ever
is noticed by the host, as an engine of one rank is.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from engine.errors import RankGoneError
from engine.sandbox.rank_meeting import Meeting
from engine.sandbox.rank_memory import CONTROL_BYTES, EVERYONE, STAGE, memory_bytes, sleep_word
from engine.sandbox.rank_queue import RankQueue
from isolation.ipc.doorbell import BellReader, BellWriter, create_pipe
from isolation.ipc.errors import PeerGoneError
from isolation.ipc.memory_order import LOOK_AGAIN_S, fence, later_look_s, require_total_store_order

EXIT_RANK_GONE = 5
"""Exit status of a rank that ends because another has ended: the keeper gives that one's status."""

LOOKS = 1_500
"""Looks at another rank's word before the waiting one sleeps: some 100 us, longer than ranks that compute alike differ,
and shorter than what a sandbox takes to sleep and to wake."""


class RankLink:
    """One rank's end."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, bell: int, others: dict[int, int]) -> None:
        """Take over what the fork has left.

        Args:
            memory: of all ranks.
            rank: this one's number.
            size: ranks.
            bell: this rank's end of its pipe, to read.
            others: by rank, the ends to write.
        """
        self.rank = rank
        self.size = size
        self.memory = memoryview(memory)
        self.words = self.memory[:CONTROL_BYTES].cast("Q")
        """The control page."""
        self._asleep = sleep_word(rank)
        self._bell = BellReader(bell)
        self._others = {peer: BellWriter(fd) for peer, fd in sorted(others.items())}
        self.everyone = Meeting(self, tuple(range(size)), EVERYONE)
        """All ranks."""

    @property
    def bells(self) -> tuple[int, tuple[int, ...]]:
        """The descriptor that is read, and those that are written."""
        return self._bell.fd, tuple(writer.fd for writer in self._others.values())

    def stage(self, ranks: tuple[int, ...]) -> Meeting:
        """The meeting of the ranks of this rank's stage of a pipeline; to be called once, by each of them."""
        return self.everyone if len(ranks) == self.size else Meeting(self, ranks, STAGE)

    def queue(self, source: int | None, target: int | None) -> RankQueue:
        """The queue from rank ``source`` to this one, and from this one to rank ``target``; to be called once."""
        return RankQueue(self, source, target)

    def wake(self, rank: int) -> None:
        """Ring a rank that sleeps; what it waits for was written before.

        Raises:
            RankGoneError: it has ended.
        """
        if self.words[sleep_word(rank)]:
            try:
                self._others[rank].ring()
            except PeerGoneError as error:
                raise RankGoneError("another rank of this engine has ended") from error

    def wait_for(self, place: int, value: int) -> None:
        """Wait until the word at ``place``, which another rank counts up, is ``value`` at least.

        Raises:
            RankGoneError: every other rank has ended.
        """
        words = self.words
        for _ in range(LOOKS):
            if words[place] >= value:
                return
        pause = LOOK_AGAIN_S
        words[self._asleep] = 1
        fence()
        while words[place] < value:
            if not self._bell.wait(pause):
                pause = later_look_s(pause)
            elif not self._bell.drain():
                raise RankGoneError("another rank of this engine has ended")
        words[self._asleep] = 0


@dataclass(frozen=True, slots=True)
class RankRoom:
    """What the ranks of one engine share; made before they are forked."""

    memory: mmap.mmap
    pipes: tuple[tuple[int, int], ...]
    """For each rank, the end that it reads and the one by which others wake it."""

    @classmethod
    def create(cls, size: int) -> RankRoom:
        """Take memory and pipes.

        Raises:
            UnsupportedMachineError: this machine orders memory otherwise.
        """
        require_total_store_order()
        # Shared between processes and without a name: nothing to open, and no descriptor is left.
        memory = mmap.mmap(-1, memory_bytes(size))
        return cls(memory, tuple(create_pipe() for _ in range(size)))

    def link(self, rank: int) -> RankLink:
        """The end of one rank, which closes what belongs to others: in that rank's process only."""
        others = {}
        for number, (reader, writer) in enumerate(self.pipes):
            if number == rank:
                os.close(writer)
            else:
                os.close(reader)
                others[number] = writer
        return RankLink(self.memory, rank, len(self.pipes), self.pipes[rank][0], others)

    def close(self) -> None:
        """Leave all of it to the ranks."""
        for pipe in self.pipes:
            for fd in pipe:
                os.close(fd)
        self.memory.close()
