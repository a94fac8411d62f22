"""What running requests are to be charged, in memory that outlives the gateway which writes it.

The supervisor makes the memory, sealed, and hands it to the gateway. A request has a slot from before it enters an
engine until its entry was sent to the supervisor: the slot has the entry as it would be if the gateway ended now, and
numbers beside it that change while the answer is delivered. A number is one aligned word of eight bytes and is written
before the bytes that it counts leave the gateway, so a kill at any instruction leaves it whole. Once the gateway is
gone the supervisor reads the slots (``lost_requests``) and makes the entries that the gateway cannot make any more.
That it is gone is told by a pipe: the gateway holds the only end to write to, and the kernel closes it.

What a slot says is as hostile as an entry that a gateway reports: it is checked in the same way.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Final

from appliance.common.audit.entry import MAX_COUNT, MAX_TEXT, Entry, EntryError, from_wire, to_wire
from policy.model import Price
from policy.prices import cost

SLOT_BYTES = 4_096
"""Bytes of one slot: a page, which holds the longest entry that is sent."""

MAX_OPEN = 8_192
"""Slots: requests that run, and as many as wait in the feed of the audit log (``audit_feed.MAX_PENDING``). The lowest
free slot is used first, and only pages that were used take memory."""

SIZE = SLOT_BYTES * MAX_OPEN

GATEWAY_LOST = "GATEWAY_LOST"
"""Outcome of a request whose gateway ended before the request did."""

FREE, RUNS, ENDED = 0, 1, 2
"""States of a slot: nothing; a request that runs, charged what it was shown; one that ended with its outcome."""

STATE, TEXT_BYTES, OUTCOME_BYTES, SHOWN, INPUT, CACHED, OUTPUT = range(7)
PRICE_INPUT, PRICE_CACHED, PRICE_OUTPUT, MOST = range(7, 11)
"""Words of a slot. ``SHOWN`` is 1 once some of the answer was shown; ``MOST`` is the reserved cost plus one, or 0 where
none was reserved."""

END_INPUT, END_CACHED, END_OUTPUT = 11, 12, 13
"""Words that count once the slot's state is ``ENDED``."""

WORDS = 16
OUTCOME_AT = 8 * WORDS
TEXT_AT = OUTCOME_AT + MAX_TEXT
_HEAD = struct.Struct(f"={WORDS}q")
_BEHIND_STATE = struct.Struct(f"={WORDS - 1}q")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

NOWHERE: Final = memoryview(bytearray(8 * WORDS)).cast("q")
"""Words of requests without a slot: written, and read by nobody."""


def create_memory() -> int:
    """Return a new memfd for all slots, empty and sealed at its size; the caller owns the descriptor.

    Raises:
        OSError: there is no memory or no descriptor for it.
    """
    memfd = os.memfd_create("athanor-charges", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memfd, SIZE)
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memfd)
        raise
    return memfd


