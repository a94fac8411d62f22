"""Answers on a real socket as seen by an observer without the plaintext: sizes and times of records.

The front end is the appliance's own; the sessions behind it play scripted answers, so that each prompt has its own
length, words and rhythm (bursts, as with speculation), with some variation. TLS adds a constant to each record, so the
observations carry over.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from appliance.common.errors import UnavailableError
from appliance.common.ids import new_request_id
from appliance.common.keys import KeyRecord, KeyTable, issue
from appliance.gateway.front.auth import Resolver
from appliance.gateway.generate_request import (
    AttestRequest,
    CallContext,
    Delta,
    Embeddings,
    EmbedRequest,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Principal,
    RateState,
    Routable,
    ScoreRequest,
    Scores,
    Sink,
    Started,
    Tokenized,
    TokenizerRequest,
)
from appliance.gateway.model_card import ModelCard
from appliance.gateway.servers import FrontEndSettings, serve_front_ends
from appliance.gateway.tenant_account import TenantLimits, TenantUsed

PROMPTS = 50
TOPICS = 5
"""Number of topics: prompts with equal ``n % TOPICS`` share one."""

STEP_S = 0.006
"""Seconds of one decoding step: 160 tokens a second, more where several arrive at once."""

VARIATION = 0.15
"""Fraction of an answer's tokens that differ at each repetition, as with sampling."""

MODEL = "rehearsed"


@dataclass(frozen=True, slots=True)
class Record:
    """One piece that arrived over the connection."""

    at_s: float
    """Seconds since the request was sent."""
    size: int


def answer_of(prompt: int, repetition: int) -> list[tuple[float, str]]:
    """Draw pauses and texts of one answer: the topic's words, the prompt's order, length and rhythm, some chance."""
    topic = random.Random(prompt % TOPICS)
    shortest = 1 + 2 * (prompt % TOPICS)  # some topics have longer words than others
    words = ["".join(topic.choices("abcdefghij", k=topic.randint(shortest, shortest + 4))) for _ in range(40)]
    own, chance = random.Random(1_000 + prompt), random.Random(f"{prompt} {repetition}")
    steps = []
    for _ in range(own.randint(12, 60)):
        word, burst = own.choice(words), own.choice((1, 1, 1, 2, 4))
        if chance.random() < VARIATION:
            word = chance.choice(words)
        steps.append((STEP_S * chance.uniform(0.9, 1.1), " ".join([word] * burst) + " "))
    return steps


class Rehearsed:
    """``appliance.gateway.service.Service`` with scripted answers; the prompt is the number of an
    answer."""

    def __init__(self) -> None:
        self.padded = False

    def routed(self, principal: Principal, request: Routable) -> Routable:
        """Return the request as it is: there are no routes."""
        return request

    async def generate(
        self, principal: Principal, request: GenerateRequest, context: CallContext, sink: Sink | None = None
    ) -> AsyncGenerator[Event]:
        """Play an answer; see ``appliance.gateway.service.Service``."""
        prompt, repetition = json.loads(request.stop[0])
        yield Started(8 + prompt, prompt)
        steps = answer_of(prompt, repetition)
        for pause_s, text in steps:
            await asyncio.sleep(pause_s)
            if sink is not None and sink.ready:
                sink.delta(Delta(text, (1,)))
            else:
                yield Delta(text, (1,))
        yield Finished(FinishReason.STOP, 8 + prompt, prompt, len(steps))

    async def embed(self, principal: Principal, request: EmbedRequest, context: CallContext) -> Embeddings:
        """Refuse: there are no embeddings."""
        raise UnavailableError("the scripted service embeds nothing")

    async def score(self, principal: Principal, request: ScoreRequest, context: CallContext) -> Scores:
        """Refuse: there are no scores."""
        raise UnavailableError("the scripted service scores nothing")

    async def tokenize(self, principal: Principal, request: TokenizerRequest, context: CallContext) -> Tokenized:
        """Refuse: there is no tokenizer."""
        raise UnavailableError("the scripted service has no tokenizer")

    async def detokenize(self, principal: Principal, request: TokenizerRequest, context: CallContext) -> str:
        """Refuse: there is no tokenizer."""
        raise UnavailableError("the scripted service has no tokenizer")

    async def attest(self, principal: Principal, request: AttestRequest, context: CallContext) -> str:
        """Refuse: nothing serves."""
        raise UnavailableError("the scripted service has no supervisor")

    def models(self, principal: Principal) -> tuple[ModelCard, ...]:
        """Return one model."""
        return (ModelCard(MODEL, 0, 4_096),)

    def limits(self, principal: Principal) -> TenantLimits:
        """Return no limits."""
        return TenantLimits(principal.tenant, (), 0, 0, 4_096, 4_096, "")

    async def usage(self, principal: Principal, end_user: str = "") -> TenantUsed:
        """Refuse: there is no supervisor."""
        raise UnavailableError("the scripted service has no supervisor")

    def rates(self, principal: Principal) -> RateState:
        """Return rate figures whose lengths differ between requests, like a tenant's."""
        left = random.randrange(100_000)
        return RateState(600, left % 600, left / 1_000, 200_000, left, left / 7_000)

    def pads(self, principal: Principal) -> bool:
        """Return the setting chosen by the caller of this module."""
        return self.padded

    def authenticate(self, credential: str, address: str) -> Principal | None:
        """Accept every caller with the key."""
        return Principal("observed", credential)

    def record_refusal(self, context: CallContext, error: Exception, caller: Principal | None) -> str:
        """Do nothing: refusals are not recorded."""
        return new_request_id()


@dataclass(frozen=True, slots=True)
class Stage:
    """A front end with scripted answers."""

    service: Rehearsed
    port: int
    key: str

    async def capture(self, prompt: int, repetition: int, *, stream: bool) -> list[Record]:
        """Send one request and record everything that arrives over its connection."""
        fields = {"model": MODEL, "prompt": "x", "stream": stream, "stop": [json.dumps([prompt, repetition])]}
        body = json.dumps(fields).ljust(200).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\nauthorization: Bearer {self.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        loop = asyncio.get_running_loop()
        writer.write(head.encode() + body)
        began = loop.time()
        seen = []
        while piece := await reader.read(1 << 20):
            seen.append(Record(loop.time() - began, len(piece)))
        writer.close()
        return seen


@asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    """Serve scripted answers on a free loopback port."""
    pepper = bytes(32)
    key, digest = issue("observed-1", pepper)
    table = KeyTable(pepper, {"observed-1": KeyRecord(digest, datetime.now(UTC))})
    service = Rehearsed()
    settings = FrontEndSettings(http_port=0, grpc_port=0)
    async with serve_front_ends(service, Resolver(service, lambda: table), settings) as ends:
        yield Stage(service, ends.http_port, key)


async def capture_all(
    *, padded: bool, repetitions: int, at_once: int, stream: bool = True
) -> dict[tuple[int, int], list[Record]]:
    """Capture every prompt several times, in random order, some concurrently; by prompt and repetition."""
    order = [(prompt, repetition) for prompt in range(PROMPTS) for repetition in range(repetitions)]
    random.Random(7).shuffle(order)
    found: dict[tuple[int, int], list[Record]] = {}
    async with staged() as stage:
        stage.service.padded = padded
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: int, repetition: int) -> None:
            async with gate:
                found[prompt, repetition] = await stage.capture(prompt, repetition, stream=stream)

        async with asyncio.TaskGroup() as group:
            for prompt, repetition in order:
                group.create_task(one(prompt, repetition))
    return found
