"""Overwrites what this process has freed, all of it in one go, now and then instead of at every free.

A freed piece of memory keeps its content until its place is used again, so a program that takes every free piece and
fills it has overwritten them all. ``Sweeper`` does that with public functions of the C library alone (malloc(3),
mallinfo(3), madvise(2)), the largest pieces first: a request for so many bytes is served from the free pieces as long
as one of them is large enough, and from the *top* of the heap, which has never been used or is given back to the
system, only then. It costs what is free, not what was freed: a few milliseconds each time, however busy the process.

For programs of one thread whose Python takes all objects from the C library (``isolation.gvisor.environment.SWEPT``);
whether both hold is tried when a sweeper is made. Where other threads are about, the C library itself overwrites what
is freed, except for the few pieces that it keeps for each thread: those are what ``overwrite_cached`` takes.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Callable
from typing import Final

from isolation.ipc.errors import SweepError

PERIOD_S: Final = 2.0
"""Seconds between two sweeps while there is work: what was freed is gone within them, of the 5 that are promised."""

CACHED_PIECES: Final = 32
"""Pieces of each size that the C library keeps for each thread of a program that calls ``overwrite_cached``."""

_SMALLEST, _CACHED, _SMALL, _STEP = 24, 1032, 2040, 16
"""Usable bytes of glibc's pieces on 64 bits: the smallest, the largest that is kept for a thread, the largest that is
taken as a Python object here, and what lies between two sizes."""

_LARGEST: Final = 32 << 20
"""Bytes of the first requests; free pieces that are larger are taken in several."""

_GIVEN_BACK: Final = 256 << 10
"""Bytes from which on a piece's pages go back to the system, which is cheaper than to write zeros into them."""

_HEAD: Final = sys.getsizeof(b"")
"""Bytes of a ``bytes`` object beside its content, the zero at its end among them."""

_NUMBER: Final = 40
"""Usable bytes of the piece of a Python number that is not ready-made."""

_SLOTS: Final = 254
"""Objects that are held in one list, besides the list before: its indexes are Python's ready-made small numbers, no
list grows, and such a list fills its piece to the last byte."""

_HEADER: Final = 16
"""Bytes of a piece before what malloc gives, where its size stands."""

_ZERO: Final = b"\0"
_ONE = 1.0

_MARK: Final = bytes(range(1, 256)) * 8


