"""``/v1/rerank``, ``/v1/score`` and ``/v1/classify``: JSON -> ``ScoreRequest``, and scores -> JSON; pure.

Names and shapes are those of vLLM 0.32; those of ``/v1/rerank``, which is ``/v2/rerank`` too, are Jina's and Cohere's
as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from appliance.common.errors import InvalidRequestError
from appliance.gateway.front import request_builder, score_builder
from appliance.gateway.front.request_builder import Stamp
from appliance.gateway.generate_request import ScoreOperation, ScoreRequest, Scores, TextPrompt
from appliance.gateway.http import unsupported
from appliance.gateway.http.openai import END_USER, document_of, end_user_of
from appliance.gateway.http.unsupported import refuse_unsupported

RERANK_FIELDS = frozenset({"model", "query", "documents", "top_n", "return_documents", *END_USER})
SCORE_FIELDS = frozenset({"model", "queries", "documents", "text_1", "text_2", *END_USER})
CLASSIFY_FIELDS = frozenset({"model", "input", *END_USER})

_PAIRS = (("text_1", "text_2"), ("queries", "documents"))
"""Names of the two lists of ``/v1/score``: one pair of names, or the other."""

Write = Callable[[Scores, ScoreRequest], Iterator[bytes]]
"""Writes the answer as JSON in pieces, between which the loop may turn."""


@dataclass(frozen=True, slots=True)
class ParsedScore:
    """A request, and what its answer is written with."""

    request: ScoreRequest
    write: Write
    ignored: tuple[str, ...]
    """Names of fields that had a value and no effect."""


def parse_rerank(body: bytes, stamp: Stamp) -> ParsedScore:
    """Parse the body of ``/v1/rerank``.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    refuse_unsupported(document, unsupported.SCORE_FIELDS)
    query = document.get("query")
    if not isinstance(query, str):
        raise InvalidRequestError("query must be a string", param="query")
    given = document.get("documents")
    if not isinstance(given, list):
        raise InvalidRequestError("documents must be an array of texts", param="documents")
    texts = _texts(given, "documents", objects=True)
    most = document.get("top_n")
    if most is not None:
        if type(most) is not int:
            raise InvalidRequestError("top_n must be an integer", param="top_n")
        request_builder.check_range(most, 0, score_builder.MAX_DOCUMENTS, "top_n")
    returned = document.get("return_documents")
    if returned is not None and type(returned) is not bool:
        raise InvalidRequestError("return_documents must be true or false", param="return_documents")
    shown = tuple(text.text for text in texts) if returned is not False else ()
    request = _request(ScoreOperation.RERANK, document, [_text(query, "query")], texts, stamp, ("query", "documents"))
    top = most or len(texts)
    return ParsedScore(
        request, lambda scores, asked: _ranked(scores, asked, top, shown), _ignored(document, RERANK_FIELDS)
    )


