"""docs/reference/http.md: routes, fields, headers and errors of the HTTP APIs.

Routes and errors come from the code; fields and headers stand here, and a test compares their names with what the
parsers take.
"""

from __future__ import annotations

from appliance.common.audit.attestation import MAX_NONCE, MIN_NONCE
from appliance.common.batches.values import (
    ENDPOINTS,
    FILE_KEEP_S,
    LEAST_KEEP_S,
    MAX_FILE_BYTES,
    MAX_METADATA,
    MAX_PROMPTS,
    PURPOSES,
    WINDOWS,
)
from appliance.gateway.front import request_builder as limits
from appliance.gateway.front.affinity import HEADER, MAX_SESSION_CHARS
from appliance.gateway.front.auth import Auth
from appliance.gateway.front.end_user import MAX_END_USER_CHARS
from appliance.gateway.front.score_builder import MAX_DOCUMENTS
from appliance.gateway.front.tool_builder import MAX_TOOLS
from appliance.gateway.http.app import ROUTES
from appliance.gateway.http.header_fields import MAX_TIMEOUT_MS
from appliance.gateway.http.openai import EFFORTS
from appliance.gateway.http.stored_objects import MAX_BATCHES_LISTED, MAX_FILES_LISTED
from appliance.operator.reference.errors import error_rows
from appliance.operator.reference.http_agents import MESSAGES, RESPONSES
from appliance.operator.reference.markdown import Field, code, page, section, table
from isolation.ipc import messages as wire
from isolation.ipc.logit_bias import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES
from isolation.ipc.sampling import PARAMETERS

ABOUT = f"""
OpenAI's API under `/v1`, on `listen.http`. A request carries `authorization: Bearer KEY`; without a known key every
route but the two health routes answers 401, so that a stranger does not learn which paths exist. Bodies are JSON of at
most {limits.MAX_BODY_BYTES} bytes. A field without effect is named in `x-athanor-ignored`; a field whose loss would
change the answer (images, audio) is refused with 400 and its name in `error.param`. A streamed answer is SSE: one
`data:` line a chunk, `data: [DONE]` at the end; of the Responses and Messages APIs, named events. Below `/v1/messages`
errors have Anthropic's form, and the key may stand in `x-api-key`.
"""

ROUTE_MEANINGS = {
    "/v1/chat/completions": "Answer to a conversation, whole or as a stream.",
    "/v1/completions": "Continuation of a text or of token ids, whole or as a stream.",
    "/v1/responses": "Answer to a conversation in the form of OpenAI's Responses API.",
    "/v1/responses/{response_id}": "A stored response, the rest of its stream, or its deletion (stored-responses.md).",
    "/v1/responses/{response_id}/input_items": "Items that it answers, page by page.",
    "/v1/responses/input_tokens": "Number of tokens that such an input has.",
    "/v1/messages": "Answer to a conversation in the form of Anthropic's Messages API.",
    "/v1/messages/count_tokens": "Number of tokens that such a conversation has.",
    "/v1/embeddings": "One vector for each text, from a model with `runner: embed`.",
    "/v1/rerank": "Documents in the order of their relevance to a query, as Jina, Cohere and vLLM have it (rerank.md).",
    "/v2/rerank": "The same as /v1/rerank, where Cohere's client looks for it.",
    "/v1/score": "Score of each pair of texts, as vLLM has it (rerank.md).",
    "/v1/classify": "Probability of each label of a text, from a model with `runner: classify` (rerank.md).",
    "/tokenize": "Token ids of a prompt or a conversation, and their number, as in vLLM.",
    "/detokenize": "Text of token ids, without special tokens, as in vLLM.",
    "/v1/attestations": "What serves the caller's requests: all of its models and adapters, signed (attestation.md).",
    "/v1/files": "Files of the caller's tenant: a new one, as multipart/form-data, or their list (batches.md).",
    "/v1/files/{file_id}": "One of these files, or its deletion.",
    "/v1/files/{file_id}/content": "Its bytes.",
    "/v1/batches": "Batches of the caller's tenant: a new one, or their list (batches.md).",
    "/v1/batches/{batch_id}": "One of these batches.",
    "/v1/batches/{batch_id}/cancel": "No line of it begins any more.",
    "/v1/limits": "Limits of the caller's tenant, and what is left of them now (usage.md).",
    "/v1/usage": "What the caller's tenant has used in the current day and month, by model and end user (usage.md).",
    "/version": "Version of the appliance.",
    "/openapi.json": "This API as a document of OpenAPI 3.1, for generators of clients.",
    "/v1/models": "Models and routes that the caller's tenant may use.",
    "/v1/models/{model:path}": "One of these models.",
    "/health": "The same as /health/ready, where routers look for it.",
    "/health/live": "200 as long as the process answers.",
    "/health/ready": "200 when requests are served; 503 while a sandbox is missing or hangs, or it drains.",
}

