"""Schemas of answers, by route: closed objects, so that a test holds every field of real answers against them."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.common.errors import ApplianceError
from appliance.gateway.http import messages_objects
from appliance.gateway.http.openai_objects import OWNER
from appliance.gateway.tenant_account import LimitUnit
from appliance.operator.reference.errors import errors_of
from appliance.operator.reference.openapi.model_answers import GENERATION, MESSAGES, RESPONSES
from appliance.operator.reference.openapi.shapes import (
    ANY_OBJECT,
    ANY_TEXT,
    COUNT,
    NULL,
    NUMBER,
    TIME,
    TRUTH,
    Schema,
    constant,
    either,
    given,
    items,
    or_null,
    ref,
    word,
)

AMOUNT: Schema = {"type": "string", "pattern": "^[0-9]+([.][0-9]+)?$", "description": "An exact decimal number."}
_FILE: dict[str, Schema] = {
    "id": ANY_TEXT,
    "object": constant("file"),
    "bytes": COUNT,
    "created_at": TIME,
    "expires_at": TIME,
    "filename": ANY_TEXT,
    "purpose": ANY_TEXT,
    "status": constant("processed"),
    "status_details": NULL,
}
_MOMENTS = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def _page(entry: Schema) -> Schema:
    ends = {"first_id": or_null(ANY_TEXT), "last_id": or_null(ANY_TEXT), "has_more": TRUTH}
    return given({"object": constant("list"), "data": items(entry), **ends})


STORED: Mapping[str, Schema] = {
    "File": given(_FILE),
    "FileDeleted": given({"id": ANY_TEXT, "object": constant("file"), "deleted": {"const": True}}),
    "ListOfFiles": _page(ref("File")),
    "Batch": given(
        {
            "id": ANY_TEXT,
            "object": constant("batch"),
            "endpoint": ANY_TEXT,
            "errors": or_null(
                given(
                    {
                        "object": constant("list"),
                        "data": items(
                            given(
                                {
                                    "code": ANY_TEXT,
                                    "message": ANY_TEXT,
                                    "line": or_null(COUNT),
                                    "param": or_null(ANY_TEXT),
                                }
                            )
                        ),
                    }
                )
            ),
            "input_file_id": ANY_TEXT,
            "completion_window": ANY_TEXT,
            "status": ANY_TEXT,
            "output_file_id": or_null(ANY_TEXT),
            "error_file_id": or_null(ANY_TEXT),
            "created_at": TIME,
            "expires_at": TIME,
            **dict.fromkeys(_MOMENTS, or_null(TIME)),
            "request_counts": given({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "metadata": or_null({"type": "object", "additionalProperties": ANY_TEXT}),
        }
    ),
    "ListOfBatches": _page(ref("Batch")),
    "ListOfItems": _page(ANY_OBJECT),
}

_USED: dict[str, Schema] = {
    "requests": COUNT,
    "input_tokens": COUNT,
    "cached_tokens": COUNT,
    "output_tokens": COUNT,
    "reasoning_tokens": COUNT,
    "cost": AMOUNT,
}
_PERIOD = given(
    {
        "begins_at": TIME,
        "ends_at": TIME,
        "total": given(_USED),
        "models": items(given({"model": or_null(ANY_TEXT), **_USED})),
        "users": items(given({"user": or_null(ANY_TEXT), **_USED})),
    }
)
_AMOUNT_OR_NUMBER = either({"type": "integer"}, {"type": "string", "pattern": "^-?[0-9]+([.][0-9]+)?$"})

_SCORED = given({"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT})


def _list_of(entry: dict[str, Schema]) -> Schema:
    """What a route answers that gives a number for each pair or text."""
    return given(
        {
            "id": ANY_TEXT,
            "object": constant("list"),
            "created": COUNT,
            "model": ANY_TEXT,
            "usage": _SCORED,
            "data": items(given(entry)),
        }
    )


OTHERS: Mapping[str, Schema] = {
    "Embeddings": given(
        {
            "object": constant("list"),
            "data": items(
                given(
                    {
                        "object": constant("embedding"),
                        "index": COUNT,
                        "embedding": either(items(NUMBER), {"type": "string", "contentEncoding": "base64"}),
                    }
                )
            ),
            "model": ANY_TEXT,
            "usage": given({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "Ranking": given(
        {
            "id": ANY_TEXT,
            "model": ANY_TEXT,
            "usage": _SCORED,
            "results": items(
                given({"index": COUNT, "relevance_score": NUMBER, "document": given({"text": ANY_TEXT})}, "document")
            ),
        }
    ),
    "Scores": _list_of({"index": COUNT, "object": constant("score"), "score": NUMBER}),
    "Classes": _list_of({"index": COUNT, "label": ANY_TEXT, "probs": items(NUMBER), "num_classes": COUNT}),
    "Tokens": given({"count": COUNT, "max_model_len": or_null(COUNT), "tokens": items(COUNT), "token_strs": NULL}),
    "Text": given({"prompt": ANY_TEXT}),
    "Attestation": given(
        {"object": constant("attestation"), "id": ANY_TEXT, "model": ANY_TEXT, "attestation": ANY_TEXT}
    ),
    "Limits": given(
        {
            "object": constant("limits"),
            "tenant": ANY_TEXT,
            "currency": or_null(ANY_TEXT),
            "limits": items(
                given(
                    {
                        "name": ANY_TEXT,
                        "unit": word("currency", *(one.value for one in LimitUnit if one is not LimitUnit.BILLIONTHS)),
                        "limit": _AMOUNT_OR_NUMBER,
                        "most": _AMOUNT_OR_NUMBER,
                        "left": _AMOUNT_OR_NUMBER,
                        "full_in_s": or_null(NUMBER),
                        "exceeded": ANY_TEXT,
                    }
                )
            ),
            "running_requests": COUNT,
            "waiting_requests": COUNT,
            "max_context_tokens": or_null(COUNT),
            "max_output_tokens": or_null(COUNT),
        }
    ),
    "TenantUsage": given(
        {
            "object": constant("usage"),
            "tenant": ANY_TEXT,
            "currency": or_null(ANY_TEXT),
            "day": _PERIOD,
            "month": _PERIOD,
        }
    ),
    "Version": given({"version": ANY_TEXT}),
    "Model": given(
        {
            "id": ANY_TEXT,
            "object": constant("model"),
            "created": TIME,
            "owned_by": constant(OWNER),
            "max_model_len": COUNT,
            "runner": ANY_TEXT,
            "digest": ANY_TEXT,
        },
        "runner",
        "digest",
    ),
    "ListOfModels": given({"object": constant("list"), "data": items(ref("Model"))}),
    "Live": given({"status": constant("live")}),
    "Ready": given({"status": word("ready", "not ready")}),
}


def _facts() -> Schema:
    kinds = sorted({one.wire.kind for one in errors_of(ApplianceError)})
    codes = sorted({one.wire.code for one in errors_of(ApplianceError)})
    return given({"message": ANY_TEXT, "type": word(*kinds), "param": or_null(ANY_TEXT), "code": word(*codes)})


ERRORS: Mapping[str, Schema] = {
    "ErrorFacts": _facts(),
    "Error": given({"error": ref("ErrorFacts")}),
    "MessagesError": given(
        {
            "type": constant("error"),
            "error": given(
                {
                    "type": word(*sorted({*messages_objects.KINDS.values(), messages_objects.OTHER_KIND})),
                    "message": ANY_TEXT,
                }
            ),
            "request_id": ANY_TEXT,
        }
    ),
}

SCHEMAS: Mapping[str, Schema] = {**GENERATION, **RESPONSES, **MESSAGES, **STORED, **OTHERS, **ERRORS}

ANSWERS: Mapping[str, str] = {
    "POST /v1/chat/completions": "ChatCompletion",
    "POST /v1/completions": "Completion",
    "POST /v1/responses": "Response",
    "POST /v1/responses/input_tokens": "InputTokens",
    "GET /v1/responses/{response_id}": "Response",
    "DELETE /v1/responses/{response_id}": "ResponseDeleted",
    "GET /v1/responses/{response_id}/input_items": "ListOfItems",
    "POST /v1/messages": "MessageAnswer",
    "POST /v1/messages/count_tokens": "MessageCount",
    "POST /v1/embeddings": "Embeddings",
    "POST /v1/rerank": "Ranking",
    "POST /v2/rerank": "Ranking",
    "POST /v1/score": "Scores",
    "POST /v1/classify": "Classes",
    "POST /tokenize": "Tokens",
    "POST /detokenize": "Text",
    "POST /v1/attestations": "Attestation",
    "POST /v1/files": "File",
    "GET /v1/files": "ListOfFiles",
    "GET /v1/files/{file_id}": "File",
    "DELETE /v1/files/{file_id}": "FileDeleted",
    "POST /v1/batches": "Batch",
    "GET /v1/batches": "ListOfBatches",
    "GET /v1/batches/{batch_id}": "Batch",
    "POST /v1/batches/{batch_id}/cancel": "Batch",
    "GET /v1/limits": "Limits",
    "GET /v1/usage": "TenantUsage",
    "GET /version": "Version",
    "GET /v1/models": "ListOfModels",
    "GET /v1/models/{model}": "Model",
    "GET /health": "Ready",
    "GET /health/live": "Live",
    "GET /health/ready": "Ready",
}
"""Operation -> schema of its JSON answer. Two have others: a file's content, and this document."""

EVENTS: Mapping[str, str] = {
    "POST /v1/chat/completions": "ChatCompletionChunk",
    "POST /v1/completions": "CompletionChunk",
    "POST /v1/responses": "ResponseEvent",
    "GET /v1/responses/{response_id}": "ResponseEvent",
    "POST /v1/messages": "MessageEvent",
}
"""Operation -> schema of each event's JSON where its answer is streamed."""
