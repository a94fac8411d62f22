"""Messages about files and batches: calls of the gateway and answers of the supervisor, on a socket of their own.

The supervisor hands the gateway one end of a pair of stream sockets (``appliance.common.control.StoreUp``), so that
megabytes of content delay no message of the control socket, whose version is that of these messages too. Each frame is
``header bytes u32, payload bytes u32, header, payload``, big-endian. The header is a JSON object with the number of the
call, a ``type`` and the fields below; unknown types and keys and wrong value types are refused on both sides. Calls are
carried out in their order, and each has one answer.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields
from typing import get_args

from appliance.common import json_codec
from appliance.common.batches.values import (
    MAX_LINE_BYTES,
    MAX_RESULT_BYTES,
    PURPOSE,
    LineProblem,
    StoredBatch,
    StoredFile,
)
from appliance.common.errors import ControlError

MAX_HEADER_BYTES = 4 << 20
"""Bytes of a header: 1,000 batches with the longest metadata would need more, and are listed 100 at a time."""

MAX_PAYLOAD_BYTES = MAX_RESULT_BYTES + MAX_LINE_BYTES
"""Bytes of a payload: a result with the line's own id, or a group of lines."""

LENGTHS = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class BeginUpload:
    """Gateway: a file comes. ``most`` are the bytes that its tenant may keep; ``lines`` is 0 where no batch will read
    it, so that its lines may be of any length."""

    tenant: str
    principal: str
    name: str
    most: int
    lines: int = 1


@dataclass(frozen=True, slots=True)
class UploadPiece:
    """Gateway: the next bytes of a file, as payload."""

    file: str


@dataclass(frozen=True, slots=True)
class EndUpload:
    """Gateway: the file is whole, and is kept for so many seconds; 0: as long as files are."""

    file: str
    keep_s: int
    purpose: str = PURPOSE


@dataclass(frozen=True, slots=True)
class DropUpload:
    """Gateway: no more of the file comes."""

    file: str


@dataclass(frozen=True, slots=True)
class FileQuery:
    """Gateway: asks for a file's facts."""

    tenant: str
    file: str


@dataclass(frozen=True, slots=True)
class FileList:
    """Gateway: asks for a tenant's files behind one of them, newest first unless ``ascending`` is 1."""

    tenant: str
    purpose: str
    after: str
    limit: int
    ascending: int


@dataclass(frozen=True, slots=True)
class FileRead:
    """Gateway: asks for the next bytes of a file; ``after`` is 0, or what the last answer said."""

    tenant: str
    file: str
    after: int


@dataclass(frozen=True, slots=True)
class FileDelete:
    """Gateway: the tenant deletes a file."""

    tenant: str
    file: str
    principal: str


@dataclass(frozen=True, slots=True)
class BeginBatch:
    """Gateway: the tenant makes a batch of a file."""

    tenant: str
    principal: str
    file: str
    endpoint: str
    window_s: int
    metadata: dict[str, str]
    key: str = ""
    """Digest of the client's key, under which the tenant makes one batch; empty where it gave none."""
    output_keep_s: int = 0
    """Seconds for which its results are kept; 0: as long as files are."""


@dataclass(frozen=True, slots=True)
class BatchQuery:
    """Gateway: asks for a batch."""

    tenant: str
    batch: str


@dataclass(frozen=True, slots=True)
class BatchList:
    """Gateway: asks for a tenant's batches behind one of them, newest first."""

    tenant: str
    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class BatchCancel:
    """Gateway: the tenant cancels a batch."""

    tenant: str
    batch: str
    principal: str


@dataclass(frozen=True, slots=True)
class OpenBatches:
    """Gateway: asks for the batches of all tenants that are not over, the oldest first."""


@dataclass(frozen=True, slots=True)
class BatchChecked:
    """Gateway: a batch's file was read; with problems the batch has failed."""

    batch: str
    problems: list[LineProblem]


@dataclass(frozen=True, slots=True)
class LineQuery:
    """Gateway: asks for lines of a batch behind one that have no result."""

    batch: str
    after: int
    count: int


@dataclass(frozen=True, slots=True)
class LineResult:
    """Gateway: what became of a line; its result is the payload. ``entries`` are those of the audit log that charge it
    (``appliance.common.audit.entry.to_wire``): none, one, or one for each of its prompts."""

    batch: str
    line: int
    ok: int
    entries: list[str]


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """Gateway: the window of a batch is over (``expired``), or nothing of a cancelled one runs any more
    (``cancelled``)."""

    batch: str
    why: str


@dataclass(frozen=True, slots=True)
class ForgetTenants:
    """Gateway: nothing of these tenants may be kept any more."""

    tenants: list[str]


@dataclass(frozen=True, slots=True)
class ResponseKeep:
    """Gateway: a response is to be kept; it is the payload. ``most`` are the bytes that its tenant may keep."""

    tenant: str
    principal: str
    response: str
    most: int


