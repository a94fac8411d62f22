"""Limits and checks of a request, and makers of its parts, for both front ends.

A front end reads values of the right types; every range and every default is here, so that HTTP and gRPC cannot drift
apart. Limits of a tenant (context, rate, output) are the policy's.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.common.errors import GrammarTooLargeError, InvalidRequestError
from appliance.gateway.generate_request import (
    ChatPrompt,
    EmbedRequest,
    GenerateRequest,
    Grammar,
    TextPrompt,
    TokenPrompt,
    Tools,
)
from isolation.ipc import messages as wire
from isolation.ipc.grammar import MAX_GRAMMAR_BYTES, GrammarKind, Whitespace
from isolation.ipc.output import MAX_TOOLS_BYTES

MAX_BODY_BYTES = 4 << 20
"""Bytes of an HTTP body or a gRPC message: a prompt of a million tokens."""

MAX_MESSAGES = 1_024
"""Messages of one conversation."""

MAX_PARTS = 1_024
"""Text parts of one message."""

MAX_ARGUMENTS = 16
"""Arguments of the chat template in one request."""

MAX_ARGUMENT_CHARS = 1_024
"""Characters of an argument, as text."""

MAX_NAME_BYTES = 64
"""Bytes of a speaker's name."""

MAX_MODEL_CHARS = 256
"""Characters of a model's name."""

MAX_CACHE_KEY_CHARS = 128
"""Characters of a key by which requests stay together: twice what OpenAI takes."""

MAX_STOP_STRINGS = 16
"""Stop strings of one request; each is searched for at every token."""

MAX_STOP_BYTES = 256
"""UTF-8 bytes of one stop string; so much output is held back at most."""

MAX_STOP_IDS = wire.MAX_STOP_IDS
MAX_TOP_LOGPROBS = wire.MAX_TOP_LOGPROBS
MAX_OUTPUT_TOKENS = wire.MAX_TOKENS_PER_REQUEST
MAX_CHOICES = wire.MAX_CHOICES
MAX_PROMPT_TOKENS = wire.MAX_TOKENS_PER_REQUEST
MAX_SOURCE_BYTES = wire.MAX_SOURCE_BYTES

MAX_INPUTS = 2_048
"""Texts of one request for embeddings, OpenAI's limit."""

MAX_DIMENSIONS = wire.MAX_EMBEDDING

MAX_TOKEN_ID = (1 << 31) - 1
"""Largest id that an engine's integers hold; the real bound, the width of the logits, is the session's to check."""

SEED_BITS = 64

ANY_OBJECT = '{"type":"object"}'
"""JSON Schema of "any JSON object"."""

_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_SCHEMA_LENIENT)
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_MODEL = re.compile(rf"[\x21-\x7e]{{1,{MAX_MODEL_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Stamp:
    """Values that the server adds to a request and no client can choose: its id, and a seed where none is asked for."""

    request_id: str
    deadline: float | None = None
    """Seconds of ``time.monotonic``."""
    seed: int = field(default_factory=lambda: secrets.randbits(SEED_BITS))


@dataclass(frozen=True, slots=True)
class TurnCall:
    """A call of a tool that the model made earlier; the fields are checked."""

    call_id: str
    name: str
    arguments: str
    """The JSON of an object."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str
    name: str | None = None
    calls: tuple[TurnCall, ...] = ()
    """Calls that an assistant's message makes."""
    call_id: str | None = None
    """The call that a tool's message answers."""
    reasoning: str | None = None
    """What the model wrote to itself before an assistant's message."""


BOUNDS: Mapping[str, tuple[int, int, int]] = {
    "choices": (1, MAX_CHOICES, 1),
    "logprobs": (0, MAX_TOP_LOGPROBS, -1),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS, -1),
}
"""Field of ``GenerateRequest`` -> least and largest value, and the value where the caller sends none."""


def asked(name: str, value: int | None, param: str) -> int:
    """Return the value of a field of ``BOUNDS``; ``param`` is the caller's spelling of it.

    Raises:
        InvalidRequestError: the value is out of its range.
    """
    low, high, absent = BOUNDS[name]
    if value is None:
        return absent
    check_range(value, low, high, param)
    return value


