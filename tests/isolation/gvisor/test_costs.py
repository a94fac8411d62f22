"""What makes a sandbox cheap: it sees the real processor, and the sentry's timers do not wake it for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from isolation.gvisor.timerslack import BUSY_SLACK_NS, SENTRY_SLACK_NS, let_timers_ring_late

CPUID = """
import ctypes, json, mmap
# push rbx; mov eax, edi; mov ecx, esi; cpuid; mov eax, eax; pop rbx; ret: gives leaf 7, sub-leaf 1, eax
code = bytes.fromhex("5389f889f10fa25bc3")
page = mmap.mmap(-1, 4096, prot=7)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_uint, ctypes.c_uint)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
print(json.dumps([call(7, 0), call(7, 1)]), flush=True)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="CPUID is an instruction of x86-64")
def test_a_sandbox_sees_the_real_processor(runtime, make_spec) -> None:
    """The features of leaf 7, sub-leaf 1 (avx512_bf16 is one) are told inside as they are outside."""
    assert runtime.native_cpuid
    outside = subprocess.run([sys.executable, "-c", CPUID], check=True, capture_output=True, text=True).stdout
    sandbox = runtime.boot(make_spec("cpuid", CPUID))
    try:
        assert sandbox.wait(30.0) == 0, sandbox.output_tail()
        assert json.loads(sandbox.output_tail()[-1]) == json.loads(outside)
    finally:
        sandbox.delete()


def slack(thread: int) -> int:
    """Nanoseconds that a thread's timers may ring late."""
    return int(Path(f"/proc/{thread}/timerslack_ns").read_text())


def test_a_settled_sentrys_timers_may_ring_late_and_ours_may_not(runtime, make_spec) -> None:
    """Once its start is over every thread of the sentry has the slack; before, and here, none has."""
    own = slack(threading.get_native_id())
    sandbox = runtime.boot(make_spec("slack", "import signal; signal.pause()"))
    try:
        threads = [int(task.name) for task in Path(f"/proc/{sandbox.pid}/task").iterdir()]
        assert len(threads) > 3
        assert SENTRY_SLACK_NS not in {slack(thread) for thread in threads}
        sandbox.settle()
        assert {slack(thread) for thread in threads} == {SENTRY_SLACK_NS}
        assert slack(threading.get_native_id()) == own != SENTRY_SLACK_NS
        sandbox.settle(busy=True)
        assert {slack(thread) for thread in threads} == {BUSY_SLACK_NS}
        sandbox.settle()
        assert {slack(thread) for thread in threads} == {SENTRY_SLACK_NS}
    finally:
        sandbox.delete()
    sandbox.settle(busy=True)
    assert sandbox.processor_s() == 0


def test_a_sandboxs_processor_time_and_memory_are_those_of_its_guest(runtime, make_spec) -> None:
    """Counting without end and 64 MiB in a sandbox are seen from outside, though a stub and not the sentry spends and
    touches them; no more time is seen than its cores had; afterwards nothing is held."""
    code = "held = b'x' * (64 << 20)\nprint('counting', flush=True)\nwhile True: pass"
    began = time.monotonic()
    sandbox = runtime.boot(make_spec("count", code))
    try:
        deadline = time.monotonic() + 60
        while "counting" not in sandbox.output_tail():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        booting_s = sandbox.processor_s()
        while sandbox.processor_s() < booting_s + 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert sandbox.processor_s() <= (os.cpu_count() or 1) * (time.monotonic() - began)
        assert 64 << 20 <= sandbox.memory_bytes() < 512 << 20
    finally:
        sandbox.delete()
    assert sandbox.memory_bytes() == 0


def test_an_ended_process_has_no_timers() -> None:
    """Nothing is raised over a process that has ended meanwhile."""
    process = subprocess.Popen(["true"])
    process.wait()
    assert let_timers_ring_late(process.pid) is False
