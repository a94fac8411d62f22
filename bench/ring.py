"""Figures of the wire: the cost of one call, round trips and one way, spinning and by doorbell.

Two bare processes of this machine are host and guest of one engine channel. The guest answers each
``Abort`` with a ``StepOutput`` of 64 tokens, or with a stream of them. Times are in microseconds:
median (p50) and 99th percentile (p99). Run: ``python bench/ring.py``.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from isolation.ipc import doorbell, segment
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.engine import Abort, StepOutput
from isolation.ipc.errors import PeerGoneError, RingFull
from isolation.ipc.messages import PROTOCOL_VERSION, Configure, EngineReady, Hello, Role

TOKENS = 64
STEP = StepOutput(
    requests=array("Q", range(1, TOKENS + 1)),
    token_ids=array("I", range(1000, 1000 + TOKENS)),
    finishes=bytes(TOKENS),
    running=TOKENS,
    waiting=3,
    free_blocks=4000,
)
ONE = 1
STREAM = 2
SPIN, BELL = "spin", "doorbell"
PATIENCE_S = 30.0

Await = Callable[[Channel], list[Message]]


def spin(channel: Channel) -> list[Message]:
    """The next messages, looked for without rest."""
    while not (messages := channel.receive()):
        pass
    return messages


def sleep(channel: Channel) -> list[Message]:
    """The next messages, waited for at the bell."""
    while not (messages := channel.receive()):
        channel.wait(PATIENCE_S)
    return messages


AWAIT: dict[str, Await] = {SPIN: spin, BELL: sleep}


def start(how: str, frames: int) -> Channel:
    """Fork a guest that answers in this manner; the host's channel, handshake done."""
    layout = segment.standard_layout()
    memfd = segment.create(layout)
    guest_in, host_out = doorbell.create_pipe()
    host_in, guest_out = doorbell.create_pipe()
    if os.fork() == 0:
        os.close(host_in)
        os.close(host_out)
        try:
            with suppress(PeerGoneError):
                answer(Channel.guest(memfd, guest_in, guest_out, layout, Role.ENGINE), how, frames)
        finally:
            os._exit(0)
    os.close(guest_in)
    os.close(guest_out)
    channel = Channel.host(memfd, host_in, host_out, layout, Role.ENGINE)
    sleep(channel)
    channel.send(Configure(b"{}"))
    sleep(channel)
    return channel


def answer(channel: Channel, how: str, frames: int) -> None:
    """The guest: answer until the host is gone."""
    channel.send(Hello(PROTOCOL_VERSION, Role.ENGINE))
    sleep(channel)
    channel.send(EngineReady(1, 1, 1, 1))
    orders = 0
    while True:
        # The last order would never come to a spinning guest: it counts.
        for message in AWAIT[how if orders < frames else BELL](channel):
            orders += 1
            assert isinstance(message, Abort)
            for _ in range(frames if message.request == STREAM else 1):
                while True:
                    try:
                        channel.send(STEP)
                        break
                    except RingFull:
                        channel.wait(PATIENCE_S)


def round_trips(how: str, count: int, idle_s: float = 0.0) -> list[float]:
    """Microseconds of each order and its answer."""
    channel = start(how, count)
    times = []
    for _ in range(count):
        if idle_s:
            time.sleep(idle_s)
        began = time.perf_counter_ns()
        channel.send(Abort(ONE))
        AWAIT[how](channel)
        times.append((time.perf_counter_ns() - began) / 1000)
    finish(channel)
    return times


def stream(how: str, count: int) -> float:
    """Microseconds a frame while the guest sends as fast as it can."""
    channel = start(BELL, count)
    channel.send(Abort(STREAM))
    got = 0
    began = time.perf_counter_ns()
    while got < count:
        got += len(AWAIT[how](channel))
    spent = (time.perf_counter_ns() - began) / 1000
    finish(channel)
    return spent / count


def calls(count: int = 20_000) -> tuple[list[float], list[float]]:
    """Microseconds of each ``send`` and each ``receive`` of a step, within one process."""
    layout = segment.standard_layout()
    memfd = segment.create(layout)
    guest_in, host_out = doorbell.create_pipe()
    host_in, guest_out = doorbell.create_pipe()
    guest = Channel.guest(os.dup(memfd), guest_in, guest_out, layout, Role.ENGINE)
    host = Channel.host(memfd, host_in, host_out, layout, Role.ENGINE)
    guest.send(Hello(PROTOCOL_VERSION, Role.ENGINE))
    host.receive()
    host.send(Configure(b"{}"))
    guest.receive()
    guest.send(EngineReady(1, 1, 1, 1))
    host.receive()
    sends, receives = [], []
    for _ in range(count):
        began = time.perf_counter_ns()
        guest.send(STEP)
        sent = time.perf_counter_ns()
        host.receive()
        receives.append((time.perf_counter_ns() - sent) / 1000)
        sends.append((sent - began) / 1000)
    guest.close()
    host.close()
    return sends, receives


def finish(channel: Channel) -> None:
    """Let the guest end and reap it."""
    missed = channel.missed_bells
    channel.close()
    os.wait()
    if missed:
        print(f"  missed bells: {missed}")


def row(name: str, times: list[float]) -> None:
    """Print one line of the table."""
    times.sort()
    middle, high = times[len(times) // 2], times[len(times) * 99 // 100]
    print(f"{name:<44}{middle:>10.1f}{high:>10.1f}")


def main() -> None:
    """Measure and print."""
    print(f"{f'StepOutput of {TOKENS} tokens, us':<44}{'p50':>10}{'p99':>10}")
    sends, receives = calls()
    row("send", sends)
    row("receive", receives)
    row("round trip, both spin", round_trips(SPIN, 20_000))
    row("round trip, both sleep, back to back", round_trips(BELL, 20_000))
    row("round trip, both sleep, 2 ms idle between", round_trips(BELL, 500, 0.002))
    for how in (SPIN, BELL):
        each = stream(how, 100_000)
        print(f"{f'one way, reader: {how}':<44}{each:>10.1f}{'':>10}  {1e6 / each:,.0f}/s")


if __name__ == "__main__":
    main()