ADMIN_ROUTES = {
    "GET /metrics": "Metrics in Prometheus' text format (metrics.md).",
    "GET /status": "State of sandboxes, tenants and policy as JSON.",
    "GET /tenants": "Requests by outcome and tokens of every tenant since the start, exactly, as JSON.",
    "GET /policy/shadow": "What the policy that is tried would have decided differently, as JSON.",
    "GET /traces": "Summaries of the last requests as JSON.",
    "GET /traces/{wanted}": "One request's trace, by the beginning of its trace id or request id.",
    "GET /health/live": "200 as long as the process answers.",
    "GET /health/ready": "As on the port of the tenants, with the reason.",
    "POST /reload": "Read policy, keys and athanor.yaml anew: 200 in force, with what needs a restart; "
    "409 nothing changed, with the problems.",
    "GET /console": "The operator's page.",
    "GET /runbooks": "What each alert means and what to do, for everybody, without a token.",
}

METRICS_ROUTES = {
    **{route: ADMIN_ROUTES[route] for route in ("GET /metrics", "GET /health/ready", "GET /runbooks")},
    "GET /metrics/picker": "Gauges for an endpoint picker, of all models together (fleet.md).",
    "GET /metrics/picker/{model}": "Those of one model.",
}
"""Those of the metrics listener: some of the admin listener's, and its own."""

SAMPLING: tuple[Field, ...] = tuple(
    (
        one.name,
        f"{'whole number' if one.kind is int else 'number'}, {one.span or f'{one.low:g} to {one.high:g}'}",
        one.absent or f"{one.default:g}",
        one.meaning,
    )
    for one in PARAMETERS
)

_END_USER: tuple[Field, ...] = (
    (
        "safety_identifier",
        f"text, at most {MAX_END_USER_CHARS} characters",
        "none",
        "Which of the tenant's users it is for: the policy may limit each of them (`end_users`).",
    ),
    ("user", f"text, at most {MAX_END_USER_CHARS} characters", "none", "As `safety_identifier`, which counts first."),
)

GENERATION: tuple[Field, ...] = (
    ("model", f"text, 1 to {limits.MAX_MODEL_CHARS} characters", "required", "Name of the model."),
    ("max_tokens", f"tokens, 1 to {wire.MAX_TOKENS_PER_REQUEST}", "what is left", "Most output tokens of each choice."),
    ("n", f"whole number, 1 to {wire.MAX_CHOICES}", "1", "Answers to the one prompt, which is computed once."),
    ("stop", f"text, or list of at most {limits.MAX_STOP_STRINGS}", "none", "Texts that end the answer, not shown."),
    ("stop_token_ids", f"list of at most {wire.MAX_STOP_IDS}", "none", "Token ids that end the answer as well."),
    ("ignore_eos", "true or false", "false", "Whether the model's own end of text is passed over."),
    ("stream", "true or false", "false", "Whether the answer comes as a stream of chunks."),
    ("stream_options", "object", "none", "`include_usage`: a last chunk with the token counts."),
    (
        "prompt_logprobs",
        f"whole number, 0 to {wire.MAX_TOP_LOGPROBS}",
        "none",
        "Log-probabilities of the prompt's tokens, with so many alternatives. Not in a stream.",
    ),
    (
        "logit_bias",
        f"object of at most {MAX_LOGIT_BIASES} token ids with numbers of {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
        "none",
        "Added to the scores of these ids, before penalties and temperature; log-probabilities are those without it.",
    ),
    (
        "service_tier",
        "auto, default, scale, priority or flex",
        "auto",
        "priority asks for high, flex for low priority.",
    ),
    (
        "deterministic",
        "true or false",
        "as the policy says",
        "Whether tokens and log-probabilities are the same bits alone and in any batch.",
    ),
    (
        "prompt_cache_key",
        f"text, at most {limits.MAX_CACHE_KEY_CHARS} characters",
        "none",
        "Requests with one key go to one model, where `model` is the name of a route; else without effect.",
    ),
    *_END_USER,
    ("response_format", "object", "none", "Form of the answer: `text`, `json_object` or `json_schema`."),
    (
        "structured_outputs",
        "object",
        "none",
        "Form of the answer as in vLLM: one of `json`, `regex`, `choice`, `grammar`, `json_object`.",
    ),
    ("guided_json", "object or text", "none", "Older spelling of `structured_outputs.json`."),
    ("guided_regex", "text", "none", "Older spelling of `structured_outputs.regex`."),
    ("guided_choice", "list of texts", "none", "Older spelling of `structured_outputs.choice`."),
    ("guided_grammar", "text", "none", "Older spelling of `structured_outputs.grammar`."),
    (
        "whitespace",
        "compact or flexible",
        "compact",
        "Whitespace between the tokens of an answer that is JSON: none, or as the model likes it, within bounds.",
    ),
)

