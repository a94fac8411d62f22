"""One engine sandbox as the gateway sees it: streams of tokens by wire id, every claim checked against the grant.

Per step the engine sends one frame. It is walked once, without awaiting: each token goes to its request's stream, and
``delivery`` hands the streams on. What the engine says about a request that is not live here (it ended or was
aborted a moment ago) is dropped; what it says beyond a request's grant, beyond its own vocabulary, or about a request
never sent, breaks the protocol and ends the sandbox.

An aborted request stays a suspect until the engine has answered the abort: who leaves just before the engine dies of
his request has not got away.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.gateway.delivery import Delivery
from appliance.gateway.grammars import GrammarRun, Grammars
from appliance.gateway.link import Link, LinkFullError
from appliance.gateway.prompt_report import PromptScores
from appliance.gateway.stream import TokenStream
from isolation.ipc.channel import Channel
from isolation.ipc.errors import LocalProtocolError
from isolation.ipc.grammar_messages import Masks
from isolation.ipc.kv_messages import KvQuotas, KvUsage
from isolation.ipc.messages import (
    Abort,
    Embed,
    Embedding,
    EngineReady,
    FailureCode,
    Finish,
    Message,
    PromptLogprobs,
    StepOutput,
    Submit,
)
from isolation.ipc.public_messages import PublicPrefixes, PublicUsage, PublicUse

MAX_LIVE_REQUESTS = 1_024
"""Requests in one engine, running or waiting: beyond it new ones are refused at once."""

LAST_PLACES = 256
"""Of these, those that are kept for tenants which have few: nobody alone fills an engine for the others."""

FEW = 32
"""Requests, choices counted, that a tenant may have there at most to get one of the last places."""

MAX_LEAVING = 1_024
"""Aborted requests whose end the engine has not told yet; beyond it the oldest is forgotten."""

MAX_UNREAD_TOKENS = 4_096
"""Tokens a session may leave unread before its request is aborted: a slow reader loses its own request only."""


class EngineFullError(Exception):
    """The engine has as many requests as it may."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's own counts of its last step: shown, never trusted with a decision about a tenant."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    defects: int = 0
    """Promises that the engine itself found broken."""


