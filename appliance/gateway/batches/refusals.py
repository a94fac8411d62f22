"""What a caller is told where the store does not carry out a call; pure."""

from __future__ import annotations

from appliance.common.batches.values import MAX_FILE_BYTES, MAX_LINE_BYTES
from appliance.common.errors import (
    ApplianceError,
    InvalidRequestError,
    PayloadTooLargeError,
    StorageLimitError,
    StoredNotFoundError,
    StoredStateError,
    UnavailableError,
)
from appliance.common.figures import counted
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.store_link import StoreDeniedError

KEY = "idempotency_key"
"""Name of the field of a client's key in errors."""


def refusal(error: StoreDeniedError, what: str, param: str) -> ApplianceError:
    """Return what the caller is told; ``what`` it asked for, by the field ``param``."""
    reason, number = error.reason, error.number
    if reason in ("unknown", "unknown_after"):
        where = "after" if reason == "unknown_after" else param
        return StoredNotFoundError(f"there is no {what} of this id, or none that is yours", param=where)
    texts = {
        "tenant_full": f"this tenant may keep {number} bytes of files and results; delete some",
        "appliance_full": "the appliance keeps as much as it may; try again later",
        "too_many_files": f"this tenant may keep {counted(number, 'file')}; delete some",
        "too_many_responses": f"this tenant may keep {counted(number, 'response')}; delete some",
        "too_many_batches": f"this tenant may have {counted(number, 'batch', 'batches')}; wait until one is over",
    }
    if reason in texts:
        return StorageLimitError(texts[reason], details={"limit": str(number)} if number else None)
    match reason:
        case "file_too_large":
            return PayloadTooLargeError(f"a file has at most {MAX_FILE_BYTES} bytes; divide it", param="file")
        case "line_too_long":
            return InvalidRequestError(f"line {number} has more than {MAX_LINE_BYTES} bytes", param="file")
        case "too_many_lines":
            return InvalidRequestError(f"a file has at most {counted(number, 'request')}; divide it", param="file")
        case "in_use":
            return StoredStateError("a batch reads this file; cancel it first, or wait until it is over", param=param)
        case "over":
            return StoredStateError("the batch is over already", param=param)
        case "other_batch":
            return StoredStateError("this idempotency key has made a batch of other values; use a new key", param=KEY)
    return UnavailableError("files and batches cannot be kept at the moment", retry_after_s=RETRY_AFTER_S)