CHAT: tuple[Field, ...] = (
    (
        "messages",
        f"list of 1 to {limits.MAX_MESSAGES}",
        "required",
        "Conversation: `role` (system, developer, user, assistant, tool), `content` (text or text parts), `name`; "
        "`tool_calls` and `reasoning_content` of an assistant, `tool_call_id` of a tool.",
    ),
    ("tools", f"list of at most {MAX_TOOLS} functions", "none", "Functions that the model may call (tools.md)."),
    ("tool_choice", "auto, none, required or object", "auto", "Whether the model calls, and what."),
    ("parallel_tool_calls", "true or false", "true", "Whether one answer may have several calls."),
    ("reasoning_effort", ", ".join(EFFORTS), "as the template has it", "Told to the model's chat template."),
    ("max_completion_tokens", "tokens", "as max_tokens", "Newer name of `max_tokens`."),
    (
        "chat_template_kwargs",
        f"object of at most {limits.MAX_ARGUMENTS} texts, numbers, true or false",
        "none",
        "Arguments of the model's chat template, such as `enable_thinking`. One that it does not know is a 400.",
    ),
    ("logprobs", "true or false", "false", "Whether each output token has its log-probability."),
    ("top_logprobs", f"whole number, 0 to {wire.MAX_TOP_LOGPROBS}", "0", "Alternatives beside it; needs `logprobs`."),
)

COMPLETION: tuple[Field, ...] = (
    (
        "prompt",
        f"text, list of token ids, or a list of at most {MAX_PROMPTS} of them",
        "required",
        "What the model continues. Each of several prompts is a request of the tenant's rate; choice i of prompt k has "
        "the index k times n plus i, and its seed is the request's plus that. Several are not streamed.",
    ),
    ("echo", "true or false", "false", "Whether the prompt stands before the answer."),
    ("logprobs", f"whole number, 0 to {wire.MAX_TOP_LOGPROBS}", "none", "Log-probabilities with so many alternatives."),
)

EMBEDDINGS: tuple[Field, ...] = (
    ("model", f"text, 1 to {limits.MAX_MODEL_CHARS} characters", "required", "Name of the model."),
    ("input", f"text, token ids, or a list of at most {limits.MAX_INPUTS}", "required", "What gets a vector each."),
    (
        "dimensions",
        f"whole number, 1 to {wire.MAX_EMBEDDING}",
        "all",
        "First numbers of the vector, for a model with `truncates: true`.",
    ),
    ("encoding_format", "float or base64", "float", "Form of a vector; base64 is of little-endian 32-bit floats."),
    *_END_USER,
)

_MODEL: Field = ("model", f"text, 1 to {limits.MAX_MODEL_CHARS} characters", "required", "Name of the model.")
_TEXTS = f"text, or a list of 1 to {MAX_DOCUMENTS}"

RERANK: tuple[Field, ...] = (
    _MODEL,
    ("query", "text", "required", "What the documents are scored against."),
    (
        "documents",
        f"list of 1 to {MAX_DOCUMENTS}",
        "required",
        'Texts, or objects `{"text": TEXT}`; none is cut short.',
    ),
    ("top_n", f"whole number, 0 to {MAX_DOCUMENTS}", "0", "How many of the best are given; 0: all."),
    ("return_documents", "true or false", "true", "Whether each result has its document."),
    *_END_USER,
)

SCORE: tuple[Field, ...] = (
    _MODEL,
    ("text_1", _TEXTS, "or queries", "What the others are scored against: one, or one for each."),
    ("text_2", _TEXTS, "or documents", "What is scored."),
    ("queries", _TEXTS, "or text_1", "Another name of text_1."),
    ("documents", _TEXTS, "or text_2", "Another name of text_2."),
    *_END_USER,
)

