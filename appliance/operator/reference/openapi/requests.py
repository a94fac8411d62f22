"""Schemas of the fields of requests, by route: names, meanings and defaults are those of the reference's rows, types
and ranges stand here, from the numbers that the parsers check; a test sends values inside and outside of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from appliance.common.audit.attestation import MAX_NONCE, MIN_NONCE
from appliance.common.batches.values import (
    ENDPOINTS,
    FILE_KEEP_S,
    LEAST_KEEP_S,
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MAX_PROMPTS,
    MAX_RESPONSE_ID_CHARS,
    WINDOWS,
)
from appliance.gateway.front import request_builder as limits
from appliance.gateway.front.end_user import MAX_END_USER_CHARS
from appliance.gateway.front.score_builder import MAX_DOCUMENTS
from appliance.gateway.front.tool_builder import MAX_CALL_ID_BYTES, MAX_NAME, MAX_TOOLS
from appliance.gateway.http.messages_request import PROMPT_FIELDS as MESSAGE_PROMPT
from appliance.gateway.http.openai import EFFORTS
from appliance.gateway.http.responses_request import PROMPT_FIELDS as RESPONSE_PROMPT
from appliance.gateway.http.stored_objects import MAX_ID_CHARS
from appliance.operator.reference import http, http_agents
from appliance.operator.reference.markdown import Field
from appliance.operator.reference.openapi.shapes import (
    ANY_OBJECT,
    ANY_TEXT,
    TRUTH,
    Schema,
    constant,
    either,
    items,
    number,
    or_null,
    ref,
    taken,
    text,
    whole,
    word,
)
from isolation.ipc.logit_bias import MAX_LOGIT_BIAS, MAX_LOGIT_BIASES
from isolation.ipc.output import MAX_CALLS
from isolation.ipc.sampling import PARAMETERS, Parameter

MODEL = text(1, limits.MAX_MODEL_CHARS, pattern="^[!-~]+$")
TOKENS = whole(1, limits.MAX_OUTPUT_TOKENS)
TOKEN_ID = whole(0, limits.MAX_TOKEN_ID)
TOKEN_IDS = items(TOKEN_ID, 1, limits.MAX_PROMPT_TOKENS)
STOP = text(1, limits.MAX_STOP_BYTES)
TOP = whole(0, limits.MAX_TOP_LOGPROBS)
END_USER = text(0, MAX_END_USER_CHARS)
TOOL_NAME = text(1, MAX_NAME, pattern="^[A-Za-z0-9_-]+$")
CALL_ID = text(1, MAX_CALL_ID_BYTES)
TIER = word("auto", "default", "scale", "priority", "flex")
WRITTEN_SCHEMA = either(ANY_OBJECT, text(1), TRUTH)
ARGUMENTS: Schema = {"type": "string", "contentMediaType": "application/json"}
"""The JSON of an object, as text."""

TEXT_PART = taken({"type": constant("text"), "text": ANY_TEXT}, "type", "text")
CONTENT = either(ANY_TEXT, items(TEXT_PART, 0, limits.MAX_PARTS))


def _sampling(one: Parameter) -> Schema:
    if one.kind is int:
        return whole(int(one.low), int(one.high))
    return number(one.low, one.high, above=one.above)


SAMPLING: Mapping[str, Schema] = {one.name: _sampling(one) for one in PARAMETERS}

_FUNCTION = {"name": TOOL_NAME, "description": ANY_TEXT, "parameters": ANY_OBJECT, "strict": TRUTH}
_NAMED = taken({"name": TOOL_NAME}, "name")
_JSON_SCHEMA = taken({"schema": ANY_OBJECT, "strict": TRUTH}, "schema")
_STRUCTURED = {
    "json": WRITTEN_SCHEMA,
    "regex": text(1),
    "choice": items(text(1), 1),
    "grammar": text(1),
    "json_object": TRUTH,
}
_CALLED = taken({"name": ANY_TEXT, "arguments": ARGUMENTS}, "name", "arguments")
_SPEAKER = {"name": text(0, limits.MAX_NAME_BYTES)}
_ALLOWED_MODE = word("auto", "required")

COMMON: Mapping[str, Schema] = {
    "model": MODEL,
    "max_tokens": TOKENS,
    "n": whole(1, limits.MAX_CHOICES),
    "stop": either(STOP, items(STOP, 0, limits.MAX_STOP_STRINGS)),
    "stop_token_ids": items(TOKEN_ID, 0, limits.MAX_STOP_IDS),
    "ignore_eos": TRUTH,
    "stream": TRUTH,
    "stream_options": taken({"include_usage": TRUTH}),
    "prompt_logprobs": TOP,
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
        "additionalProperties": number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS),
        "maxProperties": MAX_LOGIT_BIASES,
    },
    "service_tier": TIER,
    "deterministic": TRUTH,
    "prompt_cache_key": text(0, limits.MAX_CACHE_KEY_CHARS),
    "safety_identifier": END_USER,
    "user": END_USER,
    "response_format": either(
        taken({"type": word("text", "json_object")}, "type"),
        taken({"type": constant("json_schema"), "json_schema": _JSON_SCHEMA}, "type", "json_schema"),
    ),
    "structured_outputs": {**taken(_STRUCTURED), "additionalProperties": {"type": "null"}},
    "guided_json": WRITTEN_SCHEMA,
    "guided_regex": text(1),
    "guided_choice": items(text(1), 1),
    "guided_grammar": text(1),
    "whitespace": word("compact", "flexible"),
}

CHAT: Mapping[str, Schema] = {
    "messages": items(ref("ChatMessage"), 1, limits.MAX_MESSAGES),
    "tools": items(ref("FunctionTool"), 0, MAX_TOOLS),
    "tool_choice": either(
        word("auto", "none", "required"),
        taken({"type": constant("function"), "function": _NAMED}, "type", "function"),
        taken(
            {
                "type": constant("allowed_tools"),
                "allowed_tools": taken(
                    {"mode": _ALLOWED_MODE, "tools": items(taken({"function": _NAMED}, "function"), 1, MAX_TOOLS)},
                    "mode",
                    "tools",
                ),
            },
            "type",
            "allowed_tools",
        ),
    ),
    "parallel_tool_calls": TRUTH,
    "reasoning_effort": word(*EFFORTS),
    "max_completion_tokens": TOKENS,
    "chat_template_kwargs": {
        "type": "object",
        "maxProperties": limits.MAX_ARGUMENTS,
        "additionalProperties": {"type": ["string", "number", "boolean"], "maxLength": limits.MAX_ARGUMENT_CHARS},
    },
    "logprobs": TRUTH,
    "top_logprobs": TOP,
}

COMPLETION: Mapping[str, Schema] = {
    "prompt": either(ANY_TEXT, TOKEN_IDS, items(ANY_TEXT, 1, MAX_PROMPTS), items(TOKEN_IDS, 1, MAX_PROMPTS)),
    "echo": TRUTH,
    "logprobs": TOP,
}

RESPONSES: Mapping[str, Schema] = {
    "model": MODEL,
    "input": either(ANY_TEXT, items(ref("InputItem"), 1, limits.MAX_MESSAGES)),
    "previous_response_id": text(0, MAX_RESPONSE_ID_CHARS, pattern="^[A-Za-z0-9_-]*$"),
    "instructions": ANY_TEXT,
    "max_output_tokens": TOKENS,
    "tools": items(ref("ResponseTool"), 0, MAX_TOOLS),
    "tool_choice": either(
        word("auto", "none", "required"),
        taken({"type": constant("function"), "name": TOOL_NAME}, "type", "name"),
        taken(
            {"type": constant("allowed_tools"), "mode": _ALLOWED_MODE, "tools": items(_NAMED, 1, MAX_TOOLS)},
            "type",
            "mode",
            "tools",
        ),
    ),
    "parallel_tool_calls": TRUTH,
    "reasoning": taken({"effort": word(*EFFORTS)}),
    "text": taken(
        {
            "format": either(
                taken({"type": word("text", "json_object")}, "type"),
                taken({"type": constant("json_schema"), "schema": ANY_OBJECT, "strict": TRUTH}, "type", "schema"),
            )
        }
    ),
    "include": items(ANY_TEXT),
    "top_logprobs": TOP,
    "temperature": SAMPLING["temperature"],
    "top_p": SAMPLING["top_p"],
    "stream": TRUTH,
    "service_tier": TIER,
    "metadata": ANY_OBJECT,
    "prompt_cache_key": COMMON["prompt_cache_key"],
    "safety_identifier": END_USER,
    "user": END_USER,
    "background": TRUTH,
    "truncation": word("disabled", "auto"),
    "store": TRUTH,
}

MESSAGES: Mapping[str, Schema] = {
    "model": MODEL,
    "messages": items(ref("Message"), 1, limits.MAX_MESSAGES),
    "max_tokens": TOKENS,
    "system": CONTENT,
    "tools": items(ref("MessageTool"), 0, MAX_TOOLS),
    "tool_choice": either(
        taken({"type": word("auto", "any", "none"), "disable_parallel_tool_use": TRUTH}, "type"),
        taken({"type": constant("tool"), "name": TOOL_NAME, "disable_parallel_tool_use": TRUTH}, "type", "name"),
    ),
    "thinking": taken({"type": word("enabled", "disabled", "adaptive")}, "type"),
    "output_config": taken(
        {
            "format": taken({"type": constant("json_schema"), "schema": ANY_OBJECT}, "type", "schema"),
            "effort": word("low", "medium", "high", "xhigh", "max"),
        }
    ),
    "stop_sequences": items(STOP, 0, limits.MAX_STOP_STRINGS),
    "temperature": SAMPLING["temperature"],
    "top_p": SAMPLING["top_p"],
    "top_k": SAMPLING["top_k"],
    "stream": TRUTH,
    "service_tier": word("auto", "standard_only"),
    "metadata": taken({"user_id": END_USER}),
}

EMBEDDINGS: Mapping[str, Schema] = {
    "model": MODEL,
    "input": either(text(1), TOKEN_IDS, items(either(text(1), TOKEN_IDS), 1, limits.MAX_INPUTS)),
    "dimensions": whole(1, limits.MAX_DIMENSIONS),
    "encoding_format": word("float", "base64"),
    "safety_identifier": END_USER,
    "user": END_USER,
}

_TEXTS = either(text(1), items(text(1), 1, MAX_DOCUMENTS))
_USER: Mapping[str, Schema] = {"safety_identifier": END_USER, "user": END_USER}

RERANK: Mapping[str, Schema] = {
    "model": MODEL,
    "query": text(1),
    "documents": items(either(text(1), taken({"text": text(1)}, "text")), 1, MAX_DOCUMENTS),
    "top_n": whole(0, MAX_DOCUMENTS),
    "return_documents": TRUTH,
    **_USER,
}

SCORE: Mapping[str, Schema] = {
    "model": MODEL,
    "text_1": _TEXTS,
    "text_2": _TEXTS,
    "queries": _TEXTS,
    "documents": _TEXTS,
    **_USER,
}

CLASSIFY: Mapping[str, Schema] = {"model": MODEL, "input": _TEXTS, **_USER}

TOKENIZE: Mapping[str, Schema] = {
    "model": MODEL,
    "prompt": either(ANY_TEXT, items(ANY_TEXT, 1, 1)),
    "add_special_tokens": TRUTH,
    **{
        name: CHAT[name] for name in ("messages", "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls")
    },
}

DETOKENIZE: Mapping[str, Schema] = {"model": MODEL, "tokens": TOKEN_IDS}

ATTESTATIONS: Mapping[str, Schema] = {"model": MODEL, "nonce": text(MIN_NONCE, MAX_NONCE, pattern="^[0-9a-f]+$")}

BATCH: Mapping[str, Schema] = {
    "input_file_id": text(1, MAX_ID_CHARS, pattern="^[A-Za-z0-9_-]+$"),
    "endpoint": word(*ENDPOINTS),
    "completion_window": word(*WINDOWS),
    "metadata": {
        "type": "object",
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARS},
        "additionalProperties": text(0, MAX_METADATA_VALUE_CHARS),
    },
    "output_expires_after": taken(
        {"anchor": constant("created_at"), "seconds": whole(LEAST_KEEP_S, FILE_KEEP_S)}, "anchor", "seconds"
    ),
}


def _message(role: str, *blocks: dict[str, Schema]) -> Schema:
    """A message of Anthropic's API with text and these blocks, of which all fields but the last are needed, and of two
    both."""
    made = [taken(one, *(list(one)[:-1] if len(one) > 2 else one)) for one in blocks]
    content = items(
        either(TEXT_PART, *made, taken({"type": constant("redacted_thinking")}, "type")), 0, limits.MAX_PARTS
    )
    return taken({"role": constant(role), "content": either(ANY_TEXT, content)}, "role", "content")


PIECES: Mapping[str, Schema] = {
    "ChatMessage": either(
        taken({"role": word("system", "developer", "user"), "content": CONTENT, **_SPEAKER}, "role", "content"),
        taken(
            {
                "role": constant("assistant"),
                "content": CONTENT,
                **_SPEAKER,
                "tool_calls": items(
                    taken({"id": CALL_ID, "type": constant("function"), "function": _CALLED}, "id", "function"),
                    0,
                    MAX_CALLS,
                ),
                "reasoning_content": ANY_TEXT,
            },
            "role",
        ),
        taken(
            {"role": constant("tool"), "content": CONTENT, **_SPEAKER, "tool_call_id": CALL_ID},
            "role",
            "content",
            "tool_call_id",
        ),
    ),
    "FunctionTool": taken({"type": constant("function"), "function": taken(_FUNCTION, "name")}, "type", "function"),
    "ResponseTool": taken({"type": constant("function"), **_FUNCTION}, "type", "name"),
    "MessageTool": taken(
        {
            "type": constant("custom"),
            "name": TOOL_NAME,
            "description": ANY_TEXT,
            "input_schema": ANY_OBJECT,
            "strict": TRUTH,
        },
        "name",
    ),
    "InputItem": either(
        taken(
            {
                "type": constant("message"),
                "role": word("user", "assistant", "system", "developer"),
                "content": ref("ResponseContent"),
            },
            "role",
        ),
        taken(
            {"type": constant("function_call"), "call_id": CALL_ID, "name": ANY_TEXT, "arguments": ARGUMENTS},
            "type",
            "call_id",
            "name",
        ),
        taken(
            {"type": constant("function_call_output"), "call_id": CALL_ID, "output": ref("ResponseContent")},
            "type",
            "call_id",
        ),
        taken(
            {
                "type": constant("reasoning"),
                "content": items(taken({"type": constant("reasoning_text"), "text": ANY_TEXT}, "type", "text")),
            },
            "type",
        ),
    ),
    "ResponseContent": either(
        ANY_TEXT,
        items(
            either(
                taken({"type": word("input_text", "output_text", "text"), "text": ANY_TEXT}, "type", "text"),
                taken({"type": constant("refusal"), "refusal": ANY_TEXT}, "type", "refusal"),
            ),
            0,
            limits.MAX_PARTS,
        ),
    ),
    "Message": either(
        _message("system"),
        _message("user", {"type": constant("tool_result"), "tool_use_id": CALL_ID, "content": CONTENT}),
        _message(
            "assistant",
            {"type": constant("tool_use"), "id": CALL_ID, "name": ANY_TEXT, "input": ANY_OBJECT},
            {"type": constant("thinking"), "thinking": ANY_TEXT},
        ),
    ),
}
"""Schemas that those of routes refer to."""


def body(rows: Iterable[Field], shapes: Mapping[str, Schema]) -> Schema:
    """Return the schema of a route's body: a field for each row, with the shape of its name.

    Raises:
        KeyError: a row has no shape.
    """
    fields, required = {}, []
    for name, _, default, meaning in rows:
        needed = default == "required"
        said = meaning if default in ("required", "none") else f"{meaning} Default: {default}."
        fields[name] = {**(shapes[name] if needed else or_null(shapes[name])), "description": said}
        required += [name] if needed else []
    return {"type": "object", "properties": fields, "required": required}


def _among(rows: Iterable[Field], names: frozenset[str]) -> tuple[Field, ...]:
    return tuple(row for row in rows if row[0] in names)


BODIES: Mapping[str, Schema] = {
    "/v1/chat/completions": body(http.GENERATION + http.SAMPLING + http.CHAT, {**COMMON, **SAMPLING, **CHAT}),
    "/v1/completions": body(http.GENERATION + http.SAMPLING + http.COMPLETION, {**COMMON, **SAMPLING, **COMPLETION}),
    "/v1/responses": body(http_agents.RESPONSES, RESPONSES),
    "/v1/responses/input_tokens": body(_among(http_agents.RESPONSES, RESPONSE_PROMPT), RESPONSES),
    "/v1/messages": body(http_agents.MESSAGES, MESSAGES),
    "/v1/messages/count_tokens": body(_among(http_agents.MESSAGES, MESSAGE_PROMPT), MESSAGES),
    "/v1/embeddings": body(http.EMBEDDINGS, EMBEDDINGS),
    "/v1/rerank": body(http.RERANK, RERANK),
    "/v2/rerank": body(http.RERANK, RERANK),
    "/v1/score": body(http.SCORE, SCORE),
    "/v1/classify": body(http.CLASSIFY, CLASSIFY),
    "/tokenize": body(http.TOKENIZE, TOKENIZE),
    "/detokenize": body(http.DETOKENIZE, DETOKENIZE),
    "/v1/attestations": body(http.ATTESTATIONS, ATTESTATIONS),
    "/v1/batches": body(http.BATCH, BATCH),
}
"""Path -> schema of the JSON that is posted to it."""
