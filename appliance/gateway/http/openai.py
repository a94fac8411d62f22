"""OpenAI's JSON -> ``GenerateRequest``: pure; what is not understood is either refused by name or reported.

Three kinds of fields: those that are served; those whose loss would change what the caller gets (tools, images), which
are refused with a 400 that names them and says what to do instead (``unsupported``), unless they hold a value that asks
for nothing; all others, which are ignored and reported to the caller in a header. Source of names and shapes: OpenAI's
API specification of 2026-08; ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``stop_token_ids`` as in
vLLM; ``deterministic`` and ``whitespace`` are our own. How an answer's structure is asked for is in ``structured``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from appliance.common.batches.values import MAX_PROMPTS
from appliance.common.errors import InvalidRequestError
from appliance.common.strict_json import JsonError, parse_json
from appliance.gateway.front import request_builder, sampling_builder
from appliance.gateway.front.end_user import end_user
from appliance.gateway.front.request_builder import Stamp, Turn
from appliance.gateway.front.tool_builder import shown_tools
from appliance.gateway.generate_request import GenerateRequest, Operation, Prompt
from appliance.gateway.http import openai_tools, structured, unsupported
from appliance.gateway.http.dialect import Parsed
from appliance.gateway.http.fields import number, one_of, typed
from appliance.gateway.http.openai_objects import Writer
from appliance.gateway.http.unsupported import refuse_unsupported
from isolation.ipc.logit_bias import MAX_LOGIT_BIASES, LogitBias
from isolation.ipc.messages import Priority
from isolation.ipc.sampling import NAMES, PARAMETERS

END_USER = ("safety_identifier", "user")
"""Names of the field that says whom a request is for; the first that is there counts."""

_COMMON = frozenset(
    {
        "model",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "stream",
        "stream_options",
        "service_tier",
        "deterministic",
        "n",
        "prompt_logprobs",
        "logit_bias",
        "prompt_cache_key",
        *END_USER,
    }
).union(NAMES, structured.FIELDS)
_SERVED = {
    Operation.CHAT: _COMMON
    | {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "reasoning_effort"}
    | openai_tools.FIELDS,
    Operation.TEXT_COMPLETION: _COMMON | {"prompt", "echo"},
}

_NAMES = {"stop_ids": "stop_token_ids", "choices": "n"}
"""Field of ``GenerateRequest`` -> the caller's spelling, where they differ."""

_TIERS = {"auto": None, "default": None, "scale": None, "priority": Priority.HIGH, "flex": Priority.LOW}
"""OpenAI's service tier -> the priority asked for; None is the tenant's own."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI's role -> the role that chat templates know."""

_MESSAGE_SERVED = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}", re.ASCII)
"""One spelling of each id, so that none has two biases."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""What ``reasoning_effort`` may be; how many of them differ is the template's matter."""

PART_SEPARATOR = "\n"
"""Between the text parts of one message, as in vLLM."""


