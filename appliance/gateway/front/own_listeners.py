"""Listeners of single tenants: where they are bound, who may connect, and what calls by them are known by.

A listener of its own is no credential: a caller still proves who it is, and must be of the listener's tenant. It keeps
others away before that, with a firewall or the permissions of a file, and shares no place for connections with them.
"""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from appliance.common.addresses import split_address
from appliance.common.errors import StartError
from appliance.common.held_sockets import UNIX
from appliance.common.listen_config import ListenConfig

LOCAL_ADDRESS = "127.0.0.1"
"""Address of a caller at a Unix socket, where policy and proxies ask for one: it is on this machine."""

SOCKET_MODE = 0o660
"""The owner, which is the gateway's user, and the group of the configuration may connect."""

OWN_CONNECTIONS = 256
"""Connections at one listener of a tenant; a client's pool has 100. Where few files may be open it has fewer."""

OWN_STRANGERS = 64
"""Those of them without a credential."""

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""Modes of a folder in which others than its owner could replace a socket."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """Listener by which a call comes."""

    tenant: str = ""
    """The one tenant whose credentials are taken; empty: all tenants'."""
    local: bool = False
    """Whether it is a Unix socket, where file permissions stand in place of client certificates."""

    def listener(self, front_end: str) -> str:
        """Return what the audit log has of it: ``http`` or ``grpc`` for those of all tenants, ``own-`` before it for a
        tenant's own and ``-unix`` behind it for a Unix socket. The tenant's name is not in it: entries may have a
        pseudonym in its place."""
        return f"{'own-' if self.tenant else ''}{front_end}{'-unix' if self.local else ''}"


OF_ALL = Entrance()
"""A listener of all tenants."""


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """One address of a tenant's own."""

    tenant: str
    front_end: Literal["http", "grpc"]
    address: str
    """``HOST:PORT`` or ``unix:PATH``."""
    group: str = ""
    """Group of a Unix socket."""

    @property
    def key(self) -> tuple[str, str]:
        """Front end and tenant."""
        return self.front_end, self.tenant

    @property
    def name(self) -> str:
        """Name of the socket at the service manager, which allows no colon in it."""
        return f"{self.front_end}-{self.tenant}"

    @property
    def entrance(self) -> Entrance:
        """What calls by it are known by."""
        return Entrance(self.tenant, self.address.startswith(UNIX))


def own_addresses(listen: ListenConfig) -> tuple[OwnAddress, ...]:
    """Return the addresses of single tenants."""
    return tuple(
        OwnAddress(one.tenant, name, address, one.group or "")
        for one in listen.tenants
        for name, address in one.addresses
    )


def bind_own(
    one: OwnAddress, backlog: int, listen: Callable[[str, str, Callable[[], socket.socket]], socket.socket]
) -> socket.socket:
    """Return the listening socket of an address; ``listen`` makes one by its third argument or takes one that was kept.

    Raises:
        StartError: it cannot be bound, or not be given to its group.
    """
    where = f"{one.front_end} of the tenant {one.tenant} cannot listen on {one.address}"
    path = Path(one.address.removeprefix(UNIX)) if one.entrance.local else None
    try:
        if path is None:
            return listen(one.name, one.address, lambda: _bind_port(one.address, backlog))
        _check_folder(path, where)
        bound = listen(one.name, one.address, lambda: _bind_path(path))
        try:
            _give(path, one.group, where)
        except BaseException:
            bound.close()
            raise
        bound.listen(backlog)  # Only now: nobody connects before the file has its permissions.
    except OSError as error:
        why = (os.strerror(error.errno) if error.errno else str(error)).lower()
        raise StartError(f"{where}: {why}; `athanor doctor` says who has it") from None
    return bound


def shown(one: OwnAddress, bound: socket.socket, scheme: str) -> str:
    """Return the address as clients write it: a URL for HTTP, the target for gRPC."""
    if one.entrance.local:
        return one.address
    host, port = split_address(one.address)[0], bound.getsockname()[1]
    return f"{scheme if one.front_end == 'http' else ''}{f'[{host}]' if ':' in host else host}:{port}"


