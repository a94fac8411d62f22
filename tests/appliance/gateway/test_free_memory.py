"""Free memory goes back to the system when the gateway has grown, and only then."""

from __future__ import annotations

import subprocess
import sys

from appliance.gateway.free_memory import GROWN_BYTES, LOOKS_AFTER, FreeMemory

HOLES = """
import ctypes, os, resource
from appliance.gateway.free_memory import FreeMemory, resident_bytes

statm = os.open("/proc/self/statm", os.O_RDONLY)
resident = lambda: resident_bytes(statm)
memory = FreeMemory(resident, lambda: ctypes.CDLL(None).malloc_trim(0))
before = resident()
pieces = [bytearray(32 << 10) for _ in range(2_000)]
pieces[:] = pieces[::50]
resource.setrlimit(resource.RLIMIT_NOFILE, (statm + 1, statm + 1))  # as after a flood that took all descriptors
holes = resident()
print(memory.look(), (holes - before) >> 20, (resident() - before) >> 20)
"""


def test_growth_is_answered_for_a_minute():
    """Nothing is asked of the C library until the process is a step larger than it was; then at that look and at
    ``LOOKS_AFTER`` more, and not again before it has grown anew, also from less than it was."""
    size, asked = [100 << 20], []
    memory = FreeMemory(lambda: size[0], lambda: asked.append(size[0]))
    assert not memory.look()
    size[0] += GROWN_BYTES - 1
    assert not memory.look()
    size[0] += 1
    assert [memory.look() for _ in range(LOOKS_AFTER + 3)] == [True] * (LOOKS_AFTER + 1) + [False] * 2
    assert len(asked) == LOOKS_AFTER + 1
    size[0] = 50 << 20
    assert not memory.look()
    size[0] += GROWN_BYTES
    assert memory.look()


def test_what_is_freed_behind_the_last_growth_goes_back():
    """A flood is at its largest when the process is looked at, and then ends: what it took goes back."""
    size, freed = [100 << 20], [0]

    def trim() -> None:
        size[0] -= freed[0]
        freed[0] = 0

    memory = FreeMemory(lambda: size[0], trim)
    size[0] += 60 << 20
    assert memory.look() and size[0] == 160 << 20
    freed[0] = 60 << 20
    assert memory.look() and size[0] == 100 << 20


def test_holes_in_the_heap_go_back():
    """62 MiB in pieces of 32 KiB, of which every fiftieth stays: nearly all is held by holes before, little after."""
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=60)
    looked, holes, left = done.stdout.split()
    assert looked == "True" and int(holes) > 50 and int(left) < 15, done.stdout
