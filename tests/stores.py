"""A real store for the limits of a fleet: Valkey, or the Redis of Debian 12, for the time of a block."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SERVERS = ("fleet-store", "valkey-server", "redis-server")
"""What ``requirements/observers.py`` gets, and the machine's own: Debian has Valkey from 13 (trixie) on, and Redis 7.0
in 12 (bookworm)."""

START_S = 10.0


def server() -> str:
    """The path of the store's program; the test is skipped without one."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
    found = next((where for name in SERVERS if (where := shutil.which(name, path=path))), None)
    if found is None:
        pytest.skip("no valkey-server and no redis-server here: `make setup-dev` gets one")
    return found


@dataclass
class RunningStore:
    """A store at a Unix socket."""

    address: str
    process: subprocess.Popen[bytes]
    version: str


@contextlib.contextmanager
def store(folder: Path, *options: str) -> Iterator[RunningStore]:
    """A store that keeps nothing on disk, in a folder with a short name; ``options`` are further ones of its own."""
    program, path = server(), folder / "store.sock"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split(" ")
    argv = [program, "--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", *options]
    with (folder / "store.log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log)
    try:
        until = time.monotonic() + START_S
        while not _listens(path):
            assert process.poll() is None and time.monotonic() < until, (folder / "store.log").read_text()
            time.sleep(0.01)
        yield RunningStore(f"unix:{path}", process, " ".join(version[:3]))
    finally:
        process.kill()
        process.wait()


def _listens(path: Path) -> bool:
    """Whether somebody takes connections there: between the file and that a server has a moment."""
    with socket.socket(socket.AF_UNIX) as peer:
        return peer.connect_ex(os.fspath(path)) == 0