def document_of(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        InvalidRequestError: it is none, or not acceptable JSON.
    """
    try:
        document = parse_json(body)
    except JsonError as error:
        raise InvalidRequestError(f"the body is not acceptable JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return document


def parse(operation: Operation, body: bytes, stamp: Stamp) -> Parsed:
    """The request in the body of ``/v1/chat/completions`` or ``/v1/completions``.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    refuse_unsupported(document, unsupported.FIELDS)
    if operation is not Operation.CHAT:
        refuse_unsupported(document, unsupported.COMPLETION_FIELDS)
    ignored: dict[str, None] = {}
    tools = openai_tools.offered(document) if operation is Operation.CHAT else openai_tools.Offered()
    several = None if operation is Operation.CHAT else _several(document)
    given = _sampling(document)
    request = GenerateRequest(
        request_id=stamp.request_id,
        operation=operation,
        model=model_of(document),
        prompt=prompt_of(operation, document, ignored, tools) if several is None else several[0],
        sampling=sampling_builder.sampling_of(given, stamp),
        sent=sampling_builder.sent(given),
        max_tokens=_max_tokens(operation, document),
        max_tokens_param="max_completion_tokens"
        if operation is Operation.CHAT and document.get("max_tokens") is None
        else "max_tokens",
        stop=_stop(document.get("stop")),
        stop_ids=_stop_ids(document.get("stop_token_ids")),
        ignore_eos=typed(document, "ignore_eos", bool) or False,
        logprobs=_logprobs(operation, document),
        deadline=stamp.deadline,
        stream=typed(document, "stream", bool) or False,
        priority=priority_of(document),
        grammar=structured.grammar_of(document),
        tools=tools.tools,
        prompt_logprobs=_prompt_logprobs(operation, document),
        logit_bias=_logit_bias(document),
        echo=_echo(operation, document),
        choices=request_builder.asked("choices", typed(document, "n", int), "n"),
        deterministic=typed(document, "deterministic", bool) or False,
        cache_key=typed(document, "prompt_cache_key", str) or "",
        end_user=end_user_of(document),
    )
    include_usage = _stream_options(document, request.stream, ignored)
    for name, value in document.items():
        if value is not None and name not in _SERVED[operation] and name not in unsupported.FIELDS:
            ignored[name] = None
    request = request_builder.checked(request, _NAMES)
    others = () if several is None else tuple(_others(request, several[1:]))
    return Parsed(request, partial(Writer, include_usage=include_usage), tuple(ignored), others)


def _several(document: Mapping[str, Any]) -> list[Prompt] | None:
    """The prompts of a document that has more than one."""
    prompts = document.get("prompt")
    if not isinstance(prompts, list) or len(prompts) < 2 or not isinstance(prompts[0], str | list):
        return None
    request_builder.check_most(len(prompts), MAX_PROMPTS, "prompt", "prompts")
    for name in ("stream", "prompt_logprobs", "echo"):
        if document.get(name):
            raise InvalidRequestError(f"{name} goes with one prompt; send a request for each", param=name)
    return [
        request_builder.text_prompt(prompt, f"prompt[{index}]")
        if isinstance(prompt, str)
        else request_builder.token_prompt(_ids(prompt, f"prompt[{index}]"), f"prompt[{index}]")
        for index, prompt in enumerate(prompts)
    ]


def _others(first: GenerateRequest, prompts: Sequence[Prompt]) -> Iterator[GenerateRequest]:
    """Requests for further prompts. Each has a number behind the id of the first, so that a look-up by its beginning
    finds all, and seeds that none before it has."""
    for place, prompt in enumerate(prompts, start=1):
        seed = (first.sampling.seed + place * first.choices) % (1 << request_builder.SEED_BITS)
        yield replace(
            first, request_id=f"{first.request_id}.{place}", prompt=prompt, sampling=replace(first.sampling, seed=seed)
        )


def end_user_of(document: Mapping[str, Any]) -> str:
    """The pseudonym of the user for whom a document is; empty where it names none.

    Raises:
        InvalidRequestError: the name is no text, or too long.
    """
    found = [end_user(typed(document, name, str), name) for name in END_USER]
    return next(filter(None, found), "")


def priority_of(document: Mapping[str, Any]) -> Priority | None:
    """What ``service_tier`` asks for.

    Raises:
        InvalidRequestError: there is no such tier.
    """
    tier = typed(document, "service_tier", str)
    if tier is not None and tier not in _TIERS:
        raise InvalidRequestError(f"service_tier must be one of: {', '.join(_TIERS)}", param="service_tier")
    return _TIERS[tier] if tier is not None else None


def model_of(document: Mapping[str, Any]) -> str:
    """The name of the model that a document asks for.

    Raises:
        InvalidRequestError: there is none.
    """
    value = typed(document, "model", str)
    if value is None:
        raise InvalidRequestError("model is required", param="model")
    return value


def _sampling(document: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of ``Sampling`` that the document has."""
    return {
        one.name: typed(document, one.name, int) if one.kind is int else number(document, one.name)
        for one in PARAMETERS
    }


def _max_tokens(operation: Operation, document: Mapping[str, Any]) -> int | None:
    old = typed(document, "max_tokens", int)
    if operation is not Operation.CHAT:
        return old
    new = typed(document, "max_completion_tokens", int)
    if old is not None and new is not None and old != new:
        raise InvalidRequestError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    return old if new is None else new


def _logprobs(operation: Operation, document: Mapping[str, Any]) -> int:
    if operation is not Operation.CHAT:
        return request_builder.asked("logprobs", typed(document, "logprobs", int), "logprobs")
    wanted = typed(document, "logprobs", bool) or False
    top = typed(document, "top_logprobs", int)
    if top is not None and not wanted:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return request_builder.asked("logprobs", (top or 0) if wanted else None, "top_logprobs")


def _echo(operation: Operation, document: Mapping[str, Any]) -> bool:
    echo = typed(document, "echo", bool) or False
    if echo and operation is Operation.CHAT:
        raise InvalidRequestError(
            "echo is for /v1/completions; a conversation is not repeated, so leave echo out", param="echo"
        )
    return echo


def _prompt_logprobs(operation: Operation, document: Mapping[str, Any]) -> int:
    """What vLLM's field asks for, or OpenAI's ``echo`` with ``logprobs``."""
    asked = typed(document, "prompt_logprobs", int)
    if asked is not None and typed(document, "stream", bool):
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; leave out prompt_logprobs or stream", param="prompt_logprobs"
        )
    if _echo(operation, document):
        shown = typed(document, "logprobs", int)
        if asked is not None and shown is not None and asked != shown:
            raise InvalidRequestError(
                "with echo, prompt_logprobs and logprobs are one number; give one of them", param="prompt_logprobs"
            )
        asked = shown if asked is None else asked
    return request_builder.asked("prompt_logprobs", asked, "prompt_logprobs")


def _logit_bias(document: Mapping[str, Any]) -> LogitBias | None:
    given = typed(document, "logit_bias", dict)
    if not given:
        return None
    request_builder.check_most(len(given), MAX_LOGIT_BIASES, "logit_bias", "entries")
    for key, bias in given.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError("the names in logit_bias must be token ids, in digits", param="logit_bias")
        if type(bias) not in (int, float):
            raise InvalidRequestError("the values in logit_bias must be numbers", param="logit_bias")
    return sampling_builder.logit_bias_of({int(key): bias for key, bias in given.items()}, "logit_bias")


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise InvalidRequestError("stop must be a string or an array of strings", param="stop")


def _stop_ids(value: object) -> tuple[int, ...]:
    return () if value is None else tuple(_ids(value, "stop_token_ids"))


def _ids(value: object, param: str) -> list[int]:
    if isinstance(value, list) and all(type(item) is int for item in value):
        return value
    raise InvalidRequestError(f"{param} must be an array of token ids", param=param)


def _stream_options(document: Mapping[str, Any], stream: bool, ignored: dict[str, None]) -> bool:
    options = typed(document, "stream_options", dict)
    if options is None:
        return False
    if not stream:
        raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
    ignored.update({f"stream_options.{name}": None for name in options if name != "include_usage"})
    include_usage = options.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise InvalidRequestError(
            "stream_options.include_usage must be true or false", param="stream_options.include_usage"
        )
    return bool(include_usage)


def prompt_of(
    operation: Operation,
    document: Mapping[str, Any],
    ignored: dict[str, None],
    tools: openai_tools.Offered = openai_tools.Offered(),  # noqa: B008 - frozen
) -> Prompt:
    """The conversation with its tools, text or token ids of a document; names what has no effect in ``ignored``.

    Raises:
        InvalidRequestError: there is none, or it is malformed; ``param`` names the field.
    """
    if operation is Operation.CHAT:
        messages = typed(document, "messages", list)
        if messages is None:
            raise InvalidRequestError("messages is required", param="messages")
        turns = [_turn(message, f"messages[{i}]", ignored) for i, message in enumerate(messages)]
        arguments = typed(document, "chat_template_kwargs", dict)
        effort = typed(document, "reasoning_effort", str)
        hints = {}
        if effort is not None:
            asked = one_of(effort, EFFORTS, "reasoning_effort")
            hints = request_builder.thinking_hints(thinks=asked != "none", effort=asked)
        return request_builder.chat_prompt(turns, "messages", arguments, tools=shown_tools(tools.shown), hints=hints)
    prompt = document.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise InvalidRequestError(f"prompt holds {len(prompt)} prompts; send one a request", param="prompt")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return request_builder.text_prompt(prompt, "prompt")
    if prompt is None:
        raise InvalidRequestError("prompt is required", param="prompt")
    return request_builder.token_prompt(_ids(prompt, "prompt"), "prompt")


def _turn(message: object, at: str, ignored: dict[str, None]) -> Turn:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{at} must be an object", param=at)
    refuse_unsupported(message, unsupported.MESSAGE_FIELDS, f"{at}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequestError(f"{at}.role must be one of {', '.join(_ROLES)}", param=f"{at}.role")
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError(f"{at}.name must be a string", param=f"{at}.name")
    for key, value in message.items():
        if value is not None and key not in _MESSAGE_SERVED and key not in unsupported.MESSAGE_FIELDS:
            ignored[f"messages.{key}"] = None
    content = _content(message.get("content"), role, f"{at}.content")
    if role == "tool":
        call_id = openai_tools.call_id_of(message.get("tool_call_id"), f"{at}.tool_call_id")
        return Turn("tool", content, name, call_id=call_id)
    if role != "assistant":
        return Turn(_ROLES[role], content, name)
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise InvalidRequestError(f"{at}.reasoning_content must be a string", param=f"{at}.reasoning_content")
    found = openai_tools.calls_of(calls, f"{at}.tool_calls") if calls is not None else ()
    return Turn("assistant", content, name, found, reasoning=reasoning)


def _content(content: object, role: str, at: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        raise InvalidRequestError(f"{at} must be a string or an array of text parts", param=at)
    request_builder.check_most(len(content), request_builder.MAX_PARTS, at, "parts")
    return PART_SEPARATOR.join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: object, at: str) -> str:
    text: object = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequestError(
            f'{at} is not supported, since models read text here; say it in a part {{"type": "text", "text": "..."}}',
            param=at,
        )
    return text
