"""OpenAI's JSON of a response -> ``GenerateRequest``: pure; what is not served is refused by name.

A response is kept where the policy lets its tenant have it (``docs/stored-responses.md``); else a client sends the
whole conversation, as agents do with ``store: false``. Source of names and shapes: OpenAI's API specification of
2026-08.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder, sampling_builder
from appliance.gateway.front.request_builder import MAX_MESSAGES, Stamp, Turn, TurnCall, check_most
from appliance.gateway.front.tool_builder import (
    MAX_TOOLS,
    ToolChoice,
    ToolSpec,
    arguments_object,
    build_tools,
    checked_call_id,
    checked_tools,
    shown_tools,
)
from appliance.gateway.generate_request import ChatPrompt, GenerateRequest, Grammar, Operation, TokenizerRequest, Tools
from appliance.gateway.http.dialect import Parsed
from appliance.gateway.http.fields import an_object, needed, number, one_of, typed, without_effect
from appliance.gateway.http.openai import (
    EFFORTS,
    END_USER,
    PART_SEPARATOR,
    document_of,
    end_user_of,
    model_of,
    priority_of,
)
from appliance.gateway.http.response_items import (
    EarlierNeededError,
    KeptResponse,
    Withheld,
    check_response_id,
    items_json,
    items_of,
    nothing_kept,
)
from appliance.gateway.http.responses_objects import ResponseWriter, key_of
from appliance.gateway.http.tokenizer_routes import count_request
from appliance.gateway.http.unsupported import Unsupported, refuse_unsupported
from isolation.ipc.grammar import GrammarKind

UNSUPPORTED: Mapping[str, Unsupported] = {
    "conversation": Unsupported(
        "continue a response with previous_response_id, or send the whole conversation as input"
    ),
    "prompt": Unsupported("send the text of the prompt as instructions and input"),
    "context_management": Unsupported("leave out of input what the model shall not see"),
}
"""Fields that are refused with advice."""

PROMPT_FIELDS = frozenset(
    {
        "model",
        "input",
        "instructions",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning",
        "previous_response_id",
    }
)
"""Fields that say what the model reads, which are all that a count of tokens takes."""
_SERVED = PROMPT_FIELDS | {
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_logprobs",
    "include",
    "text",
    "stream",
    "background",
    "service_tier",
    "metadata",
    "truncation",
    "store",
    "prompt_cache_key",
    *END_USER,
}
_NAMES = {"logprobs": "top_logprobs", "reasoning_effort": "reasoning.effort"}
"""Field of ``GenerateRequest`` or the policy -> the caller's spelling, where they differ."""
_INCLUDES = "message.output_text.logprobs"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_MODES = ("auto", "required")
_FORMATS = ("text", "json_schema", "json_object")


def parse_response(
    body: bytes, stamp: Stamp, withheld: Withheld = nothing_kept, earlier: bytes | None = None
) -> Parsed:
    """The request in the body of ``/v1/responses``.

    Args:
        body: JSON.
        stamp: what the server adds.
        withheld: gives the error where a response cannot be kept.
        earlier: what is kept of the response that this one continues, once it was fetched.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
        ApplianceError: that of ``withheld``.
        EarlierNeededError: it continues a response.
    """
    document = document_of(body)
    refuse_unsupported(document, UNSUPPORTED)
    keeps = _keeps(document, withheld)
    background = _background(document, withheld)
    previous, before = _earlier(document, withheld, earlier, parse_response)
    prompt, tools = _prompt(document, before)
    given = {name: number(document, name) for name in ("temperature", "top_p")}
    request = GenerateRequest(
        request_id=stamp.request_id,
        operation=Operation.CHAT,
        model=model_of(document),
        prompt=prompt,
        sampling=sampling_builder.sampling_of(given, stamp),
        sent=sampling_builder.sent(given),
        max_tokens=typed(document, "max_output_tokens", int),
        max_tokens_param="max_output_tokens",
        logprobs=_logprobs(document),
        deadline=stamp.deadline,
        stream=typed(document, "stream", bool) or False,
        priority=priority_of(document),
        grammar=_grammar(document),
        tools=tools,
        cache_key=typed(document, "prompt_cache_key", str) or "",
        end_user=end_user_of(document),
    )
    request = request_builder.checked(request, _NAMES)
    _check_truncation(document)
    typed(document, "metadata", dict)
    shown = {name: document.get(name) for name in ResponseWriter.REPEATED}
    make_writer = partial(ResponseWriter, shown=shown, kept=keeps, previous=previous, background=background)
    items = items_json([*before, *items_of(_input(document, before), key_of(stamp.request_id))]) if keeps else None
    ignored = without_effect(document, _SERVED, UNSUPPORTED)
    return Parsed(request, make_writer, ignored, items=items, background=background)


