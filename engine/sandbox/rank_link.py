"""Shared memory and bells between the ranks of one engine, made before they are forked; standard library only.

Ranks *meet*: each writes into its own part of the memory, tells the number of its turn, and waits until all others have
told theirs; then every rank may read what all have written. One turn's parts are written again two turns later. By then
every rank has come to the turn between, so it has read what it wanted, and nothing has to be acknowledged.

A rank that waits looks again and again for a short while, then sleeps at a pipe; who comes later rings. There is no
time limit: a rank that ends is the engine's end (``engine.ranks``), and one that computes for ever is noticed by the
host, as an engine of one rank is.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from engine.errors import RankError, RankGoneError
from isolation.ipc.doorbell import BellReader, BellWriter, create_pipe
from isolation.ipc.errors import PeerGoneError
from isolation.ipc.memory_order import LOOK_AGAIN_AT_MOST_S, LOOK_AGAIN_S, fence, require_total_store_order
from isolation.ipc.wiping import wipe

MOST_RANKS = 8
"""Ranks of one engine at the most: bounds memory and descriptors that are taken before a configuration is there."""

EXIT_RANK_GONE = 5
"""Exit status of a rank that ends because another has ended: the keeper gives that one's status."""

PART_BYTES = 4 << 20
"""Bytes that a rank writes in one turn at the most; more takes several turns. Pages that nobody writes take none."""

LOOKS = 1_500
"""Looks at another rank's turn before the waiting one sleeps: some 100 us, longer than ranks that compute alike differ,
and shorter than what a sandbox takes to sleep and to wake."""

_PARITIES = 2
_LINE_WORDS = 8
"""64-bit words of a cache line: what one rank writes lies in a line of its own."""
_CONTROL_BYTES = 4096
_TURN, _ASLEEP, _LENGTH = 0, 1, 2
"""Words of a rank's line: its turn, whether it sleeps, the bytes that it wrote in even and in odd turns."""
_SIZE_BYTES = 8
"""Bytes of the length before a told text."""


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
        self._words = self.memory[:_CONTROL_BYTES].cast("Q")
        self._own = rank * _LINE_WORDS
        self._bell = BellReader(bell)
        self._others = [(peer * _LINE_WORDS, BellWriter(fd)) for peer, fd in sorted(others.items())]
        self._turn = 0
        self._told: memoryview | None = None
        """What this rank told last, which is overwritten as soon as all have read it."""

    @property
    def turn(self) -> int:
        """Number of the next turn."""
        return self._turn + 1

    @property
    def bells(self) -> tuple[int, tuple[int, ...]]:
        """The descriptor that is read, and those that are written."""
        return self._bell.fd, tuple(writer.fd for _, writer in self._others)

    def place(self, rank: int, turn: int) -> int:
        """Offset in ``memory`` of what a rank writes in a turn."""
        return _CONTROL_BYTES + (turn % _PARITIES * self.size + rank) * PART_BYTES

    def meet(self, length: int) -> None:
        """Say that ``length`` bytes of this turn are written, and wait for all ranks to say theirs.

        Raises:
            RankGoneError: another rank has ended.
        """
        words = self._words
        turn = self._turn = self._turn + 1
        words[self._own + _LENGTH + turn % _PARITIES] = length
        words[self._own + _TURN] = turn
        fence()
        for line, bell in self._others:
            if words[line + _ASLEEP]:
                self._ring(bell)
        for line, _ in self._others:
            if words[line + _TURN] < turn:
                self._await(line + _TURN, turn)
        if self._told is not None:
            # All have come to this turn, so all have read what was told in the last one.
            self._told[:] = bytes(len(self._told))
            self._told = None

    def length_of(self, rank: int) -> int:
        """Bytes that a rank wrote in the turn that has just been met in."""
        return self._words[rank * _LINE_WORDS + _LENGTH + self._turn % _PARITIES]

    def tell(self, text: bytes | bytearray) -> None:
        """Give every other rank these bytes; they call ``hear``."""
        given = bytearray(_SIZE_BYTES + len(text))
        given[:_SIZE_BYTES] = len(text).to_bytes(_SIZE_BYTES, "little")
        given[_SIZE_BYTES:] = text
        whole = memoryview(given)
        for start in range(0, len(whole), PART_BYTES):
            piece = whole[start : start + PART_BYTES]
            place = self.place(self.rank, self.turn)
            room = self.memory[place : place + len(piece)]
            room[:] = piece
            self.meet(len(piece))
            self._told = room
        wipe(given)

    def hear(self, teller: int = 0) -> bytearray:
        """What rank ``teller`` tells: a copy, which the caller overwrites."""
        text = bytearray()
        size = _SIZE_BYTES
        while len(text) < size:
            self.meet(0)
            length = self.length_of(teller)
            if not 0 < length <= PART_BYTES:
                raise RankError(f"rank {teller} told {length} bytes in one turn; ranks are out of step")
            place = self.place(teller, self._turn)
            text += self.memory[place : place + length]
            size = _SIZE_BYTES + int.from_bytes(text[:_SIZE_BYTES], "little")
        del text[:_SIZE_BYTES]
        return text

    def _await(self, place: int, turn: int) -> None:
        words = self._words
        for _ in range(LOOKS):
            if words[place] >= turn:
                return
        asleep = self._own + _ASLEEP
        pause = LOOK_AGAIN_S
        words[asleep] = 1
        fence()
        while words[place] < turn:
            if not self._bell.wait(pause):
                pause = min(2 * pause, LOOK_AGAIN_AT_MOST_S)
            elif not self._bell.drain():
                raise RankGoneError("another rank of this engine has ended")
        words[asleep] = 0

    def _ring(self, bell: BellWriter) -> None:
        try:
            bell.ring()
        except PeerGoneError as error:
            raise RankGoneError("another rank of this engine has ended") from error


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
        memory = mmap.mmap(-1, _CONTROL_BYTES + _PARITIES * size * PART_BYTES)
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
