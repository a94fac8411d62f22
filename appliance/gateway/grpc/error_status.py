"""An ``ApplianceError`` as a rich gRPC status: google.rpc.Status with the details that a client can act on; pure.

Source: google/rpc/error_details.proto and AIP-193. ``ErrorInfo`` and ``RequestInfo`` are always there.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from google.rpc import status_pb2

from appliance.common.errors import ApplianceError, ModelNotFoundError, PayloadTooLargeError

DOMAIN = "athanor"
"""``ErrorInfo.domain``: whose reasons these are."""

MAX_MESSAGE_CHARS = 1_200
"""Most characters of a message, which stands three times in the trailers of an answer: clients take 8 KiB of these by
default, and end the call with an error of their own where there are more. The problems of a policy can be longer."""


def status_of(error: ApplianceError, request_id: str) -> status_pb2.Status:
    """The status that ends the call."""
    code: int = getattr(grpc.StatusCode, error.wire.grpc).value[0]
    message = _short(error.message)
    return status_pb2.Status(
        code=code, message=message, details=[_packed(part) for part in _parts(error, message, request_id)]
    )


def _short(message: str) -> str:
    """Return a message, or its begin with the number of characters that are left out."""
    further = len(message) - MAX_MESSAGE_CHARS
    return message if further <= 0 else f"{message[:MAX_MESSAGE_CHARS]} ... and {further} more characters"


def _parts(error: ApplianceError, message: str, request_id: str) -> list[Message]:
    parts: list[Message] = [
        details.ErrorInfo(reason=error.wire.reason, domain=DOMAIN, metadata=error.details),
        details.RequestInfo(request_id=request_id),
    ]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1_000_000_000))
        parts.append(details.RetryInfo(retry_delay=delay))
    if error.wire.grpc == "INVALID_ARGUMENT" and error.param is not None:
        violation = details.BadRequest.FieldViolation(field=error.param, description=message)
        parts.append(details.BadRequest(field_violations=[violation]))
    if error.wire.grpc == "RESOURCE_EXHAUSTED":
        # Of a quota the subject is the caller itself, whose name is no news to it and of no use to others.
        subject = "message" if isinstance(error, PayloadTooLargeError) else "tenant"
        excess = details.QuotaFailure.Violation(subject=subject, description=message)
        parts.append(details.QuotaFailure(violations=[excess]))
    if isinstance(error, ModelNotFoundError):
        parts.append(
            details.ResourceInfo(
                resource_type="model", resource_name=error.details.get("model", ""), description=message
            )
        )
    return parts


def _packed(part: Message) -> any_pb2.Any:
    box = any_pb2.Any()
    box.Pack(part)
    return box
