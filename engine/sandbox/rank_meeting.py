"""Ranks that meet in memory which they share; standard library only.

Each rank writes into its own part of the memory, tells the number of its turn, and waits until all others have told
theirs; then every rank may read what all have written. One turn's parts are written again two turns later. By then
every rank has come to the turn between, so it has read what it wanted, and nothing has to be acknowledged.
"""

from __future__ import annotations

from typing import Protocol

from engine.errors import RankError
from engine.sandbox.rank_memory import PARITIES, PART_BYTES, meeting_words, part_place
from isolation.ipc.memory_order import fence
from isolation.ipc.wiping import wipe

_TURN, _LENGTH = 0, 1
"""Words of a rank's line: its turn, and the bytes that it wrote in even and in odd turns."""
_SIZE_BYTES = 8
"""Bytes of the length before a told text."""


class Waiting(Protocol):
    """What a meeting needs of ``engine.sandbox.rank_link.RankLink``."""

    @property
    def rank(self) -> int:
        """This rank's number among all."""

    @property
    def size(self) -> int:
        """Number of all ranks."""

    @property
    def memory(self) -> memoryview:
        """What all ranks share."""

    @property
    def words(self) -> memoryview:
        """The control page, as 64-bit words."""

    def wake(self, rank: int) -> None:
        """Ring a rank that sleeps."""

    def wait_for(self, place: int, value: int) -> None:
        """Wait until a word has a value at least."""


class Meeting:
    """One rank's end of a meeting of some ranks."""

    def __init__(self, link: Waiting, ranks: tuple[int, ...], kind: int) -> None:
        """``ranks``: numbers of those that meet, this one among them; ``kind``: see ``rank_memory``."""
        self.rank = ranks.index(link.rank)
        """Place among those that meet."""
        self.size = len(ranks)
        self.memory = link.memory
        self._link = link
        self._ranks = ranks
        self._kind = kind
        self._lines = [meeting_words(rank, kind) for rank in ranks]
        self._own = self._lines[self.rank]
        self._others = [(rank, line) for rank, line in zip(ranks, self._lines, strict=True) if rank != link.rank]
        self._turn = 0
        self._told: memoryview | None = None
        """What this rank told last, which is overwritten as soon as all have read it."""

    @property
    def turn(self) -> int:
        """Number of the next turn."""
        return self._turn + 1

    def place(self, rank: int, turn: int) -> int:
        """Offset in ``memory`` of what the rank at this place writes in a turn."""
        return part_place(self._link.size, self._ranks[rank], self._kind, turn)

    def meet(self, length: int) -> None:
        """Say that ``length`` bytes of this turn are written, and wait for all ranks to say theirs.

        Raises:
            RankGoneError: another rank has ended.
        """
        words, link = self._link.words, self._link
        turn = self._turn = self._turn + 1
        words[self._own + _LENGTH + turn % PARITIES] = length
        words[self._own + _TURN] = turn
        fence()
        for rank, _ in self._others:
            link.wake(rank)
        for _, line in self._others:
            if words[line + _TURN] < turn:
                link.wait_for(line + _TURN, turn)
        if self._told is not None:
            # All have come to this turn, so all have read what was told in the last one.
            self._told[:] = bytes(len(self._told))
            self._told = None

    def length_of(self, rank: int) -> int:
        """Bytes that the rank at this place wrote in the turn that has just been met in."""
        length: int = self._link.words[self._lines[rank] + _LENGTH + self._turn % PARITIES]
        return length

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
        """What the rank at place ``teller`` tells: a copy, which the caller overwrites."""
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
