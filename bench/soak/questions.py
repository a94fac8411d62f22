"""What is asked: a fixed catalogue of greedy requests of every kind, whose right answers are taken once, at rest."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.gateway.grpc.generated import inference_pb2 as pb
from bench.soak.answers import Answer
from bench.soak.clients import PLAIN, Grpc, Manner, post
from bench.soak.served import EMBED_MODEL, MODEL, Served

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}

PREFIX = "A furnace that feeds itself keeps an even heat behind its wall, and nobody has to stand beside it. "
"""Repeated, it fills KV blocks, so that prefixes are found, leave the engine and come back."""

BODIES: Mapping[str, dict[str, Any]] = {
    "stream": {"prompt": "The furnace keeps", "max_tokens": 64, "stream": True, "ignore_eos": True},
    "long": {"prompt": PREFIX * 6, "max_tokens": 24, "stream": True, "ignore_eos": True},
    "other": {"prompt": "Who " + PREFIX * 5, "max_tokens": 16, "ignore_eos": True},
    "whole": {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True},
    "chat": {"messages": [{"role": "user", "content": "What is a sandbox?"}], "max_tokens": 24, "stream": True},
    "logprobs": {"prompt": "One two three", "max_tokens": 8, "logprobs": 2},
    "several": {"prompt": "Either way", "max_tokens": 8, "n": 2},
    "structured": {
        "messages": [{"role": "user", "content": "A colour and a count."}],
        "max_tokens": 64,
        "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}},
    },
    "vectors": {"model": EMBED_MODEL, "input": ["a wall", "an even heat"]},
}
"""By name; those with ``messages`` are chats, those with ``input`` embeddings."""

MARK_BITS = 19
"""Of a mark; ``top_k`` has at most 2**20."""

GRPC = "grpc"
"""The name of the one that is asked over gRPC."""


@dataclass(frozen=True, slots=True)
class Bad:
    """A request that is refused, and why."""

    body: bytes
    reason: str
    path: str = "/v1/completions"
    key: str | None = None
    """In place of the tenant's own."""


_SOUND = {"model": MODEL, "prompt": "x", "max_tokens": 1}
BAD: tuple[Bad, ...] = (
    Bad(b"{", "invalid_request"),
    Bad(json.dumps({**_SOUND, "temperature": 9}).encode(), "invalid_request"),
    Bad(json.dumps({**_SOUND, "model": "nobody"}).encode(), "model_not_found"),
    Bad(json.dumps(_SOUND).encode(), "unauthenticated", key="ath_alpha-1_" + "0" * 64),
    Bad(json.dumps({**_SOUND, "prompt": "word " * 6_000}).encode(), "context_length_exceeded"),
    Bad(json.dumps({**_SOUND, "guided_regex": "(["}).encode(), "invalid_grammar"),
    Bad(json.dumps(_SOUND).encode(), "route_not_found", path="/v1/nothing"),
)
"""Foolish requests with the errors that the documents give them."""


def path_of(body: Mapping[str, Any]) -> str:
    """The route that takes it."""
    if "input" in body:
        return "/v1/embeddings"
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def encoded(body: Mapping[str, Any], mark: int) -> bytes:
    """Its bytes: greedy, and of this model unless it names another.

    The mark stands where a greedy answer takes no notice (``top_k``) and makes each request another one: suspicion
    of having killed an engine (``appliance.gateway.request.suspects``) goes by what is asked, and would add up over a
    run.
    """
    if "input" in body:
        return json.dumps(body).encode()
    return json.dumps({"model": MODEL, "temperature": 0, "top_k": mark, **body}).encode()


def grpc_request(mark: int) -> pb.GenerateRequest:
    """The one over gRPC."""
    sampling = pb.Sampling(temperature=0.0, top_k=mark)
    return pb.GenerateRequest(model=MODEL, text="The wall is", max_output_tokens=32, ignore_eos=True, sampling=sampling)


@dataclass(frozen=True, slots=True)
class Asker:
    """Asks as one tenant; ``draw`` gives each request a mark of its own."""

    served: Served
    tenant: str
    channel: Grpc
    draw: random.Random

    async def ask(self, name: str, manner: Manner = PLAIN) -> Answer:
        """Ask one of the catalogue."""
        mark = 1 + self.draw.getrandbits(MARK_BITS)
        if name == GRPC:
            return await self.channel.generate(grpc_request(mark), manner)
        body = BODIES[name]
        return await post(
            self.served.http_port, path_of(body), encoded(body, mark), self.served.keys[self.tenant], manner
        )

    async def ask_badly(self, bad: Bad) -> Answer:
        """Ask what is refused."""
        return await post(self.served.http_port, bad.path, bad.body, bad.key or self.served.keys[self.tenant])


def names_for(tenant: str) -> tuple[str, ...]:
    """What a tenant asks: one of them may use one model only."""
    return tuple(name for name in (*BODIES, GRPC) if name != "vectors" or tenant != "gamma")


def draw_manner(draw: random.Random) -> Manner:
    """Most stay and read; some leave in the middle, some dawdle."""
    kind = draw.random()
    if kind < 0.12:
        return Manner(leave_after=draw.choice((1, 300, 900)))
    if kind < 0.2:
        return Manner(pause_s=draw.uniform(0.01, 0.1))
    return PLAIN
