"""Messages between gateway and supervisor: typed, one datagram each, with descriptors beside them.

The two host processes meet on one local ``SOCK_SEQPACKET`` socket. The supervisor listens, the gateway connects and
says ``Attach``; from then on the supervisor pushes what happens to sandboxes, and the gateway says of each that it
was handed whether it has it. It may ask for exactly twelve things: namespace keys, what tenants have spent, what one
has used, what all have used for the operator's page, attestations, the socket on which files and batches are spoken of,
the end of a sandbox that misbehaved, the freezing of idle ones, the coming and going of the sandboxes that the policy
grants to single tenants, and of models as the configuration names them, both of which the supervisor looks up for
itself, and the sleep of these models. Besides, it says whose KV may be kept outside of engines, reserves what requests
may cost, and reports what belongs into the audit log and when keys were used. There is no message that names a program
or a file or reads a key of another kind, so a taken-over gateway gains nothing here.

Datagrams are JSON objects with a ``type``; unknown types, keys and wrong value types are refused on both sides.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import socket
import sys
import termios
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from appliance.common.control_cards import GPU_LOST, GPU_MEMORY, CardState, EngineEnds
from appliance.common.control_charges import ChargesUp, KeepCharges
from appliance.common.control_checkpoints import CheckpointState
from appliance.common.control_models import ModelWishes, ModelWords
from appliance.common.control_usage import UsageAnswer, UsageQuestion
from appliance.common.errors import ControlError, MessageTooLargeError

CONTROL_VERSION = 28
"""Version, raised whenever a message changes its meaning; different versions refuse each other."""

MAX_DATAGRAM_BYTES = 128 << 10
"""Most bytes of one message: 500 tenants' namespace keys are 71 kB."""

MAX_FDS = 3
"""Most descriptors beside one message: the segment and the host's two ends of the doorbells."""

SPEND_CONFIRM_S = 5.0
"""Longest that a request waits for its reservation of spend: a disk that takes longer is no place for an account. The
supervisor writes none that is older, since nobody waits for it."""

MAX_RESERVATIONS = 500
"""Reservations of one message: with ids and names of full length they take half a datagram."""

LOSS_REASONS = ("oom", "fault", GPU_LOST, GPU_MEMORY, "ended")
"""Reasons why a sandbox ended: its memory limit, a fault that gateway or supervisor found, its GPU was lost, it held
more than its share of the GPU's memory, anything else."""

REFUSED = "refused"
"""State, in ``SandboxDown``, of a tenant's sandboxes that are not booted."""

COLD, RESTORED, FALLEN_BACK = "cold", "restored", "fallen_back"
"""How a sandbox began: started, as a copy of a checkpoint, or started because its checkpoint was of no use."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Gateway: first message, with its version."""

    version: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """Supervisor: answer to ``Attach``. ``models`` are names in the order of the configuration."""

    version: int
    sandbox: str
    limits: str
    models: list[str]


@dataclass(frozen=True, slots=True)
class NamespaceQuery:
    """Gateway: asks for the namespace keys of these tenants."""

    tenants: list[str]


@dataclass(frozen=True, slots=True)
class Namespaces:
    """Supervisor: tenant to key, hex; random per boot of the supervisor."""

    keys: dict[str, str]


LEAVES = 2
"""What ``Retention`` says of a tenant whose sealed KV may leave this machine."""

SHARED = 3
"""What ``Retention`` says of a tenant whose sealed KV other hosts of the fleet may use as well."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Gateway: whether the policy lets these tenants' KV be kept outside of an engine (1), sealed in a store outside of
    this machine too (``LEAVES``), there for all members of the fleet (``SHARED``), or none of these (0); tenants never
    named count as 0."""

    kept: dict[str, int]


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Gateway: answer to ``SandboxUp``. It has the descriptors (1), or they did not all arrive, or cannot be used yet,
    because it may open no more: to be sent again (0)."""

    model: str
    role: str
    generation: int
    whole: int
    tenant: str = ""
    most_open: int = 0
    """Descriptors that it may have open, where they did not arrive."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Gateway: this sandbox broke the protocol or hangs and is to be ended."""

    model: str
    role: str
    generation: int
    reason: str
    tenant: str = ""
    """Tenant that the sandbox belongs to; empty: shared."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Gateway: nobody uses this sandbox, so it may be frozen (1), or something is about to be sent to it (0)."""

    model: str
    role: str
    generation: int
    frozen: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Want:
    """Gateway: a request needs the sandboxes of its own that this tenant's class asks for, of this model."""

    model: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Release:
    """Gateway: no request uses these sandboxes any more, and others need their place."""

    model: str
    tenant: str


