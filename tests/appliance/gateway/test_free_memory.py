"""Free memory goes back to the system when the gateway has grown, and only then."""

from __future__ import annotations

import subprocess
import sys

from appliance.gateway.free_memory import GROWN_BYTES, FreeMemory

HOLES = """
import ctypes, os
from appliance.gateway.free_memory import FreeMemory, resident_bytes

memory = FreeMemory(resident_bytes, lambda: ctypes.CDLL(None).malloc_trim(0))
before = resident_bytes()
pieces = [bytearray(32 << 10) for _ in range(2_000)]
pieces[:] = pieces[::50]
holes = resident_bytes()
print(memory.look(), (holes - before) >> 20, (resident_bytes() - before) >> 20)
"""


def test_only_growth_is_answered():
    """Nothing is asked of the C library until the process is a step larger than after the last time, or than ever
    since."""
    size, asked = [100 << 20], []

    def trim() -> None:
        asked.append(size[0])
        size[0] -= 4 << 20

    memory = FreeMemory(lambda: size[0], trim)
    assert not memory.look()
    size[0] += GROWN_BYTES - 1
    assert not memory.look()
    size[0] += 1
    assert memory.look() and asked == [size[0] + (4 << 20)]
    assert not memory.look()
    size[0] = 50 << 20
    assert not memory.look()
    size[0] += GROWN_BYTES
    assert memory.look() and len(asked) == 2


def test_holes_in_the_heap_go_back():
    """62 MiB in pieces of 32 KiB, of which every fiftieth stays: nearly all is held by holes before, little after."""
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=60)
    looked, holes, left = done.stdout.split()
    assert looked == "True" and int(holes) > 50 and int(left) < 15, done.stdout
