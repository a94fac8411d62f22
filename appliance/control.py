"""The words between gateway and supervisor: typed messages, one datagram each, descriptors beside them.

The two host processes meet on one local ``SOCK_SEQPACKET`` socket. The supervisor listens, the gateway connects and
says ``Attach``; from then on the supervisor pushes what happens to sandboxes and the gateway may ask for exactly four
things: namespace keys, the end of a sandbox that misbehaved, and the coming and going of the sandboxes that the policy
grants to single tenants, which the supervisor looks up for itself. Besides, it says whose KV may be kept outside of
engines, and reports what belongs into the audit log. There is no message that names a program or a file or reads a key
of another kind, so a taken-over gateway gains nothing here.

Datagrams are JSON objects with a ``type``; unknown types, keys and wrong value types are refused on both sides.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import termios
from dataclasses import asdict, dataclass, fields
from typing import get_args

from appliance.errors import ControlError

CONTROL_VERSION = 6
"""Raised whenever a message changes its meaning; gateway and supervisor of different versions refuse each other."""

MAX_DATAGRAM_BYTES = 128 << 10
"""Bytes of one message: 1,000 tenants' namespace keys are 100 kB."""

MAX_FDS = 3
"""Descriptors beside one message: the segment and the host's two bell ends."""


LOSS_REASONS = ("oom", "fault", "ended")
"""Why a sandbox ended: its memory limit, at the gateway's word, or anything else."""

REFUSED = "refused"
"""State, in ``SandboxDown``, of a tenant's sandboxes that are not booted."""


COLD, RESTORED, FALLEN_BACK = "cold", "restored", "fallen_back"
"""How a sandbox began: started, as a copy of a checkpoint, or started because its checkpoint was of no use."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Gateway: I am here and speak this version."""

    version: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Supervisor: what runs here. ``models`` are names in the order of the configuration."""

    version: int
    sandbox: str
    limits: str
    models: list[str]


@dataclass(frozen=True, slots=True)
class NamespaceQuery:
    """Gateway: the namespace keys of these tenants, please."""

    tenants: list[str]


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Supervisor: tenant to key, hex; random per boot of the supervisor."""

    keys: dict[str, str]


@dataclass(frozen=True, slots=True)
class Retention:
    """Gateway: of these tenants, whether the policy lets their KV live outside of an engine (1) or not (0); those never
    named count as 0."""

    kept: dict[str, int]


@dataclass(frozen=True, slots=True)
class Fault:
    """Gateway: this sandbox broke the protocol or hangs; end it."""

    model: str
    role: str
    generation: int
    reason: str
    tenant: str = ""
    """Whose own it is; empty: shared."""


@dataclass(frozen=True, slots=True)
class Want:
    """Gateway: a request has come for the sandboxes that this tenant's class asks for, of this model."""

    model: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Release:
    """Gateway: nobody uses these any more, and others need their place."""

    model: str
    tenant: str


@dataclass(frozen=True, slots=True)
class SandboxUp:
    """Supervisor: a sandbox is ready; the segment and two bell ends come with this message."""

    model: str
    role: str
    generation: int
    pid: int
    restarts: int
    layout: str
    ready: dict[str, int]
    tenant: str = ""
    start: str = COLD
    """How it began: ``COLD``, ``RESTORED`` or ``FALLEN_BACK``."""


@dataclass(frozen=True, slots=True)
class SandboxDown:
    """Supervisor: a sandbox is gone or could not start; it comes back after ``retry_in_s`` unless ``state`` says
    otherwise: one that is ``refused`` is never started."""

    model: str
    role: str
    generation: int
    restarts: int
    state: str
    cause: str
    retry_in_s: float
    tenant: str = ""
    reason: str = "ended"
    """One of ``LOSS_REASONS``: what is counted; ``cause`` is for people."""


@dataclass(frozen=True, slots=True)
class SandboxUse:
    """Supervisor: the memory that a ready sandbox holds now, and what it may hold."""

    model: str
    role: str
    memory_bytes: int
    memory_limit_bytes: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Audited:
    """Gateway: entries for the audit log (``appliance.audit.entry.to_wire``), and how many were lost before them."""

    entries: list[str]
    dropped: int