def _bind_port(address: str, backlog: int) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=backlog)


def _bind_path(path: Path) -> socket.socket:
    """Bind a socket whose file no other user can connect to yet.

    Raises:
        OSError: the file cannot be made, or another program listens there.
    """
    if path.is_socket() and not _listens(path):
        path.unlink(missing_ok=True)  # What an earlier gateway left; anything else there is a mistake to be told.
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(bound.fileno(), 0o600)  # The file is made with the mode of the socket (unix(7)).
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    return bound


def _listens(path: Path) -> bool:
    """Whether a program listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
        asked.setblocking(False)
        try:
            asked.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
    return True


def _check_folder(path: Path, where: str) -> None:
    """Check that no other user could put a socket of its own in the place of ours.

    Raises:
        StartError: the folder is another user's, or its group, or everybody, may write to it.
    """
    folder = path.parent.stat()
    if folder.st_uid not in (0, os.geteuid()):  # root could replace anything anyhow
        raise StartError(
            f"{where}: its folder belongs to another user, who could put a socket of their own in its place; "
            f"chown athanor-gateway {path.parent}"
        )
    if folder.st_mode & OTHERS_WRITE:
        raise StartError(
            f"{where}: its folder is writable for others than its owner, who could put a socket of their own in its "
            f"place; chmod go-w {path.parent}"
        )


def _give(path: Path, group: str, where: str) -> None:
    """Give a socket's file to its group, and let that connect.

    The gateway may give files to groups of its own user alone. So a folder with the setgid bit is the other way: what
    is made in it belongs to the folder's group. In the shipped unit's user namespace that group shows no number, and
    `athanor doctor`, which is outside, compares it.

    Raises:
        StartError: there is no such group, or the file cannot be given to it.
    """
    number = group_number(group)
    if number is None:
        raise StartError(f"{where}: there is no group {group} on this machine; groupadd --system {group}")
    try:
        os.chown(path, -1, number)
    except OSError:
        folder, file = path.parent.stat(), path.stat()
        inherited = bool(folder.st_mode & stat.S_ISGID) and file.st_gid == folder.st_gid
        if not inherited or _is_mapped(folder.st_gid):
            raise StartError(
                f"{where}: the gateway's user may not give the socket to the group {group}; make its folder with: "
                f"install -d -m 2750 -o athanor-gateway -g {group} {path.parent}"
            ) from None
    path.chmod(SOCKET_MODE)


def group_number(group: str) -> int | None:
    """Return the number of a group given by name or number; None where there is none of the name."""
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None


def _is_mapped(number: int) -> bool:
    """Whether a group's number is known in this user namespace: the others all show one number."""
    try:
        return number != int(Path("/proc/sys/kernel/overflowgid").read_text())
    except (OSError, ValueError):
        return True


class Stalls:
    """Connections at Unix sockets whose peers take nothing: TCP's own end of those (RFC 5482) is not there."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._seen: dict[asyncio.Transport, tuple[int, float]] = {}
        """Transport -> bytes that it has to send, and since when they have not become fewer."""

    def watch(self, transport: asyncio.Transport) -> None:
        """Look at a connection until it is closed and has nothing to send."""
        self._seen[transport] = 0, 0.0

    def look(self, now: float) -> None:
        """Close those that have not moved for too long, at this time of the loop."""
        stuck: list[asyncio.Transport] = []
        for transport, (before, since) in list(self._seen.items()):
            size = transport.get_write_buffer_size()
            if not size and transport.is_closing():
                del self._seen[transport]
            elif not size or not before or size < before:
                self._seen[transport] = size, now
            elif now - since > self._longest_s:
                stuck.append(transport)
        _abort(stuck)


def _abort(transports: Iterable[asyncio.Transport]) -> None:
    for transport in transports:
        transport.abort()
