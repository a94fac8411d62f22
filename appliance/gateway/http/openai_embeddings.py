"""``/v1/embeddings``: OpenAI's JSON -> ``EmbedRequest``, and vectors -> OpenAI's object; pure.

``input`` is a string, an array of strings, an array of token ids, or an array of such arrays. Source of names and
shapes: OpenAI's API specification of 2026-08.
"""

from __future__ import annotations

import base64 as base64_
import json
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import Embeddings, EmbedRequest, TextPrompt, TokenPrompt
from appliance.gateway.http import unsupported
from appliance.gateway.http.openai import END_USER, document_of, end_user_of
from appliance.gateway.http.unsupported import refuse_unsupported

_SERVED = frozenset({"model", "input", "dimensions", "encoding_format", *END_USER})


@dataclass(frozen=True, slots=True)
class ParsedEmbed:
    """A request and what only the answer's shape depends on."""

    request: EmbedRequest
    base64: bool
    ignored: tuple[str, ...]
    """Names of fields that had a value and no effect."""


def parse(body: bytes, stamp: Stamp) -> ParsedEmbed:
    """The request in the body of ``/v1/embeddings``.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    refuse_unsupported(document, unsupported.EMBED_FIELDS)
    model = document.get("model")
    if not isinstance(model, str):
        raise InvalidRequestError("model must be a string", param="model")
    dimensions = document.get("dimensions")
    if dimensions is not None and type(dimensions) is not int:
        raise InvalidRequestError("dimensions must be an integer", param="dimensions")
    encoding = document.get("encoding_format", "float")
    if encoding not in ("float", "base64", None):
        raise InvalidRequestError("encoding_format must be float or base64", param="encoding_format")
    known = _SERVED.union(unsupported.EMBED_FIELDS)
    ignored = tuple(name for name, value in document.items() if value is not None and name not in known)
    user = end_user_of(document)
    request = replace(
        request_builder.build_embed(model, _inputs(document.get("input")), dimensions, stamp), end_user=user
    )
    return ParsedEmbed(request, encoding == "base64", ignored)


def answer(embeddings: Embeddings, model: str, *, base64: bool) -> Iterator[bytes]:
    """The list of vectors with its usage, as JSON in pieces of one vector: millions of numbers are not written in one
    turn of the loop."""
    yield b'{"object":"list","data":['
    for index, vector in enumerate(embeddings.vectors):
        shown = _packed(vector) if base64 else vector.tolist()
        entry = {"object": "embedding", "index": index, "embedding": shown}
        yield (b"," if index else b"") + json.dumps(entry, separators=(",", ":")).encode()
    used = embeddings.input_tokens
    usage = {"prompt_tokens": used, "total_tokens": used}
    yield f'],"model":{json.dumps(model)},"usage":{json.dumps(usage, separators=(",", ":"))}}}'.encode()


def _packed(vector: array[float]) -> str:
    """Little-endian float32 in base64."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64_.b64encode(vector.tobytes()).decode("ascii")


def _inputs(value: object) -> list[TextPrompt | TokenPrompt]:
    if value is None:
        raise InvalidRequestError("input is required", param="input")
    if isinstance(value, str):
        return [_text(value, "input")]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError("input must be a string or an array that holds something", param="input")
    if type(value[0]) is int:
        return [_tokens(value, "input")]
    request_builder.check_most(len(value), request_builder.MAX_INPUTS, "input", "texts")
    return [
        _text(one, f"input[{index}]") if isinstance(one, str) else _tokens(one, f"input[{index}]")
        for index, one in enumerate(value)
    ]


def _text(value: str, param: str) -> TextPrompt:
    if not value:
        raise InvalidRequestError(f"{param} is an empty string", param=param)
    return request_builder.text_prompt(value, param)


def _tokens(value: object, param: str) -> TokenPrompt:
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise InvalidRequestError(f"{param} must be a string or an array of token ids", param=param)
    return request_builder.token_prompt(value, param)