@dataclass(frozen=True, slots=True)
class SandboxUp:
    """Supervisor: a sandbox is ready; the segment and two bell ends come with this message. It is sent again until the
    gateway says that it has them."""

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
    computes: str = ""
    """What an engine says that it computes with."""
    model_digest: str = ""
    """Digest of the model's files as `athanor model digest` prints it; empty for a model without files."""
    ranks: int = 1
    """Processes that compute together in an engine."""


@dataclass(frozen=True, slots=True)
class SandboxDown:
    """Supervisor: a sandbox ended or could not start. It boots again after ``retry_in_s``, unless ``state`` is
    ``refused``."""

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
    """Supervisor: memory that a ready sandbox holds, and its limit."""

    model: str
    role: str
    memory_bytes: int
    memory_limit_bytes: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Frozen:
    """Supervisor: a sandbox is frozen now (1) or not (0), which also answers a ``Freeze`` that cannot be followed."""

    model: str
    role: str
    generation: int
    frozen: int
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Audited:
    """Gateway: entries for the audit log (``appliance.common.audit.entry.to_wire``), and the number lost before
    them."""

    entries: list[str]
    dropped: int


@dataclass(frozen=True, slots=True)
class KeysUsed:
    """Gateway, every few seconds: last uses of API keys, as Unix seconds by secret
    (``appliance.common.keys.secret_name``)."""

    used: dict[str, int]


@dataclass(frozen=True, slots=True)
class SpendQuery:
    """Gateway: asks what these tenants have spent."""

    tenants: list[str]


@dataclass(frozen=True, slots=True)
class Spent:
    """Supervisor: what tenants have spent in a day and a month, by number (``appliance.common.usage.periods``): four
    amounts each, in billionths of the currency's unit: spent in the day, in the month, reserved on that day, and
    reserved on earlier days of the month. ``asked`` are those of the question: one that has spent and reserved nothing
    is not in ``spent``."""

    day: int
    month: int
    asked: list[str]
    spent: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class ReserveSpend:
    """Gateway: the most that requests may cost, in billionths, by tenant and request, to be recorded before their first
    tokens. A request's entry in the audit log releases its cost. ``MAX_RESERVATIONS`` at most."""

    costs: dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class SpendReserved:
    """Supervisor: the costs of these requests are recorded on disk."""

    requests: list[str]


@dataclass(frozen=True, slots=True)
class Attest:
    """Gateway: asks for an attestation of what serves this tenant's requests (``appliance.common.audit.attestation``).
    ``model`` is the one that the tenant asked about, ``nonce`` the tenant's."""

    request: str
    tenant: str
    model: str
    nonce: str


@dataclass(frozen=True, slots=True)
class Attested:
    """Supervisor: answer to ``Attest``: the signed text, or the problem why there is none."""

    request: str
    text: str
    problem: str


@dataclass(frozen=True, slots=True)
class AuditState:
    """Supervisor: problem of the audit log; empty while it is written. ``refuses``: 1 if requests are refused
    meanwhile. ``witness``: what is wrong with the witnesses of its checkpoints; empty while they cosign."""

    problem: str
    refuses: int
    witness: str


@dataclass(frozen=True, slots=True)
class SpillState:
    """Supervisor, every few seconds where KV spills: counts of spilled blocks since its start, what is held now, and
    the state of the store outside, by name (``appliance.gateway.watch.gauges``)."""

    figures: dict[str, int]