class _Info(ctypes.Structure):
    """What mallinfo2(3) gives."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def _zeros(usable: int) -> bytes:
    """An object that lies in a piece of so many usable bytes (more than ``_SMALLEST``), with zeros to the last."""
    return _ZERO * (usable - _HEAD)


def overwrite_cached(pieces: int = CACHED_PIECES) -> None:
    """Overwrite the free pieces that the C library keeps for the calling thread, ``pieces`` (<= 255) of each size."""
    held: list[object] = [None] * pieces
    slots, zero = range(pieces), _ZERO  # Every idle gateway does this all day: names are looked up once.
    for slot in slots:
        held[slot] = bytearray(_SMALLEST - 1)  # No immutable object is so small, but what this holds, with a zero.
    for usable in range(_SMALLEST + _STEP, _CACHED + 1, _STEP):
        size = usable - _HEAD
        for slot in slots:
            held[slot] = None
        for slot in slots:
            held[slot] = zero * size
    for slot in slots:
        held[slot] = None


def _is_marked(place: int) -> bool:
    """Whether memory where an object with a piece of ``_MARK`` was still holds some of it."""
    return ctypes.string_at(place + 2 * _HEAD, 64) in _MARK


def check_overwriting() -> None:
    """Try whether what this process frees is overwritten, by the C library or by ``overwrite_cached``.

    Raises:
        SweepError: it is not: the process was not started with the environment that it takes.
    """
    small, large = ([_MARK[:size] for _ in range(2 * CACHED_PIECES)] for size in (200, 2_000))
    guard = bytes(len(_MARK))  # So that what is freed does not become the top, which is given back.
    places, at_once = [id(mark) for mark in small], [id(mark) for mark in large]
    del small, large
    left = any(map(_is_marked, at_once))
    overwrite_cached()
    if left or any(map(_is_marked, places)) or not guard:
        raise SweepError("freed memory is not overwritten: the environment lacks PYTHONMALLOC and GLIBC_TUNABLES")


class Rounds:
    """When to sweep: soon after work, never oftener than every ``PERIOD_S``, and not at all where there was none."""

    def __init__(self, sweep: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._sweep = sweep
        self._clock = clock
        self._due = 0.0

    def worked(self) -> None:
        """Something was done that may have left its content behind."""
        self._due = self._due or self._clock() + PERIOD_S

    def left_s(self, most: float) -> float:
        """Seconds to the next sweep; ``most`` where that is later or there is none."""
        return min(most, max(0.0, self._due - self._clock())) if self._due else most

    def turn(self) -> None:
        """Sweep where that is due.

        Raises:
            SweepError: as ``Sweeper.sweep``.
        """
        if self._due and self._clock() >= self._due:
            self._due = 0.0
            self._sweep()


class Sweeper:
    """Overwrites all free memory of this process; not for processes with several threads."""

    def __init__(self) -> None:
        """Find the C library's functions, and try them.

        Raises:
            SweepError: it is not glibc 2.33 or later, or the environment of this program is not ``SWEPT``.
        """
        # Functions of a PyDLL are called with the interpreter's lock held: nobody else allocates meanwhile.
        self._libc = libc = ctypes.PyDLL(None)
        try:
            libc.mallinfo2.restype = _Info
            libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
            libc.malloc.argtypes = libc.malloc_usable_size.argtypes = (ctypes.c_size_t,)
            libc.malloc_usable_size.restype = ctypes.c_size_t
        except AttributeError as error:
            raise SweepError("overwriting freed memory needs glibc 2.33 or later") from error
        libc.sbrk.argtypes = (ctypes.c_ssize_t,)
        libc.free.argtypes = (ctypes.c_size_t,)
        libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
        self._try()

    def sweep(self) -> None:
        """Overwrite whatever is free, and give the top of the heap back to the system.

        Raises:
            SweepError: the heap is not laid out as it was.
        """
        gc.collect(1)
        # Small pieces that were freed grow together when a large one is asked for, also with the top.
        self._libc.free(self._libc.malloc(_LARGEST) or 0)
        top, end = self._top()
        self._blank(top + _HEADER, end)  # First: from here on memory is taken from there, too.
        large = self._take_large(top)
        # Those from the top go last, and merge with it. The C library must keep none for the thread (``SWEPT``): a kept
        # one would hold up the top, and the next sweep would take the next piece from there.
        below, above = _take_small(top)
        del below
        del above
        while large:
            link = ctypes.c_size_t.from_address(large)
            piece, large = large, link.value
            link.value = 0
            self._libc.free(piece)

    def _top(self) -> tuple[int, int]:
        """Where the top of the heap begins and ends."""
        end = self._libc.sbrk(0) or 0
        size = self._libc.mallinfo2().keepcost
        start = end - size
        if not 2 * _HEADER <= size < end or ctypes.c_size_t.from_address(start + 8).value & ~7 != size:
            raise SweepError("the top of the heap is not where the C library says")
        return start, end

    def _take_large(self, top: int) -> int:
        """Take all free pieces that are too large for ``_take_small``, blank; gives the last, each names the one
        before."""
        last, size = 0, _LARGEST
        while size > _SMALL:
            piece = self._libc.malloc(size)
            if not piece:
                raise SweepError("no memory is left to overwrite what is free")
            if piece >= top:
                self._libc.free(piece)
                size //= 2
                continue
            self._blank(piece, piece + self._libc.malloc_usable_size(piece))
            ctypes.c_size_t.from_address(piece).value = last
            last = piece
        return last

    def _blank(self, start: int, end: int) -> None:
        """Make memory zero."""
        first, behind = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if behind - first < _GIVEN_BACK or self._libc.madvise(first, behind - first, mmap.MADV_DONTNEED):
            ctypes.memset(start, 0, end - start)
        else:
            ctypes.memset(start, 0, first - start)
            ctypes.memset(behind, 0, end - behind)

    def _try(self) -> None:
        """Sweep, and look whether that overwrote a small object and a large one."""
        marks = [_MARK[:200], _MARK[:700], _MARK * 256]
        others = [bytes(len(mark)) for mark in marks]  # So that what is freed does not become part of the top.
        places = [id(mark) for mark in marks]
        top, end = self._top()
        start = end - self._libc.mallinfo2().arena
        del marks
        if not all(start < place < top for place in places):
            raise SweepError("objects are not all in the heap: the environment is not the one that wiping needs")
        self.sweep()
        del others
        if any(map(_is_marked, places)):
            raise SweepError("freed memory was not overwritten")


def _take_small(top: int) -> tuple[list[object], list[object]]:
    """Take all free pieces up to ``_SMALL`` bytes as objects, from the largest to the smallest; gives what holds them,
    and what holds the one of each size that had to come from the top."""
    held: list[object] = [None] * (_SLOTS + 1)
    above: list[object] = [None] * _SLOTS
    slot, before = 0, None
    for place, usable in enumerate(range(_SMALL, _SMALLEST - 1, -_STEP)):
        # A float fills the smallest piece: count, type, value. (Some come from Python's own store: no harm done.)
        while id(one := _zeros(usable) if usable > _SMALLEST else _ONE / _ONE) < top:
            if slot == _SLOTS:
                before, held = held, [None] * (_SLOTS + 1)
                held[0], slot = before, 0
            slot += 1
            held[slot] = one
        above[place] = one
    # Where the numbers above were: Python 3.11 leaves one, 3.12 and later two. No loop: it would be a number more.
    above[-1] = _zeros(_NUMBER)
    above[-2] = _zeros(_NUMBER)
    above[-3] = _zeros(_NUMBER)
    return held, above