def parse_score(body: bytes, stamp: Stamp) -> ParsedScore:
    """Parse the body of ``/v1/score``.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    refuse_unsupported(document, unsupported.SCORE_FIELDS)
    found = [names for names in _PAIRS if any(document.get(name) is not None for name in names)]
    if len(found) > 1:
        raise InvalidRequestError("give text_1 and text_2, or queries and documents, not both", param="text_1")
    names = found[0] if found else _PAIRS[0]
    queries, documents = (_texts(_listed(document.get(name), name), name) for name in names)
    request = _request(ScoreOperation.SCORE, document, queries, documents, stamp, names)
    return ParsedScore(request, _scored, _ignored(document, SCORE_FIELDS))


def parse_classify(body: bytes, stamp: Stamp) -> ParsedScore:
    """Parse the body of ``/v1/classify``.

    Raises:
        InvalidRequestError: anything is wrong with it; ``param`` names the field.
    """
    document = document_of(body)
    refuse_unsupported(document, unsupported.SCORE_FIELDS)
    texts = _texts(_listed(document.get("input"), "input"), "input")
    request = _request(ScoreOperation.CLASSIFY, document, [], texts, stamp, ("input", "input"))
    return ParsedScore(request, _classified, _ignored(document, CLASSIFY_FIELDS))


def _request(
    operation: ScoreOperation,
    document: Mapping[str, Any],
    queries: Sequence[TextPrompt],
    documents: Sequence[TextPrompt],
    stamp: Stamp,
    params: tuple[str, str],
) -> ScoreRequest:
    model = document.get("model")
    if not isinstance(model, str):
        raise InvalidRequestError("model must be a string", param="model")
    request = score_builder.build_score(operation, model, queries, documents, stamp, params=params)
    return replace(request, end_user=end_user_of(document))


def _ignored(document: Mapping[str, Any], served: frozenset[str]) -> tuple[str, ...]:
    known = served.union(unsupported.SCORE_FIELDS)
    return tuple(name for name, value in document.items() if value is not None and name not in known)


def _listed(value: object, param: str) -> list[Any]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise InvalidRequestError(f"{param} must be a string or an array of strings", param=param)
    return value


def _texts(values: list[Any], param: str, *, objects: bool = False) -> list[TextPrompt]:
    """Make prompts of texts; with ``objects`` a text may stand in an object, under ``text``."""
    request_builder.check_most(len(values), score_builder.MAX_DOCUMENTS, param, "entries")
    texts = []
    for index, one in enumerate(values):
        at = f"{param}[{index}]"
        if objects and isinstance(one, dict):
            one = one.get("text")
        if not isinstance(one, str):
            form = "a string, or an object with a text" if objects else "a string"
            raise InvalidRequestError(f"{at} must be {form}", param=at)
        texts.append(_text(one, at))
    return texts


def _text(value: str, param: str) -> TextPrompt:
    if not value:
        raise InvalidRequestError(f"{param} is an empty string", param=param)
    return request_builder.text_prompt(value, param)


def _ranked(scores: Scores, request: ScoreRequest, top: int, shown: Sequence[str]) -> Iterator[bytes]:
    """Write the best documents, the best first."""
    yield f'{{"id":{json.dumps(request.request_id)},"model":{_model(request)},{_usage(scores)},"results":['.encode()
    for place, index in enumerate(scores.best(top)):
        entry: dict[str, Any] = {"index": index, "relevance_score": scores.values[index][0]}
        if shown:
            entry["document"] = {"text": shown[index]}
        yield _entry(place, entry)
    yield b"]}"


def _scored(scores: Scores, request: ScoreRequest) -> Iterator[bytes]:
    """Write the scores in the order of the pairs."""
    yield from _list(scores, request, ({"object": "score", "score": one[0]} for one in scores.values))


def _classified(scores: Scores, request: ScoreRequest) -> Iterator[bytes]:
    """Write each text's likeliest label, and the probabilities of all."""
    labels = scores.labels
    entries = (
        {"label": labels[one.index(max(one))], "probs": list(one), "num_classes": len(one)} for one in scores.values
    )
    yield from _list(scores, request, entries)


def _list(scores: Scores, request: ScoreRequest, entries: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    head = f'{{"id":{json.dumps(request.request_id)},"object":"list","created":{int(time.time())}'
    yield f'{head},"model":{_model(request)},{_usage(scores)},"data":['.encode()
    for index, entry in enumerate(entries):
        yield _entry(index, {"index": index, **entry})
    yield b"]}"


def _entry(place: int, entry: dict[str, Any]) -> bytes:
    return (b"," if place else b"") + json.dumps(entry, separators=(",", ":")).encode()


def _model(request: ScoreRequest) -> str:
    return json.dumps(request.model)


def _usage(scores: Scores) -> str:
    used = scores.input_tokens
    return f'"usage":{{"prompt_tokens":{used},"completion_tokens":0,"total_tokens":{used}}}'