def parse_input_tokens(
    body: bytes, stamp: Stamp, withheld: Withheld = nothing_kept, earlier: bytes | None = None
) -> tuple[TokenizerRequest, tuple[str, ...]]:
    """The request in the body of ``/v1/responses/input_tokens``, and the names of fields without effect; see
    ``parse_response``."""
    document = document_of(body)
    refuse_unsupported(document, UNSUPPORTED)
    _, before = _earlier(document, withheld, earlier, parse_input_tokens)
    request = count_request(document, _prompt(document, before)[0], stamp)
    return request, without_effect(document, PROMPT_FIELDS, UNSUPPORTED)


def _keeps(document: Mapping[str, Any], withheld: Withheld) -> bool:
    """Whether the response is to be kept: as OpenAI's API has it unless the caller says no, and where the policy has it
    not, only a caller that asks for it is refused.

    Raises:
        ApplianceError: that of ``withheld``.
    """
    asked = typed(document, "store", bool)
    error = withheld("store")
    if asked and error is not None:
        raise error
    return asked is not False and error is None


def _background(document: Mapping[str, Any], withheld: Withheld) -> bool:
    """Whether the response goes on without its client.

    Raises:
        InvalidRequestError: it is not streamed, or not kept, as OpenAI's API demands.
        ApplianceError: that of ``withheld``.
    """
    if not typed(document, "background", bool):
        return False
    if not document.get("stream"):
        raise InvalidRequestError("a background response is streamed; set stream, or leave it out", param="background")
    if (error := withheld("background")) is not None:
        raise error
    if document.get("store") is False:
        raise InvalidRequestError("a background response is kept; leave store out", param="background")
    return True


def _earlier(
    document: Mapping[str, Any], withheld: Withheld, earlier: bytes | None, parse: Callable[..., Any]
) -> tuple[str | None, list[dict[str, Any]]]:
    """The response that the request continues, if any, and the items of that conversation.

    Raises:
        ApplianceError: that of ``withheld``, or no response has such an id.
        EarlierNeededError: what is kept of it was not fetched yet.
    """
    previous = typed(document, "previous_response_id", str)
    if not previous:
        return None, []
    if (error := withheld("previous_response_id")) is not None:
        raise error
    check_response_id(previous, "previous_response_id")
    if earlier is None:
        raise EarlierNeededError(previous, lambda body, stamp, found: parse(body, stamp, withheld, found))
    return previous, KeptResponse.unpacked(earlier).conversation()


def _check_truncation(document: Mapping[str, Any]) -> None:
    if typed(document, "truncation", str) not in (None, "disabled", "auto"):
        raise InvalidRequestError("truncation must be one of: disabled, auto", param="truncation")


def _logprobs(document: Mapping[str, Any]) -> int:
    included = typed(document, "include", list) or []
    if not all(isinstance(one, str) for one in included):
        raise InvalidRequestError("include must be an array of strings", param="include")
    top = typed(document, "top_logprobs", int)
    if top is None and _INCLUDES in included:
        top = 0
    return request_builder.asked("logprobs", top, "top_logprobs")