def checked(request: GenerateRequest, names: Mapping[str, str]) -> GenerateRequest:
    """Return the request once its ranges are checked, with the grammar of its answers among its tools where it has
    both. A front end has put in it what ``asked``, ``sampling_of`` and the makers of prompts and grammars gave;
    everything else is checked here.

    Args:
        request: what the caller asks for.
        names: field of the request -> the caller's spelling, where they differ.

    Raises:
        InvalidRequestError: a value is out of its range; ``param`` is the caller's spelling.
    """
    choices, most = names.get("choices", "choices"), request.max_tokens
    check_model(request.model)
    if most is not None:
        param = request.max_tokens_param
        check_range(most, 1, MAX_OUTPUT_TOKENS, param)
        if request.choices * most > MAX_OUTPUT_TOKENS:
            raise InvalidRequestError(
                f"{choices} x {param} is {request.choices * most}; at most {MAX_OUTPUT_TOKENS} output tokens can be "
                "asked for in one request",
                param=choices,
            )
    if request.choices > 1 and request.grammar is not None:
        raise InvalidRequestError(
            f"{choices} is {request.choices}, and an output that follows a grammar is asked for one at a time; send a "
            "request for each",
            param=choices,
        )
    _check_stop(request.stop, names.get("stop", "stop"))
    param = names.get("stop_ids", "stop_ids")
    check_most(len(request.stop_ids), MAX_STOP_IDS, param, "entries")
    for token_id in request.stop_ids:
        check_range(token_id, 0, MAX_TOKEN_ID, param)
    if request.grammar is not None and request.ignore_eos:
        raise InvalidRequestError(
            "ignore_eos does not go with structured output, which ends where its grammar does", param="ignore_eos"
        )
    check_most(len(request.cache_key), MAX_CACHE_KEY_CHARS, "prompt_cache_key", "characters")
    request = replace(request, names=names)
    return replace(request, tools=_checked_tools(request, choices), grammar=None) if request.tools else request


def _checked_tools(request: GenerateRequest, choices: str) -> Tools:
    tools = request.tools
    assert tools is not None
    if request.grammar is not None:
        tools = _with_answer(tools, request.grammar)
    if request.choices > 1 and tools.held:
        raise InvalidRequestError(
            f"{choices} is {request.choices}, and an output whose calls are held to their schemas is asked for one at "
            "a time; send a request for each",
            param=choices,
        )
    if request.ignore_eos:
        raise InvalidRequestError(
            f"ignore_eos does not go with {tools.param}, since an output ends with its calls", param="ignore_eos"
        )
    return tools


def _with_answer(tools: Tools, grammar: Grammar) -> Tools:
    """Return the tools with what an output without calls follows; without effect where a call is required.

    Raises:
        InvalidRequestError: it is no JSON without whitespace, or too long beside the tools.
    """
    if grammar.kind not in _JSON_KINDS or grammar.whitespace is not Whitespace.COMPACT:
        raise InvalidRequestError(
            f"{grammar.param} does not go with {tools.param} in this form: an output that may call tools, and does "
            "not, can follow a JSON Schema, without whitespace between its tokens",
            param=grammar.param,
        )
    document = json.loads(tools.source)
    if document["required"]:
        return tools
    strict = grammar.kind is GrammarKind.JSON_SCHEMA
    answer = {"schema": grammar.source.decode(), "strict": strict}
    source = compact_json({**document, "answer": answer}).encode()
    check_most(len(source), MAX_TOOLS_BYTES, grammar.param, "bytes")
    return replace(tools, source=source, held=True, answer_param=grammar.param)


def build_embed(
    model: str,
    inputs: Sequence[TextPrompt | TokenPrompt],
    dimensions: int | None,
    stamp: Stamp,
    *,
    priority: wire.Priority | None = None,
    param: str = "input",
) -> EmbedRequest:
    """Return the checked request for embeddings.

    Raises:
        InvalidRequestError: no text, too many, or a value out of its range.
    """
    check_model(model)
    if not inputs:
        raise InvalidRequestError(f"{param} must hold at least one text", param=param)
    check_most(len(inputs), MAX_INPUTS, param, "entries")
    if dimensions is not None:
        check_range(dimensions, 1, MAX_DIMENSIONS, "dimensions")
    return EmbedRequest(
        request_id=stamp.request_id,
        model=model,
        inputs=tuple(inputs),
        param=param,
        dimensions=dimensions,
        deadline=stamp.deadline,
        priority=priority,
    )


