"""The gateway's link to one engine sandbox: token streams by wire id, every claim checked against the grant.

The engine sends one frame a step. It is walked once, without awaiting: each token goes to its request's stream, and
``delivery`` hands the streams on. What the engine says about a request that is not live here (it ended or was aborted a
moment ago) is dropped; what it says beyond a request's grant, beyond its own vocabulary, or about a request never sent
breaks the protocol and ends the sandbox.

An aborted request stays a suspect until the engine has answered the abort, so that a client that leaves just before its
request kills the engine does not escape suspicion.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from appliance.gateway.sandboxes.delivery import Delivery
from appliance.gateway.sandboxes.engine_loss import EngineLoss
from appliance.gateway.sandboxes.grammars import GrammarRun, Grammars
from appliance.gateway.sandboxes.link import Link, LinkFullError, SandboxLink
from appliance.gateway.sandboxes.probe import LATE_S
from appliance.gateway.sandboxes.progress import Progress
from appliance.gateway.sandboxes.stream import PromptScores, TokenStream
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import Abort, StepOutput, Submit
from isolation.ipc.errors import LocalProtocolError
from isolation.ipc.grammar import Masks
from isolation.ipc.kv import KvQuotas, KvUsage
from isolation.ipc.logprob import PromptLogprobs
from isolation.ipc.messages import EngineReady, FailureCode, Finish
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.public import PublicPrefixes, PublicState, PublicUsage, PublicUse

MAX_LIVE_REQUESTS = 1_024
"""Requests in one engine, running or waiting: beyond it new ones are refused at once."""

LAST_PLACES = 256
"""Part of them that is kept for tenants with few requests, so that no tenant alone fills an engine."""

FEW = 32
"""Most requests, choices counted, that a tenant may have in the engine to get one of the last places."""

MAX_LEAVING = 1_024
"""Aborted requests remembered until the engine reports their end; beyond it the oldest is forgotten."""

MAX_UNREAD_TOKENS = 4_096
"""Tokens that a request may leave unread before it is aborted: a slow reader loses its own request only."""


class EngineFullError(Exception):
    """The engine is full: it has as many requests as it may have."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts that the engine reports of its last step: shown, and used to choose between the models of a route; never
    for a decision about a tenant."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    defects: int = 0
    """Broken promises of fairness or isolation that the engine itself found."""


