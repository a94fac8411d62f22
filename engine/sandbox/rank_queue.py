"""A queue from one rank to the next, in memory that they share; standard library only.

A stage of a pipeline passes plans and the residual stream on to the next one, and the last stage gives its results to
the first, so that queues make a ring: each rank has one queue that leads to it, and one that leads away. What is sent
is cut into pieces. The sender counts those that it has put into slots, the receiver those that it has taken out; a
sender waits only while all slots are full.

A ring of full queues would stop for good. It cannot fill: the first stage takes every result that is on its way before
it sends what does not fit (``has_room``).
"""

from __future__ import annotations

from engine.errors import RankError
from engine.sandbox.rank_meeting import Waiting
from engine.sandbox.rank_memory import SLOT_BYTES, SLOTS, length_word, sent_word, slot_place, taken_word
from isolation.ipc.memory_order import fence
from isolation.ipc.wiping import wipe

_SIZE_BYTES = 8
"""Bytes of the length before a text."""


class RankQueue:
    """One rank's ends of the queue that leads to it, and of the one that leads away; either may be missing."""

    def __init__(self, link: Waiting, source: int | None, target: int | None) -> None:
        """``source``, ``target``: the ranks at the other ends; None: there is none."""
        self._link = link
        self._source = source
        self._target = target
        self._sent = self._taken = 0

    def has_room(self, length: int) -> bool:
        """Whether so many bytes can be sent without waiting."""
        assert self._target is not None, "no queue leads away from this rank"
        return -(-length // SLOT_BYTES) <= SLOTS - (self._sent - self._link.words[taken_word(self._target)])

    def send(self, data: memoryview) -> None:
        """Put bytes into the queue that leads away, waiting while it is full. Returns when all are copied.

        Raises:
            RankGoneError: another rank has ended.
        """
        link, target = self._link, self._target
        assert target is not None, "no queue leads away from this rank"
        words, taken = link.words, taken_word(target)
        for start in range(0, len(data), SLOT_BYTES):
            if self._sent - words[taken] >= SLOTS:
                link.wait_for(taken, self._sent - SLOTS + 1)
            piece = data[start : start + SLOT_BYTES]
            place = slot_place(link.size, link.rank, self._sent)
            link.memory[place : place + len(piece)] = piece
            words[length_word(link.rank, self._sent)] = len(piece)
            self._sent += 1
            words[sent_word(link.rank)] = self._sent
            fence()
            link.wake(target)

    def send_text(self, text: bytes | bytearray) -> None:
        """Put a text of any length into the queue that leads away; the other end calls ``receive_text``."""
        given = bytearray(_SIZE_BYTES + len(text))
        given[:_SIZE_BYTES] = len(text).to_bytes(_SIZE_BYTES, "little")
        given[_SIZE_BYTES:] = text
        self.send(memoryview(given))
        wipe(given)

    def receive(self, out: memoryview) -> None:
        """Take the next bytes out of the queue that leads here, just as many as were sent at once.

        Raises:
            RankGoneError: another rank has ended.
            RankError: something else was sent.
        """
        place = 0
        while place < len(out):
            piece = self._next()
            if len(piece) != min(SLOT_BYTES, len(out) - place):
                raise RankError(f"a rank sent a piece of {len(piece)} bytes in {len(out)}; ranks are out of step")
            out[place : place + len(piece)] = piece
            place += len(piece)
            self._free()

    def receive_text(self) -> bytearray:
        """Take the next text: a copy, which the caller overwrites. What was in the queue is overwritten here."""
        text, size = bytearray(), _SIZE_BYTES
        while len(text) < size:
            piece = self._next()
            text += piece
            piece[:] = bytes(len(piece))
            self._free()
            size = _SIZE_BYTES + int.from_bytes(text[:_SIZE_BYTES], "little")
        if len(text) != size:
            raise RankError(f"a rank sent a text of {size} bytes in {len(text)}; ranks are out of step")
        del text[:_SIZE_BYTES]
        return text

    def _next(self) -> memoryview:
        """The next piece, waited for; it stays in its slot until ``_free``."""
        link, source = self._link, self._source
        if source is None:
            raise RankError("no queue leads to this rank; ranks are out of step")
        sent = sent_word(source)
        if link.words[sent] <= self._taken:
            link.wait_for(sent, self._taken + 1)
        length = link.words[length_word(source, self._taken)]
        if not 0 < length <= SLOT_BYTES:
            raise RankError(f"rank {source} sent a piece of {length} bytes; ranks are out of step")
        place = slot_place(link.size, source, self._taken)
        return link.memory[place : place + length]

    def _free(self) -> None:
        """Give the slot of the piece that was taken back to the sender."""
        link, source = self._link, self._source
        assert source is not None, "a piece came from somewhere"
        self._taken += 1
        link.words[taken_word(link.rank)] = self._taken
        fence()
        link.wake(source)
