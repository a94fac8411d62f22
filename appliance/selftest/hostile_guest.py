"""The host's response to hostile guests: the gateway's own link, over a real socket and real memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.selftest.intruder import serving_spec
from isolation.gvisor.environment import guest_environment
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.host.process import MINIMAL_ENVIRONMENT, spawn
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message, decode
from isolation.ipc.engine import Submit
from isolation.ipc.errors import RemoteProtocolError
from isolation.ipc.frame import HEADER_BYTES
from isolation.ipc.listener import Listener
from isolation.ipc.messages import Configure, EngineReady, Hello, Role
from isolation.ipc.ring import RingReader
from isolation.ipc.sampling import Sampling
from isolation.ipc.segment import GUEST_TO_HOST, standard_layout

ENDED = (
    "oversized",
    "empty",
    "beyond",
    "backwards",
    "crooked",
    "garbage",
    "forged_id",
    "over_grant",
    "wide_token",
    "out_of_order",
    "other_role",
    "head",
)
"""Ways after which the host must end the sandbox, by name in ``redteam.wire``."""

BORNE = ("flood", "bells")
"""Ways that violate no rule: the host must stay responsive."""

MEET_S = 60.0
SEE_S = 5.0
"""Seconds within which a violation must be detected."""

WATCH_S = 1.0
"""Seconds for which a flood continues while the event loop's turns are counted."""

LEAST_TURNS = 10
"""Smallest number of event-loop turns during a flood."""

MOST_S = 10.0
"""Seconds permitted for these turns on a busy machine."""

SLOT, SLOTS, CONTROL_BYTES, TAIL, HEAD = 4096, 8, 4096, 0, 16
"""Constants of ``redteam.wire`` and ``isolation.ipc.ring``."""
LARGE = 1 << 20
"""Ids of a prompt of 4 MiB: two fill the ring to the guest."""
PROGRAM = Path(__file__).parent / "redteam" / "wire.py"


@dataclass(frozen=True, slots=True)
class LinkEnding:
    """Result of one way."""

    way: str
    reason: str
    """Reason for the link's end; empty when it did not end."""
    at_fault: bool
    turns: int
    """Event-loop turns during the observation."""


@dataclass(frozen=True, slots=True)
class Mutated:
    """Results of reading memory that changes meanwhile."""

    whole: int
    """Frames that decoded."""
    refused: int
    """Frames refused with the protocol's own error."""
    fooled: int
    """Frames whose length changed between two reads: a careless reader would have been fooled."""


def meet(way: str, runtime: GvisorRuntime | None) -> contextlib.AbstractContextManager[Channel]:
    """Open the host's end, past the greeting, with a guest that goes this way; a plain process without a runtime."""
    return _bare(way) if runtime is None else _sandboxed(way, runtime)


@contextlib.contextmanager
def _bare(way: str) -> Iterator[Channel]:
    with tempfile.TemporaryDirectory(prefix="ath-") as folder:
        path = str(Path(folder, "host.sock"))
        root = Path(__file__).resolve().parents[2]
        environment = {**MINIMAL_ENVIRONMENT, **dict(guest_environment(threads=1)), "PYTHONPATH": os.fspath(root)}
        with Listener(path) as listener, spawn((sys.executable, str(PROGRAM), path, way), env=environment):
            channel = listener.accept(None, MEET_S, standard_layout(), Role.ENGINE)
            try:
                yield _greeted(channel)
            finally:
                channel.close()


@contextlib.contextmanager
def _sandboxed(way: str, runtime: GvisorRuntime) -> Iterator[Channel]:
    with tempfile.TemporaryDirectory(prefix="ath-") as folder:
        socket_dir = Path(folder)
        socket_dir.chmod(0o755)
        argv = ("-c", PROGRAM.read_text(), "/ipc/host.sock", way)
        spec = serving_spec(Role.ENGINE, f"hostile-{way.replace('_', '-')}", socket_dir, argv)
        with Listener(str(socket_dir / "host.sock")) as listener:
            sandbox = runtime.boot(spec)
            try:
                channel = listener.accept(sandbox.peer_pids, MEET_S, standard_layout(), Role.ENGINE)
                try:
                    yield _greeted(channel)
                finally:
                    channel.close()
            finally:
                sandbox.delete()


