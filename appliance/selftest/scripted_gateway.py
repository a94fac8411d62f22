"""A gateway in this process: the real front ends, identity, policy, sessions and links, over real rings to scripted
sandboxes. The caller's identity is observed at the sandbox's end of the ring.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

import structlog

from appliance.common.keys import KeyRecord, KeyTable, issue
from appliance.common.kv_shares import public_account
from appliance.gateway.front.auth import Resolver
from appliance.gateway.front.own_listeners import OwnAddress
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.service import GatewayService
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.text_link import TextLink, VocabularyTable
from appliance.gateway.servers import FrontEnds, FrontEndSettings, serve_front_ends
from appliance.gateway.stored_work import StoredWork
from appliance.gateway.telemetry.tracer import TelemetrySettings, open_telemetry
from isolation.ipc import doorbell, segment
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import Started, StepOutput, Submit
from isolation.ipc.errors import PeerGoneError
from isolation.ipc.grammar import Advance, Masks, MaskState, OpenGrammar
from isolation.ipc.logprob import PromptLogprobs
from isolation.ipc.messages import PROTOCOL_VERSION, Configure, EngineReady, Finish, Hello, Role, TextReady
from isolation.ipc.public import PublicPrefixes, PublicState, PublicUsage, PublicUse
from isolation.ipc.text import Decode, Decoded, Encode, Encoded
from policy.loader import Source, load_policy

TENANTS = ("alpha", "beta")
MODEL, EMBED_MODEL, CLASSIFY_MODEL = "athanor-mini", "embedder", "judge"
VOCABULARY = 256
PEPPER = bytes(range(32))
ENGINE_READY = EngineReady(VOCABULARY, 4096, 16, 256, deterministic=True, publishes=True)
PROMPT = array("I", range(1, 21))
"""Token ids of every text and conversation: so all of them begin with the public prefix of their tenant."""
TEXT_READY = TextReady(VOCABULARY, True, True, False)
PUBLIC_KEYS = {tenant: bytes([number + 101]) * 32 for number, tenant in enumerate(TENANTS)}
"""Key of each tenant's public prefix, which only that tenant may use."""
NAMESPACES = {tenant: bytes([number + 1]) * 32 for number, tenant in enumerate(TENANTS)}

TENANT = """\
  {0}:
    credentials: ["key:{0}-1", "spiffe://athanor.test/tenant/{0}"]
    models: ["*"]
    deterministic: allowed
    features: {{{1}}}
    {2}
    limits: {{requests_per_minute: 1000000, tokens_per_minute: 1000000000, concurrency: 4096,
             max_context_tokens: 1048576, max_output_tokens: 1048576}}
"""
PUBLIC = "  of-{0}: {{model: athanor-mini, tenants: [{0}], text: it begins so for {0}}}\n"


@dataclass(slots=True)
class Heard:
    """Messages that reached the sandboxes since the last ``clear``."""

    namespaces: list[bytes] = field(default_factory=list)
    """Namespace of each Submit and Embed."""
    grammar_owners: list[bytes] = field(default_factory=list)
    """Owner of each OpenGrammar."""
    publics: list[bytes] = field(default_factory=list)
    """Keys of the public prefixes with which Submits begin, empty for none."""
    wire_ids: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all messages."""
        for one in (self.namespaces, self.publics, self.grammar_owners, self.wire_ids):
            one.clear()


@dataclass(slots=True)
class ScriptedGateway:
    """A serving gateway and what a client needs to reach it."""

    service: GatewayService
    ends: FrontEnds
    keys: dict[str, str]
    """API key of each tenant."""
    heard: Heard
    links_lost: list[str]
    """Reasons for the end of links while serving; empty unless a scripted guest violated the protocol."""


class _Guest:
    """The sandbox's end of one ring, answering by rule from this event loop."""

    def __init__(self, role: Role, ready: EngineReady | TextReady, heard: Heard) -> None:
        layout = segment.standard_layout()
        memfd = segment.create(layout)
        guest_in, host_out = doorbell.create_pipe()
        host_in, guest_out = doorbell.create_pipe()
        self.host = Channel.host(memfd, host_in, host_out, layout, role)
        self.guest = Channel.guest(os.dup(memfd), guest_in, guest_out, layout, role)
        self._heard = heard
        self.guest.send(Hello(PROTOCOL_VERSION, role))
        self.host.receive()
        self.host.send(Configure(b"{}"))
        self.guest.receive()
        self.guest.send(ready)
        self.host.receive()
        asyncio.get_running_loop().add_reader(self.guest.fileno(), self._serve)
        self.guest.arm()

    def _serve(self) -> None:
        try:
            self.guest.disarm()
            while True:
                messages = self.guest.receive()
                for message in messages:
                    self._answer(message)
                if not messages and not self.guest.arm():
                    return
        except PeerGoneError:
            self.close()

    def _answer(self, message: Message) -> None:
        if isinstance(message, Submit | Embed):
            self._heard.namespaces.append(message.namespace)
            self._heard.wire_ids.append(message.request)
        if isinstance(message, Submit):
            self._heard.publics.append(message.public)
            self.guest.send(_one_step(message))
        elif isinstance(message, PublicPrefixes):
            uses = [PublicUse(prefix.key, PublicState.RESIDENT, 1, 0) for prefix in message.prefixes]
            self.guest.send(PublicUsage(tuple(uses)))
        elif isinstance(message, Embed):
            self.guest.send(Embedding(message.request, array("f", [1.0, 0.0])))
            self.guest.send(_end(range(message.request, message.request + 1)))
        elif isinstance(message, Encode):
            self.guest.send(Encoded(message.request, PROMPT))
        elif isinstance(message, Decode):
            self.guest.send(Decoded(message.request, b"x"))
        elif isinstance(message, OpenGrammar):
            self._heard.grammar_owners.append(message.tenant)
            self.guest.send(_all_allowed([message.request], [0]))
        elif isinstance(message, Advance):
            self.guest.send(_all_allowed(list(message.requests), [1] * len(message.requests)))

    def close(self) -> None:
        """Close the channel."""
        asyncio.get_running_loop().remove_reader(self.guest.fileno())
        self.guest.close()


