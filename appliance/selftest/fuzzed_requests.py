"""Malformed and hostile requests with a valid key, over HTTP and gRPC; responses and crashes."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from appliance.gateway.grpc.batch_calls import BATCH_SERVICE
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.servicer import SERVICE
from appliance.gateway.grpc.usage_calls import USAGE_SERVICE
from appliance.selftest.fuzzed_batches import BATCH_METHODS, batch_message
from appliance.selftest.fuzzed_scores import SCORING, ranking, scored
from appliance.selftest.fuzzed_values import TEXTS, prompt, sound, text, value, word
from appliance.selftest.raw_http import request_bytes, status_of, talk
from appliance.selftest.real_appliance import MODEL, RealAppliance
from isolation.ipc.sampling import NAMES, PARAMETERS

STATUSES = frozenset({200, 400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 499, 501, 503, 504})
"""Permitted statuses; 500 is a defect, and 0 a closed connection without a response, permitted only for non-HTTP
input."""

CODES = frozenset(
    {
        "OK",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "FAILED_PRECONDITION",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
        "UNIMPLEMENTED",
        "DEADLINE_EXCEEDED",
        "CANCELLED",
        "UNAUTHENTICATED",
    }
)

PATHS = (
    "/v1/models",
    "/v1/completions",
    "/v1/limits",
    "/v1/usage",
    "/openapi.json",
    "/",
    "*",
    "//",
    "/v1/%00",
    "/v1/models/" + "a" * 9_000,
    "http://x/",
)

LANES = 12
"""Number of concurrent requests."""

SOUND: tuple[tuple[str, tuple[Any, ...]], ...] = (
    *((one.name, (one.identity, one.example, one.high)) for one in PARAMETERS),
    ("temperature", (0,)),
    ("top_k", (-1, 1)),
    ("seed", (-5,)),
    ("repetition_penalty", (0.5,)),
    ("presence_penalty", (-2,)),
    ("frequency_penalty", (-1,)),
    ("n", (1, 2, 4)),
    ("stop", ("x", ["a", "b"])),
    ("ignore_eos", (True, False)),
    ("stream", (True, False)),
    ("deterministic", (True,)),
    ("stop_token_ids", ([], [5, 9])),
    ("logit_bias", ({}, {"5": -100, "9": 100}, {str(number): -0.5 for number in range(300)})),
    ("service_tier", ("flex", "default")),
    ("user", ("somebody",)),
)
"""Fields with valid values: half of all requests have only these, so that the engine is reached as well."""

FIELDS = (
    *NAMES,
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "stream",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "response_format",
    "guided_regex",
    "guided_json",
    "guided_choice",
    "guided_grammar",
    "whitespace",
    "structured_outputs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "system",
    "stop_sequences",
    "thinking",
    "output_config",
    "output_expires_after",
    "instructions",
    "max_output_tokens",
    "reasoning",
    "reasoning_effort",
    "previous_response_id",
    "store",
    "text",
    "include",
    "metadata",
    "chat_template",
    "chat_template_kwargs",
    "stream_options",
    "user",
    "service_tier",
    "deterministic",
    "max_tokens",
    "max_completion_tokens",
    "suffix",
    "bad_words",
    "allowed_token_ids",
    "images",
    "add_special_tokens",
    "query",
    "documents",
    "top_n",
    "return_documents",
    "text_1",
    "text_2",
    "truncate_prompt_tokens",
    "tokens",
    "background",
    "dimensions",
    "encoding_format",
    "input",
    "messages",
    "model",
    "nonce",
    "prompt",
    "prompt_cache_key",
    "queries",
    "safety_identifier",
    "truncation",
)
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
WITHOUT_ANSWER = ("/tokenize", "/detokenize", "/v1/attestations")
"""Routes on which no model answers."""

NONCES: tuple[Any, ...] = ("0" * 16, "9f86d081884c7d65" * 8, "f" * 129, "F" * 16, "", 3, None, "\u0660" * 16)
GRAMMARS: tuple[Any, ...] = (
    {"type": "json_object"},
    {"type": "text"},
    {"type": "json_schema"},
    {"type": "x"},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {}}}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": list(range(300))}}},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(a+)+b"}}},
)

TOOLS: tuple[Any, ...] = (
    [{"type": "function", "function": {"name": "now"}}],
    [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"type": "object", "$ref": "#"}}}],
    [{"type": "function", "function": {"name": '"\n</tool_call>'}}],
    [{"type": "custom"}, {}],
    [{"type": "function", "function": {"name": "x" * 65, "parameters": []}}],
)
CHOICES: tuple[Any, ...] = (
    "none",
    "auto",
    "required",
    {"type": "function", "function": {"name": "now"}},
    {"type": "x"},
)
BIASES: tuple[Any, ...] = (
    {"5": 100},
    {"511": -100, "512": 1},
    {"05": 1},
    {"\u0665": 1},
    {"-1": 1},
    {"5": 100.1},
    {"5": True},
    {"5": None},
    {"5": 1e999},
    {"9999999999": 1},
    {str(number): 1 for number in range(301)},
    [5, 1],
)
CALLS: tuple[Any, ...] = (
    [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    [{"id": "", "function": {"name": "now", "arguments": "{"}}],
    [{}],
    "now",
)
ITEMS: tuple[Any, ...] = (
    [{"role": "user", "content": "hi"}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_image"}]}],
    [{"type": "function_call", "call_id": "call_1", "name": "now", "arguments": "{"}],
    [{"type": "function_call_output", "call_id": "call_1", "output": "x"}, {"type": "reasoning", "summary": []}],
    [{"type": "item_reference", "id": "msg_1"}, 7],
)


@dataclass(slots=True)
class Responses:
    """Responses received."""

    sent: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    """Responses that no documented error explains, with their requests; the first few."""

    def add(self, status: str, fine: bool, what: str) -> None:
        """Count one response."""
        self.sent += 1
        self.by_status[status] += 1
        if not fine and len(self.odd) < 8:
            self.odd.append(f"{status}: {what[:160]}")


async def send(appliance: RealAppliance, requests: int, seed: int) -> Responses:
    """Send this many requests, several concurrently; the seed determines every one."""
    found = Responses()
    async with grpc.aio.insecure_channel(appliance.grpc_target) as channel:

        async def lane(number: int) -> None:
            draw = random.Random(seed * 1_000 + number)
            for _ in range(requests // LANES + (number < requests % LANES)):
                kind = draw.choices((_http, _broken, _rpc), (6, 1, 3))[0]
                await kind(appliance, channel, draw, found)

        await asyncio.gather(*(lane(number) for number in range(LANES)))
    return found


async def _http(appliance: RealAppliance, _channel: grpc.aio.Channel, draw: random.Random, found: Responses) -> None:
    """Send a request that is HTTP and, mostly, JSON."""
    path, document = body(draw)
    data = json.dumps(document, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    if draw.random() < 0.15:
        data = mutated(data, draw)
    tenant = draw.choice(("alpha", "beta"))
    proof = ("authorization", f"Bearer {appliance.key(tenant)}")
    request = request_bytes("POST", path, data, proof, ("content-type", "application/json"))
    await _ask(appliance, request, data, found, leaves=draw.random() < 0.05)


async def _broken(appliance: RealAppliance, _channel: grpc.aio.Channel, draw: random.Random, found: Responses) -> None:
    """Build a request with a malformed head."""
    proof = ("authorization", f"Bearer {appliance.key('alpha')}")
    headers = [("x-" + word(draw), word(draw)) for _ in range(draw.choice((0, 1, 5, 200)))]
    method = draw.choice(("GET", "POST", "PUT", "PATCH", "TRACE", "G\x00T", "post", "CONNECT"))
    path = draw.choice(PATHS)
    request = request_bytes(method, path, word(draw).encode(), proof, *headers)
    if draw.random() < 0.5:
        request = mutated(request, draw)
    await _ask(appliance, request, request, found, leaves=False, closed=True)


async def _ask(
    appliance: RealAppliance, request: bytes, what: bytes, found: Responses, *, leaves: bool, closed: bool = False
) -> None:
    try:
        answer = await talk(appliance.http_port, request, 0.05 if leaves else 30.0)
    except (OSError, TimeoutError):
        found.add("left" if leaves else "no answer", leaves or closed, repr(what))
        return
    status = status_of(answer)
    fine = status in STATUSES or (status == 0 and closed) or leaves
    if status >= 400 and fine and not closed:
        fine = _is_typed(answer)
    found.add(str(status), fine, repr(what) + repr(answer[-160:]))


def _is_typed(answer: bytes) -> bool:
    """Return whether an error is OpenAI's object, or Anthropic's, without internal details."""
    try:
        document = json.loads(answer.partition(b"\r\n\r\n")[2])
        error = document["error"]
    except (ValueError, KeyError, TypeError):
        return False
    leaks = ("Traceback", ".py", "/usr/", "/proc/", "0x")
    fields = {"message", "type"} if document.get("type") == "error" else {"message", "type", "param", "code"}
    return set(error) == fields and not any(one in error["message"] for one in leaks)


async def _rpc(appliance: RealAppliance, channel: grpc.aio.Channel, draw: random.Random, found: Responses) -> None:
    """Call a method with a message that is, mostly, of its type."""
    own = ("Generate", "Embed", "Rerank", "CountTokens", "Attest", "ListModels", "GetModel", word(draw))
    methods = (*(f"{SERVICE}/{name}" for name in own), f"{USAGE_SERVICE}/GetLimits", f"{USAGE_SERVICE}/GetUsage")
    methods += (f"{BATCH_SERVICE}/{draw.choice(BATCH_METHODS)}",)
    method = draw.choices(methods, (14, 2, 2, 2, 1, 1, 1, 2, 1, 1, 6))[0]
    data = (ranking(draw) if method.endswith("/Rerank") else message(draw)).SerializeToString()
    if method.startswith(BATCH_SERVICE):
        data = batch_message(method.rpartition("/")[2], draw)
    if draw.random() < 0.3:
        data = mutated(data, draw)
    proof = ("authorization", f"Bearer {appliance.key('beta')}")
    call = channel.unary_stream(f"/{method}")(data, metadata=(proof,), timeout=30)
    try:
        async for _ in call:
            if draw.random() < 0.02:
                call.cancel()
                break
        status = "OK"
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    except asyncio.CancelledError:
        status = "CANCELLED"
    found.add(status, status in CODES, repr(data))


def body(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Build a body with or without an error; outputs are short so that many can be requested."""
    document: dict[str, Any] = {"model": MODEL, "max_tokens": draw.choice((1, 2, 3, 8))}
    if draw.random() < 0.5:
        document |= {name: draw.choice(values) for name, values in draw.sample(SOUND, draw.randint(0, 5))}
        if draw.random() < 0.5:
            ids = [draw.randrange(1, 500) for _ in range(draw.randint(1, 60))]
            return "/v1/completions", {**document, "prompt": ids}
        return "/v1/chat/completions", {**document, "messages": [{"role": "user", "content": text(draw)}]}
    weights = [4] * len(GENERATING) + [1] * len(SCORING + WITHOUT_ANSWER)
    path = draw.choices(GENERATING + SCORING + WITHOUT_ANSWER, weights)[0]
    document |= asked(path, draw)
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        name = draw.choice(FIELDS)
        known = {"response_format": GRAMMARS, "tools": TOOLS, "tool_choice": CHOICES, "logit_bias": BIASES}.get(name)
        document[name] = value(draw) if known is None or draw.random() < 0.1 else draw.choice(known)
    if draw.random() < 0.05:
        document["model"] = value(draw)
    # Expensive requests are rare: the goal is to break the engine, not to keep it busy.
    if type(document.get("max_tokens")) is int and document["max_tokens"] > 64 and draw.random() < 0.8:
        document["max_tokens"] = 4
    return path, document


