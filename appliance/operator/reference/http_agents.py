"""Fields of the Responses API and the Messages API, for docs/reference/http.md; a test compares their names with what
the parsers take."""

from __future__ import annotations

from appliance.gateway.front import request_builder as limits
from appliance.gateway.front.tool_builder import MAX_TOOLS
from appliance.gateway.http.openai import EFFORTS
from appliance.operator.reference.markdown import Field
from isolation.ipc import messages as wire

_MODEL: Field = ("model", f"text, 1 to {limits.MAX_MODEL_CHARS} characters", "required", "Name of the model.")
_STREAM: Field = ("stream", "true or false", "false", "Whether the answer comes as a stream of events.")
_TEMPERATURE: Field = ("temperature", "number, 0 to 2", "1", "Divides the logits; 0 takes the likeliest token.")
_TOP_P: Field = ("top_p", "number, above 0, to 1", "1", "Keeps the smallest set of tokens that reaches it.")

RESPONSES: tuple[Field, ...] = (
    _MODEL,
    (
        "input",
        f"text, or list of at most {limits.MAX_MESSAGES} items",
        "none",
        "The conversation, or what is new of it. Needed unless `previous_response_id` is given.",
    ),
    ("previous_response_id", "id", "none", "Stored response whose conversation goes on (stored-responses.md)."),
    ("instructions", "text", "none", "Stands before the conversation, as a message of the system."),
    ("max_output_tokens", f"tokens, 1 to {wire.MAX_TOKENS_PER_REQUEST}", "what is left", "Most output tokens."),
    ("tools", f"list of at most {MAX_TOOLS} functions", "none", "Functions that the model may call (tools.md)."),
    ("tool_choice", "auto, none, required or object", "auto", "Whether the model calls, and what."),
    ("parallel_tool_calls", "true or false", "true", "Whether one answer may have several calls."),
    ("reasoning", "object", "none", f"`effort`: {', '.join(EFFORTS)}; told to the model's chat template."),
    ("text", "object", "none", "`format`: `text`, `json_object` or `json_schema`."),
    ("include", "list of texts", "none", "`message.output_text.logprobs`: log-probabilities of the text."),
    ("top_logprobs", f"whole number, 0 to {wire.MAX_TOP_LOGPROBS}", "none", "Log-probabilities, with alternatives."),
    _TEMPERATURE,
    _TOP_P,
    _STREAM,
    ("service_tier", "auto, default, scale, priority or flex", "auto", "As in chat."),
    ("metadata", "object", "none", "Repeated in the response."),
    (
        "prompt_cache_key",
        f"text, at most {limits.MAX_CACHE_KEY_CHARS} characters",
        "none",
        "Requests with one key go to one model, where `model` is the name of a route.",
    ),
    ("safety_identifier", "text", "none", "Which of the tenant's users it is for; as in chat."),
    ("user", "text", "none", "As `safety_identifier`, which counts first."),
    ("truncation", "disabled or auto", "disabled", "Repeated in the response; nothing is ever truncated."),
    ("store", "true or false", "as the policy says", "Whether the response is kept; it says so (stored-responses.md)."),
    ("background", "true or false", "false", "Whether the request goes on without its client (stored-responses.md)."),
)

MESSAGES: tuple[Field, ...] = (
    _MODEL,
    (
        "messages",
        f"list of 1 to {limits.MAX_MESSAGES}",
        "required",
        "Conversation of user, assistant and system, in blocks.",
    ),
    ("max_tokens", f"tokens, 1 to {wire.MAX_TOKENS_PER_REQUEST}", "required", "Most output tokens."),
    ("system", "text, or list of text blocks", "none", "Stands before the conversation, as a message of the system."),
    ("tools", f"list of at most {MAX_TOOLS}", "none", "Functions that the model may call (tools.md)."),
    ("tool_choice", "object", "auto", "`type`: auto, any, tool or none; `disable_parallel_tool_use`."),
    ("thinking", "object", "none", "`type`: enabled, adaptive or disabled; told to the model's chat template."),
    (
        "output_config",
        "object",
        "none",
        "`format`: `json_schema` with the `schema` of the answer; `effort`: low, medium, high, xhigh or max, told to "
        "the model's chat template.",
    ),
    ("stop_sequences", f"list of at most {limits.MAX_STOP_STRINGS} texts", "none", "Texts that end the answer."),
    _TEMPERATURE,
    _TOP_P,
    ("top_k", "whole number", "0", "Keeps the k likeliest tokens; 0 keeps all."),
    _STREAM,
    ("service_tier", "auto or standard_only", "auto", "standard_only asks for normal priority at most."),
    ("metadata", "object", "none", "`user_id`: which of the tenant's users it is for, as `safety_identifier` in chat."),
)
