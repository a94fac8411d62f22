"""Whether the store of a fleet answers, as a host asks it. Blocks."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

from appliance.common.fleet_config import FleetConfig
from appliance.operator.doctor.finding import Area, Finding, Subject

ASK_S = 3.0
"""Longest wait for each step."""

MAX_PASSWORD_BYTES = 4_096

MAX_REPLY_BYTES = 512

_ASK = b"*2\r\n$4\r\nMGET\r\n$21\r\nathanor:limits:doctor\r\n"
_NOTHING = b"*1\r\n$-1\r\n"


def store_problem(config: FleetConfig) -> str:
    """Return why the store does not serve the fleet; empty where it answers as one."""
    try:
        with _connected(config) as connection:
            wanted, sent = _NOTHING, _ASK
            if config.store_password is not None:
                password = config.store_password.read_bytes()[:MAX_PASSWORD_BYTES].strip()
                words = [b"AUTH", *([config.store_user.encode()] if config.store_user else []), password]
                sent = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in words) + sent
                wanted = b"+OK\r\n" + wanted
            connection.sendall(sent)
            got = b""
            while len(got) < len(wanted) and got == wanted[: len(got)]:
                piece = connection.recv(MAX_REPLY_BYTES)
                if not piece:
                    return "it closes the connection"
                got += piece
    except TimeoutError:
        return f"it does not answer within {ASK_S:g} s"
    except OSError as error:
        return f"it cannot be asked: {error.strerror or error}"
    return "" if got == wanted else f"it says: {got[:100].decode('ascii', 'replace').strip()}"


def _connected(config: FleetConfig) -> socket.socket:
    """Return a connection to the store, with TLS where the configuration has it."""
    if config.socket_path:
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.settimeout(ASK_S)
        try:
            found.connect(config.socket_path)
        except OSError:
            found.close()
            raise
        return found
    host, port = config.address
    plain = socket.create_connection((host, port), timeout=ASK_S)
    if config.store_ca is None:
        return plain
    context = ssl.create_default_context(cafile=config.store_ca)
    return context.wrap_socket(plain, server_hostname=host)


def check_store(problem: str | None) -> Iterator[Finding]:
    """Judge what the store of a fleet answered; None where there is none, which finds nothing."""
    if problem is None:
        return
    subject = Subject(Area.SERVICE, "fleet")
    if not problem:
        yield subject.ok("the fleet's store answers")
        return
    means = "this host has its own part of each limit, and borrows nothing of what other hosts do not use"
    yield subject.warning(
        f"the fleet's store does not serve: {problem}", means, "start it, or see fleet in athanor.yaml"
    )