@dataclass(frozen=True, slots=True)
class DiskState:
    """Supervisor, now and then: free and total bytes of the file system of each folder that it writes to
    (``appliance.common.disk_space``)."""

    places: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class OpenStore:
    """Gateway: asks for the socket on which files and batches are spoken of (``appliance.common.batches``)."""


@dataclass(frozen=True, slots=True)
class StoreUp:
    """Supervisor: the gateway's end of that socket comes with this message; an earlier one is closed."""


@dataclass(frozen=True, slots=True)
class StoreState:
    """Supervisor, every few seconds where files and batches are kept: what is kept now, by name."""

    figures: dict[str, int]


FromGateway = (
    Attach
    | NamespaceQuery
    | Retention
    | HandedOver
    | Fault
    | Freeze
    | Want
    | Release
    | Audited
    | KeysUsed
    | SpendQuery
    | ReserveSpend
    | Attest
    | UsageQuestion
    | OpenStore
    | KeepCharges
    | ModelWishes
)
FromSupervisor = (
    Welcome
    | Namespaces
    | SandboxUp
    | SandboxDown
    | EngineEnds
    | SandboxUse
    | Frozen
    | AuditState
    | SpillState
    | DiskState
    | CheckpointState
    | CardState
    | Spent
    | SpendReserved
    | Attested
    | UsageAnswer
    | StoreUp
    | StoreState
    | ChargesUp
    | ModelWords
)
Control = FromGateway | FromSupervisor

_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*get_args(FromGateway), *get_args(FromSupervisor))}


def encode(message: Control) -> bytes:
    """Encode a message as one datagram.

    Raises:
        MessageTooLargeError: the message is larger than a datagram may be.
    """
    # UTF-8 and no escapes: a character outside of ASCII takes up to four bytes in place of twelve. Paths may hold
    # single surrogates, which json.loads takes as well.
    kind: type = type(message)
    values = {name: getattr(message, name) for name in _names(kind)}
    text = json.dumps({"type": kind.__name__, **values}, ensure_ascii=False)
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > MAX_DATAGRAM_BYTES:
        raise MessageTooLargeError(
            f"control message {kind.__name__} of {len(data)} bytes is larger than {MAX_DATAGRAM_BYTES}"
        )
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
    try:
        _shape(kind).model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ControlError(f"control message {kind.__name__} is malformed: {where}: {first['msg']}") from None
    message: Control = kind(**values)
    return message


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    """Names of a message's fields. What they hold is JSON already: ``dataclasses.asdict`` would copy it all, which
    takes ten times as long as to write it."""
    return tuple(field.name for field in fields(kind))


@functools.cache
def _shape(kind: type) -> type[BaseModel]:
    """Exact keys and types of a message."""
    shape: dict[str, Any] = {name: (hint, ...) for name, hint in get_type_hints(kind).items()}
    return create_model(kind.__name__, __config__=ConfigDict(extra="forbid", strict=True), **shape)


def send(sock: socket.socket, message: Control, fds: tuple[int, ...] = ()) -> None:
    """Send one message on a connected, blocking or non-blocking socket.

    Raises:
        MessageTooLargeError: the message is larger than a datagram may be; nothing was sent.
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
    """Bytes sent on a socket and not yet received by the peer (unix(7), SIOCOUTQ)."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def receive(sock: socket.socket, *, repeats: bool = False) -> tuple[Control, tuple[int, ...]] | None:
    """One message and its descriptors (close-on-exec), or None at end of file. ``BlockingIOError`` passes through. From
    a peer that ``repeats`` what was cut off, a message whose descriptors did not all arrive is returned without any.

    Raises:
        ControlError: a malformed message, or one that was cut off.
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
        if flags & socket.MSG_TRUNC or (flags & socket.MSG_CTRUNC and not repeats):
            raise ControlError("control message was cut off")
        message = decode(data)
        if flags & socket.MSG_CTRUNC:
            _close(fds)
            return message, ()
        return message, tuple(fds)
    except (ControlError, EOFError) as error:
        # Whatever came beside a message that is none would stay open for ever.
        _close(fds)
        if isinstance(error, EOFError):
            return None
        raise


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
