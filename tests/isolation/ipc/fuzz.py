"""What a fuzzer may call: any bytes in, only RemoteProtocolError inside, and one frame a message.

``fuzz_decode`` and ``fuzz_ring`` return nothing and raise only when a promise is broken, which is
the form coverage-guided fuzzers ask for.
"""

from __future__ import annotations

from isolation.ipc.codec import decode, encode
from isolation.ipc.errors import RemoteProtocolError
from isolation.ipc.messages import MAX_FRAME_BYTES
from isolation.ipc.ring import CONTROL_BYTES, RingReader

_ARENA_BYTES = CONTROL_BYTES + MAX_FRAME_BYTES
_CURSOR_BYTES = 8
_HEAD_AT = 128
_MAX_POPS = 1000


def fuzz_decode(data: bytes) -> None:
    """Decode; a message that comes out must encode to the very same bytes."""
    try:
        message = decode(data)
    except RemoteProtocolError:
        return
    assert encode(message) == data


def fuzz_ring(data: bytes) -> None:
    """Read an arena whose tail, head and first data bytes the input gives."""
    memory = bytearray(_ARENA_BYTES)
    memory[:_CURSOR_BYTES] = data[:_CURSOR_BYTES].ljust(_CURSOR_BYTES, b"\0")
    head = data[_CURSOR_BYTES : 2 * _CURSOR_BYTES].ljust(_CURSOR_BYTES, b"\0")
    memory[_HEAD_AT : _HEAD_AT + _CURSOR_BYTES] = head
    rest = data[2 * _CURSOR_BYTES :][:MAX_FRAME_BYTES]
    memory[CONTROL_BYTES : CONTROL_BYTES + len(rest)] = rest
    try:
        reader = RingReader(memoryview(memory))
        for _ in range(_MAX_POPS):
            frame = reader.pop()
            if frame is None:
                return
            decode(frame)
    except RemoteProtocolError:
        return