class EngineLink(SandboxLink):
    """Token streams of one engine. ``on_end(link, reason, at_fault)`` is called once when the sandbox is lost."""

    def __init__(
        self, channel: Channel, ready: EngineReady, generation: int, on_end: Callable[[EngineLink, str, bool], None]
    ) -> None:
        self.ready = ready
        self.generation = generation
        self.stats = EngineStats(free_blocks=ready.num_blocks)
        self.integrity_failures = 0
        """Requests that the engine ended because a KV block in their tables was not theirs; ``GatewayService`` counts
        them and resets this."""
        self.loss: EngineLoss | None = None
        """What the supervisor said of its end, if it did."""
        self.kv = KvUsage()
        """KV blocks by account, as the engine last said; shown to the operator, never to a tenant."""
        self.public: dict[bytes, PublicUse] = {}
        """States of the public prefixes, by key."""
        self._on_end = on_end
        self._live: dict[int, TokenStream] = {}
        self._leaving: OrderedDict[int, TokenStream] = OrderedDict()
        self._last_sent = 0
        self.progress = Progress(lambda: bool(self._live), self._owed)
        self._width = 0
        """Numbers of a vector, once the engine has sent one; 0 before."""
        self._delivery = Delivery(lambda: len(self._live), lambda: self._link.look())
        self._link = Link(channel, self._on_message, self._ended, lambda: bool(self._live), self._naps)

    @property
    def live(self) -> tuple[TokenStream, ...]:
        """Streams that have not ended."""
        return tuple(self._live.values())

    @property
    def occupied(self) -> bool:
        """Whether a request may be inside, or a public prefix is being computed."""
        computes = any(use.state is PublicState.PENDING for use in self.public.values())
        return bool(self._live or self._leaving) or computes

    @property
    def hang(self) -> str:
        """As for every sandbox; with requests it is the engine's steps that count."""
        return "has requests and finishes no step" if self.progress.hangs else super().hang

    @property
    def inside(self) -> tuple[TokenStream, ...]:
        """Streams whose requests may still be in the engine: live ones, and aborted ones until the engine answered."""
        return (*self._live.values(), *self._leaving.values())

    @property
    def suspected(self) -> tuple[TokenStream, ...]:
        """Those of them that may have ended the engine: none where its GPU was lost."""
        return () if self.loss is not None and not self.loss.requests_may_be_at_fault else self.inside

    def submit(
        self, message: Submit, fingerprint: bytes, *, every_step: bool = False, grammar: GrammarRun | None = None
    ) -> TokenStream:
        """Send a request for one output; see ``submit_all``."""
        (stream,) = self.submit_all(message, fingerprint, every_step=every_step, grammar=grammar)
        return stream

    def submit_all(
        self, message: Submit, fingerprint: bytes, *, every_step: bool = False, grammar: GrammarRun | None = None
    ) -> list[TokenStream]:
        """Send a request; the tokens of each of its choices arrive in a stream, with ``every_step`` never held back
        for others. All streams of a request wake the same waiter. The tokens of a structured one, which has one choice,
        are chosen under the masks of ``grammar``.

        Raises:
            EngineFullError: a bound is reached; nothing was sent.
            LocalProtocolError: the request is outside the protocol's bounds; nothing was sent.
        """
        streams = _streams_of(message, fingerprint, every_step=every_step)
        streams[0].grammar = grammar
        return self._send(message, streams)

    def embed(self, message: Embed, fingerprint: bytes) -> TokenStream:
        """Send a text; its vector arrives in the stream before the stream ends.

        Raises:
            EngineFullError, LocalProtocolError: as ``submit_all``.
        """
        stream = TokenStream(message.request, 1, fingerprint=fingerprint, namespace=message.namespace, embeds=True)
        self._send(message, [stream])
        return stream

    def _send(self, message: Submit | Embed, streams: list[TokenStream]) -> list[TokenStream]:
        if not _has_room(self._live, message.namespace, len(streams)):
            raise EngineFullError
        if self._link.closed:
            for stream in streams:
                stream.engine_gone = "the sandbox is gone"
            return streams
        if not self._live:
            self.progress.begin()
        self._live |= {stream.request: stream for stream in streams}
        self._last_sent = max(self._last_sent, streams[-1].request)
        try:
            self._link.send(message)
            if (grammar := streams[0].grammar) is not None:
                grammar.follow(streams[0], self)
        except (LinkFullError, LocalProtocolError) as error:
            for stream in streams:
                del self._live[stream.request]
            if isinstance(error, LinkFullError):
                raise EngineFullError from error
            raise
        return streams

    def abort_all(self, streams: Sequence[TokenStream]) -> None:
        """Stop all choices of one request; idempotent."""
        first = streams[0].request
        if first in self._live and self._link.withdraw(first):
            for stream in streams:
                self._live.pop(stream.request, None)
        for stream in streams:
            self.abort(stream)

    def abort(self, stream: TokenStream) -> None:
        """Stop a request; idempotent. The stream counts as ended at once."""
        if self._live.pop(stream.request, None) is not None and not self._link.withdraw(stream.request):
            self._leaving[stream.request] = stream
            if len(self._leaving) > MAX_LEAVING:
                self._leaving.popitem(last=False)
            self._tell(Abort(stream.request))

    def prefetch(self, message: Prefetch) -> None:
        """Have the engine take blocks of a prompt that another host computes; where the ring is full, it does not."""
        self._offer(message)

    def end_prefetch(self, request: int) -> None:
        """Have the engine take no more of it; idempotent. Where the ring is full it goes on, for a bounded time."""
        self._offer(Abort(request))

    def _offer(self, message: Prefetch | Abort) -> None:
        """Send what the engine may miss: a queue that is full of others' frames costs nobody the engine."""
        with contextlib.suppress(LinkFullError):
            self._link.send(message)

    def send_masks(self, masks: Masks) -> None:
        """Send masks on, unless the engine is gone."""
        self._tell(masks)

    def set_quotas(self, quotas: KvQuotas) -> None:
        """Tell the engine what accounts may keep of its KV; without quotas it reports no accounts any more."""
        if not quotas.quotas:
            self.kv = KvUsage()
        self._tell(quotas)

    def set_public(self, public: PublicPrefixes) -> None:
        """Tell the engine which public prefixes to keep; ``public`` later has their states."""
        self._tell(public)

    def _tell(self, message: Masks | KvQuotas | PublicPrefixes | Abort) -> None:
        try:
            self._link.send(message)
        except LinkFullError:
            self._link.close()
            self._ended("does not read its ring", at_fault=True)

    def check_progress(self, limit_s: float) -> None:
        """End an engine that has had requests and finished no step for ``limit_s`` seconds, or has answered no probe;
        probe one without work, or all of whose requests wait for masks. To be called every few seconds."""
        if self.progress.stuck(limit_s):
            self._link.close()
            self._ended(f"finished no step for {limit_s:g} s", at_fault=True)
            return
        # An aborted request or a public prefix may keep it in a step.
        late_s = self.progress.bound_s if self.occupied else LATE_S
        self._link.check_alive(limit_s, idle=self._owed(), late_s=late_s)

    def _owed(self) -> bool:
        """Whether all requests, if there are any, wait for masks of the text sandbox."""
        return all(stream.grammar is not None and stream.grammar.asked is not None for stream in self._live.values())

    def lose(self, loss: EngineLoss) -> None:
        """End the link because the supervisor ends the engine; the streams are told why."""
        if not self._link.closed:
            self.loss = loss
            self._link.close()
            self._ended(loss.words, at_fault=False)

    def close(self) -> None:
        """Close the link: all streams end."""
        if not self._link.closed:
            self._link.close()
            self._lose("the sandbox was let go")

    def _naps(self) -> bool:
        """Whether only urgent frames need be taken before the next pass."""
        return self._delivery.will_look and not any(stream.every_step for stream in self._live.values())

    def _on_message(self, message: Message) -> None:
        self.progress.heard()
        fault = None
        if isinstance(message, StepOutput):
            fault = self._take_step(message)
        elif isinstance(message, Embedding):
            fault = self._take_vector(message)
        elif isinstance(message, KvUsage):
            self.kv = message
        elif isinstance(message, PublicUsage):
            self.public = {use.key: use for use in message.uses}
        else:
            fault = f"sent {type(message).__name__}"
        if fault is not None:
            self._link.close()
            self._ended(f"broke the protocol: {fault}", at_fault=True)

    def _take_step(self, message: StepOutput) -> str | None:
        """Hand out what a step gave; returns how the engine broke the protocol, if it did."""
        for start in message.starts:
            stream = self._live.get(start.request)
            if stream is not None:
                stream.started = start
                stream.wake.set()
        fault = _take_prompts(self._live, self._last_sent, self.ready.vocab_size, message.prompts)
        fault = fault or self._take_tokens(message)
        if fault is not None:
            return fault
        for failure in message.failures:
            self.integrity_failures += failure.code is FailureCode.INTEGRITY
            self._leaving.pop(failure.request, None)
            stream = self._live.pop(failure.request, None)
            if stream is not None:
                stream.failure = failure.code
                stream.wake.set()
        self._delivery.plan()
        self.stats = EngineStats(message.running, message.waiting, message.free_blocks, message.defects)
        return None

    def _take_vector(self, message: Embedding) -> str | None:
        """Hand out a vector; all vectors of one engine have one length. Returns how the protocol was broken."""
        stream = self._live.get(message.request)
        if stream is None:
            return "sent a vector for a request it was never given" if message.request > self._last_sent else None
        self._width = self._width or len(message.values)
        if not stream.embeds or stream.vector is not None or len(message.values) != self._width:
            return "sent a vector that was not asked for, or of another length"
        stream.vector = message.values
        return None

    def _take_tokens(self, message: StepOutput) -> str | None:
        """Hand out the step's tokens; returns how the protocol was broken."""
        if message.token_ids and max(message.token_ids) >= self.ready.vocab_size:
            return "sent a token beyond its vocabulary"
        logprobs = {item.index: item for item in message.logprobs}
        live = self._live
        followed: dict[Grammars, list[tuple[GrammarRun, int]]] = {}
        tokens = zip(message.requests, message.token_ids, message.finishes, strict=True)
        for index, (request, token, finish) in enumerate(tokens):
            stream = live.get(request)
            if stream is None:
                if request > self._last_sent:
                    return "sent tokens for a request it was never given"
                if finish:
                    self._leaving.pop(request, None)
                continue
            stream.received += 1
            fault = _fault(stream)
            if fault is not None:
                return fault
            stream.token_ids.append(token)
            if stream.keeps_logprobs:
                stream.logprobs.append(logprobs.get(index))
            if finish:
                stream.finish = Finish(finish)
                del live[request]
                self._delivery.hurry(stream)
            else:
                self._hand_on(stream)
            if stream.grammar is not None and not finish:
                followed.setdefault(stream.grammar.home, []).append((stream.grammar, token))
        for home, runs in followed.items():
            if not home.advance(runs):
                return "sent a token before it had the mask to choose it under"
        return None

    def _hand_on(self, stream: TokenStream) -> None:
        """Schedule the delivery of a stream's newest token, which is not its last."""
        if len(stream.token_ids) > MAX_UNREAD_TOKENS:
            stream.overrun = True
            self.abort(stream)
            stream.wake.set()
        elif stream.received == 1 or stream.every_step:
            self._delivery.hurry(stream)
        elif not stream.due:
            self._delivery.add(stream)

    def _ended(self, reason: str, at_fault: bool) -> None:
        self._on_end(self, reason, at_fault)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._leaving.clear()
        live, self._live = self._live, {}
        for stream in live.values():
            stream.engine_gone, stream.loss = reason, self.loss
            stream.wake.set()


