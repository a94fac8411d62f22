"""System calls of the engine's loop thread in a steady decode step, counted on the real program, locked down.

Counted outside gVisor, where a thread can be traced; the program and its calls are the same inside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.ptrace_counter import PtraceCounter
from engine.config import EngineConfig
from engine.sandbox.allowed_calls import Bells, engine_calls
from isolation.gvisor.environment import guest_environment
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.engine import StepOutput
from isolation.ipc.listener import Listener
from isolation.ipc.messages import Configure, Role
from isolation.ipc.segment import standard_layout
from tests.engine.support import model_config, save_model, submit

pytestmark = [
    pytest.mark.clock,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the counter reads the registers of x86-64"),
]

NAMES = {call.x86_64: call.name for call in engine_calls(Bells(0, 1), threads=8, generates_code=True)}
MOST_CALLS = 4
"""For each step of the loop's thread, barriers of the thread pool aside."""
STEPS, FULL_STEPS = 20, 60
"""Steady steps that are counted."""


class Engine:
    """The engine's program on its ring."""

    def __init__(self, folder: Path, threads: int) -> None:
        root = Path(__file__).resolve().parents[2]
        save_model(folder, model_config(hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=512))
        path = folder / "host.sock"
        environment = {**os.environ, **dict(guest_environment(threads=threads))}
        with Listener(str(path)) as listener:
            self.process = subprocess.Popen([sys.executable, "-m", "engine", str(path)], cwd=root, env=environment)
            self.channel: Channel = listener.accept(None, 60.0, standard_layout(), Role.ENGINE)
        self.next()
        config = EngineConfig(
            model_dir=str(folder),
            model_digest="00",
            kv_bytes=16 << 20,
            threads=threads,
            max_context=512,
            prefix_caching=False,
        )
        self.channel.send(Configure(config.to_json()))
        self.next()
        self.next_id = 0

    def next(self) -> Message:
        """The next message, waited for."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if found := self.channel.receive(1):
                return found[0]
            self.channel.wait(1.0)
        raise AssertionError("the engine said nothing for a minute")

    def steps(self, count: int, rows: int) -> int:
        """Take frames until so many steady ones came; gives how many came in all."""
        steady = taken = 0
        while steady < count:
            message = self.next()
            assert isinstance(message, StepOutput)
            taken += 1
            steady += len(message.requests) == rows
        return taken

    def count(self, rows: int, steps: int) -> dict[str, float]:
        """Calls of the loop's thread for each of so many steady steps, by name."""
        self.next_id += 100
        for number in range(rows):
            self.channel.send(submit(self.next_id + number, [1 + number] * 8, 3 * max(steps, 20)))
        self.steps(20, rows)
        with PtraceCounter(self.process.pid) as counter:
            self.steps(5, rows)
            before = Counter(counter.counts)
            taken = self.steps(steps, rows)
            spent = counter.counts - before
        left = rows
        while left:
            message = self.next()
            assert isinstance(message, StepOutput)
            left -= sum(1 for finish in message.finishes if finish)
        return {NAMES[number]: calls / taken for number, calls in spent.items()}

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.channel.close()


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with as many threads as the test says."""
    started = Engine(tmp_path, request.param)
    yield started
    started.close()


@pytest.mark.full
@pytest.mark.parametrize(("engine", "steps"), [(2, STEPS), (1, FULL_STEPS), (2, FULL_STEPS)], indirect=["engine"])
def test_a_steady_step_makes_few_system_calls_whatever_the_batch(
    engine: Engine, steps: int, record_property: pytest.RecordProperty
) -> None:
    """Alone, with 16 and with 64 rows the loop's thread makes at most four calls a step, the pool's barriers aside, and
    at least one in ten steps is seen (the bell): the counter counts."""
    for rows in (1, 16, 64):
        found = engine.count(rows, steps)
        record_property(f"{rows} rows", found)
        pool = found.pop("futex", 0.0)
        print(f"{rows} rows: {found}, barriers {pool:.1f}")
        assert 0.1 <= sum(found.values()) <= MOST_CALLS, found


def test_the_counter_counts() -> None:
    """Positive control: a program that asks for its parent a thousand times is counted a thousand times."""
    code = "import os, sys; sys.stdin.readline(); [os.getppid() for _ in range(1000)]; sys.stdin.readline()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        with PtraceCounter(process.pid) as counter:
            process.stdin.write(b"go\n")
            process.stdin.flush()
            deadline = time.monotonic() + 30
            while counter.counts[110] < 1000 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert counter.counts[110] == 1000
            process.stdin.close()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