class EngineLink:
    """The engine's streams. ``on_end(link, reason, at_fault)`` is called once when the sandbox is lost."""

    def __init__(
        self,
        channel: Channel,
        ready: EngineReady,
        generation: int,
        on_end: Callable[[EngineLink, str, bool], None],
    ) -> None:
        self.ready = ready
        self.generation = generation
        self.stats = EngineStats(free_blocks=ready.num_blocks)
        self.integrity_failures = 0
        """Requests that the engine ended because a KV block in their tables was not theirs; ``GatewayService`` takes
        them away."""
        self.tokens = 0
        """Output tokens received: shown, never charged."""
        self.kv = KvUsage()
        """What its accounts of KV have, as it last said: shown to the operator, never to a tenant."""
        self.public: dict[bytes, PublicUse] = {}
        """By key what became of the public prefixes that it was told of."""
        self._on_end = on_end
        self._live: dict[int, TokenStream] = {}
        self._leaving: OrderedDict[int, TokenStream] = OrderedDict()
        self._last_sent = 0
        self._heard_at = self._checked_at = time.monotonic()
        self._width = 0
        """Numbers of a vector, once the engine has given one."""
        self._delivery = Delivery(lambda: len(self._live), self._look)
        self._link = Link(channel, self._on_message, self._ended, lambda: bool(self._live), self._naps)

    @property
    def live(self) -> tuple[TokenStream, ...]:
        """The streams that have not ended."""
        return tuple(self._live.values())

    @property
    def silence_s(self) -> float:
        """How long it has had requests and has said nothing, to a few seconds; 0 without requests."""
        return time.monotonic() - self._heard_at if self._live else 0.0

    @property
    def inside(self) -> tuple[TokenStream, ...]:
        """The streams whose requests may still be in the engine: live ones, and aborted ones until it answered."""
        return (*self._live.values(), *self._leaving.values())

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
        wake = asyncio.Event()
        streams = [
            TokenStream(
                message.request + index, message.max_tokens, message.logprobs >= 0, every_step,
                fingerprint=fingerprint, namespace=message.namespace, wake=wake,
            )
            for index in range(message.choices)
        ]  # fmt: skip
        if message.prompt_logprobs >= 0:
            streams[0].scores = PromptScores(len(message.token_ids), message.prompt_logprobs)
        streams[0].grammar = grammar
        return self._send(message, streams)

    def embed(self, message: Embed, fingerprint: bytes) -> TokenStream:
        """Send a text; its vector arrives in the stream before the stream ends.

        Raises:
            EngineFullError, LocalProtocolError: as ``submit_all``.
        """
        stream = TokenStream(
            message.request, 1, fingerprint=fingerprint, namespace=message.namespace, embeds=True
        )  # fmt: skip
        self._send(message, [stream])
        return stream

    def _send(self, message: Submit | Embed, streams: list[TokenStream]) -> list[TokenStream]:
        if not self._has_room(message.namespace, len(streams)):
            raise EngineFullError
        if self._link.closed:
            for stream in streams:
                stream.engine_gone = "the sandbox is gone"
            return streams
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

    def _has_room(self, namespace: bytes, count: int) -> bool:
        there = len(self._live) + count
        if there <= MAX_LIVE_REQUESTS - LAST_PLACES:
            return True
        held = sum(stream.namespace == namespace for stream in self._live.values())
        return there <= MAX_LIVE_REQUESTS and held + count <= FEW

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

    def send_masks(self, masks: Masks) -> None:
        """Send masks on; an engine that is gone needs none."""
        self._tell(masks)

    def set_quotas(self, quotas: KvQuotas) -> None:
        """Tell it what accounts may keep of its KV; where none are told, it says nothing of them any more."""
        if not quotas.quotas:
            self.kv = KvUsage()
        self._tell(quotas)

    def set_public(self, public: PublicPrefixes) -> None:
        """Tell it which public prefixes to keep; what became of them is in ``public``, later."""
        self._tell(public)

    def _tell(self, message: Masks | KvQuotas | PublicPrefixes | Abort) -> None:
        try:
            self._link.send(message)
        except LinkFullError:
            self._link.close()
            self._ended("does not read its ring", at_fault=True)

    def check_progress(self, limit_s: float) -> None:
        """End an engine that has requests and has finished no step for so long: it hangs. A step that computes
        anything sends a frame, part of a long prompt included. Of requests whose masks the text sandbox owes it can
        compute nothing. While this process stood still itself it heard nobody and relayed no masks: such time says
        nothing of the engine. To be called every few seconds."""
        now = time.monotonic()
        stood_still, self._checked_at = now - self._checked_at > limit_s, now
        owed = all(stream.grammar is not None and stream.grammar.asked is not None for stream in self._live.values())
        if owed or stood_still:
            self._heard_at = now
        elif now - self._heard_at > limit_s:
            self._link.close()
            self._ended(f"finished no step for {limit_s:g} s", at_fault=True)

    def close(self) -> None:
        """Let the engine go: all streams end."""
        if not self._link.closed:
            self._link.close()
            self._lose("the sandbox was let go")

    def _look(self) -> None:
        self._link.look()

    def _naps(self) -> bool:
        """Whether nothing but what is urgent need be taken before the next pass."""
        return self._delivery.will_look and not any(stream.every_step for stream in self._live.values())

    def _on_message(self, message: Message) -> None:
        self._heard_at = time.monotonic()
        if isinstance(message, Embedding):
            self._take_vector(message)
            return
        if isinstance(message, KvUsage):
            self.kv = message
            return
        if isinstance(message, PublicUsage):
            self.public = {use.key: use for use in message.uses}
            return
        if not isinstance(message, StepOutput):
            self._break(f"sent {type(message).__name__}")
            return
        for start in message.starts:
            stream = self._live.get(start.request)
            if stream is not None:
                stream.started = start
                stream.wake.set()
        if message.prompts and not self._take_prompts(message.prompts):
            return
        if not self._take_tokens(message):
            return
        for failure in message.failures:
            self.integrity_failures += failure.code is FailureCode.INTEGRITY
            self._leaving.pop(failure.request, None)
            stream = self._live.pop(failure.request, None)
            if stream is not None:
                stream.failure = failure.code
                stream.wake.set()
        self._delivery.plan()
        self.stats = EngineStats(message.running, message.waiting, message.free_blocks, message.defects)

    def _take_vector(self, message: Embedding) -> None:
        """Hand out a vector. All that one engine gives are of one length."""
        stream = self._live.get(message.request)
        if stream is None:
            if message.request > self._last_sent:
                self._break("sent a vector for a request it was never given")
            return
        self._width = self._width or len(message.values)
        if not stream.embeds or stream.vector is not None or len(message.values) != self._width:
            self._break("sent a vector that was not asked for, or of another length")
            return
        stream.vector = message.values

    def _take_prompts(self, parts: Sequence[PromptLogprobs]) -> bool:
        """Hand out log-probabilities of prompts; False when the engine broke the protocol."""
        for part in parts:
            stream = self._live.get(part.request)
            if stream is None:
                if part.request > self._last_sent:
                    self._break("sent log-probabilities for a request it was never given")
                    return False
                continue
            if stream.scores is None or not stream.scores.take(part, self.ready.vocab_size):
                self._break("sent log-probabilities of a prompt that nobody asked for, or out of turn")
                return False
            if stream.scores.complete:
                stream.wake.set()
        return True

    def _take_tokens(self, message: StepOutput) -> bool:
        """Hand out the step's tokens; False when the engine broke the protocol."""
        if message.token_ids and max(message.token_ids) >= self.ready.vocab_size:
            self._break("sent a token beyond its vocabulary")
            return False
        self.tokens += len(message.token_ids)
        logprobs = {item.index: item for item in message.logprobs}
        live = self._live
        followed: dict[Grammars, list[tuple[GrammarRun, int]]] = {}
        tokens = zip(message.requests, message.token_ids, message.finishes, strict=True)
        for index, (request, token, finish) in enumerate(tokens):
            stream = live.get(request)
            if stream is None:
                if request > self._last_sent:
                    self._break("sent tokens for a request it was never given")
                    return False
                if finish:
                    self._leaving.pop(request, None)
                continue
            stream.received += 1
            fault = _fault(stream)
            if fault is not None:
                self._break(fault)
                return False
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
                self._break("sent a token before it had the mask to choose it under")
                return False
        return True

    def _hand_on(self, stream: TokenStream) -> None:
        """See to it that a stream's newest token, which is not its last, is handed on in time."""
        if len(stream.token_ids) > MAX_UNREAD_TOKENS:
            stream.overrun = True
            self.abort(stream)
            stream.wake.set()
        elif stream.received == 1 or stream.every_step:
            self._delivery.hurry(stream)
        elif not stream.due:
            self._delivery.add(stream)

    def _break(self, reason: str) -> None:
        self._link.close()
        self._ended(f"broke the protocol: {reason}", at_fault=True)

    def _ended(self, reason: str, at_fault: bool) -> None:
        self._on_end(self, reason, at_fault)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._leaving.clear()
        live, self._live = self._live, {}
        for stream in live.values():
            stream.engine_gone = reason
            stream.wake.set()


def _fault(stream: TokenStream) -> str | None:
    """What is wrong with the token that the stream has just received, if anything is."""
    if stream.received > stream.grant:
        return "sent more tokens than granted"
    if stream.embeds and stream.vector is None:
        return "sent an end without a vector"
    if stream.received == 1 and stream.scores is not None and not stream.scores.complete:
        return "sent a token before the log-probabilities of its prompt"
    return None
