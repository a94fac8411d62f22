"""Host and guest meet: who is let in, what is handed over, and every way it can fail."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.sandbox.attach import attach
from isolation.ipc import doorbell, segment
from isolation.ipc import messages as m
from isolation.ipc.channel import Channel
from isolation.ipc.doorbell import BellWriter
from isolation.ipc.engine import Abort
from isolation.ipc.errors import AttachError, PeerGoneError, RemoteProtocolError
from isolation.ipc.listener import Listener
from isolation.ipc.segment import standard_layout
from isolation.ipc.state import State

LAYOUT = standard_layout()
TIMEOUT_S = 20.0
INTRUDER = """
import socket, sys
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
sys.exit(len(peer.recv(1)))
"""


@pytest.fixture
def path():
    """A path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ath-") as directory:
        yield os.path.join(directory, "host.sock")


def beside(call, *arguments, **options):
    """Run a call in a thread of its own; what is returned waits for its result or raises."""
    executor = ThreadPoolExecutor(1)
    future = executor.submit(call, *arguments, **options)
    executor.shutdown(wait=False)
    return future.result


def unheard(bell: int) -> int:
    """Rings that nobody has taken off yet."""
    return int.from_bytes(fcntl.ioctl(bell, termios.FIONREAD, bytes(4)), sys.byteorder)


def accept_in_thread(listener: Listener, pids, timeout_s: float = TIMEOUT_S):
    """Accept beside the test."""
    return beside(listener.accept, pids, timeout_s, LAYOUT, m.Role.ENGINE)


def attach_in_thread(path: str, **timeouts: float):
    """Attach beside the test."""
    return beside(attach, path, m.Role.ENGINE, **timeouts)


def test_meeting(path):
    """Guest and host meet, greet and configure; the socket is open to any uid and gone after."""
    descriptors = len(os.listdir("/proc/self/fd"))
    with Listener(path) as listener:
        assert os.stat(path).st_mode & 0o777 == 0o666
        guest = attach_in_thread(path)
        host = listener.accept({os.getpid()}, TIMEOUT_S, LAYOUT, m.Role.ENGINE)
    assert not os.path.exists(path)
    assert host.wait(TIMEOUT_S)
    assert host.receive() == [m.Hello(m.PROTOCOL_VERSION, m.Role.ENGINE)]
    host.send(m.Configure(b'{"a": 1}'))
    channel, config = guest()
    assert config == b'{"a": 1}'
    assert host.state is channel.state is State.LOADING
    assert not any(os.get_inheritable(fd) for fd in (*host.fds(), *channel.fds()))
    channel.send(m.EngineReady(1, 1, 1, 1))
    assert host.receive() == [m.EngineReady(1, 1, 1, 1)]
    host.close()
    with pytest.raises(PeerGoneError):
        channel.wait(TIMEOUT_S)
    channel.close()
    listener.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_another_process_is_turned_away(path, caplog):
    """A process that is not the sandbox gets nothing and is logged; the sandbox after it is let
    in by the same call."""
    with Listener(path) as listener, caplog.at_level(logging.WARNING):
        accepted = accept_in_thread(listener, {os.getpid()})
        intruder = subprocess.run([sys.executable, "-c", INTRUDER, path], timeout=TIMEOUT_S)
        assert intruder.returncode == 0, "it got a byte"
        guest = attach_in_thread(path)
        host = accepted()
    assert "not the sandbox" in caplog.text
    host.wait(TIMEOUT_S)
    host.receive()
    host.send(m.Configure(b"{}"))
    channel, _ = guest()
    channel.close()
    host.close()


def test_a_guest_that_was_turned_away_says_so(path):
    """The guest's own error tells that the host may have refused it."""
    with Listener(path) as listener:
        accepted = accept_in_thread(listener, {1}, timeout_s=1.0)
        with pytest.raises(AttachError, match="turned"):
            attach(path, m.Role.ENGINE)
        with pytest.raises(AttachError, match="did not connect"):
            accepted()


def test_without_a_sandbox_the_uid_decides(path, monkeypatch, caplog):
    """With no pid to expect, our own uid is let in and another is not."""
    with Listener(path) as listener:
        guest = attach_in_thread(path)
        host = listener.accept(None, TIMEOUT_S, LAYOUT, m.Role.ENGINE)
        host.close()
        with pytest.raises(PeerGoneError):
            guest()
        own = os.getuid()
        monkeypatch.setattr("isolation.ipc.listener.os.getuid", lambda: own + 1)
        refused = attach_in_thread(path)
        with pytest.raises(AttachError):
            listener.accept(None, 1.0, LAYOUT, m.Role.ENGINE)
        with pytest.raises(AttachError):
            refused()
    assert "refused a connection" in caplog.text


def test_nobody_comes(path):
    """The wait for a guest ends."""
    with Listener(path) as listener, pytest.raises(AttachError, match=r"within 0\.05 s"):
        listener.accept({os.getpid()}, 0.05, LAYOUT, m.Role.ENGINE)


