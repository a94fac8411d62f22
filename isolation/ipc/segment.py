"""The shared memory of one sandbox: a sealed memfd, divided into named arenas.

The host creates the memfd, gives it its size and seals it: nobody, the sandbox included, can shrink
or grow it afterwards or take the seals off. Without them a sandbox could truncate the file, and the
host's next access would be a SIGBUS. The sandbox can still write anywhere in it, so nothing that the
host must rely on lives here.

A ``Layout`` says which bytes belong to whom. It travels beside the descriptor, packed (format in
``Layout.encode``), and is checked on both sides.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import struct
from dataclasses import dataclass

from isolation.ipc.errors import LocalProtocolError, RemoteProtocolError
from isolation.ipc.memory_order import require_total_store_order
from isolation.ipc.messages import PROTOCOL_VERSION
from isolation.ipc.ring import CONTROL_BYTES

PAGE_BYTES = 4096
"""Arenas begin and end on pages, so that one can be touched or protected alone."""

RING_BYTES = 8 << 20
"""Data of one ring: the largest frame and 3 MiB beside it, or some seconds of step outputs."""

HOST_TO_GUEST = "host-to-guest"
GUEST_TO_HOST = "guest-to-host"

MAX_ARENAS = 16
MAX_NAME_BYTES = 32
MAX_SEGMENT_BYTES = 1 << 40
"""Bytes of all arenas: above any machine's KV spill, and far from the ends of 64 bits."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NAME = re.compile(r"[a-z][a-z0-9-]*\Z")
_LAYOUT = struct.Struct("<HH")
_ARENA = struct.Struct("<QQB")
MAX_LAYOUT_BYTES = _LAYOUT.size + MAX_ARENAS * (_ARENA.size + MAX_NAME_BYTES)


@dataclass(frozen=True, slots=True)
class Arena:
    """A part of the segment with one purpose; offset and length in bytes, both whole pages."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The arenas of a segment, in ascending order, without overlap."""

    version: int
    """Protocol version of the program that made it."""
    arenas: tuple[Arena, ...]

    def __post_init__(self) -> None:
        """Refuse a layout outside the bounds with ValueError."""
        if not 1 <= len(self.arenas) <= MAX_ARENAS:
            raise ValueError(f"a layout has 1 to {MAX_ARENAS} arenas, not {len(self.arenas)}")
        end = 0
        for arena in self.arenas:
            if not _NAME.match(arena.name) or len(arena.name) > MAX_NAME_BYTES:
                raise ValueError("an arena's name is not short, lower-case ASCII")
            if arena.offset < end or arena.length <= 0:
                raise ValueError(f"arena {arena.name} is empty or overlaps the one before it")
            if arena.offset % PAGE_BYTES or arena.length % PAGE_BYTES:
                raise ValueError(f"arena {arena.name} does not begin and end on a page")
            end = arena.offset + arena.length
        if end > MAX_SEGMENT_BYTES:
            raise ValueError(f"a segment of {end} bytes is above {MAX_SEGMENT_BYTES}")
        if len({arena.name for arena in self.arenas}) != len(self.arenas):
            raise ValueError("two arenas have one name")

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return self.arenas[-1].offset + self.arenas[-1].length

    def encode(self) -> bytes:
        """Packed: version u16, count u16; of each arena offset u64, length u64, name length u8 and
        name; little-endian."""
        parts = [_LAYOUT.pack(self.version, len(self.arenas))]
        for arena in self.arenas:
            name = arena.name.encode()
            parts += (_ARENA.pack(arena.offset, arena.length, len(name)), name)
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Read what ``encode`` wrote.

        Raises:
            RemoteProtocolError: the bytes are no layout of this protocol version.
        """
        try:
            version, count = _LAYOUT.unpack_from(data)
            if version != PROTOCOL_VERSION or count > MAX_ARENAS:
                raise RemoteProtocolError(f"a layout of version {version} with {count} arenas")
            arenas = []
            position = _LAYOUT.size
            for _ in range(count):
                offset, length, name_bytes = _ARENA.unpack_from(data, position)
                position += _ARENA.size
                name = data[position : position + name_bytes].decode("ascii")
                position += name_bytes
                arenas.append(Arena(name, offset, length))
            if position != len(data):
                raise RemoteProtocolError("a layout does not end where its bytes end")
            return cls(version, tuple(arenas))
        except (struct.error, ValueError) as error:
            raise RemoteProtocolError(f"malformed layout: {error}") from error


def standard_layout(*others: tuple[str, int]) -> Layout:
    """The two rings and, behind them, further arenas given by name and length in bytes.

    Lengths are rounded up to whole pages.
    """
    arenas = []
    offset = 0
    ring_bytes = CONTROL_BYTES + RING_BYTES
    for name, length in ((HOST_TO_GUEST, ring_bytes), (GUEST_TO_HOST, ring_bytes), *others):
        rounded = (length + PAGE_BYTES - 1) // PAGE_BYTES * PAGE_BYTES
        arenas.append(Arena(name, offset, rounded))
        offset += rounded
    return Layout(PROTOCOL_VERSION, tuple(arenas))


def create(layout: Layout) -> int:
    """A new memfd of the layout's size, all zeros, sealed; the caller owns the descriptor."""
    memfd = os.memfd_create("athanor-ipc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memfd, layout.size)
        fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(memfd)
        raise
    return memfd


class Segment:
    """A mapped segment. It does not own the descriptor it was mapped from."""

    def __init__(self, memory: mmap.mmap, layout: Layout) -> None:
        self._memory = memory
        self._layout = layout

    def arena(self, name: str) -> memoryview:
        """The bytes of one arena, writable; release the view before ``close``.

        Raises:
            LocalProtocolError: the layout has no such arena.
        """
        for arena in self._layout.arenas:
            if arena.name == name:
                view = memoryview(self._memory)
                return view[arena.offset : arena.offset + arena.length]
        raise LocalProtocolError(f"the layout has no arena {name}")

    def close(self) -> None:
        """Unmap; all views must have been released."""
        self._memory.close()


def map_segment(memfd: int, layout: Layout, *, check_seals: bool = True) -> Segment:
    """Map the whole segment.

    The guest passes ``check_seals=False``: gVisor answers F_GET_SEALS on a descriptor from outside
    with EINVAL, and the guest has nothing to fear from the host's file.

    Raises:
        RemoteProtocolError: the file is not sealed, or smaller than the layout.
    """
    require_total_store_order()
    if check_seals:
        try:
            seals = fcntl.fcntl(memfd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise RemoteProtocolError("the segment is not a sealable memfd") from error
        if seals & _SEALS != _SEALS:
            raise RemoteProtocolError("the segment can still be shrunk, grown or unsealed")
    size = os.fstat(memfd).st_size
    if size < layout.size:
        raise RemoteProtocolError(f"the segment has {size} bytes and its layout {layout.size}")
    return Segment(mmap.mmap(memfd, layout.size), layout)