def asked(path: str, draw: random.Random) -> dict[str, Any]:
    """Draw what a route is asked about."""
    if path == "/v1/attestations":
        return {"nonce": draw.choice(NONCES)}
    if path == "/detokenize":
        return {"tokens": prompt(draw)}
    if path in SCORING:
        return scored(path, draw)
    if path in ("/v1/chat/completions", "/v1/messages") or (path == "/tokenize" and draw.random() < 0.5):
        roles = ("user", "system", "assistant", "tool", "", 3)
        messages = [{"role": draw.choice(roles), "content": text(draw)} for _ in range(draw.randint(0, 3))]
        for message in messages:
            if draw.random() < 0.2:
                message |= draw.choice(({"tool_calls": draw.choice(CALLS)}, {"tool_call_id": text(draw)}))
        return {"messages": messages}
    if path in ("/v1/completions", "/tokenize"):
        return {"prompt": prompt(draw)}
    return {"input": draw.choice(ITEMS) if path == "/v1/responses" and draw.random() < 0.5 else prompt(draw)}


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Mutate bytes: change, truncate, duplicate or insert some."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found) + 1)
        match draw.randrange(4):
            case 0:
                found[at : at + 1] = draw.randbytes(1)
            case 1:
                del found[at:]
            case 2:
                found[at:at] = found[: draw.randrange(64)]
            case _:
                found[at:at] = draw.randbytes(draw.randrange(8))
    return bytes(found)


