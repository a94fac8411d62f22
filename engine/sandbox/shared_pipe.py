"""Two streams of bytes between two processes of one sandbox, in memory that both map, with a pipe each way as bell.

Inside gVisor a pipe's content passes through the heap of gVisor's own process. No guest can overwrite it there: a copy
of a tenant's grammar stayed for as long as nothing larger came through. Here the bells alone are pipes, over which
zeros pass, and the reader overwrites with zeros what it has taken.

The memory begins with a page of words, each alone on its pair of cache lines. For each direction there are three:
``tail`` (the writer: bytes end here), ``head`` (the reader: everything before is taken) and ``waiting`` (set by a
writer that met full memory, taken by the reader that made room and rings). Behind it lie the two areas. Cursors count
bytes since the beginning and never wrap. A side keeps its own cursor in a local variable and checks that of the other,
which may be hostile. It rings after every write, so no flag says whether the reader sleeps.
``isolation.ipc.memory_order`` says why plain loads and stores suffice.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import Self

from isolation.ipc.doorbell import BellReader, BellWriter
from isolation.ipc.errors import PeerGoneError, RemoteProtocolError
from isolation.ipc.memory_order import fence
from isolation.ipc.wiping import ZEROS

AREA_BYTES = 64 << 10
"""Bytes of each direction, as Linux gives a pipe."""

_CONTROL_BYTES = 4096
_TAIL, _HEAD, _WAITING, _DIRECTION = 0, 16, 32, 64
"""Words 128 bytes apart; those of the second direction stand so many words behind those of the first."""

SIZE_BYTES = _CONTROL_BYTES + 2 * AREA_BYTES

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class SharedMemory:
    """``SIZE_BYTES`` of zeros that two processes map.

    The C library's own call and not ``mmap.mmap``, which copies the descriptor and looks at the file: calls that the
    lists of a text sandbox do not have.
    """

    def __init__(self, memfd: int | None) -> None:
        """Map a descriptor's memory or, for processes that are forked later, memory without a name.

        The caller has asked ``require_total_store_order`` before its lock-down.

        Raises:
            OSError: the address space or the sandbox's memory does not allow it.
        """
        flags = mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if memfd is None else 0)
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        found = _LIBC.mmap(None, SIZE_BYTES, rights, flags, -1 if memfd is None else memfd, 0)
        if found == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot map shared memory: {os.strerror(number)}")
        self._address = found
        self.view = memoryview((ctypes.c_ubyte * SIZE_BYTES).from_address(found)).cast("B")

    def close(self) -> None:
        """Unmap it; all other views must have been released."""
        self.view.release()
        _LIBC.munmap(self._address, SIZE_BYTES)


class SharedPipe:
    """One side's end. One thread of one process uses it; it owns its mapping and its two descriptors."""

    def __init__(self, memory: SharedMemory, bell_in: int, bell_out: int, *, first: bool) -> None:
        """Take an end, before the other side has taken or written anything that this side would have to know.

        Args:
            memory: what both processes map.
            bell_in: the end of a pipe that this side reads. Where it blocks, ``read`` does.
            bell_out: the end of the other pipe, which this side writes.
            first: True on one side, False on the other.
        """
        self._memory = memory
        second = _CONTROL_BYTES + AREA_BYTES
        self._words = memory.view[:_CONTROL_BYTES].cast("Q")
        areas = memory.view[_CONTROL_BYTES:second], memory.view[second:]
        self._outbound, self._inbound = areas if first else reversed(areas)
        self._out, self._in = (0, _DIRECTION) if first else (_DIRECTION, 0)
        self._tail = self._head = 0
        self._bell_in, self._bell_out = BellReader(bell_in), BellWriter(bell_out)

    @classmethod
    def opened(cls, memfd: int, bell_in: int, bell_out: int, *, first: bool) -> Self:
        """Map the memory of a descriptor, which is closed, and take an end of it.

        Raises:
            OSError: as ``SharedMemory``.
        """
        try:
            memory = SharedMemory(memfd)
        finally:
            os.close(memfd)
        return cls(memory, bell_in, bell_out, first=first)

    @property
    def bells(self) -> tuple[int, int]:
        """Descriptors of the inbound bell and of the outbound one."""
        return self._bell_in.fd, self._bell_out.fd

    def fileno(self) -> int:
        """Return the descriptor that is readable when bytes or room have come, or the other side has ended."""
        return self._bell_in.fd

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write as many bytes as there is room for, and ring; return their number.

        Where it is less than all, the bell rings once there is room.

        Raises:
            PeerGoneError: the other side has ended.
            RemoteProtocolError: the reader's cursor is not possible.
        """
        written = self._put(data)
        if written < len(data):
            self._words[self._out + _WAITING] = 1
            fence()
            written += self._put(data[written:])  # Room may have come before the flag was up.
        self._bell_out.ring()
        return written

    def read(self) -> bytearray | None:
        """Take and overwrite all bytes that are there; None once the other side has ended and all is taken.

        Raises:
            RemoteProtocolError: the writer's cursor is not possible.
        """
        lives = self._bell_in.drain()
        data = self._take()
        if data:
            fence()
            if self._words[self._in + _WAITING]:
                self._words[self._in + _WAITING] = 0
                with suppress(PeerGoneError):  # The next read tells.
                    self._bell_out.ring()
        return data if data or lives else None

    def close(self) -> None:
        """Overwrite both areas, unmap them and close the descriptors."""
        for area in (self._outbound, self._inbound):
            area[:] = ZEROS[:AREA_BYTES]
            area.release()
        self._words.release()
        self._memory.close()
        for fd in self.bells:
            os.close(fd)

    def _put(self, data: bytes | bytearray | memoryview) -> int:
        head = self._words[self._out + _HEAD]
        room = AREA_BYTES - self._held(self._tail, head)
        size = min(room, len(data))
        start = self._tail % AREA_BYTES
        before_wrap = min(size, AREA_BYTES - start)
        with memoryview(data) as view:
            self._outbound[start : start + before_wrap] = view[:before_wrap]
            self._outbound[: size - before_wrap] = view[before_wrap:size]
        self._tail += size
        self._words[self._out + _TAIL] = self._tail
        return size

    def _take(self) -> bytearray:
        size = self._held(self._words[self._in + _TAIL], self._head)
        data = bytearray(size)
        start = self._head % AREA_BYTES
        before_wrap = min(size, AREA_BYTES - start)
        for place, begin, count in ((0, start, before_wrap), (before_wrap, 0, size - before_wrap)):
            data[place : place + count] = self._inbound[begin : begin + count]
            self._inbound[begin : begin + count] = ZEROS[:count]
        self._head += size
        self._words[self._in + _HEAD] = self._head
        return data

    def _held(self, tail: int, head: int) -> int:
        if not 0 <= tail - head <= AREA_BYTES:
            raise RemoteProtocolError(f"a shared pipe is written up to {tail} and read up to {head}")
        return tail - head


def memory_by_descriptor() -> int:
    """Return a descriptor of memory for a pair of ends, which goes to the second process over a socket."""
    memfd = os.memfd_create("athanor-pipe", os.MFD_CLOEXEC)
    os.ftruncate(memfd, SIZE_BYTES)
    return memfd
