"""A listening socket over a restart: what is said on both sides; systemd itself is in tests/test_systemd_boot.py."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import os, socket, sys
if sys.argv[3:]:
    os.dup2(int(sys.argv[3]), 3)  # As a service manager numbers it; number 3 of the tests is in use.
from appliance.common import held_sockets
os.environ["LISTEN_PID"] = str(os.getpid()) if sys.argv[2] == "own" else "1"
host, port = os.environ["HOST"], int(sys.argv[1])
held = held_sockets.HeldSockets()
if port:
    sock = held.listen("http", f"{host}:{port}", lambda: socket.create_server((host, port), backlog=8))
else:
    def make():
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(host.removeprefix("unix:"))
        sock.listen(8)
        return sock
    sock = held.listen("http", host, make)
held.settle()
print(port, "LISTEN_FDS" in os.environ, os.get_inheritable(sock.fileno()), flush=True)
sock.settimeout(5)
peer, _ = sock.accept()
peer.sendall(b"served")
"""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The service manager's end of the notification socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def begin(
    manager: socket.socket,
    port: int,
    root: Path,
    held: socket.socket | None,
    whose: str = "own",
    host: str = "127.0.0.1",
):
    """One life of a service, with what the manager has kept for it."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(root),
        "NOTIFY_SOCKET": manager.getsockname(),
        "HOST": host,
    }
    arguments = [str(port), whose]
    if held is not None:
        environment |= {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "http"}
        arguments.append(str(held.fileno()))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment,
        pass_fds=() if held is None else (held.fileno(),),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def ask(port: int) -> bytes:
    """What is answered to a connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
        return peer.recv(16)


def kept(manager: socket.socket) -> tuple[bytes, socket.socket]:
    """What the manager was told to keep."""
    data, numbers, _, _ = socket.recv_fds(manager, 1024, 4)
    return data, socket.socket(fileno=numbers[0])


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_a_connection_made_between_two_lives_is_served(manager: socket.socket, root: Path) -> None:
    """The first life gives its socket away; while no process is there a connection is taken by the kernel, and the
    second life answers it. Control: without the kept socket the connection is refused."""
    port = free_port()
    first = begin(manager, port, root, None)
    assert first.stdout.readline().split() == [str(port), "False", "False"]
    told, held = kept(manager)
    assert told == b"FDSTORE=1\nFDNAME=http"
    assert ask(port) == b"served"
    assert first.wait(10) == 0
    with socket.create_connection(("127.0.0.1", port), timeout=5) as early:
        second = begin(manager, port, root, held)
        assert second.stdout.readline().split() == [str(port), "False", "False"], second.stderr.read()
        early.settimeout(5)
        assert early.recv(16) == b"served"
        assert second.wait(10) == 0
    held.close()
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_a_socket_of_another_address_is_let_go(manager: socket.socket, root: Path) -> None:
    """After the configuration was changed the new address is served, and the manager told to close the old one."""
    old, port = socket.create_server(("127.0.0.1", 0)), free_port()
    process = begin(manager, port, root, old)
    assert process.stdout.readline().split()[0] == str(port)
    assert manager.recv(1024) == b"FDSTOREREMOVE=1\nFDNAME=http"
    told, held = kept(manager)
    assert (told.startswith(b"FDSTORE=1"), held.getsockname()[1]) == (True, port)
    assert ask(port) == b"served"
    assert process.wait(10) == 0
    old.close()
    held.close()


@pytest.mark.parametrize("before", ["127.0.0.1", "0.0.0.0"])
def test_the_same_port_of_other_addresses_is_free_at_once(manager: socket.socket, root: Path, before: str) -> None:
    """From one address to all of the machine's and back, with the same port: the manager still has its copy of the old
    socket, and the new one is bound. Control: while the old one listens, the address is taken."""
    old = socket.create_server((before, 0))
    port, after = old.getsockname()[1], "0.0.0.0" if before == "127.0.0.1" else "127.0.0.1"
    with pytest.raises(OSError, match="in use"):
        socket.create_server((after, port))
    process = begin(manager, port, root, old, host=after)
    assert process.stdout.readline().split()[0] == str(port), process.stderr.read()
    assert manager.recv(1024) == b"FDSTOREREMOVE=1\nFDNAME=http"
    told, held = kept(manager)
    assert (told.startswith(b"FDSTORE=1"), held.getsockname()) == (True, (after, port))
    assert ask(port) == b"served"
    assert process.wait(10) == 0
    old.close()
    held.close()


def test_the_old_address_is_free_for_others_at_once(manager: socket.socket, root: Path) -> None:
    """Once the new address is bound, another listener can have the old one while the manager still has its copy: gRPC
    may be given HTTP's address of before."""
    old, port = socket.create_server(("127.0.0.1", 0)), free_port()
    process = begin(manager, port, root, old)
    assert process.stdout.readline().split()[0] == str(port)
    with socket.create_server(("127.0.0.1", old.getsockname()[1])) as other:
        assert other.fileno() != old.fileno()
    assert ask(port) == b"served"
    assert process.wait(10) == 0
    old.close()


def test_a_start_that_fails_leaves_the_old_socket_to_the_next(manager: socket.socket, root: Path) -> None:
    """The new address belongs to somebody else: the start fails, the manager is told nothing, and the next start with
    the old address answers who connected meanwhile."""
    old = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as strangers:
        failing = begin(manager, strangers.getsockname()[1], root, old)
        assert failing.wait(10) != 0
        assert "in use" in failing.stderr.read()
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(1024)
    port = old.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), timeout=5) as early:
        process = begin(manager, port, root, old)
        early.settimeout(5)
        assert early.recv(16) == b"served"
        assert process.wait(10) == 0
    old.close()


def test_what_was_kept_for_another_process_is_not_taken(manager: socket.socket, root: Path) -> None:
    """A descriptor that is there by chance is nobody's socket."""
    other, port = socket.create_server(("127.0.0.1", 0)), free_port()
    process = begin(manager, port, root, other, whose="another's")
    assert process.stdout.readline().split()[0] == str(port)
    assert kept(manager)[1].getsockname()[1] == port
    assert ask(port) == b"served"
    assert process.wait(10) == 0
    other.close()


def test_a_unix_socket_is_kept_too(manager: socket.socket, root: Path) -> None:
    """A connection to a Unix socket that was made between two lives is answered by the second one, and another path is
    a new socket."""
    with tempfile.TemporaryDirectory() as folder:
        path, other = f"{folder}/a.sock", f"{folder}/b.sock"
        first = begin(manager, 0, root, None, host=f"unix:{path}")
        assert first.stdout.readline()
        told, held = kept(manager)
        assert told == b"FDSTORE=1\nFDNAME=http"
        first.kill()
        first.wait(10)
        with socket.socket(socket.AF_UNIX) as early:
            early.connect(path)
            second = begin(manager, 0, root, held, host=f"unix:{path}")
            early.settimeout(5)
            assert early.recv(16) == b"served", second.stderr.read()
            assert second.wait(10) == 0
        third = begin(manager, 0, root, held, host=f"unix:{other}")
        assert manager.recv(1024) == b"FDSTOREREMOVE=1\nFDNAME=http"
        assert kept(manager)[1].getsockname() == other
        third.kill()
        third.wait(10)
        held.close()