def test_a_guest_that_leaves_too_early_is_no_guest(path, caplog, monkeypatch):
    """A peer that is gone before it got its descriptors is passed over, without a leak."""
    before = len(os.listdir("/proc/self/fd"))

    def gone(*_arguments):
        raise BrokenPipeError("gone")

    with Listener(path) as listener, socket.socket(socket.AF_UNIX) as early, monkeypatch.context() as patch:
        patch.setattr("isolation.ipc.listener.socket.send_fds", gone)
        early.connect(path)
        with pytest.raises(AttachError):
            listener.accept({os.getpid()}, 0.2, LAYOUT, m.Role.ENGINE)
    assert "left before" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_path_that_is_taken(path):
    """A second listener at one path is refused, without a leak; the first one lives on."""
    with Listener(path):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="in use"):
            Listener(path)
        assert len(os.listdir("/proc/self/fd")) == before
        assert os.path.exists(path)


def test_close_where_the_path_is_gone_already(path):
    """The supervisor may have removed the directory's content first."""
    listener = Listener(path)
    os.unlink(path)
    listener.close()


def test_the_guest_waits_for_its_host(path):
    """A guest that comes first tries until the socket is there and listens."""
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(path)  # It exists and refuses: nobody listens yet.
        guest = attach_in_thread(path)
        threading.Event().wait(0.1)
        os.unlink(path)
    with Listener(path) as listener:
        host = listener.accept({os.getpid()}, TIMEOUT_S, LAYOUT, m.Role.ENGINE)
    host.wait(TIMEOUT_S)
    host.receive()
    host.send(m.Configure(b"{}"))
    channel, _ = guest()
    channel.close()
    host.close()


def test_the_guest_gives_up(path):
    """Without a host, without a right to connect and without a configuration the guest ends."""
    with pytest.raises(AttachError, match="no host listens"):
        attach(path, m.Role.ENGINE, connect_timeout_s=0.05)
    Path(path).mkdir()
    with pytest.raises(AttachError, match="cannot connect"):
        attach(f"{path}/" + "x" * 200, m.Role.ENGINE)
    Path(path).rmdir()
    with Listener(path) as listener:
        guest = attach_in_thread(path, configure_timeout_s=0.05)
        host = listener.accept(None, TIMEOUT_S, LAYOUT, m.Role.ENGINE)
        with pytest.raises(AttachError, match="no configuration"):
            guest()
        host.close()


def test_a_broken_introduction_is_refused(path):
    """Too few descriptors, a wrong layout, a layout larger than the segment, a reset and a message
    that is not Configure each end the guest's attempt, and nothing stays open."""
    memfd = os.memfd_create("small")
    read_end, write_end = os.pipe()
    fds = [memfd, read_end, write_end]
    before = len(os.listdir("/proc/self/fd"))
    for data, sent, error in (
        (LAYOUT.encode(), fds[:2], AttachError),
        (b"", [], AttachError),
        (b"nonsense", fds, RemoteProtocolError),
        (LAYOUT.encode() * 30, fds, RemoteProtocolError),
        (LAYOUT.encode(), fds, RemoteProtocolError),
    ):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(1)
            guest = attach_in_thread(path)
            connection, _ = server.accept()
            with connection:
                if sent:
                    socket.send_fds(connection, [data], sent)
            with pytest.raises(error):
                guest()
        os.unlink(path)
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in fds:
        os.close(fd)


def test_an_introduction_that_does_not_come(path, monkeypatch):
    """A host that accepts and then says nothing does not hold the guest for ever."""
    monkeypatch.setattr("engine.sandbox.attach.CONFIGURE_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        with pytest.raises(AttachError, match="did not arrive"):
            attach(path, m.Role.ENGINE)


def test_an_introduction_in_two_parts(path):
    """A layout that arrives in pieces, and a bell without a message, change nothing."""
    layout = LAYOUT.encode()
    memfd = segment.create(LAYOUT)
    guest_in, bell_out = doorbell.create_pipe()
    bell_in, guest_out = doorbell.create_pipe()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        guest = attach_in_thread(path)
        connection, _ = server.accept()
        with connection:
            socket.send_fds(connection, [layout[:5]], [memfd, guest_in, guest_out])
            connection.sendall(layout[5:])
    os.close(guest_in)
    os.close(guest_out)
    host = Channel.host(memfd, bell_in, bell_out, LAYOUT, m.Role.ENGINE)
    host.wait(TIMEOUT_S)
    host.receive()
    BellWriter(bell_out).ring()
    while unheard(bell_out):
        pass
    host.send(m.Configure(b"{}"))
    channel, config = guest()
    assert config == b"{}"
    channel.close()
    host.close()


def test_only_configure_answers_hello(path, monkeypatch):
    """Another first message from the host breaks the order and ends the attempt."""
    with Listener(path) as listener:
        guest = attach_in_thread(path)
        host = listener.accept(None, TIMEOUT_S, LAYOUT, m.Role.ENGINE)
        host.wait(TIMEOUT_S)
        host.receive()
        host._conversation.enter(State.READY)
        host.send(Abort(1))
        with pytest.raises(RemoteProtocolError, match="Abort"):
            guest()
        host.close()