class OpenCharge:
    """Slot of one request, as its gateway writes it."""

    __slots__ = ("_owner", "entry", "page", "slot", "words")

    def __init__(self, owner: OpenCharges | None = None, slot: int = -1, entry: Entry | None = None) -> None:
        """Use ``OpenCharges.open``; without an owner nothing is kept."""
        self._owner = owner
        self.entry = entry
        """Entry as it was when the request was let in; None where nothing is kept."""
        self.slot = slot
        self.page = memoryview(b"")
        """Bytes of the slot."""
        self.words = NOWHERE
        """Numbers of the slot, which change in place."""

    def show(self, input_tokens: int, cached_tokens: int) -> None:
        """Note that some of the answer is about to be shown: the prompt is charged from now on."""
        words = self.words
        words[INPUT], words[CACHED] = input_tokens, cached_tokens
        words[SHOWN] = 1

    def end(self, outcome: str, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Note how the request ended and what it is charged, before its entry is on its way."""
        if self._owner is None:
            return
        words, text = self.words, outcome.encode("ascii", "replace")[:MAX_TEXT]
        words[END_INPUT], words[END_CACHED], words[END_OUTPUT] = input_tokens, cached_tokens, output_tokens
        self.page[OUTCOME_AT : OUTCOME_AT + len(text)] = text
        words[OUTCOME_BYTES] = len(text)
        words[STATE] = ENDED

    def release(self) -> None:
        """Free the slot: the entry was sent, or there will be none. The second and later calls do nothing."""
        if self._owner is not None:
            owner, self._owner = self._owner, None
            self.words[STATE] = FREE
            self.words, self.page = NOWHERE, memoryview(b"")
            owner.free(self.slot)


NO_CHARGE: Final = OpenCharge()
"""Charge of requests without a slot, which all share: lines of batches, and where no audit log is kept."""


class OpenCharges:
    """All slots of one gateway; all methods run in one event loop. Without memory no request has a slot."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._alive = -1
        """End of the pipe that tells the supervisor of this memory that this process lives."""
        self._open: dict[int, OpenCharge] = {}
        self._free: list[int] = []
        self._next = 0
        """Lowest slot that was never used."""

    def use(self, memfd: int, alive: int) -> None:
        """Write into this memory from now on, and take over both descriptors; what runs is moved into it.

        Raises:
            OSError: it cannot be mapped; the memory before stays in use.
            ValueError: it is not of the size that this version has.
        """
        try:
            if os.fstat(memfd).st_size != SIZE:
                raise ValueError("the memory of open charges is not of this version's size")
            memory = mmap.mmap(memfd, SIZE)
        except (OSError, ValueError):
            os.close(alive)
            raise
        finally:
            os.close(memfd)
        self._memory = memory
        for charge in self._open.values():
            before, words = charge.page, charge.words
            self._place(charge, memory)
            charge.page[8:] = before[8:]
            charge.words[STATE] = words[STATE]
            words[STATE] = FREE
        alive, self._alive = self._alive, alive
        if alive >= 0:
            os.close(alive)  # Only now: nothing is left that the end of the pipe would have charged.

    def open(self, one: Entry, price: Price, most: int | None) -> OpenCharge:
        """Keep a request's entry, whose numbers and outcome stand in the slot; ``most`` is the cost reserved for it,
        None where none was. Where there is no slot any more the charge is kept nowhere."""
        text = to_wire(one).encode()
        if self._memory is None or len(text) > SLOT_BYTES - TEXT_AT or not (self._free or self._next < MAX_OPEN):
            return NO_CHARGE
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._next = self._next, self._next + 1
        charge = self._open[slot] = OpenCharge(self, slot, one)
        self._place(charge, self._memory)
        charge.page[TEXT_AT : TEXT_AT + len(text)] = text
        reserved = 0 if most is None else min(most, MAX_COUNT) + 1
        prices = price.input, price.cached_input, price.output
        _BEHIND_STATE.pack_into(charge.page, 8, len(text), 0, 0, 0, 0, 0, *prices, reserved, 0, 0, 0, 0, 0)
        charge.words[STATE] = RUNS
        return charge

    def free(self, slot: int) -> None:
        """Give a slot to later requests."""
        if self._open.pop(slot, None) is not None:
            self._free.append(slot)

    @staticmethod
    def _place(charge: OpenCharge, memory: mmap.mmap) -> None:
        at = charge.slot * SLOT_BYTES
        charge.page = memoryview(memory)[at : at + SLOT_BYTES]
        charge.words = charge.page[: 8 * WORDS].cast("q")


def lost_requests(memfd: int) -> Iterator[Entry | None]:
    """Yield an entry for each request that a gateway left in its slots, once that gateway is gone. One that had ended
    has its outcome and its charge; one that ran has the outcome ``GATEWAY_LOST`` and what it had been shown, and no
    request costs more than what was reserved for it. For a slot that is free, or that no gateway writes, None: the
    caller may rest after any slot, and a hostile gateway fills all of them.

    Raises:
        OSError: the memory cannot be read.
    """
    # Read by calls: a look through a mapping would make pages of those that were never used.
    at = 0
    while True:
        try:
            at = os.lseek(memfd, at, os.SEEK_DATA) // SLOT_BYTES * SLOT_BYTES
        except OSError:
            return  # Behind the last page that was used.
        page = os.pread(memfd, SLOT_BYTES, at)
        at += SLOT_BYTES
        yield _entry(page) if len(page) == SLOT_BYTES else None


def _entry(page: bytes) -> Entry | None:
    """Return the entry of a slot; None for one that is free, or that no gateway has written."""
    words = _HEAD.unpack_from(page)
    if words[STATE] not in (RUNS, ENDED) or not all(0 <= word < MAX_COUNT for word in words):
        return None
    text = page[TEXT_AT : TEXT_AT + words[TEXT_BYTES]]
    try:
        one = from_wire(text.decode("ascii"))
    except (EntryError, UnicodeDecodeError):
        return None
    if one.kind != "request":
        return None
    if words[STATE] == ENDED:
        outcome = page[OUTCOME_AT : OUTCOME_AT + min(words[OUTCOME_BYTES], MAX_TEXT)].decode("ascii", "replace")
        numbers = words[END_INPUT], words[END_CACHED], words[END_OUTPUT]
    else:
        outcome = GATEWAY_LOST
        numbers = (words[INPUT], words[CACHED], words[OUTPUT]) if words[SHOWN] else (0, 0, 0)
    price = Price(input=words[PRICE_INPUT], cached_input=words[PRICE_CACHED], output=words[PRICE_OUTPUT])
    spent = cost(price, numbers[0], min(numbers[1], numbers[0]), numbers[2])
    if words[MOST]:
        spent = min(spent, words[MOST] - 1)
    charged = dict(zip(("input_tokens", "cached_tokens", "output_tokens"), numbers, strict=True))
    fields = one.fields | charged | {"cost": min(spent, MAX_COUNT - 1), "outcome": outcome}
    try:
        return from_wire(to_wire(Entry("request", fields)))
    except EntryError:
        return None
