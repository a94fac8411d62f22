"""Where what the ranks of one engine share lies in their memory; standard library only.

A control page: for each rank lines of 64-bit words that it alone writes, but for the flag by which others know that it
sleeps. Then the parts of meetings, and the slots of queues. Pages that nobody writes take no memory.
"""

from __future__ import annotations

MOST_RANKS = 8
"""Ranks of one engine at the most: bounds memory and descriptors that are taken before a configuration is there."""

PART_BYTES = 4 << 20
"""Bytes that a rank writes in one turn of a meeting at the most; more takes several turns."""

SLOTS = 8
"""Pieces that wait in a queue at the most."""

SLOT_BYTES = 1 << 20
"""Bytes of one piece at the most: the residual stream of 64 rows of 4,096 float32."""

PARITIES = 2
"""Turns of a meeting whose parts are there at once."""

EVERYONE, STAGE = 0, 1
"""Kinds of meetings: all ranks, and those of one stage. Each has words and parts of its own."""

LINE_WORDS = 8
"""64-bit words of a cache line: what one rank writes lies in lines of its own."""

_MEETINGS = 2
_LINES = 6
"""Lines of a rank: one for each kind of meeting, then sleep, what it sent, how long that is, and what it took."""
_SLEEP_LINE, _SENT_LINE, _LENGTH_LINE, _TAKEN_LINE = 2, 3, 4, 5
_WORD_BYTES = 8
CONTROL_BYTES = 4096
"""Bytes of the control page."""
assert SLOTS <= LINE_WORDS
assert MOST_RANKS * _LINES * LINE_WORDS * _WORD_BYTES <= CONTROL_BYTES


def memory_bytes(size: int) -> int:
    """Bytes of the memory of so many ranks."""
    return CONTROL_BYTES + size * (_MEETINGS * PARITIES * PART_BYTES + SLOTS * SLOT_BYTES)


def meeting_words(rank: int, kind: int) -> int:
    """First word of a rank's line for a kind of meeting."""
    return (rank * _LINES + kind) * LINE_WORDS


def sleep_word(rank: int) -> int:
    """Word that says whether a rank sleeps."""
    return (rank * _LINES + _SLEEP_LINE) * LINE_WORDS


def sent_word(rank: int) -> int:
    """Word with the number of pieces that a rank has put into its queue."""
    return (rank * _LINES + _SENT_LINE) * LINE_WORDS


def length_word(rank: int, number: int) -> int:
    """Word with the length of a piece that a rank has put into its queue, by the number of the piece."""
    return (rank * _LINES + _LENGTH_LINE) * LINE_WORDS + number % SLOTS


def taken_word(rank: int) -> int:
    """Word with the number of pieces that a rank has taken out of the queue that leads to it."""
    return (rank * _LINES + _TAKEN_LINE) * LINE_WORDS


def part_place(size: int, rank: int, kind: int, turn: int) -> int:
    """Offset of what a rank writes in a turn of a kind of meeting."""
    return CONTROL_BYTES + ((kind * PARITIES + turn % PARITIES) * size + rank) * PART_BYTES


def slot_place(size: int, rank: int, number: int) -> int:
    """Offset of the slot of a piece that a rank puts into its queue, by the number of the piece."""
    begin = CONTROL_BYTES + _MEETINGS * PARITIES * size * PART_BYTES
    return begin + (rank * SLOTS + number % SLOTS) * SLOT_BYTES
