"""Orders to the downloader: to the service's socket where there is one, else to a child that this process starts.

The command itself opens no connection to a source, and reads no credential: what does so is a program of its own.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.common.errors import ModelCacheError
from appliance.common.paths import OPERATOR_SOCKET
from appliance.fetch.access import ENVIRONMENT
from appliance.fetch.protocol import MAX_LINE_BYTES, FetchOrder
from appliance.fetch.settings import FetchSettings
from isolation.errors import ProcessError
from isolation.host.process import MINIMAL_ENVIRONMENT, start

PROGRAM = "appliance.fetch"

END_S = 5.0
"""Seconds that a child has to end after its connection has."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done and bytes in all."""


def send_order(
    order: FetchOrder, settings: FetchSettings, service: Path | None, progress: Progress, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Have an order carried out; gives the answer.

    Args:
        order: what is to be done.
        settings: for a child; the service has its own.
        service: socket of the service, if the configuration names one.
        progress: told how far it is.
        environment: of this process; a child gets the variables that providers' tools read.

    Raises:
        ModelCacheError: it could not be done; the message says why and what to do.
    """
    with _connection(settings, service, environment) as connection:
        try:
            connection.sendall(order.line())
            for message in _messages(connection):
                match message:
                    case {"event": "progress", "doing": str(doing), "done": int(done), "total": int(total)}:
                        progress(doing, done, total)
                    case {"event": "failed", "message": str(text)}:
                        raise ModelCacheError(text)
                    case {"event": "done"}:
                        return message
        except OSError as error:
            raise ModelCacheError(f"the connection to the downloader broke: {error.strerror or error}") from error
    raise ModelCacheError("the downloader ended before it was done; what has come is kept, pull again to go on")


@contextmanager
def _connection(
    settings: FetchSettings, service: Path | None, environment: Mapping[str, str]
) -> Iterator[socket.socket]:
    if service is None:
        with _child(settings, environment) as connection:
            yield connection
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.connect(str(service))
        except OSError as error:
            raise ModelCacheError(
                f"nothing answers on {service}: {(error.strerror or str(error)).lower()}; "
                f"systemctl status athanor-fetch, and be root"
            ) from error
        yield connection


@contextmanager
def _child(settings: FetchSettings, environment: Mapping[str, str]) -> Iterator[socket.socket]:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    given = {name: value for name, value in environment.items() if name.startswith(ENVIRONMENT)}
    argv = (sys.executable, "-m", PROGRAM, str(its.fileno()), settings.model_dump_json())
    with ours:
        try:
            child = start(argv, env={**MINIMAL_ENVIRONMENT, **given}, stdio=2, descriptors=(its.fileno(),))
        except ProcessError as error:
            raise ModelCacheError(str(error)) from error
        finally:
            its.close()
        try:
            yield ours
        finally:
            ours.close()
            child.wait(END_S)
            child.end()


def _messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """What the downloader says, until it ends.

    Raises:
        ModelCacheError: it says what no release says.
    """
    rest = b""
    while chunk := connection.recv(1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ModelCacheError("the downloader says more than an answer is; is another release of it running?")
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                raise ModelCacheError("the downloader says no JSON; is another release of it running?")
            yield message


def is_served(path: Path) -> bool:
    """Whether a downloader takes orders on a socket; a socket that a killed one has left does not count."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def tell_supervisor(run_dir: Path, fields: Mapping[str, str | int]) -> bool:
    """Have a running supervisor write into its audit log what was done to the cache; False where none runs."""
    return order_supervisor(run_dir, {"do": "record", **fields})


def order_supervisor(run_dir: Path, order: Mapping[str, str | int]) -> bool:
    """Have a running supervisor carry out an order; False where none runs, or it refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(END_S)
        try:
            connection.connect(str(run_dir / OPERATOR_SOCKET))
            connection.sendall(json.dumps(order).encode() + b"\n")
            return b'"ok": true' in connection.recv(MAX_LINE_BYTES)
        except OSError:
            return False


def own_environment() -> dict[str, str]:
    """The variables of this process that a downloader gets."""
    return {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
