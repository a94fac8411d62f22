"""What of a request the policy's content rules look at. Pure.

Fields are read from the request and not from the caller's document: however a field is spelled, what asks for it is
found here, and what asks for nothing is not.
"""

from __future__ import annotations

from appliance.gateway.generate_request import (
    AnyRequest,
    AttestRequest,
    ChatPrompt,
    EmbedRequest,
    GenerateRequest,
    Prompt,
    ScoreRequest,
    TextPrompt,
)
from policy.content import PLAIN
from policy.request import Content

TOKEN_BYTES = 4
"""Bytes that a token id counts."""


def content_of(request: AnyRequest) -> Content | None:
    """Return what a request holds; None where it holds nothing of its caller's."""
    if isinstance(request, AttestRequest):
        return None
    if isinstance(request, EmbedRequest):
        asked = {"dimensions": request.dimensions is not None, "service_tier": request.priority is not None}
        return Content(bytes=sum(map(prompt_bytes, request.inputs)), fields=_asked(asked))
    if isinstance(request, ScoreRequest):
        fields = _asked({"service_tier": request.priority is not None})
        return Content(bytes=sum(map(prompt_bytes, request.queries + request.documents)), fields=fields)
    if not isinstance(request, GenerateRequest):
        return Content(bytes=prompt_bytes(request.prompt), fields=_fields_of(request.prompt))
    grammar = len(request.grammar.source) if request.grammar is not None else 0
    roles = request.prompt.roles if isinstance(request.prompt, ChatPrompt) else frozenset({PLAIN})
    return Content(bytes=prompt_bytes(request.prompt) + grammar, fields=fields_of(request), roles=roles)


def fields_of(request: GenerateRequest) -> frozenset[str]:
    """Return the fields of ``policy.content.REQUEST_FIELDS`` that a request asks for something by."""
    tools = request.tools
    answers = request.grammar is not None or (tools is not None and tools.answer_param is not None)
    asked = {
        "stop": bool(request.stop or request.stop_ids),
        "ignore_eos": request.ignore_eos,
        "logit_bias": request.logit_bias is not None,
        "logprobs": request.logprobs >= 0,
        "prompt_logprobs": request.prompt_logprobs >= 0,
        "echo": request.echo,
        "n": request.choices > 1,
        "stream": request.stream,
        "deterministic": request.deterministic,
        "prompt_cache_key": bool(request.cache_key),
        "service_tier": request.priority is not None,
        "response_format": answers,
        "tools": tools is not None,
    }
    return _asked(asked) | request.sent | _fields_of(request.prompt)


def prompt_bytes(prompt: Prompt) -> int:
    """Return the bytes that a prompt counts."""
    if isinstance(prompt, ChatPrompt):
        return len(prompt.source)
    if isinstance(prompt, TextPrompt):
        return len(prompt.text) if prompt.text.isascii() else len(prompt.text.encode())
    return TOKEN_BYTES * len(prompt.token_ids)


def _fields_of(prompt: Prompt) -> frozenset[str]:
    return prompt.fields if isinstance(prompt, ChatPrompt) else frozenset()


def _asked(fields: dict[str, bool]) -> frozenset[str]:
    return frozenset(name for name, asked in fields.items() if asked)
