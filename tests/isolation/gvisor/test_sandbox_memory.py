"""``engine.text.sandbox_memory`` under a real gVisor: what a program inside sees of the sandbox's memory."""

from __future__ import annotations

import json

import pytest

from engine.text.sandbox_memory import SandboxMemory

LOOK = """
import json, os, sys, time
from engine.text.sandbox_memory import SandboxMemory
memory = SandboxMemory(512 << 20, 128 << 20)
told = [memory.used_bytes(), memory.scarce()]
held = bytearray(b"x") * (200 << 20)
time.sleep(1.5)
told += [memory.used_bytes()]
wait, done = os.pipe()
pid = os.fork()
if pid == 0:
    for place in range(0, len(held), 4096):
        held[place] = 1
    os.write(done, b"x")
    time.sleep(60)
os.read(wait, 1)
time.sleep(1.5)
told += [memory.used_bytes(), memory.scarce(), SandboxMemory(0, 1).scarce()]
print(json.dumps(told), flush=True)
os.kill(pid, 9)
"""


@pytest.mark.runsc
def test_a_forked_processs_copies_count(runtime, make_spec) -> None:
    """What a program takes and what a forked one copies is seen, within a few MiB; where nothing is known of a limit,
    memory is never scarce."""
    sandbox = runtime.boot(make_spec("memory", LOOK, memory_mib=1024))
    try:
        assert sandbox.wait(60.0) == 0, sandbox.output_tail()
        sandbox.delete()  # Its pipe is read to the end by now.
        before, early, taken, copied, late, unknown = json.loads(sandbox.output_tail()[-1])
    finally:
        sandbox.delete()
    assert (early, late, unknown) == (False, True, False)
    assert taken - before == pytest.approx(200 << 20, rel=0.1)
    assert copied - taken == pytest.approx(200 << 20, rel=0.1)


def test_where_nobody_looks_no_file_is_opened() -> None:
    """Without a limit there is nothing to compare with."""
    assert not SandboxMemory(0, 1 << 40).scarce()