@dataclass(frozen=True, slots=True)
class ResponseRead:
    """Gateway: asks for a response."""

    tenant: str
    response: str
    principal: str


@dataclass(frozen=True, slots=True)
class ResponseDelete:
    """Gateway: the tenant deletes a response."""

    tenant: str
    response: str
    principal: str


@dataclass(frozen=True, slots=True)
class UploadBegun:
    """Supervisor: the id of the file that comes."""

    file: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """Supervisor: done, or done before."""


@dataclass(frozen=True, slots=True)
class FileFound:
    """Supervisor: a file."""

    file: StoredFile


@dataclass(frozen=True, slots=True)
class FilesFound:
    """Supervisor: files; ``more``: 1 if there are further ones."""

    files: list[StoredFile]
    more: int


@dataclass(frozen=True, slots=True)
class FileBytes:
    """Supervisor: bytes of a file, as payload; ``last``: 1 if nothing is behind them."""

    after: int
    last: int


@dataclass(frozen=True, slots=True)
class BatchFound:
    """Supervisor: a batch."""

    batch: StoredBatch


@dataclass(frozen=True, slots=True)
class BatchesFound:
    """Supervisor: batches; ``more``: 1 if there are further ones."""

    batches: list[StoredBatch]
    more: int


@dataclass(frozen=True, slots=True)
class LinesFound:
    """Supervisor: numbers and bytes of lines, whose texts are the payload. ``last``: 1 if no other line is behind
    them. ``stored`` are the bytes that the tenant keeps."""

    lines: list[int]
    sizes: list[int]
    last: int
    stored: int


@dataclass(frozen=True, slots=True)
class ResponseFound:
    """Supervisor: a response, as payload, with the times at which it was made and goes."""

    created: int
    expires: int


@dataclass(frozen=True, slots=True)
class StoreRefused:
    """Supervisor: why a call was not carried out: one of ``REFUSALS``, with a number where there is one."""

    reason: str
    number: int = 0


REFUSALS = (
    *("unknown", "unknown_after", "tenant_full", "appliance_full", "too_many_files", "too_many_batches", "failing"),
    *("file_too_large", "line_too_long", "too_many_lines", "too_many_responses", "in_use", "over", "other_batch"),
)
"""Reasons of ``StoreRefused``. ``failing``: disk or keyring."""

StoreCall = (
    BeginUpload
    | UploadPiece
    | EndUpload
    | DropUpload
    | FileQuery
    | FileList
    | FileRead
    | FileDelete
    | BeginBatch
    | BatchQuery
    | BatchList
    | BatchCancel
    | OpenBatches
    | BatchChecked
    | LineQuery
    | LineResult
    | BatchEnd
    | ForgetTenants
    | ResponseKeep
    | ResponseRead
    | ResponseDelete
)
StoreAnswer = (
    UploadBegun
    | Accepted
    | FileFound
    | FilesFound
    | FileBytes
    | BatchFound
    | BatchesFound
    | LinesFound
    | ResponseFound
    | StoreRefused
)
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*get_args(StoreCall), *get_args(StoreAnswer))}


@dataclass(frozen=True, slots=True)
class StoreFrame:
    """One call or answer."""

    call: int
    """Number that the gateway gave the call."""
    message: StoreCall | StoreAnswer
    payload: bytes = b""


def encode_frame(frame: StoreFrame) -> bytes:
    """Encode a frame.

    Raises:
        ControlError: it is larger than a frame may be.
    """
    kind = type(frame.message).__name__
    header = json.dumps({"call": frame.call, "type": kind, **asdict(frame.message)}, separators=(",", ":")).encode()
    check_lengths(len(header), len(frame.payload))
    return b"".join((LENGTHS.pack(len(header), len(frame.payload)), header, frame.payload))


def check_lengths(header: int, payload: int) -> None:
    """Check the lengths of a frame.

    Raises:
        ControlError: it is larger than a frame may be.
    """
    if not 0 < header <= MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
        raise ControlError(f"a frame of the store with a header of {header} bytes and a payload of {payload}")


def decode_frame(header: bytes, payload: bytes) -> StoreFrame:
    """Read a frame.

    Raises:
        ControlError: not one of the messages above, to the letter.
    """
    try:
        values = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ControlError("a frame of the store is not JSON") from error
    call, kind = (values.pop("call", None), values.pop("type", None)) if isinstance(values, dict) else (None, None)
    found = _TYPES.get(kind) if isinstance(kind, str) else None
    if found is None or type(call) is not int or values.keys() != {field.name for field in fields(found)}:
        raise ControlError("a frame of the store of unknown form")
    try:
        message: StoreCall | StoreAnswer = json_codec.decode(found, values)
    except json_codec.SnapshotError as error:
        raise ControlError(f"a frame {kind} of the store is malformed: {error}") from None
    return StoreFrame(call, message, payload)
