"""Messages of ``athanor.batch.v1`` from and to the values of the store; pure."""

from __future__ import annotations

from collections.abc import Mapping

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from appliance.common.batches.values import (
    DAY_S,
    MAX_NAME_CHARS,
    OUTPUT_PURPOSE,
    PURPOSE,
    WINDOWS,
    StoredBatch,
    StoredFile,
)
from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder, stored_builder
from appliance.gateway.grpc.generated import batch_pb2 as pb
from appliance.gateway.stored_work import Page

MAX_LISTED = 100
LISTED = 20
"""Largest limit of a list, and the one that holds where none is given."""

_PURPOSES: Mapping[str, pb.FilePurpose.ValueType] = {
    PURPOSE: pb.FILE_PURPOSE_BATCH,
    OUTPUT_PURPOSE: pb.FILE_PURPOSE_BATCH_OUTPUT,
}
_ASKED = {value: name for name, value in _PURPOSES.items()} | {pb.FILE_PURPOSE_UNSPECIFIED: ""}


def to_head(message: pb.UploadFileRequest) -> tuple[str, int]:
    """Return the name of a file that comes, and the seconds for which it is kept; 0: as long as files are.

    Raises:
        InvalidRequestError: it is no head, or a field is out of its range.
    """
    if message.WhichOneof("part") != "head":
        raise InvalidRequestError("the first message of an upload must have head", param="head")
    head = message.head
    if len(head.name) > MAX_NAME_CHARS:
        raise InvalidRequestError(f"head.name has more than {MAX_NAME_CHARS} characters", param="head.name")
    keep_s = stored_builder.keep_of(_seconds(head.keep, "head.keep"), "head.keep") if head.HasField("keep") else 0
    return head.name or stored_builder.UNNAMED, keep_s


def to_data(message: pb.UploadFileRequest) -> bytes:
    """Return the bytes of a file in a message behind its head.

    Raises:
        InvalidRequestError: it has none.
    """
    if message.WhichOneof("part") != "data":
        raise InvalidRequestError("every message of an upload behind its head must have data", param="data")
    return message.data


def to_files_page(message: pb.ListFilesRequest) -> Page:
    """Return the part of the list of files that is asked for.

    Raises:
        InvalidRequestError: a field is out of its range.
    """
    # A purpose that no file has is no mistake: there are none.
    purpose = _ASKED.get(message.purpose, "-")
    after = stored_builder.after_of(message.after)
    return Page(_limit(message), after, ascending=message.oldest_first, purpose=purpose)


def to_batches_page(message: pb.ListBatchesRequest) -> Page:
    """Return the part of the list of batches that is asked for.

    Raises:
        InvalidRequestError: a field is out of its range.
    """
    return Page(_limit(message), stored_builder.after_of(message.after))


def to_new_batch(message: pb.CreateBatchRequest) -> tuple[str, str, int, dict[str, str]]:
    """Return file, endpoint, seconds of the window and metadata of a new batch.

    Raises:
        InvalidRequestError: a field is missing or out of its range.
    """
    file = stored_builder.input_file_of(message.input_file_id)
    endpoint = stored_builder.endpoint_of(message.endpoint)
    window_s = DAY_S
    if message.HasField("completion_window"):
        window_s = _seconds(message.completion_window, "completion_window")
    if window_s not in WINDOWS.values():
        raise InvalidRequestError("completion_window must be 86400 s, or absent", param="completion_window")
    return file, endpoint, window_s, stored_builder.metadata_of(dict(message.metadata))


def to_file(one: StoredFile) -> pb.File:
    """Return a file as a message."""
    return pb.File(
        id=one.id,
        name=one.name,
        purpose=_PURPOSES.get(one.purpose, pb.FILE_PURPOSE_UNSPECIFIED),
        size=one.size,
        created_at=Timestamp(seconds=one.created),
        expires_at=Timestamp(seconds=one.expires),
    )


def to_batch(one: StoredBatch) -> pb.Batch:
    """Return a batch as a message."""
    problems = [
        pb.BatchProblem(code=each.code, message=each.message, line=each.line, field=each.param) for each in one.problems
    ]
    ended = one.completed_at or one.failed_at or one.expired_at or one.cancelled_at
    return pb.Batch(
        id=one.id,
        endpoint=one.endpoint,
        status=pb.BatchStatus.Value(f"BATCH_STATUS_{one.status.upper()}"),
        input_file_id=one.input_file,
        output_file_id=one.output_file,
        error_file_id=one.error_file,
        created_at=Timestamp(seconds=one.created),
        expires_at=Timestamp(seconds=one.expires),
        in_progress_at=_moment(one.in_progress_at),
        cancelling_at=_moment(one.cancelling_at),
        ended_at=_moment(ended),
        total_lines=one.total,
        completed_lines=one.completed,
        failed_lines=one.failed,
        metadata=one.metadata,
        problems=problems,
    )


def _moment(seconds: int) -> Timestamp | None:
    return Timestamp(seconds=seconds) if seconds else None


def _seconds(duration: Duration, param: str) -> int:
    if duration.nanos:
        raise InvalidRequestError(f"{param} must be whole seconds", param=param)
    return duration.seconds


def _limit(message: pb.ListFilesRequest | pb.ListBatchesRequest) -> int:
    limit = message.limit if message.HasField("limit") else LISTED
    request_builder.check_range(limit, 1, MAX_LISTED, "limit")
    return limit
