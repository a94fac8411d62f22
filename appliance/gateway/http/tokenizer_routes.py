"""``/tokenize`` and ``/detokenize``: vLLM's JSON -> ``TokenizerRequest``, and what became of it -> its objects; pure.

Source of names and shapes: vLLM 0.32, "Tokenizer API". ``/tokenize`` takes a ``prompt`` as ``/v1/completions`` does, or
``messages`` as ``/v1/chat/completions``; so its count is the ``prompt_tokens`` of that request.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import (
    Operation,
    Prompt,
    TextPrompt,
    Tokenized,
    TokenizerOperation,
    TokenizerRequest,
    TokenPrompt,
)
from appliance.gateway.http import openai_tools, unsupported
from appliance.gateway.http.fields import without_effect
from appliance.gateway.http.openai import document_of, model_of, prompt_of
from appliance.gateway.http.unsupported import refuse_unsupported

IDS_AT_ONCE = 4_096
"""Token ids written in one piece of JSON: some 30 KiB, less than a millisecond."""

_TOKENIZE = (
    frozenset({"model", "prompt", "messages", "chat_template_kwargs", "add_special_tokens"}) | openai_tools.FIELDS
)
_DETOKENIZE = frozenset({"model", "tokens"})


@dataclass(frozen=True, slots=True)
class ParsedTokenizer:
    """A request, and the names of fields that had a value and no effect."""

    request: TokenizerRequest
    ignored: tuple[str, ...]


def parse_tokenize(body: bytes, stamp: Stamp) -> ParsedTokenizer:
    """The request in the body of ``/tokenize``.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    refuse_unsupported(document, unsupported.TOKENIZE_FIELDS)
    if (document.get("prompt") is None) == (document.get("messages") is None):
        raise InvalidRequestError("give one of prompt and messages", param="prompt")
    ignored: dict[str, None] = {}
    operation = Operation.CHAT if document.get("messages") is not None else Operation.TEXT_COMPLETION
    tools = openai_tools.offered(document) if operation is Operation.CHAT else openai_tools.Offered()
    if operation is not Operation.CHAT:
        refuse_unsupported(document, unsupported.COMPLETION_FIELDS)
    prompt = prompt_of(operation, document, ignored, tools)
    if isinstance(prompt, TokenPrompt):
        raise InvalidRequestError("prompt holds token ids already; /detokenize makes text of them", param="prompt")
    framed = document.get("add_special_tokens")
    if framed is not None and not isinstance(framed, bool):
        raise InvalidRequestError("add_special_tokens must be true or false", param="add_special_tokens")
    if isinstance(prompt, TextPrompt):
        prompt = replace(prompt, framed=framed is not False)
    elif framed:
        raise InvalidRequestError(
            "add_special_tokens goes with prompt; the chat template writes the special tokens of messages",
            param="add_special_tokens",
        )
    request = count_request(document, prompt, stamp)
    return ParsedTokenizer(request, (*ignored, *_unknown(document, _TOKENIZE)))


def parse_detokenize(body: bytes, stamp: Stamp) -> ParsedTokenizer:
    """The request in the body of ``/detokenize``.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    ids = document.get("tokens")
    if not isinstance(ids, list) or any(type(one) is not int for one in ids):
        raise InvalidRequestError("tokens must be an array of token ids", param="tokens")
    request = TokenizerRequest(
        request_id=stamp.request_id,
        operation=TokenizerOperation.DETOKENIZE,
        model=_checked_model(document),
        prompt=request_builder.token_prompt(ids, "tokens"),
        deadline=stamp.deadline,
    )
    return ParsedTokenizer(request, _unknown(document, _DETOKENIZE))


def tokenized(found: Tokenized) -> Iterator[bytes]:
    """The answer of ``/tokenize``, as JSON in pieces of some thousand ids."""
    ids: array[int] = found.token_ids
    context = found.max_context or None
    yield f'{{"count":{len(ids)},"max_model_len":{json.dumps(context)},"tokens":['.encode()
    for start in range(0, len(ids), IDS_AT_ONCE):
        piece = ",".join(map(str, ids[start : start + IDS_AT_ONCE]))
        yield f"{',' if start else ''}{piece}".encode()
    yield b'],"token_strs":null}'


def detokenized(text: str) -> dict[str, Any]:
    """The answer of ``/detokenize``."""
    return {"prompt": text}


def count_request(document: Mapping[str, Any], prompt: Prompt, stamp: Stamp) -> TokenizerRequest:
    """The request for the token ids of a document's prompt.

    Raises:
        InvalidRequestError: no model could have the name that the document asks for.
    """
    return TokenizerRequest(
        request_id=stamp.request_id,
        operation=TokenizerOperation.TOKENIZE,
        model=_checked_model(document),
        prompt=prompt,
        deadline=stamp.deadline,
    )


def _checked_model(document: Mapping[str, Any]) -> str:
    name = model_of(document)
    request_builder.check_model(name)
    return name


def _unknown(document: Mapping[str, Any], served: frozenset[str]) -> tuple[str, ...]:
    return without_effect(document, served, unsupported.TOKENIZE_FIELDS)