def _take_prompts(
    live: Mapping[int, TokenStream], last_sent: int, vocab_size: int, parts: Sequence[PromptLogprobs]
) -> str | None:
    """Hand out log-probabilities of prompts; returns how the protocol was broken."""
    for part in parts:
        stream = live.get(part.request)
        if stream is None:
            if part.request > last_sent:
                return "sent log-probabilities for a request it was never given"
            continue
        if stream.scores is None or not stream.scores.take(part, vocab_size):
            return "sent log-probabilities of a prompt that nobody asked for, or out of turn"
        if stream.scores.complete:
            stream.wake.set()
    return None


def _has_room(live: Mapping[int, TokenStream], namespace: bytes, count: int) -> bool:
    """Whether so many more streams of a namespace have a place in the engine."""
    there = len(live) + count
    if there <= MAX_LIVE_REQUESTS - LAST_PLACES:
        return True
    held = sum(stream.namespace == namespace for stream in live.values())
    return there <= MAX_LIVE_REQUESTS and held + count <= FEW


def _streams_of(message: Submit, fingerprint: bytes, *, every_step: bool) -> list[TokenStream]:
    """Make the streams of a request's choices, which share the event that wakes their reader."""
    wake = asyncio.Event()
    streams = [
        TokenStream(
            message.request + index,
            message.max_tokens,
            message.logprobs >= 0,
            every_step,
            fingerprint=fingerprint,
            namespace=message.namespace,
            wake=wake,
        )
        for index in range(message.choices)
    ]
    if message.prompt_logprobs >= 0:
        streams[0].scores = PromptScores(len(message.token_ids), message.prompt_logprobs)
    return streams


def _fault(stream: TokenStream) -> str | None:
    """Return what is wrong with the token that the stream has just received; None for nothing."""
    if stream.received > stream.grant:
        return "sent more tokens than granted"
    if stream.embeds and stream.vector is None:
        return "sent an end without a vector"
    if stream.received == 1 and stream.scores is not None and not stream.scores.complete:
        return "sent a token before the log-probabilities of its prompt"
    return None