def check_model(name: str) -> None:
    """Raises:
    InvalidRequestError: no model of the appliance could have this name.
    """
    if not _MODEL.fullmatch(name):
        raise InvalidRequestError(
            f"model must be 1 to {MAX_MODEL_CHARS} printable ASCII characters without spaces", param="model"
        )


def chat_prompt(
    turns: Sequence[Turn],
    param: str,
    arguments: Mapping[str, object] | None = None,
    arguments_param: str = "chat_template_kwargs",
    tools: Sequence[Mapping[str, Any]] = (),
    hints: Mapping[str, object] | None = None,
) -> ChatPrompt:
    """Return a conversation as the text sandbox takes it. ``arguments``: of the model's chat template, such as
    ``enable_thinking``; whether it has them, the sandbox finds out. ``tools``: those that the model is told of.
    ``hints``: arguments that a template gets if it has them.

    Raises:
        InvalidRequestError: no message, too many, or text that is not Unicode or too long; arguments that are no short
            texts, numbers or truth values.
    """
    if not turns:
        raise InvalidRequestError(f"{param} must hold at least one message", param=param)
    check_most(len(turns), MAX_MESSAGES, param, "entries")
    rows = []
    for index, turn in enumerate(turns):
        row: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.calls:
            row["tool_calls"] = [
                {"id": one.call_id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
                for one in turn.calls
            ]
        if turn.call_id is not None:
            row["tool_call_id"] = turn.call_id
        if turn.reasoning is not None:
            row["reasoning_content"] = turn.reasoning
        if turn.name is not None:
            if len(utf8(turn.name, f"{param}[{index}].name")) > MAX_NAME_BYTES:
                raise InvalidRequestError(f"a name may have {MAX_NAME_BYTES} bytes", param=f"{param}[{index}].name")
            row["name"] = turn.name
        rows.append(row)
    document: dict[str, object] = {"messages": rows}
    if tools:
        document["tools"] = tools
    if arguments:
        document["template_kwargs"] = _checked_arguments(arguments, arguments_param)
    if hints:
        document["hints"] = hints
    source = utf8(compact_json(document), param)
    check_most(len(source), MAX_SOURCE_BYTES, param, "bytes")
    roles = frozenset(turn.role for turn in turns)
    asks = {"chat_template_kwargs": arguments, "reasoning_effort": hints, "name": any(turn.name for turn in turns)}
    fields = frozenset(name for name, value in asks.items() if value)
    return ChatPrompt(source, param, arguments_param, roles, fields)


def thinking_hints(*, thinks: bool, effort: str | None = None) -> dict[str, object]:
    """Return the arguments by which chat templates know whether, and how hard, the model shall reason."""
    hints: dict[str, object] = {"enable_thinking": thinks, "thinking": thinks}
    return hints if effort is None else {**hints, "reasoning_effort": effort}


def _checked_arguments(arguments: Mapping[str, object], param: str) -> dict[str, object]:
    check_most(len(arguments), MAX_ARGUMENTS, param, "entries")
    for name, value in arguments.items():
        utf8(name, param)
        if not isinstance(value, str | bool | int | float):
            raise InvalidRequestError(f"{param} must hold texts, numbers, true or false", param=param)
        text = str(value)
        check_most(len(text), MAX_ARGUMENT_CHARS, param, "characters in one entry")
        utf8(text, param)
    return dict(arguments)


def text_prompt(text: str, param: str) -> TextPrompt:
    """Return a plain prompt.

    Raises:
        InvalidRequestError: it is not Unicode or too long.
    """
    check_most(len(utf8(text, param)), MAX_SOURCE_BYTES, param, "bytes")
    return TextPrompt(text, param)


def token_prompt(ids: Sequence[int], param: str) -> TokenPrompt:
    """Return a prompt of token ids.

    Raises:
        InvalidRequestError: none, too many, or an id that no model can have.
    """
    if not ids:
        raise InvalidRequestError(f"{param} must hold at least one token id", param=param)
    check_most(len(ids), MAX_PROMPT_TOKENS, param, "entries")
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise InvalidRequestError(f"a token id is outside 0 to {MAX_TOKEN_ID}", param=param)
    return TokenPrompt(array("I", ids), param)


def grammar(kind: GrammarKind, text: str, param: str) -> Grammar:
    """Return a grammar as the text sandbox takes it; whether it can be used is decided there.

    Raises:
        InvalidRequestError: it is empty or not Unicode.
        GrammarTooLargeError: it has too many bytes.
    """
    source = utf8(text, param)
    if not source:
        raise InvalidRequestError(f"{param} is empty", param=param)
    check_most(len(source), MAX_GRAMMAR_BYTES, param, "bytes", GrammarTooLargeError)
    return Grammar(kind, source, param=param)


def choice_grammar(values: Sequence[Any], param: str) -> Grammar:
    """Return the grammar of "one of these strings".

    Raises:
        InvalidRequestError: there is none, or something that is no text.
    """
    if not values or not all(isinstance(value, str) and value for value in values):
        raise InvalidRequestError(f"{param} must hold strings", param=param)
    return grammar(GrammarKind.CHOICE, compact_json(list(values)), param)


def spaced(asked_for: Grammar | None, whitespace: Whitespace | None, param: str) -> Grammar | None:
    """Return the grammar with the whitespace that the caller asks for, compact where it asks for none.

    Raises:
        InvalidRequestError: whitespace is asked for, and the output is not to be JSON.
    """
    if whitespace is None:
        return asked_for
    if asked_for is None or asked_for.kind not in _JSON_KINDS:
        raise InvalidRequestError(
            f"{param} is for outputs that are JSON by a schema or are any JSON object; ask for one of them, or leave "
            f"{param} out",
            param=param,
        )
    return replace(asked_for, whitespace=whitespace)


def compact_json(value: object) -> str:
    """Return the JSON of a value, without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def traceparent(values: Sequence[str]) -> str | None:
    """Return the value of the caller's ``traceparent`` headers if there is exactly one and it is well-formed (W3C Trace
    Context, version 00), else None: a bad one is no error."""
    return values[0] if len(values) == 1 and _TRACEPARENT.fullmatch(values[0]) else None


def check_most(
    actual: int, most: int, param: str, unit: str, error: type[InvalidRequestError] = InvalidRequestError
) -> None:
    """Refuse a value that has more than ``most`` of a unit (a plural noun).

    Raises:
        InvalidRequestError: it has; the error is of the type given.
    """
    if actual > most:
        raise error(
            f"{param} has {actual} {unit}; at most {most} are taken",
            param=param,
            details={f"limit_{unit}": str(most), f"actual_{unit}": str(actual)},
        )


def utf8(text: str, param: str) -> bytes:
    """Return the text's bytes.

    Raises:
        InvalidRequestError: it holds half a surrogate pair, which no UTF-8 can carry.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{param} holds half a surrogate pair, which is not a character", param=param
        ) from None


def check_range(value: float, low: float, high: float, param: str) -> None:
    """Refuse a number outside of its range.

    Raises:
        InvalidRequestError: it is, or is no number.
    """
    # Not "value < low or value > high": a NaN is neither, and must not pass.
    if not low <= value <= high:
        raise InvalidRequestError(
            f"{param} is outside its range; give a value from {low} to {high}",
            param=param,
            details={"minimum": str(low), "maximum": str(high)},
        )


def _check_stop(stop: Sequence[str], param: str) -> None:
    check_most(len(stop), MAX_STOP_STRINGS, param, "entries")
    for text in stop:
        size = len(utf8(text, param))
        if not 1 <= size <= MAX_STOP_BYTES:
            raise InvalidRequestError(
                f"a stop string has {size} bytes; each must have 1 to {MAX_STOP_BYTES}", param=param
            )