CLASSIFY: tuple[Field, ...] = (_MODEL, ("input", _TEXTS, "required", "What is classified."), *_END_USER)

TOKENIZE: tuple[Field, ...] = (
    ("model", f"text, 1 to {limits.MAX_MODEL_CHARS} characters", "required", "Name of the model."),
    ("prompt", "text", "or messages", "What is made token ids, as /v1/completions would."),
    ("messages", f"list of 1 to {limits.MAX_MESSAGES}", "or prompt", "Conversation, as /v1/chat/completions takes it."),
    (
        "add_special_tokens",
        "true or false",
        "true",
        "Whether the tokenizer's own special tokens stand around a prompt; without effect on messages.",
    ),
    ("chat_template_kwargs", "as in chat", "none", "Arguments of the model's chat template, with messages."),
    ("tools", "as in chat", "none", "Functions that the model is told of, with messages."),
    ("tool_choice", "as in chat", "auto", "none: the model is told of none."),
    ("parallel_tool_calls", "true or false", "true", "Without effect on the count."),
)

DETOKENIZE: tuple[Field, ...] = (
    ("model", f"text, 1 to {limits.MAX_MODEL_CHARS} characters", "required", "Name of the model."),
    ("tokens", "list of token ids", "required", "What is made text; half a character shows as U+FFFD."),
)

ATTESTATIONS: tuple[Field, ...] = (
    ("model", f"text, 1 to {limits.MAX_MODEL_CHARS} characters", "required", "Name of the model."),
    (
        "nonce",
        f"{MIN_NONCE} to {MAX_NONCE} digits of 0-9 and a-f",
        "required",
        "Drawn by the caller for this call; the attestation has it.",
    ),
)

FORM: tuple[Field, ...] = (
    ("file", f"a part with a filename, at most {MAX_FILE_BYTES} bytes", "required", "Requests, one a line, as JSON."),
    ("purpose", ", ".join(PURPOSES), "required", "What the file is for; only those of `batch` are read here."),
    (
        "expires_after[anchor], [seconds]",
        f"created_at, and {LEAST_KEEP_S} to {FILE_KEEP_S} seconds",
        f"{FILE_KEEP_S} seconds",
        "Time after which the file is removed.",
    ),
)

BATCH: tuple[Field, ...] = (
    ("input_file_id", "id of a file", "required", "File with the requests."),
    ("endpoint", ", ".join(ENDPOINTS), "required", "Route of all of them."),
    ("completion_window", ", ".join(WINDOWS), "required", "Time after which lines without a result end with an error."),
    ("metadata", f"object of at most {MAX_METADATA} texts", "none", "Shown again with the batch."),
    (
        "output_expires_after",
        f"object: `anchor` created_at, `seconds` {LEAST_KEEP_S} to {FILE_KEEP_S}",
        f"{FILE_KEEP_S} seconds",
        "Time after which the files of results are removed, from when they are made.",
    ),
)

LISTS: tuple[Field, ...] = (
    ("after", "id", "none", "Entry behind which the page begins."),
    ("limit", f"whole number, 1 to {MAX_FILES_LISTED} files or {MAX_BATCHES_LISTED} batches", "all, or 20", "Entries."),
    ("order", "asc or desc", "desc", "Oldest or newest first; of files."),
    ("purpose", "that of an upload, or batch_output", "all", "Files of one purpose."),
)

READ_ON: tuple[Field, ...] = (
    ("stream", "true or false", "false", "Events of a response with `background`, while they are kept."),
    ("starting_after", "whole number", "none", "Number of the last event that the caller has."),
)

ACCOUNT: tuple[Field, ...] = (
    ("user", "text", "all", "Name of an end user, as requests have it: of the end users this one alone is told."),
)

REQUEST_HEADERS = {
    "authorization": "`Bearer KEY`.",
    "x-api-key": "The key, below `/v1/messages`, as Anthropic's clients send it.",
    "idempotency-key": "With POST /v1/batches: a text of at most 255 characters that the caller draws for the batch; a "
    "call with a key that has made one already answers with that one.",
    "last-event-id": "Number of the last event that the caller has, in place of `starting_after`.",
    "traceparent": "W3C trace context; makes the request part of the caller's trace.",
    "x-request-timeout-ms": f"Milliseconds, 1 to {MAX_TIMEOUT_MS}, after which the answer is given up with 504.",
    HEADER: f"Name of the caller's session, 1 to {MAX_SESSION_CHARS} visible characters, or the tag that an answer had "
    "(fleet.md).",
}

