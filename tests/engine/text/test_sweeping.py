"""The worker's loop does not make its heap grow while freed memory is overwritten: in a process of its own, with the
environment that the appliance gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from appliance.common.catalog import embedded_model
from isolation.gvisor.environment import SWEPT, guest_environment

ROOT = Path(__file__).resolve().parents[3]

LOOP = """
import os, sys
from engine.config import TextConfig
from engine.text.__main__ import serve
from engine.text.worker import load_worker
from isolation.ipc.codec import decode, encode
from isolation.ipc.engine import Drain
from isolation.ipc.sweeping import Rounds, Sweeper
from isolation.ipc.text import Encode, SourceKind

worker = load_worker(TextConfig(model_dir=sys.argv[1], wipe_memory=True))
sweeper = Sweeper()
tops, number = [0] * 60, 0

class Channel:
    # A host that asks ten times a second; the clock is the number of its questions.
    def receive(self, limit):
        global number
        number += 1
        prompt = b"One two %d" % (number * 7_919)
        left = any(top == 0 for top in tops)
        return [decode(encode(Encode(number, SourceKind.TEXT, prompt, 4_096)))] if left else [Drain()]
    def send(self, message, urgent=True):
        encode(message)
    def wait(self, timeout_s):
        pass

def sweep():
    sweeper.sweep()
    tops[tops.index(0)], _ = sweeper._top()

serve(worker, Channel(), None, Rounds(sweep, lambda: number / 10))
print(tops[-1] - tops[20])
"""
"""Prints by how many bytes the part of the heap that is in use grew over the last forty sweeps."""


def grown(environment: dict[str, str]) -> int:
    """Bytes by which the heap of a worker grew."""
    command = [sys.executable, "-c", LOOP, str(embedded_model())]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    return int(ended.stdout)


def test_a_worker_that_sweeps_does_not_grow() -> None:
    """Over forty sweeps between answers the heap stays as large as it is. Control: where the C library keeps small
    pieces for the thread, one from the top of the heap stays there after each sweep and holds up 136 kB below it."""
    environment = dict(guest_environment(threads=1, extra=SWEPT))
    assert grown(environment) < 64 << 10
    tunables = environment["GLIBC_TUNABLES"].replace("tcache_count=0", "tcache_count=7")
    assert grown({**environment, "GLIBC_TUNABLES": tunables}) > 4 << 20
