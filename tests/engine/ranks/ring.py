"""Four ranks in two stages, without tensors: ``python -m tests.engine.ranks.ring`` ends with 0 when all heard alike."""

from __future__ import annotations

import os
import sys

from engine.errors import RankError
from engine.sandbox.rank_link import RankLink, RankRoom
from engine.sandbox.rank_memory import SLOT_BYTES, SLOTS
from engine.sandbox.rank_place import RankPlace

TURNS = 12
LONG, SHORT = b"t" * (SLOT_BYTES * 2 + 5), b"short"
STREAM = SLOT_BYTES * 3 + 1
"""Bytes that a stage passes on: a turn's are more than a slot, and several turns' more than a queue."""
RESULT = 5000


def run(link: RankLink) -> None:
    """Do as an engine's ranks do: texts from rank 0, streams from stage to stage, results back."""
    place = RankPlace.of(link, 2)
    assert place.stage == link.rank // 2
    assert place.answers == (link.rank == 2)
    for turn in range(TURNS):
        text = SHORT if turn % 5 else LONG
        if link.rank:
            assert bytes(place.hear()) == text
        else:
            place.tell(text)
        exchange(place, turn)
    place.meet()
    check_out_of_step(place)


def exchange(place: RankPlace, turn: int) -> None:
    """One turn's stream and result."""
    queue, rank = place.queue, place.link.rank
    assert queue is not None
    stream, result = bytearray(STREAM), bytearray(RESULT)
    if place.stage == 0:
        queue.send(memoryview(bytes([turn]) * STREAM))
    else:
        queue.receive(memoryview(stream))
        assert stream == bytes([turn]) * STREAM
    if place.answers:
        queue.send(memoryview(bytes([turn]) * RESULT))
    if rank == 0:
        queue.receive(memoryview(result))
        assert result == bytes([turn]) * RESULT


def check_out_of_step(place: RankPlace) -> None:
    """A full queue has no room, and one that gets another number of bytes than it waits for says so."""
    queue = place.queue
    assert queue is not None
    if place.link.rank == 0:
        assert queue.has_room(SLOTS * SLOT_BYTES)
        queue.send(memoryview(bytes(7)))
        assert not queue.has_room(SLOTS * SLOT_BYTES)
    elif place.link.rank == 2:
        try:
            queue.receive(memoryview(bytearray(8)))
        except RankError:
            return
        raise AssertionError("ranks that are out of step went on")


def main() -> int:
    """Fork the ranks; gives 0 when all ended well."""
    room = RankRoom.create(4)
    children = []
    for rank in range(4):
        child = os.fork()
        if child == 0:
            run(room.link(rank))
            os._exit(0)
        children.append(child)
    room.close()
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
