"""Everything on the host that an attacker could want, set up for the duration of a block, each with a canary."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isolation.host.process import MINIMAL_ENVIRONMENT, spawn
from isolation.host.scratch import Outside, note
from isolation.ipc import doorbell, segment

KEYCTL_UNLINK, KEYCTL_SET_TIMEOUT, USER_KEYRING = 9, 15, -4
KEY_S = 600
"""Seconds after which the kernel removes the key: above the time of all attacks in one sandbox."""
IPC_CREAT, IPC_EXCL, IPC_RMID = 0o1000, 0o2000, 0
GREETING = b"hello from the host"

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets that are set up."""

    common: dict[str, Any]
    meeting: str
    """Path of a socket where a careless host accepts descriptors, for the control."""

    def words(self, **others: Any) -> dict[str, Any]:
        """Return the attacker's knowledge: everything except the secret itself."""
        return {**self.common, **others}


@contextlib.contextmanager
def standing() -> Iterator[Targets]:
    """Set up all targets, and remove them afterwards."""
    canary = f"canary-{secrets.token_hex(12)}"
    tag = secrets.token_hex(6)
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="ath-")))
        folder.chmod(0o755)
        secret = folder / "secret"
        secret.write_text(canary)
        secret.chmod(0o644)
        shared = Path("/dev/shm", f"athanor-{tag}")
        segment_key = secrets.randbits(30) + 1
        # What outlives a killed process and lies in no folder is written down before it is made.
        note(folder, Outside("file", str(shared)))
        note(folder, Outside("queue", f"athanor-{tag}"))
        note(folder, Outside("segment", str(segment_key)))
        held.callback(shared.unlink, missing_ok=True)
        shared.write_text(canary)
        shared.chmod(0o644)
        sleeper = "import sys; print('up', flush=True); sys.stdin.read(1) or __import__('time').sleep(600)"
        victim = held.enter_context(
            spawn((sys.executable, "-c", sleeper, canary), env={**MINIMAL_ENVIRONMENT, "SECRET": canary})
        )
        common: dict[str, Any] = {
            "canary": canary,
            "file": str(secret),
            "shared": shared.name,
            "victim": victim.pid,
            "address": own_address(),
            "release": platform.release(),
            "abstract": f"athanor-{tag}",
            "home": str(Path(sys.executable).resolve().parent),
            "tcp": held.enter_context(_server(socket.AF_INET, ("0.0.0.0", 0))),
            "tcp6": held.enter_context(_server(socket.AF_INET6, ("::1", 0))),
            "udp": held.enter_context(_echo()),
            "neighbour": str(folder / "host.sock"),
            "key": f"athanor-{tag}",
            "queue": f"athanor-{tag}",
            "segment": held.enter_context(_system_v(segment_key)),
        }
        held.enter_context(_server(socket.AF_UNIX, f"\0{common['abstract']}"))
        held.enter_context(_server(socket.AF_UNIX, common["neighbour"]))
        held.enter_context(_key(common["key"]))
        held.enter_context(_queue(common["queue"]))
        meeting = str(folder / "careless.sock")
        held.enter_context(_server(socket.AF_UNIX, meeting, _take_descriptors))
        held.enter_context(_held_ring())
        yield Targets(common, meeting)


def own_address() -> str:
    """Return an address of this machine, not loopback if possible; nothing is sent to find it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _greet(peer: socket.socket) -> None:
    peer.sendall(GREETING)


def _take_descriptors(peer: socket.socket) -> None:
    """Run a careless host that accepts descriptors and passes out unsealed memory."""
    _, fds, _, _ = socket.recv_fds(peer, 65_536, 16)
    memfd = os.memfd_create("athanor-ipc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, 1 << 16)
    socket.send_fds(peer, [b"got %d descriptors" % len(fds)], [memfd])
    for fd in (*fds, memfd):
        os.close(fd)


@contextlib.contextmanager
def _server(family: int, address: Any, serve: Callable[[socket.socket], None] = _greet) -> Iterator[int]:
    """Run a stream server that serves each caller once; return its port, or 0."""
    with socket.socket(family, socket.SOCK_STREAM) as server:
        try:
            server.bind(address)
        except OSError:
            yield 1  # no IPv6 here: nothing listens at that port
            return
        server.listen(8)

        def loop() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer, contextlib.suppress(OSError):
                    peer.settimeout(5)
                    serve(peer)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1] if family != socket.AF_UNIX else 0
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextlib.contextmanager
def _echo() -> Iterator[int]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("0.0.0.0", 0))

        def loop() -> None:
            while True:
                data, peer = server.recvfrom(64)
                if data == b"end":
                    return
                server.sendto(GREETING, peer)

        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        port = server.getsockname()[1]
        try:
            yield port
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stop:
                stop.sendto(b"end", ("127.0.0.1", port))
            thread.join()


@contextlib.contextmanager
def _system_v(key: int) -> Iterator[int]:
    """Create shared memory under a new key."""
    found = _LIBC.shmget(key, 4096, IPC_CREAT | IPC_EXCL | 0o666)
    try:
        yield key
    finally:
        _LIBC.shmctl(found, IPC_RMID, None)


@contextlib.contextmanager
def _key(name: str) -> Iterator[None]:
    """Add a key to the user's keyring (add_key, number 248 on x86-64; keyctl, 250); the kernel ends it if we cannot."""
    _LIBC.syscall.restype = ctypes.c_long
    ring = ctypes.c_long(USER_KEYRING)
    found = _LIBC.syscall(ctypes.c_long(248), b"user", name.encode(), GREETING, ctypes.c_long(len(GREETING)), ring)
    lasts = ctypes.c_long(KEY_S)
    _LIBC.syscall(ctypes.c_long(250), ctypes.c_long(KEYCTL_SET_TIMEOUT), ctypes.c_long(found), lasts)
    try:
        yield
    finally:
        _LIBC.syscall(ctypes.c_long(250), ctypes.c_long(KEYCTL_UNLINK), ctypes.c_long(found), ring)


@contextlib.contextmanager
def _queue(name: str) -> Iterator[None]:
    """Create a POSIX message queue (mq_open 240, mq_unlink 241)."""
    flags = ctypes.c_long(os.O_CREAT | os.O_RDWR)
    found = _LIBC.syscall(ctypes.c_long(240), name.encode(), flags, ctypes.c_long(0o666), ctypes.c_long(0))
    try:
        yield
    finally:
        if found >= 0:
            os.close(found)
        _LIBC.syscall(ctypes.c_long(241), name.encode())


@contextlib.contextmanager
def _held_ring() -> Iterator[None]:
    """Create another channel's memory and doorbells, held by this process."""
    memfd = segment.create(segment.standard_layout())
    bells = doorbell.create_pipe()
    try:
        yield
    finally:
        for fd in (memfd, *bells):
            os.close(fd)