def message(draw: random.Random) -> pb.GenerateRequest:
    """Build a gRPC request with arbitrary numbers."""
    made = pb.GenerateRequest(model=draw.choice((MODEL, MODEL, MODEL, "x", "")))
    match draw.randrange(3):
        case 0:
            made.text = sound(text(draw))
        case 1:
            ids = (0, 1, 300, 511, 512, 2**31, 2**32 - 1)
            made.token_ids.ids.extend(draw.choice(ids) for _ in range(draw.randint(0, 9)))
        case _:
            for _ in range(draw.randint(0, 3)):
                made.conversation.messages.add(role=draw.randrange(6), content=sound(text(draw)))
            if draw.random() < 0.3:
                made.conversation.tools.add(name=draw.choice(("now", "", "x" * 65)), strict=draw.random() < 0.5)
                made.tool_choice.mode = draw.choice((0, 1, 2, 3, 99))  # type: ignore[assignment]
    made.max_output_tokens = draw.choice((1, 2, 4, 8))
    if draw.random() < 0.5:
        return made
    made.max_output_tokens = draw.choice((0, 1, 8))
    for name in (one.name for one in PARAMETERS if one.kind is float):
        if draw.random() < 0.2:
            setattr(made.sampling, name, draw.choice((0.0, -1.0, 1.0, 2.0, 1e308, float("nan"), float("inf"), 1e-30)))
    if draw.random() < 0.3:
        made.logprobs = draw.choice((0, 1, 20, 21, 2**32 - 1))
        made.choices = draw.choice((0, 1, 2, 16, 17, 2**32 - 1))
    if draw.random() < 0.2:
        made.structured_output.regex = draw.choice(("[a-z]+", "(", "(a+)+", "." * 300, ""))
        made.structured_output.whitespace = draw.choice((0, 0, 0, 0, 0, 1, 2, 99))  # type: ignore[assignment]
    made.stop.extend(sound(draw.choice(TEXTS)) for _ in range(draw.choice((0, 0, 1, 20))))
    made.stop_token_ids.extend(draw.choice((0, 511, 2**32 - 1)) for _ in range(draw.choice((0, 0, 1, 65))))
    for _ in range(draw.choice((0, 0, 1, 301))):
        values = (-100.0, 0.5, 100.5, float("nan"), float("inf"))
        made.logit_bias[draw.randrange(draw.choice((512, 2**32)))] = draw.choice(values)
    return made
