"""The HTTP API as a document of OpenAPI 3.1: routes, scopes and errors from the gateway's own tables, fields from the
reference's rows. Built when the references are written; the gateway serves the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from appliance.common.batches.values import FILE_KEEP_S, LEAST_KEEP_S, PURPOSES
from appliance.common.errors import ApplianceError
from appliance.common.scopes import Scope
from appliance.common.version import VERSION
from appliance.gateway.front.affinity import HEADER, MAX_SESSION_CHARS
from appliance.gateway.front.auth import Auth
from appliance.gateway.front.end_user import MAX_END_USER_CHARS
from appliance.gateway.front.stored_builder import MAX_KEY_CHARS
from appliance.gateway.http import messages_request, responses_request, unsupported
from appliance.gateway.http.app import ROUTES, Route
from appliance.gateway.http.background import MAX_NUMBER_CHARS
from appliance.gateway.http.header_fields import MAX_TIMEOUT_MS
from appliance.gateway.http.stored_objects import MAX_BATCHES_LISTED, MAX_FILES_LISTED, MAX_ID_CHARS
from appliance.operator.reference import http
from appliance.operator.reference.errors import errors_of
from appliance.operator.reference.markdown import Field, first_paragraph
from appliance.operator.reference.openapi.answers import ANSWERS, EVENTS, SCHEMAS
from appliance.operator.reference.openapi.requests import BODIES, PIECES
from appliance.operator.reference.openapi.shapes import ANY_TEXT, TRUTH, Schema, constant, ref, text, whole, word

FORM = "/v1/files"
CONTENT = "/v1/files/{file_id}/content"
DOCUMENT = "/openapi.json"

LINES_DEPTH = 3
"""Levels of the document whose entries have lines of their own."""

JSON = "application/json"
STREAM = "text/event-stream"

_ID = text(1, MAX_ID_CHARS, pattern="^[A-Za-z0-9_-]+$")
_QUERIES: Mapping[str, Mapping[str, Schema]] = {
    "GET /v1/files": {
        "after": _ID,
        "limit": whole(1, MAX_FILES_LISTED),
        "order": word("asc", "desc"),
        "purpose": ANY_TEXT,
    },
    "GET /v1/batches": {"after": _ID, "limit": whole(1, MAX_BATCHES_LISTED)},
    "GET /v1/responses/{response_id}": {"stream": TRUTH, "starting_after": whole(0, 10**MAX_NUMBER_CHARS - 1)},
    "GET /v1/responses/{response_id}/input_items": {
        "after": _ID,
        "limit": whole(1, MAX_BATCHES_LISTED),
        "order": word("asc", "desc"),
    },
    "GET /v1/usage": {"user": {"type": "string", "maxLength": MAX_END_USER_CHARS}},
}
"""Operation -> fields of its query."""

_FORM_FIELDS: Mapping[str, Schema] = {
    "file": {"type": "string", "contentMediaType": "application/octet-stream"},
    "purpose": word(*PURPOSES),
    "expires_after[anchor]": constant("created_at"),
    "expires_after[seconds]": whole(LEAST_KEEP_S, FILE_KEEP_S),
}

_REFUSED: Mapping[str, tuple[Mapping[str, unsupported.Unsupported], ...]] = {
    "/v1/chat/completions": (unsupported.FIELDS,),
    "/v1/completions": (unsupported.FIELDS, unsupported.COMPLETION_FIELDS),
    "/v1/responses": (responses_request.UNSUPPORTED,),
    "/v1/responses/input_tokens": (responses_request.UNSUPPORTED,),
    "/v1/messages": (messages_request.UNSUPPORTED,),
    "/v1/messages/count_tokens": (messages_request.UNSUPPORTED,),
    "/v1/embeddings": (unsupported.EMBED_FIELDS,),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/v1/score", "/v1/classify"), (unsupported.SCORE_FIELDS,)),
    "/tokenize": (unsupported.TOKENIZE_FIELDS,),
}
"""Path -> fields that are refused with advice."""

_BY_RULE = frozenset({400, 403, 409, 413, 429})
"""Statuses of errors that a rule of the policy may be the cause of."""

_RULE_HEADERS = ("x-athanor-rule", "x-athanor-policy")

_SECURITY: Mapping[str, Schema] = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key, or a token of a known issuer."},
    "messages_key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "The key, below /v1/messages, as Anthropic's clients send it.",
    },
    "certificate": {"type": "mutualTLS", "description": "A client certificate, where the operator has them asked for."},
}


def document() -> dict[str, Any]:
    """Return the document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(path_of(route), {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.1",
        "info": {
            "title": "Athanor",
            "version": VERSION,
            "description": http.ABOUT.strip(),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": one.value, "description": _scope_meaning(one)} for one in Scope],
        "paths": paths,
        "components": {
            "schemas": {**PIECES, **SCHEMAS},
            "responses": _errors(),
            "parameters": _request_headers(),
            "headers": dict(_response_headers()),
            "securitySchemes": dict(_SECURITY),
        },
    }


def render() -> str:
    """Return the text of the file: an operation or a schema a line, so that a change shows where it is."""
    return _lines(document(), LINES_DEPTH) + "\n"


def _lines(value: Any, depth: int) -> str:
    if not depth or not isinstance(value, dict) or not value:
        return json.dumps(value, separators=(",", ":"))
    return "{\n" + ",\n".join(f"{json.dumps(name)}:{_lines(one, depth - 1)}" for name, one in value.items()) + "\n}"


def path_of(route: Route) -> str:
    """Return the path of a route as OpenAPI writes it."""
    return re.sub(r"{(\w+):path}", r"{\1}", route.path)


def _operation(route: Route) -> dict[str, Any]:
    path = path_of(route)
    name = f"{route.method} {path}"
    made: dict[str, Any] = {
        "operationId": "_".join(re.findall(r"[a-z]+", name.lower().replace("/v2/", "/second/"))),
        "summary": http.ROUTE_MEANINGS[route.path],
        "security": _security(route),
    }
    if route.scope is not None:
        made["tags"] = [route.scope.value]
    if parameters := _parameters(name, path):
        made["parameters"] = parameters
    if route.method == "POST" and (path in BODIES or path == FORM):
        made["requestBody"] = {"required": True, "content": _body(path)}
    made["responses"] = {"200": _answer(name, path), **_refusals(route, name, path)}
    return made


def _security(route: Route) -> list[dict[str, list[str]]]:
    """A credential of any kind, with the scope as the role that it needs."""
    if route.auth is Auth.PUBLIC or route.scope is None:
        return []
    messages = (route.path + "/").startswith("/v1/messages/")
    kinds = ["key", *(["messages_key"] if messages else []), "certificate"]
    return [{kind: [route.scope.value]} for kind in kinds]


def _parameters(name: str, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": one, "in": "path", "required": True, "schema": text(1) if one == "model" else _ID}
        for one in re.findall(r"{(\w+)}", path)
    ]
    meanings = {row[0]: row[3] for row in (*http.LISTS, *http.READ_ON, *http.ACCOUNT)}
    found += [
        {"name": field, "in": "query", "description": meanings[field], "schema": schema}
        for field, schema in _QUERIES.get(name, {}).items()
    ]
    if name.startswith("POST ") and path in BODIES and path != "/v1/batches":
        found += [{"$ref": f"#/components/parameters/{one}"} for one in ("traceparent", "x-request-timeout-ms", HEADER)]
    if name == "POST /v1/batches":
        found.append({"$ref": "#/components/parameters/idempotency-key"})
    return found


def _body(path: str) -> dict[str, Any]:
    if path == FORM:
        rows: dict[str, Field] = {row[0].partition("[")[0]: row for row in http.FORM}
        fields = {
            name: {**schema, "description": rows[name.partition("[")[0]][3]} for name, schema in _FORM_FIELDS.items()
        }
        return {
            "multipart/form-data": {"schema": {"type": "object", "properties": fields, "required": list(fields)[:2]}}
        }
    schema = dict(BODIES[path])
    if refused := {name: one.advice for table in _REFUSED.get(path, ()) for name, one in table.items()}:
        schema["x-athanor-refused"] = {name: one for name, one in refused.items() if name not in schema["properties"]}
    return {JSON: {"schema": schema}}


def _answer(name: str, path: str) -> dict[str, Any]:
    headers = {one: {"$ref": f"#/components/headers/{one}"} for one in ("x-request-id", "openai-processing-ms")}
    made: dict[str, Any] = {"description": "The answer.", "headers": headers}
    if path == CONTENT:
        return {**made, "content": {"application/octet-stream": {"schema": {}}}}
    if path == DOCUMENT:
        return {**made, "content": {JSON: {"schema": {"type": "object"}}}}
    made["content"] = {JSON: {"schema": ref(ANSWERS[name])}}
    if name in EVENTS:
        # OpenAPI 3.1 has no word for what stands in each event of a stream.
        made["content"][STREAM] = {"schema": ANY_TEXT, "x-athanor-event": ref(EVENTS[name])}
    return made


def _refusals(route: Route, name: str, path: str) -> dict[str, Any]:
    if route.auth is Auth.PUBLIC and ANSWERS[name] != "Ready":
        return {}
    if route.auth is Auth.PUBLIC:
        return {"503": {"description": "Not ready.", "content": {JSON: {"schema": ref("Ready")}}}}
    kind = "MessagesError" if (path + "/").startswith("/v1/messages/") else "Error"
    statuses = {401, 403, 429, 500}
    if "{" in path:
        statuses |= {404}
    if route.method == "POST":
        statuses |= {400, 404, 409, 413, 503, 504}
    if name in _QUERIES:
        statuses |= {400}
    return {str(status): {"$ref": f"#/components/responses/{kind}{status}"} for status in sorted(statuses)}


def _errors() -> dict[str, Any]:
    """Answers by status, in both forms, with the codes that each can have."""
    meanings: dict[int, dict[str, str]] = {}
    for error in errors_of(ApplianceError):
        meanings.setdefault(error.wire.http, {})[error.wire.code] = first_paragraph(error.__doc__)
    return {
        f"{kind}{status}": {
            "description": " ".join(f"{code}: {meaning}" for code, meaning in sorted(codes.items())),
            "headers": {
                one: {"$ref": f"#/components/headers/{one}"}
                for one in ("x-request-id", "x-should-retry", *(_RULE_HEADERS if status in _BY_RULE else ()))
            },
            "content": {JSON: {"schema": ref(kind)}},
        }
        for kind in ("Error", "MessagesError")
        for status, codes in sorted(meanings.items())
    }


def _request_headers() -> dict[str, Any]:
    shapes = {
        "traceparent": ANY_TEXT,
        "x-request-timeout-ms": whole(1, MAX_TIMEOUT_MS),
        "idempotency-key": text(1, MAX_KEY_CHARS),
        HEADER: text(1, MAX_SESSION_CHARS),
    }
    return {
        name: {"name": name, "in": "header", "description": http.REQUEST_HEADERS[name], "schema": schema}
        for name, schema in shapes.items()
    }


def _response_headers() -> Iterable[tuple[str, Any]]:
    """The rows of the reference, of which one can stand for several headers: "a-requests, -tokens"."""
    for names, meaning in http.RESPONSE_HEADERS.items():
        first, *others = names.split(", ")
        stem = first.rpartition("-")[0]
        for name in (first, *(stem + one if one.startswith("-") else one for one in others)):
            yield name, {"description": meaning, "schema": ANY_TEXT}


def _scope_meaning(scope: Scope) -> str:
    return f"Routes that a credential limited to scopes may use with {scope.value}."
