"""The limits of a request and the one check that both front ends build a ``GenerateRequest`` with.

A front end fills a ``Draft`` with values of the right types; ``build`` holds every range. Defaults of absent values are
set here too, so that HTTP and gRPC cannot drift apart. Limits of a tenant (context, rate, output) are the policy's.
"""

from __future__ import annotations

import json
import re
import secrets
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from appliance.errors import GrammarTooLargeError, InvalidRequestError
from appliance.request import (
    ChatPrompt,
    EmbedRequest,
    GenerateRequest,
    Grammar,
    Operation,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from isolation.ipc import messages as wire
from isolation.ipc.grammar_messages import MAX_GRAMMAR_BYTES, GrammarKind

MAX_BODY_BYTES = 4 << 20
"""Bytes of an HTTP body or a gRPC message: a prompt of a million tokens."""

MAX_MESSAGES = 1_024
"""Messages of one conversation."""

MAX_PARTS = 1_024
"""Text parts of one message."""

MAX_NAME_BYTES = 64
"""Bytes of a speaker's name."""

MAX_MODEL_CHARS = 256
"""Characters of a model's name."""

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

MAX_TOP_K = 1 << 20
"""Above every published vocabulary."""

GREEDY_BELOW = 1e-5
"""A temperature under this is taken as 0: dividing by it would overflow 32-bit logits."""

SEED_BITS = 64

_MODEL = re.compile(rf"[\x21-\x7e]{{1,{MAX_MODEL_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the server adds to a request and no client can choose: its id, and the seed where none is asked for."""

    request_id: str
    deadline: float | None = None
    """Seconds of ``time.monotonic``."""
    seed: int = field(default_factory=lambda: secrets.randbits(SEED_BITS))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDraft:
    """Sampling numbers as a client gave them; None is absent."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A request as a client gave it: types are right, ranges are not yet checked."""

    operation: Operation
    model: str
    prompt: Prompt
    sampling: SamplingDraft
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    stream: bool = False
    priority: wire.Priority | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    choices: int | None = None
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str
    name: str | None = None


def build(draft: Draft, stamp: Stamp, names: Mapping[str, str]) -> GenerateRequest:
    """The checked request. ``names`` translates a field of the draft to the caller's spelling, where they differ.

    Raises:
        InvalidRequestError: a value is out of its range; ``param`` is the caller's spelling.
    """

    def named(name: str) -> str:
        return names.get(name, name)

    check_model(draft.model)
    if draft.max_tokens is not None:
        _check_range(draft.max_tokens, 1, MAX_OUTPUT_TOKENS, named("max_tokens"))
    if draft.prompt_logprobs is not None:
        _check_range(draft.prompt_logprobs, 0, MAX_TOP_LOGPROBS, named("prompt_logprobs"))
    choices = 1 if draft.choices is None else draft.choices
    _check_range(choices, 1, MAX_CHOICES, named("choices"))
    if draft.max_tokens is not None and choices * draft.max_tokens > MAX_OUTPUT_TOKENS:
        raise InvalidRequestError(
            f"{named('choices')} x {named('max_tokens')} is {choices * draft.max_tokens}; at most {MAX_OUTPUT_TOKENS} "
            "output tokens can be asked for in one request",
            param=named("choices"),
        )
    if choices > 1 and draft.grammar is not None:
        raise InvalidRequestError(
            f"{named('choices')} is {choices}, and an output that follows a grammar is asked for one at a time; send a "
            "request for each",
            param=named("choices"),
        )
    if draft.logprobs is not None:
        _check_range(draft.logprobs, 0, MAX_TOP_LOGPROBS, named("logprobs"))
    _check_stop(draft.stop, named("stop"))
    _check_count(len(draft.stop_ids), MAX_STOP_IDS, named("stop_ids"))
    for token_id in draft.stop_ids:
        _check_range(token_id, 0, MAX_TOKEN_ID, named("stop_ids"))
    if draft.grammar is not None and draft.ignore_eos:
        raise InvalidRequestError(
            "ignore_eos does not go with structured output, which ends where its grammar does", param="ignore_eos"
        )
    return GenerateRequest(
        request_id=stamp.request_id,
        operation=draft.operation,
        model=draft.model,
        prompt=draft.prompt,
        sampling=_sampling(draft.sampling, stamp, names),
        max_tokens=draft.max_tokens,
        stop=draft.stop,
        stop_ids=draft.stop_ids,
        ignore_eos=draft.ignore_eos,
        logprobs=-1 if draft.logprobs is None else draft.logprobs,
        deadline=stamp.deadline,
        stream=draft.stream,
        priority=draft.priority,
        grammar=draft.grammar,
        prompt_logprobs=-1 if draft.prompt_logprobs is None else draft.prompt_logprobs,
        echo=draft.echo,
        choices=choices,
        deterministic=draft.deterministic,
    )


def build_embed(
    model: str,
    inputs: Sequence[TextPrompt | TokenPrompt],
    dimensions: int | None,
    stamp: Stamp,
    *,
    priority: wire.Priority | None = None,
    param: str = "input",
) -> EmbedRequest:
    """The checked request for embeddings.

    Raises:
        InvalidRequestError: no text, too many, or a value out of its range.
    """
    check_model(model)
    if not inputs:
        raise InvalidRequestError(f"{param} must hold at least one text", param=param)
    _check_count(len(inputs), MAX_INPUTS, param)
    if dimensions is not None:
        _check_range(dimensions, 1, MAX_DIMENSIONS, "dimensions")
    return EmbedRequest(
        request_id=stamp.request_id, model=model, inputs=tuple(inputs), dimensions=dimensions,
        deadline=stamp.deadline, priority=priority,
    )  # fmt: skip


def check_model(name: str) -> None:
    """Raises:
    InvalidRequestError: no model of the appliance could have this name.
    """
    if not _MODEL.fullmatch(name):
        raise InvalidRequestError(
            f"model must be 1 to {MAX_MODEL_CHARS} printable ASCII characters without spaces", param="model"
        )


def chat_prompt(turns: Sequence[Turn], param: str) -> ChatPrompt:
    """A conversation as the text sandbox takes it.

    Raises:
        InvalidRequestError: no message, too many, or text that is not Unicode or too long.
    """
    if not turns:
        raise InvalidRequestError(f"{param} must hold at least one message", param=param)
    _check_count(len(turns), MAX_MESSAGES, param)
    rows = []
    for index, turn in enumerate(turns):
        row = {"role": turn.role, "content": turn.content}
        if turn.name is not None:
            if len(utf8(turn.name, f"{param}[{index}].name")) > MAX_NAME_BYTES:
                raise InvalidRequestError(f"a name may have {MAX_NAME_BYTES} bytes", param=f"{param}[{index}].name")
            row["name"] = turn.name
        rows.append(row)
    source = utf8(json.dumps({"messages": rows}, ensure_ascii=False, separators=(",", ":")), param)
    _check_source(source, param)
    return ChatPrompt(source)


def text_prompt(text: str, param: str) -> TextPrompt:
    """A plain prompt.

    Raises:
        InvalidRequestError: it is not Unicode or too long.
    """
    _check_source(utf8(text, param), param)
    return TextPrompt(text)


def token_prompt(ids: Sequence[int], param: str) -> TokenPrompt:
    """A prompt of token ids.

    Raises:
        InvalidRequestError: none, too many, or an id that no model can have.
    """
    if not ids:
        raise InvalidRequestError(f"{param} must hold at least one token id", param=param)
    _check_count(len(ids), MAX_PROMPT_TOKENS, param)
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise InvalidRequestError(f"a token id is outside 0 to {MAX_TOKEN_ID}", param=param)
    return TokenPrompt(array("I", ids))


def grammar(kind: GrammarKind, text: str, param: str) -> Grammar:
    """A grammar as the text sandbox takes it; whether it can be used is decided there.

    Raises:
        InvalidRequestError: it is empty or not Unicode.
        GrammarTooLargeError: it has too many bytes.
    """
    source = utf8(text, param)
    if not source:
        raise InvalidRequestError(f"{param} is empty", param=param)
    if len(source) > MAX_GRAMMAR_BYTES:
        raise GrammarTooLargeError(
            f"{param} has {len(source)} bytes; a grammar may have {MAX_GRAMMAR_BYTES}",
            param=param,
            details={"limit_bytes": str(MAX_GRAMMAR_BYTES), "actual_bytes": str(len(source))},
        )
    return Grammar(kind, source)


def utf8(text: str, param: str) -> bytes:
    """The text's bytes.

    Raises:
        InvalidRequestError: it holds half a surrogate pair, which no UTF-8 can carry.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequestError(
            f"{param} holds half a surrogate pair, which is not a character", param=param
        ) from None


def _sampling(draft: SamplingDraft, stamp: Stamp, names: Mapping[str, str]) -> wire.Sampling:
    def number(name: str, low: float, high: float, default: float) -> float:
        value = getattr(draft, name)
        if value is None:
            return default
        _check_range(value, low, high, names.get(name, name))
        return float(value)

    temperature = number("temperature", 0.0, 2.0, 1.0)
    top_p = number("top_p", 0.0, 1.0, 1.0)
    if top_p == 0.0:
        name = names.get("top_p", "top_p")
        raise InvalidRequestError(f"{name} must be above 0; temperature 0 takes the likeliest token", param=name)
    if draft.seed is not None:
        # OpenAI's seed is signed, the wire's is not: both spellings of the same 64 bits are taken.
        _check_range(draft.seed, -(1 << 63), (1 << SEED_BITS) - 1, names.get("seed", "seed"))
    seed = stamp.seed if draft.seed is None else draft.seed % (1 << SEED_BITS)
    return wire.Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        # vLLM spells "keep all" as -1.
        top_k=max(0, int(number("top_k", -1, MAX_TOP_K, 0))),
        top_p=top_p,
        min_p=number("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=number("repetition_penalty", 0.01, 100.0, 1.0),
        presence_penalty=number("presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=number("frequency_penalty", -2.0, 2.0, 0.0),
        seed=seed,
    )


def _check_range(value: float, low: float, high: float, param: str) -> None:
    # Not "value < low or value > high": a NaN is neither, and must not pass.
    if not low <= value <= high:
        raise InvalidRequestError(
            f"{param} is outside its range; give a value from {low} to {high}",
            param=param,
            details={"minimum": str(low), "maximum": str(high)},
        )


def _check_count(count: int, limit: int, param: str) -> None:
    if count > limit:
        raise InvalidRequestError(
            f"{param} has {count} entries; at most {limit} are taken",
            param=param,
            details={"limit_entries": str(limit), "actual_entries": str(count)},
        )


def _check_stop(stop: Sequence[str], param: str) -> None:
    _check_count(len(stop), MAX_STOP_STRINGS, param)
    for text in stop:
        size = len(utf8(text, param))
        if not 1 <= size <= MAX_STOP_BYTES:
            raise InvalidRequestError(
                f"a stop string has {size} bytes; each must have 1 to {MAX_STOP_BYTES}", param=param
            )


def _check_source(source: bytes, param: str) -> None:
    if len(source) > MAX_SOURCE_BYTES:
        raise InvalidRequestError(
            f"{param} has {len(source)} bytes; at most {MAX_SOURCE_BYTES} are taken",
            param=param,
            details={"limit_bytes": str(MAX_SOURCE_BYTES), "actual_bytes": str(len(source))},
        )
