"""Attributes of spans, from a call, a request and its end, as the conventions define them. Pure.

Nothing here reads a prompt, an answer or a stop string. Text that a caller chose (the model's
name) is cut and stripped of control characters, since it ends on an operator's terminal.
"""

from __future__ import annotations

from collections.abc import Mapping

from appliance.common.errors import ApplianceError
from appliance.common.figures import printable
from appliance.common.outcomes import outcome_of
from appliance.gateway.generate_request import AnyRequest, CallContext, EmbedRequest, GenerateRequest
from appliance.gateway.telemetry import names
from isolation.ipc.grammar import GrammarKind

MAX_VALUE_CHARS = 128
"""Characters of a text attribute: room for a model's name or a SPIFFE URI, not for a prompt."""

RESPONSE_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/responses": "resp_",
    "/v1/messages": "msg_",
}
"""What an answer's id begins with, by route; the other answers have none, or the request's own."""

JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_SCHEMA_LENIENT)
"""Grammars whose output is JSON."""

Value = str | int | float | bool
Attributes = dict[str, Value]


def told(**words: Value) -> Attributes:
    """Return the attributes that say something: neither empty nor 0."""
    return {word: value for word, value in words.items() if value}


def clean(text: str) -> str:
    """Return the text, cut to ``MAX_VALUE_CHARS`` and with unprintable characters replaced."""
    return printable(text[:MAX_VALUE_CHARS])


def clean_values(values: Mapping[str, Value]) -> Attributes:
    """Return the attributes with their texts cleaned."""
    return {key: clean(value) if isinstance(value, str) else value for key, value in values.items()}


def own(words: Mapping[str, Value]) -> Attributes:
    """Return keywords of ``annotate`` or ``end`` as ``athanor.`` attributes."""
    return clean_values({names.own_attribute(word): value for word, value in words.items()})


def server(context: CallContext, request_id: str, tenant: str | None) -> Attributes:
    """Return the attributes of the server span that are known when the call arrives."""
    found = clean_values(context.attributes)
    found[names.FRONT_END] = context.front_end
    found[names.REQUEST_ID] = request_id
    if context.listener:
        found[names.LISTENER] = clean(context.listener)
    if tenant is not None:
        found[names.TENANT] = clean(tenant)
    if context.front_end == "grpc":
        found[names.RPC_SYSTEM] = "grpc"
        found[names.RPC_METHOD] = clean(context.route.lstrip("/"))
        return found
    method, _, route = context.route.partition(" ")
    found[names.HTTP_METHOD] = clean(method)
    found[names.HTTP_ROUTE] = clean(route)
    return found


def server_end(context: CallContext, error: ApplianceError | None) -> Attributes:
    """Return the attributes of the server span that are known at the end."""
    if context.front_end == "grpc":
        found: Attributes = {names.RPC_STATUS: error.wire.grpc if error else "OK"}
    else:
        found = {names.HTTP_STATUS: error.wire.http if error else 200}
    found[names.OUTCOME] = outcome_of(error)
    if error is not None:
        found[names.ERROR_TYPE] = error_type(error)
    return found


def response_id(route: str, request_id: str) -> str:
    """Return the id of a response as its client sees it, from the route, ``POST /v1/messages`` or a gRPC method, and
    the request's id. Further prompts of one request have a number behind theirs, and share one answer."""
    shown, prefix = request_id.partition(".")[0], RESPONSE_PREFIXES.get(route.rpartition(" ")[2])
    return shown if prefix is None else prefix + shown.removeprefix("req_")


def generation(request: AnyRequest, route: str) -> Attributes:
    """Return the attributes of the generation span of a call by ``route``. Stop strings are the caller's content and
    stay out."""
    found: Attributes = {
        names.OPERATION: request.operation.value,
        names.PROVIDER: names.SCOPE,
        names.REQUEST_MODEL: clean(request.alias or request.model),
        names.RESPONSE_ID: response_id(route, request.request_id),
    }
    if isinstance(request, EmbedRequest) and request.dimensions is not None:
        found[names.EMBEDDING_DIMENSIONS] = request.dimensions
    if not isinstance(request, GenerateRequest):
        return found
    sampling = request.sampling
    found |= {
        names.OUTPUT_TYPE: "json" if request.grammar is not None and request.grammar.kind in JSON_KINDS else "text",
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_STREAM: request.stream,
    }
    if request.max_tokens is not None:
        found[names.REQUEST_MAX_TOKENS] = request.max_tokens
    if request.choices != 1:
        found[names.REQUEST_CHOICES] = request.choices
    optional = {
        names.REQUEST_TOP_K: float(sampling.top_k),
        names.REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
        names.REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
    }
    found |= {name: value for name, value in optional.items() if value}
    # OTLP integers are signed: the upper half of the seeds cannot be written.
    if sampling.seed < 1 << 63:
        found[names.REQUEST_SEED] = sampling.seed
    return found


def error_type(error: ApplianceError) -> str:
    """Return ``error.type``: the wire reason in lower case, from a closed list."""
    return error.wire.reason.lower()
