"""Limits and checks of a request for scores, for both front ends."""

from __future__ import annotations

from collections.abc import Sequence

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import ScoreOperation, ScoreRequest, TextPrompt
from isolation.ipc import messages as wire

MAX_DOCUMENTS = 2_048
"""Documents, queries or classified texts of one request: as many as Jina's API takes."""


def build_score(
    operation: ScoreOperation,
    model: str,
    queries: Sequence[TextPrompt],
    documents: Sequence[TextPrompt],
    stamp: Stamp,
    *,
    priority: wire.Priority | None = None,
    params: tuple[str, str] = ("query", "documents"),
) -> ScoreRequest:
    """Return the checked request for scores; ``params`` are the caller's names of queries and documents.

    Raises:
        InvalidRequestError: no text, too many, or several queries that are not as many as the documents.
    """
    request_builder.check_model(model)
    query, document = params
    if not documents:
        raise InvalidRequestError(f"{document} must hold at least one text", param=document)
    request_builder.check_most(len(documents), MAX_DOCUMENTS, document, "entries")
    if operation is not ScoreOperation.CLASSIFY and len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            f"{query} must hold one text for all {document}, or one for each of them", param=query
        )
    return ScoreRequest(
        request_id=stamp.request_id,
        operation=operation,
        model=model,
        queries=tuple(queries),
        documents=tuple(documents),
        param=document,
        deadline=stamp.deadline,
        priority=priority,
    )
