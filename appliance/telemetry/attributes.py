"""Pure: from a call, a request and its end to the attributes that the conventions ask for.

Nothing here reads a prompt, an answer or a stop string. Text that a caller chose (the model's
name) is cut and stripped of control characters, since it ends on an operator's terminal.
"""

from __future__ import annotations

from collections.abc import Mapping

from appliance.errors import ApplianceError
from appliance.request import CallContext, EmbedRequest, GenerateRequest
from appliance.telemetry import names

MAX_VALUE_CHARS = 128
"""Characters of a text attribute: room for a model's name or a SPIFFE URI, not for a prompt."""

CLIENT_CLOSED = 499
"""HTTP status of a request whose client left."""

Value = str | int | float | bool
Attributes = dict[str, Value]


def clean(value: Value) -> Value:
    """The value, text cut to ``MAX_VALUE_CHARS`` and unprintable characters replaced."""
    if not isinstance(value, str):
        return value
    kept = value[:MAX_VALUE_CHARS]
    return kept if kept.isprintable() else "".join(c if c.isprintable() else "?" for c in kept)


def clean_text(text: str) -> str:
    """``clean`` of a text."""
    return str(clean(text))


def own(words: Mapping[str, Value]) -> Attributes:
    """Keywords of ``annotate`` or ``end`` as ``athanor.`` attributes."""
    return {names.own_attribute(word): clean(value) for word, value in words.items()}


def server(context: CallContext, request_id: str, tenant: str | None) -> Attributes:
    """Of the server span, known when the call arrives."""
    found: Attributes = {key: clean(value) for key, value in context.attributes.items()}
    found[names.FRONT_END] = context.front_end
    found[names.REQUEST_ID] = request_id
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
    """Of the server span, known at the end."""
    if context.front_end == "grpc":
        found: Attributes = {names.RPC_STATUS: error.wire.grpc if error else "OK"}
    else:
        found = {names.HTTP_STATUS: error.wire.http if error else 200}
    found[names.OUTCOME] = outcome(error)
    if error is not None:
        found[names.ERROR_TYPE] = error_type(error)
    return found


def generation(request: GenerateRequest | EmbedRequest) -> Attributes:
    """Of the generation span. Stop strings are the caller's content and stay out."""
    if isinstance(request, EmbedRequest):
        return {
            names.OPERATION: request.operation.value,
            names.PROVIDER: names.SCOPE,
            names.REQUEST_MODEL: clean(request.model),
            names.RESPONSE_ID: request.request_id,
        }
    sampling = request.sampling
    found: Attributes = {
        names.OPERATION: request.operation.value,
        names.PROVIDER: names.SCOPE,
        names.OUTPUT_TYPE: "text",
        names.REQUEST_MODEL: clean(request.model),
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_STREAM: request.stream,
        names.RESPONSE_ID: request.request_id,
    }
    if request.max_tokens is not None:
        found[names.REQUEST_MAX_TOKENS] = request.max_tokens
    if sampling.top_k:
        found[names.REQUEST_TOP_K] = float(sampling.top_k)
    if sampling.frequency_penalty:
        found[names.REQUEST_FREQUENCY_PENALTY] = sampling.frequency_penalty
    if sampling.presence_penalty:
        found[names.REQUEST_PRESENCE_PENALTY] = sampling.presence_penalty
    # OTLP integers are signed: the upper half of the seeds cannot be written.
    if sampling.seed < 1 << 63:
        found[names.REQUEST_SEED] = sampling.seed
    return found


def outcome(error: ApplianceError | None) -> str:
    """``ok``, ``cancelled``, ``refused`` (the caller's or a limit's doing) or ``failed``."""
    if error is None:
        return "ok"
    if error.wire.http == CLIENT_CLOSED:
        return "cancelled"
    return "refused" if error.wire.http < 500 else "failed"


def error_type(error: ApplianceError) -> str:
    """``error.type``: the wire reason in lower case, from a closed list."""
    return error.wire.reason.lower()
