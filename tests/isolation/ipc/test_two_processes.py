"""Two real processes on one channel, bare and with the guest inside a gVisor sandbox."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isolation.gvisor.spec import Mount
from isolation.ipc import segment
from isolation.ipc.channel import Channel
from isolation.ipc.engine import Abort, Drain, StepOutput
from isolation.ipc.errors import PeerGoneError
from isolation.ipc.listener import Listener
from isolation.ipc.messages import Configure, EngineReady, Hello, Role
from isolation.ipc.segment import standard_layout

CODE = Path(__file__).with_name("guest_peer.py").read_text()
PATIENCE_S = 20.0
EXCHANGES = (10_000, pytest.param(100_000, marks=pytest.mark.full))
"""Each is a frame there and a frame back: 20,000 frames, and 200,000 at the full count."""

NAP_S = 30e-6

WAITING = 48
"""Word of the control page that a writer raises when it has met a full ring."""

MAX_MISSED = 3
"""Bells that may seem missed: a message can come in the very moment a look-again falls due."""


class Bare:
    """A guest that is a plain process."""

    def __init__(self, root: Path, directory: Path) -> None:
        self._command = [sys.executable, "-c", CODE, str(directory / "host.sock")]
        self._root = root

    @contextmanager
    def guest(self) -> Iterator[tuple[set[int], subprocess.Popen]]:
        """Its possible pids and something to wait for."""
        with subprocess.Popen(self._command, cwd=self._root) as process:
            try:
                yield {process.pid}, process
            finally:
                process.kill()


class Sandboxed:
    """A guest inside gVisor, booted as the product boots it."""

    def __init__(self, runtime, make_spec, directory: Path) -> None:
        self._runtime = runtime
        self._spec = make_spec("peer", CODE, "/ipc/host.sock", mounts=[Mount(directory, "/ipc")])

    @contextmanager
    def guest(self):
        """Its possible pids and something to wait for."""
        sandbox = self._runtime.boot(self._spec)
        try:
            yield sandbox.peer_pids, sandbox
            print(*sandbox.output_tail(), sep="\n")
        finally:
            sandbox.delete()


@pytest.fixture
def directory():
    """A directory that a sandbox's user may enter, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ath-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture(params=["bare", pytest.param("runsc", marks=pytest.mark.runsc)])
def place(request, root, directory):
    """Where the guest runs."""
    if request.param == "bare":
        return Bare(root, directory)
    runtime, make_spec = (request.getfixturevalue(name) for name in ("runtime", "make_spec"))
    return Sandboxed(runtime, make_spec, directory)


@contextmanager
def meeting(place, directory: Path, **config):
    """A channel to a guest that is ready, and the guest."""
    with Listener(str(directory / "host.sock")) as listener, place.guest() as (pids, guest):
        channel = listener.accept(pids, PATIENCE_S, standard_layout(), Role.ENGINE)
        try:
            assert isinstance(one(channel), Hello)
            channel.send(Configure(json.dumps(config).encode()))
            assert isinstance(one(channel), EngineReady)
            yield channel, guest
        finally:
            channel.close()


def one(channel: Channel):
    """The next message."""
    while True:
        assert channel.wait(PATIENCE_S)
        if messages := channel.receive(limit=1):
            return messages[0]


@pytest.mark.clock
@pytest.mark.parametrize("exchanges", EXCHANGES)
def test_no_wake_up_is_lost(place, directory, exchanges, record_property):
    """Frames cross both ways while both readers nap and sleep at random: all arrive, in order, no
    wait runs into its timeout and no bell is missed."""
    rng = random.Random(8)
    sent = got = 0
    longest_s = 0.0
    guest_missed = 0
    with meeting(place, directory, mode="echo", seed=9) as (channel, guest):
        while got < exchanges:
            window = rng.choice((1, 1, 1, 4, 32))
            while sent < exchanges and sent - got < window:
                channel.send(Abort(sent))
                sent += 1
            if rng.random() < 0.5:
                until = time.perf_counter() + rng.random() * NAP_S
                while time.perf_counter() < until:
                    pass
            began = time.perf_counter()
            assert channel.wait(PATIENCE_S), f"no answer to {got}"
            longest_s = max(longest_s, time.perf_counter() - began)
            for message in channel.receive():
                assert message.requests[0] == got
                guest_missed = message.waiting
                got += 1
        channel.send(Drain())
        assert guest.wait(PATIENCE_S) == 0
        record_property("longest_wait_s", longest_s)
        assert channel.missed_bells + guest_missed <= MAX_MISSED


def test_a_slow_reader_holds_the_writer_back(place, directory):
    """A guest that floods the ring of a host that reads nothing meets its end, waits for room and
    loses nothing; its last words are read after it has gone."""
    count = 1_500
    with meeting(place, directory, mode="flood", seed=0, count=count) as (channel, guest):
        deadline = time.monotonic() + PATIENCE_S
        while not channel._reader._words[WAITING]:
            assert time.monotonic() < deadline, "the guest met no full ring"
        numbers = []
        try:
            while True:
                channel.wait(PATIENCE_S)
                numbers += [message.token_ids[-1] for message in channel.receive()]
        except PeerGoneError:
            assert numbers == list(range(count))
        assert guest.wait(PATIENCE_S) == 0


def test_the_guest_cannot_resize_the_segment(place, directory):
    """Shrinking, growing and emptying fail with EPERM where the guest really runs."""
    with meeting(place, directory, mode="tamper", seed=0) as (channel, _):
        assert [one(channel).running for _ in range(3)] == [errno.EPERM] * 3


def test_an_unsealed_segment_could_be_resized(place, directory, monkeypatch):
    """The control: without the seals the same guest grows the file."""
    monkeypatch.setattr(segment, "_SEALS", 0)
    with meeting(place, directory, mode="tamper", seed=0) as (channel, _):
        assert one(channel).running == 0
        assert os.fstat(channel.fds()[0]).st_size > standard_layout().size


def test_the_end_of_a_killed_guest_is_seen(place, directory):
    """A guest that is killed while it sleeps ends the host's wait, without a message."""
    with meeting(place, directory, mode="echo", seed=1) as (channel, guest):
        channel.send(Abort(1))
        assert isinstance(one(channel), StepOutput)
        guest.kill()
        with pytest.raises(PeerGoneError):
            channel.wait(PATIENCE_S)