@dataclass(frozen=True, slots=True)
class AuditState:
    """Supervisor: why the audit log is not written now; empty when it is. ``refuses``: 1 where no request may then be
    taken."""

    problem: str
    refuses: int


@dataclass(frozen=True, slots=True)
class SpillState:
    """Supervisor, every few seconds where KV spills: what became of blocks outside of engines since its start, and what
    is kept now, by name (``appliance.gateway.spill_gauges``)."""

    figures: dict[str, int]


FromGateway = Attach | NamespaceQuery | Retention | Fault | Want | Release | Audited
FromSupervisor = Welcome | Namespaces | SandboxUp | SandboxDown | SandboxUse | AuditState | SpillState
Control = FromGateway | FromSupervisor

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*get_args(FromGateway), *get_args(FromSupervisor))}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "float": (int, float),
    "list[str]": (list,),
    "dict[str, str]": (dict,),
    "dict[str, int]": (dict,),
}


def encode(message: Control) -> bytes:
    """One datagram.

    Raises:
        ControlError: the message is larger than a datagram may be.
    """
    data = json.dumps({"type": type(message).__name__, **asdict(message)}).encode()
    if len(data) > MAX_DATAGRAM_BYTES:
        raise ControlError(f"control message of {len(data)} bytes is larger than {MAX_DATAGRAM_BYTES}")
    return data


def decode(data: bytes) -> Control:
    """Read one datagram.

    Raises:
        ControlError: not one of the messages above, to the letter.
    """
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ControlError("control message is not JSON") from error
    kind = _TYPES.get(str(values.pop("type", None))) if isinstance(values, dict) else None
    if kind is None:
        raise ControlError("control message of unknown type")
    known = {item.name: str(item.type) for item in fields(kind)}
    if values.keys() != known.keys():
        raise ControlError(f"control message {kind.__name__} has unknown or missing keys")
    for name, spelled in known.items():
        _check(kind.__name__, name, spelled, values[name])
    message: Control = kind(**values)
    return message


def _check(kind: str, name: str, spelled: str, value: object) -> None:
    right = isinstance(value, _JSON_TYPES[spelled]) and not isinstance(value, bool)
    if right and isinstance(value, list):
        right = all(isinstance(item, str) for item in value)
    if right and isinstance(value, dict):
        inner = str if spelled.endswith("str]") else int
        right = all(isinstance(item, inner) for item in value.values())
    if not right:
        raise ControlError(f"control message {kind} has a wrong type in {name}")


def send(sock: socket.socket, message: Control, fds: tuple[int, ...] = ()) -> None:
    """Send one message on a connected, blocking or non-blocking socket.

    Raises:
        ControlError: the peer is gone, or so far behind that the socket is full.
    """
    try:
        if fds:
            socket.send_fds(sock, [encode(message)], list(fds))
        else:
            sock.send(encode(message))
    except OSError as error:
        raise ControlError(f"the other host process does not take messages: {error.strerror}") from error


def num_unread(sock: socket.socket) -> int:
    """Bytes sent on a socket that the peer has not taken yet, as the kernel accounts for them (unix(7), SIOCOUTQ)."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def receive(sock: socket.socket) -> tuple[Control, tuple[int, ...]] | None:
    """One message and its descriptors (close-on-exec), or None at end of file. ``BlockingIOError`` passes through.

    Raises:
        ControlError: a malformed message.
    """
    try:
        data, fds, flags, _ = socket.recv_fds(sock, MAX_DATAGRAM_BYTES + 1, MAX_FDS)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ControlError(f"control socket broke: {error.strerror}") from error
    for fd in fds:
        # recv_fds of Python 3.11 passes no flags on, so MSG_CMSG_CLOEXEC would be lost.
        os.set_inheritable(fd, False)
    try:
        if not data:
            raise EOFError
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ControlError("control message was cut off")
        return decode(data), tuple(fds)
    except (ControlError, EOFError) as error:
        # Whatever came beside a message that is none would stay open for ever.
        for fd in fds:
            os.close(fd)
        if isinstance(error, EOFError):
            return None
        raise
