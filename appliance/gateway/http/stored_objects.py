"""Files and batches as OpenAI's objects, and its parameters of lists; pure. Source of the shapes: OpenAI's API
specification of 2026-08."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from appliance.common.batches.values import DAY_S, OUTPUT_PURPOSE, PURPOSES, WINDOWS, StoredBatch, StoredFile
from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import stored_builder
from appliance.gateway.http.fields import one_of, typed
from appliance.gateway.stored_work import Page

MAX_FILES_LISTED = 10_000
"""Largest limit of a list of files, as with OpenAI; the store gives fewer."""

MAX_BATCHES_LISTED = 100
BATCHES_LISTED = 20
"""Largest limit of a list of batches, or of a response's items, and the one that holds where none is given."""

MAX_QUERY_FIELDS = 16
MAX_ID_CHARS = 64

_NUMBER = re.compile(r"[0-9]{1,9}")

BATCH_FIELDS = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"})
"""Fields of a new batch that are served."""


def file_object(one: StoredFile) -> dict[str, Any]:
    """Return OpenAI's ``file``."""
    return {
        "id": one.id,
        "object": "file",
        "bytes": one.size,
        "created_at": one.created,
        "expires_at": one.expires,
        "filename": one.name,
        "purpose": one.purpose,
        "status": "processed",
        "status_details": None,
    }


def file_deleted(file: str) -> dict[str, Any]:
    """Return OpenAI's answer to a deletion."""
    return {"id": file, "object": "file", "deleted": True}


def batch_object(one: StoredBatch) -> dict[str, Any]:
    """Return OpenAI's ``batch``."""
    problems = [
        {"code": each.code, "message": each.message, "line": each.line or None, "param": each.param or None}
        for each in one.problems
    ]
    return {
        "id": one.id,
        "object": "batch",
        "endpoint": one.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": one.input_file,
        "completion_window": next((word for word, seconds in WINDOWS.items() if seconds == DAY_S), "24h"),
        "status": one.status,
        "output_file_id": one.output_file or None,
        "error_file_id": one.error_file or None,
        "created_at": one.created,
        "in_progress_at": one.in_progress_at or None,
        "expires_at": one.expires,
        "finalizing_at": one.finalizing_at or None,
        "completed_at": one.completed_at or None,
        "failed_at": one.failed_at or None,
        "expired_at": one.expired_at or None,
        "cancelling_at": one.cancelling_at or None,
        "cancelled_at": one.cancelled_at or None,
        "request_counts": {"total": one.total, "completed": one.completed, "failed": one.failed},
        "metadata": one.metadata or None,
    }


def page_object(entries: Sequence[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """Return OpenAI's list."""
    ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"]} if entries else {}
    return {"object": "list", "data": list(entries), "first_id": None, "last_id": None, **ends, "has_more": more}


def query_of(text: str) -> dict[str, str]:
    """Return the fields of a query.

    Raises:
        InvalidRequestError: it is none, or one stands in it twice.
    """
    try:
        pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS, errors="strict")
    except ValueError:
        raise InvalidRequestError("the query of the URL is malformed, or has too many fields") from None
    found = dict(pairs)
    if len(found) != len(pairs):
        raise InvalidRequestError("a field stands in the query of the URL twice")
    return found


def files_page(query: Mapping[str, str]) -> Page:
    """Return the part of the list of files that a query asks for.

    Raises:
        InvalidRequestError: a field is out of its range; ``param`` names it.
    """
    order = one_of(query.get("order") or "desc", ("asc", "desc"), "order")
    purpose = query.get("purpose", "")
    limit = _limit(query, MAX_FILES_LISTED, MAX_FILES_LISTED)
    # A purpose that no file has is no mistake: there are none.
    known = purpose if purpose in ("", *PURPOSES, OUTPUT_PURPOSE) else "-"
    return Page(limit, stored_builder.after_of(query.get("after", "")), ascending=order == "asc", purpose=known)


def batches_page(query: Mapping[str, str]) -> Page:
    """Return the part of the list of batches that a query asks for.

    Raises:
        InvalidRequestError: a field is out of its range; ``param`` names it.
    """
    return Page(_limit(query, BATCHES_LISTED, MAX_BATCHES_LISTED), stored_builder.after_of(query.get("after", "")))


def items_query(query: Mapping[str, str]) -> Page:
    """Return the part of the list of a response's items that a query asks for.

    Raises:
        InvalidRequestError: a field is out of its range; ``param`` names it.
    """
    order = one_of(query.get("order") or "desc", ("asc", "desc"), "order")
    return Page(
        _limit(query, BATCHES_LISTED, MAX_BATCHES_LISTED),
        stored_builder.after_of(query.get("after", "")),
        ascending=order == "asc",
    )


def _limit(query: Mapping[str, str], default: int, most: int) -> int:
    text = query.get("limit", str(default))
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= most:
        raise InvalidRequestError(f"limit must be a whole number from 1 to {most}", param="limit")
    return int(text)


def keep_of(fields: Mapping[str, str]) -> int:
    """Return the seconds for which an upload asks to be kept; 0 where it does not.

    Raises:
        InvalidRequestError: a field is out of its range; ``param`` names it.
    """
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return 0
    if anchor != "created_at":
        raise InvalidRequestError("expires_after[anchor] must be created_at", param="expires_after")
    asked = int(seconds) if seconds is not None and _NUMBER.fullmatch(seconds) else 0
    return stored_builder.keep_of(asked, "expires_after[seconds]")


def purpose_of(purpose: str | None) -> str:
    """Return what an upload is for.

    Raises:
        InvalidRequestError: it is none of ``PURPOSES``.
    """
    if purpose is None:
        raise InvalidRequestError("purpose is required", param="purpose")
    return one_of(purpose, PURPOSES, "purpose")


def new_batch(document: Mapping[str, Any]) -> tuple[str, str, int, dict[str, str]]:
    """Return file, endpoint, seconds of the window and metadata of a new batch.

    Raises:
        InvalidRequestError: a field is missing or out of its range; ``param`` names it.
    """
    file = stored_builder.input_file_of(document.get("input_file_id"))
    endpoint = stored_builder.endpoint_of(document.get("endpoint"))
    window = document.get("completion_window")
    if not isinstance(window, str) or window not in WINDOWS:
        raise InvalidRequestError(f"completion_window must be {', '.join(WINDOWS)}", param="completion_window")
    metadata = stored_builder.metadata_of(typed(document, "metadata", dict) or {})
    return file, endpoint, WINDOWS[window], metadata


def output_keep_of(document: Mapping[str, Any]) -> int:
    """Return the seconds for which a new batch asks its results to be kept; 0 where it does not.

    Raises:
        InvalidRequestError: a field is missing or out of its range; ``param`` names it.
    """
    asked = typed(document, "output_expires_after", dict)
    if asked is None:
        return 0
    if asked.get("anchor") != "created_at":
        raise InvalidRequestError("output_expires_after.anchor must be created_at", param="output_expires_after")
    seconds = asked.get("seconds")
    whole = seconds if isinstance(seconds, int) and not isinstance(seconds, bool) else 0
    return stored_builder.keep_of(whole, "output_expires_after[seconds]")