def _grammar(document: Mapping[str, Any]) -> Grammar | None:
    text = typed(document, "text", dict)
    form = typed(text, "format", dict, "text.") if text is not None else None
    if form is None:
        return None
    kind = one_of(form.get("type"), _FORMATS, "text.format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return request_builder.grammar(GrammarKind.JSON_SCHEMA, request_builder.ANY_OBJECT, "text.format")
    strict = typed(form, "strict", bool, "text.format.")
    schema = needed(form, "schema", dict, "text.format.")
    asked = GrammarKind.JSON_SCHEMA if strict else GrammarKind.JSON_SCHEMA_LENIENT
    return request_builder.grammar(asked, request_builder.compact_json(schema), "text.format.schema")


def _prompt(document: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> tuple[ChatPrompt, Tools | None]:
    """The conversation, which begins with items of earlier ones, and what the model may call."""
    turns = _turns(_input(document, before), before)
    instructions = typed(document, "instructions", str)
    if instructions:
        turns.insert(0, Turn("system", instructions))
    entries = typed(document, "tools", list) or []
    check_most(len(entries), MAX_TOOLS, "tools", "entries")
    specs = checked_tools([_tool(entry, f"tools[{index}]") for index, entry in enumerate(entries)], "tools")
    parallel = typed(document, "parallel_tool_calls", bool)
    choice = _choice(document.get("tool_choice"), parallel=parallel is not False)
    tools = build_tools(specs, choice, "tools")
    shown = shown_tools(specs) if choice.calls else ()
    return request_builder.chat_prompt(turns, "input", tools=shown, hints=_hints(document)), tools


def _hints(document: Mapping[str, Any]) -> dict[str, object]:
    reasoning = typed(document, "reasoning", dict)
    effort = reasoning.get("effort") if reasoning is not None else None
    if effort is None:
        return {}
    asked = one_of(effort, EFFORTS, "reasoning.effort")
    return request_builder.thinking_hints(thinks=asked != "none", effort=asked)


def _input(document: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> str | list[Any]:
    """The input, which may be absent where a response is continued, as with OpenAI: its conversation goes on as it is.

    Raises:
        InvalidRequestError: it is absent otherwise, or of another type.
    """
    value = document.get("input")
    if value is None and before:
        return []
    if not isinstance(value, str | list):
        raise InvalidRequestError("input must be a string or an array of items", param="input")
    return value


def _turns(value: str | list[Any], before: Sequence[Mapping[str, Any]]) -> list[Turn]:
    check_most(len(before) + (1 if isinstance(value, str) else len(value)), MAX_MESSAGES, "input", "items")
    turns: list[Turn] = []
    for item in before:
        _add(turns, item, "previous_response_id")
    if isinstance(value, str):
        return [*turns, Turn("user", value)]
    for index, item in enumerate(value):
        _add(turns, an_object(item, f"input[{index}]"), f"input[{index}]")
    return turns


def _add(turns: list[Turn], item: Mapping[str, Any], at: str) -> None:
    """Add an item; what one answer had in several items is one turn."""
    kind = item.get("type", "message")
    if kind == "message":
        role = one_of(item.get("role"), tuple(_ROLES), f"{at}.role")
        text = _text(item.get("content"), f"{at}.content")
        if role == "assistant":
            _join(turns, Turn("assistant", text))
        else:
            turns.append(Turn(_ROLES[role], text))
    elif kind == "function_call":
        call_id = checked_call_id(needed(item, "call_id", str, f"{at}."), f"{at}.call_id")
        arguments = arguments_object(typed(item, "arguments", str, f"{at}.") or "", f"{at}.arguments")
        call = TurnCall(call_id, needed(item, "name", str, f"{at}."), arguments)
        _join(turns, Turn("assistant", "", calls=(call,)))
    elif kind == "function_call_output":
        call_id = checked_call_id(needed(item, "call_id", str, f"{at}."), f"{at}.call_id")
        turns.append(Turn("tool", _text(item.get("output"), f"{at}.output"), call_id=call_id))
    elif kind == "reasoning":
        if reasoning := _reasoning(item, at):
            turns.append(Turn("assistant", "", reasoning=reasoning))
    else:
        raise InvalidRequestError(
            f"{at}.type must be message, function_call, function_call_output or reasoning", param=f"{at}.type"
        )


def _join(turns: list[Turn], turn: Turn) -> None:
    last = turns[-1] if turns else None
    follows = last is not None and last.role == "assistant" and (turn.calls or not (last.content or last.calls))
    if last is None or not follows:
        turns.append(turn)
        return
    turns[-1] = replace(last, content=last.content or turn.content, calls=last.calls + turn.calls)


def _reasoning(item: Mapping[str, Any], at: str) -> str:
    """The text of a reasoning item that this API gave; of another server's encrypted one there is none."""
    parts = typed(item, "content", list, f"{at}.") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "reasoning_text"]
    return PART_SEPARATOR.join(text for text in texts if isinstance(text, str))


def _text(value: object, at: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequestError(f"{at} must be a string or an array of text parts", param=at)
    check_most(len(value), request_builder.MAX_PARTS, at, "parts")
    texts = []
    for index, part in enumerate(value):
        where = f"{at}[{index}]"
        entry = an_object(part, where)
        if entry.get("type") == "refusal":
            texts.append(needed(entry, "refusal", str, f"{where}."))
            continue
        if entry.get("type") not in _TEXT_PARTS:
            raise InvalidRequestError(f"{where} must be a text part, since models read text here", param=where)
        texts.append(needed(entry, "text", str, f"{where}."))
    return PART_SEPARATOR.join(texts)


def _tool(entry: object, at: str) -> ToolSpec:
    fields = an_object(entry, at)
    if fields.get("type") != "function":
        raise InvalidRequestError(f"{at}.type must be function, the one kind that is served", param=f"{at}.type")
    return ToolSpec(
        needed(fields, "name", str, f"{at}."),
        typed(fields, "description", str, f"{at}."),
        typed(fields, "parameters", dict, f"{at}."),
        typed(fields, "strict", bool, f"{at}.") or False,
        at,
    )


def _choice(value: object, *, parallel: bool) -> ToolChoice:
    if value is None or value == "auto":
        return ToolChoice(parallel=parallel)
    if value in ("none", "required"):
        return ToolChoice(calls=value != "none", required=value == "required", parallel=parallel)
    kind = value.get("type") if isinstance(value, dict) else None
    only: tuple[str, ...]
    if isinstance(value, dict) and kind == "function":
        only = (needed(value, "name", str, "tool_choice."),)
        return ToolChoice(required=True, only=only, parallel=parallel)
    if isinstance(value, dict) and kind == "allowed_tools":
        mode = one_of(value.get("mode"), _MODES, "tool_choice.mode")
        tools = needed(value, "tools", list, "tool_choice.")
        check_most(len(tools), MAX_TOOLS, "tool_choice.tools", "entries")
        only = tuple(
            needed(an_object(tool, f"tool_choice.tools[{index}]"), "name", str, f"tool_choice.tools[{index}].")
            for index, tool in enumerate(tools)
        )
        return ToolChoice(required=mode == "required", only=only, parallel=parallel)
    raise InvalidRequestError(
        "tool_choice must be auto, none, required, or an object with a type of: function, allowed_tools",
        param="tool_choice",
    )
