"""Report of a defect: enough in the log to find it, nothing of any request.

An exception's text may quote what a tenant sent, so it is left out; its type and the places it passed are ours.
"""

from __future__ import annotations

import traceback

import structlog

from appliance.common.errors import InternalError
from appliance.common.tracebacks import forget_frames

MAX_FRAMES = 16
"""Innermost frames shown."""

log = structlog.get_logger()


def defect(error: Exception, request_id: str) -> InternalError:
    """Log a defect (request id, or what stands for it; type of the exception; frames from the outermost to the
    innermost) and return the error that the caller sees in its place. The exception has no frames after that, and so
    none of the texts that these refer to."""
    frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
    where = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}:{frame.name}" for frame in frames]
    forget_frames(error)
    log.error("defect", request_id=request_id, kind=type(error).__name__, where=where)
    return InternalError(f"internal error; the operator finds it under request id {request_id}")