RESPONSE_HEADERS = {
    "x-request-id": "Id of the request, in logs, traces and the audit log.",
    "openai-processing-ms": "Milliseconds from the request's arrival to the answer's first byte.",
    "x-ratelimit-limit-requests, -tokens": "Requests, or tokens, a minute that the policy allows.",
    "x-ratelimit-remaining-requests, -tokens": "What is left of them now.",
    "x-ratelimit-reset-requests, -tokens": "Time until all of it is back, such as `600ms` or `6m0s`.",
    "x-athanor-ignored": "Names of fields that had a value and no effect.",
    HEADER: "Tag of the session, where the appliance is one of a fleet: to be sent with its next request.",
    "x-athanor-padding": "Filling that hides an answer's length, for tenants whose class asks for it.",
    "x-accel-buffering": "`no` on a stream, so that proxies pass chunks on at once.",
    "retry-after, retry-after-ms": "Seconds, or milliseconds, after which trying again helps; on errors.",
    "x-should-retry": "`true` where trying again may help; on errors.",
    "x-athanor-rule": "Rule of the policy that denied, without the tenant's name, such as `limits.concurrency`.",
    "x-athanor-policy": "Digest of the policy whose rule that is, as audit log and attestations have it.",
    "www-authenticate": "`Bearer`, with 401.",
    "allow": "Methods of the route, with 405.",
}


def render() -> str:
    """The page."""
    header = ("field", "type and range", "default", "meaning")
    routes = [
        [code(f"{one.method} {one.path}"), "API key" if one.auth is Auth.TENANT else "none", ROUTE_MEANINGS[one.path]]
        for one in ROUTES
    ]
    return page(
        "HTTP API",
        ABOUT,
        section("Routes", table(("route", "credential", "meaning"), routes)),
        section("Fields of both generating routes", table(header, _coded(GENERATION))),
        section("Fields that choose tokens", table(header, _coded(SAMPLING))),
        section("Fields of /v1/chat/completions", table(header, _coded(CHAT))),
        section("Fields of /v1/completions", table(header, _coded(COMPLETION))),
        section("Fields of /v1/responses", table(header, _coded(RESPONSES))),
        section("Fields of /v1/messages", table(header, _coded(MESSAGES))),
        section("Fields of /v1/embeddings", table(header, _coded(EMBEDDINGS))),
        section("Fields of /v1/rerank", table(header, _coded(RERANK))),
        section("Fields of /v1/score", table(header, _coded(SCORE))),
        section("Fields of /v1/classify", table(header, _coded(CLASSIFY))),
        section("Fields of /tokenize", table(header, _coded(TOKENIZE))),
        section("Fields of /detokenize", table(header, _coded(DETOKENIZE))),
        section("Fields of /v1/attestations", table(header, _coded(ATTESTATIONS))),
        section("Fields of POST /v1/files", table(header, _coded(FORM))),
        section("Fields of POST /v1/batches", table(header, _coded(BATCH))),
        section("Fields in the query of GET /v1/files and /v1/batches", table(header, _coded(LISTS))),
        section("Fields in the query of GET /v1/responses/{response_id}", table(header, _coded(READ_ON))),
        section("Field in the query of GET /v1/usage", table(header, _coded(ACCOUNT))),
        section("Request headers", table(("header", "meaning"), [[code(k), v] for k, v in REQUEST_HEADERS.items()])),
        section("Response headers", table(("header", "meaning"), [[code(k), v] for k, v in RESPONSE_HEADERS.items()])),
        section(
            "Errors",
            'An error is `{"error": {"message", "type", "param", "code"}}`. In a stream it is the last chunk.\n',
            table(("status", "type", "code", "meaning"), error_rows(for_grpc=False)),
        ),
        section(
            "Admin listener",
            "On `listen.admin`, for the operator alone; no credential, loopback or a Unix socket only.\n",
            table(("route", "meaning"), [[code(route), meaning] for route, meaning in ADMIN_ROUTES.items()]),
        ),
        section(
            "Metrics listener",
            "On `listen.metrics`, where there is one; every other route is 404, every other method 405. With "
            "`listen.metrics_token` a request carries `authorization: Bearer TOKEN`, else it is 401.\n",
            table(("route", "meaning"), [[code(route), meaning] for route, meaning in METRICS_ROUTES.items()]),
        ),
    )


def _coded(fields: tuple[Field, ...]) -> list[list[str]]:
    return [[code(name), *rest] for name, *rest in fields]