def _greeted(channel: Channel) -> Channel:
    """Complete the handshake.

    Raises:
        TimeoutError: the guest sends nothing.
    """
    _await(channel, Hello)
    channel.send(Configure(b"{}"))
    _await(channel, EngineReady)
    return channel


def _await(channel: Channel, kind: type[Message]) -> None:
    deadline = time.monotonic() + MEET_S
    while time.monotonic() < deadline:
        if any(isinstance(message, kind) for message in channel.receive(1)):
            return
        channel.wait(0.5)
    raise TimeoutError("the hostile guest did not greet")


async def watch(channel: Channel, way: str) -> LinkEnding:
    """Pass the channel to the gateway's link, with one request in it, and observe how it ends."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[str, bool]] = loop.create_future()

    def on_end(_link: EngineLink, reason: str, at_fault: bool) -> None:
        if not ended.done():
            ended.set_result((reason, at_fault))

    link = EngineLink(channel, EngineReady(512, 256, 16, 64), 1, on_end)
    with contextlib.suppress(ConnectionError):
        link.submit(Submit(10, bytes(32), array("I", [1, 2, 3]), 2, Sampling(temperature=0.0)), b"f")
    turns = 0
    began = time.monotonic()
    enough = WATCH_S if way in BORNE else SEE_S
    # A busy machine turns slowly whatever the guest does, so more time is permitted for the required turns.
    while not ended.done() and ((now := time.monotonic() - began) < enough or (turns < LEAST_TURNS and now < MOST_S)):
        await asyncio.sleep(0.001)
        turns += 1
        if way == "head" and turns in (10, 20, 30):  # the host reads that cursor when it needs room
            link.submit(Submit(10 + turns, bytes(32), array("I", [1]) * LARGE, 1, Sampling()), b"f")
    reason, at_fault = ended.result() if ended.done() else ("", False)
    link.close()
    return LinkEnding(way, reason, at_fault, turns)


def one_way(way: str, runtime: GvisorRuntime | None) -> LinkEnding:
    """Run one way and return the result."""
    with meet(way, runtime) as channel:
        return asyncio.run(watch(channel, way))


def read_while_it_changes(frames: int, runtime: GvisorRuntime | None) -> Mutated:
    """Read frames that another process overwrites meanwhile: first as the host does, then carelessly.

    A decoded frame must be a message or raise the protocol's own error; any other exception propagates.
    """
    whole = refused = fooled = 0
    with meet("mutate", runtime) as channel:
        arena = channel._segment.arena(GUEST_TO_HOST)
        words, data = arena[:CONTROL_BYTES].cast("Q"), arena[CONTROL_BYTES:]
        deadline = time.monotonic() + MEET_S
        while words[TAIL] <= SLOT and time.monotonic() < deadline:
            time.sleep(0.01)
        for number in range(frames):
            position = (1 + number % SLOTS) * SLOT
            words[HEAD] = position
            reader = RingReader(arena)
            try:
                frame = reader.pop()
                if frame is not None:
                    decode(frame)
                    whole += 1
            except RemoteProtocolError:
                refused += 1
            finally:
                reader.release()
            fooled += _careless(data, position)
        # On a crowded machine the other process may have had no turn during any of these reads.
        deadline = time.monotonic() + MEET_S
        while not fooled and time.monotonic() < deadline:
            fooled += _careless(data, SLOT)
        for view in (words, data, arena):
            view.release()
    return Mutated(whole, refused, fooled)


def _careless(data: memoryview, start: int) -> bool:
    """Read a length, check it, and read it again for the copy, as a careless reader would; return whether they
    differ."""
    first = int.from_bytes(data[start : start + 4], "little")
    if first < HEADER_BYTES:
        return False
    return any(int.from_bytes(data[start : start + 4], "little") != first for _ in range(20))