def _one_step(message: Submit) -> StepOutput:
    """Answer with one token, the last, for every choice of a request, and with what is asked of its prompt."""
    count = len(message.token_ids) - 1
    scores: tuple[PromptLogprobs, ...] = ()
    if message.prompt_logprobs >= 0 and count:
        numbers, tops = array("d", [-1.0] * count), count * message.prompt_logprobs
        scores = (PromptLogprobs(message.request, 1, numbers, array("I", [65] * tops), array("d", [-1.0] * tops)),)
    return _end(range(message.request, message.request + message.choices), scores)


def _end(ids: range, prompts: tuple[PromptLogprobs, ...] = ()) -> StepOutput:
    return StepOutput(
        array("Q", ids),
        array("I", [65] * len(ids)),
        bytes([Finish.STOP] * len(ids)),
        starts=tuple(Started(one, 0, 0) for one in ids),
        prompts=prompts,
    )


def _all_allowed(requests: list[int], positions: list[int]) -> Masks:
    row = b"\xff" * (VOCABULARY // 8)
    states = bytes([MaskState.ACCEPTING] * len(requests))
    return Masks(array("Q", requests), array("I", positions), states, row * len(requests))


OWN_LISTENERS: tuple[Literal["http", "grpc"], ...] = ("http", "grpc")
"""APIs for which the first tenant has a listener of its own."""


Attach = Callable[[GatewayService, Callable[[], KeyTable]], StoredWork | None]
"""Makes what keeps files and responses, from the service and the keys in force."""


def _policy(features: str, terms: str, others: str) -> str:
    """Return the text of the policy."""
    lines = dict.fromkeys(TENANTS, others or terms) | {TENANTS[0]: terms}
    tenants = "".join(TENANT.format(tenant, features, line.replace(", ", "\n    ")) for tenant, line in lines.items())
    public = "" if terms else "public_prefixes:\n" + "".join(map(PUBLIC.format, TENANTS))
    return f"version: 1\ntenants:\n{tenants}{public}"


@contextlib.asynccontextmanager
async def scripted_gateway(
    attach: Attach = lambda _service, _keys: None, features: str = "", terms: str = "", others: str = ""
) -> AsyncIterator[ScriptedGateway]:
    """Serve on free loopback ports for the duration of the block; ``features`` are each tenant's, as in a policy. With
    ``terms`` each tenant has these too, all but the first ``others`` where given, and no public prefix."""
    heard = Heard()
    lost: list[str] = []
    guests: list[_Guest] = []
    rooms = {
        MODEL: ModelSandboxes(MODEL),
        EMBED_MODEL: ModelSandboxes(EMBED_MODEL, "embed", truncates=True),
        CLASSIFY_MODEL: ModelSandboxes(CLASSIFY_MODEL, "classify"),
    }
    words = VocabularyTable(tuple(bytes([number]) for number in range(VOCABULARY)), False)
    for one in rooms.values():
        engine, text = _Guest(Role.ENGINE, ENGINE_READY, heard), _Guest(Role.TEXT, TEXT_READY, heard)
        guests += (engine, text)
        one.set_engine(EngineLink(engine.host, ENGINE_READY, 1, lambda _link, reason, _fault: lost.append(reason)))
        link = TextLink(text.host, TEXT_READY, 1, lambda _link, reason, _fault: lost.append(reason))
        link.table = words
        one.set_text(link)
    written = _policy(features, terms, others)
    policy = load_policy([Source("policy.yaml", written)])
    owned = {public_account(policy.public[f"of-{tenant}"]): key for tenant, key in PUBLIC_KEYS.items() if policy.public}
    telemetry = open_telemetry(TelemetrySettings(version="0"))
    service = GatewayService(rooms, Ledger(policy, NAMESPACES | owned), telemetry)
    problems = await service.publications.prepare(policy)
    assert not problems, problems
    service.share_out()
    keys, records = {}, {}
    for tenant in TENANTS:
        keys[tenant], digest = issue(f"{tenant}-1", PEPPER)
        records[f"{tenant}-1"] = KeyRecord(digest, datetime(2026, 1, 1, tzinfo=UTC))
    table = KeyTable(PEPPER, records)
    resolver, stored = Resolver(service, lambda: table), attach(service, lambda: table)
    own = tuple(OwnAddress(TENANTS[0], name, "127.0.0.1:0") for name in OWN_LISTENERS)
    settings = FrontEndSettings(http_port=0, grpc_port=0, own=own)
    spoken = structlog.get_config()
    # One log line for each request would hide the self-test's own output.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        async with serve_front_ends(service, resolver, settings, stored=stored) as ends:
            yield ScriptedGateway(service, ends, keys, heard, lost)
    finally:
        structlog.configure(**spoken)
        for one in rooms.values():
            if one.engine is not None:
                one.engine.close()
        for guest in guests:
            with contextlib.suppress(ValueError, OSError):
                guest.close()
        await asyncio.to_thread(telemetry.close)
