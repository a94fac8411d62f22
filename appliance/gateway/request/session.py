"""A request for text: prompt to token ids, one run in an engine or several, tokens to events."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

from appliance.common.errors import (
    ContextLengthError,
    DeterministicNotAllowedError,
    DeterministicUnavailableError,
    InvalidRequestError,
    UnavailableError,
)
from appliance.common.external_config import EXTERNAL
from appliance.gateway.generate_request import Event, GenerateRequest, Grammar, Operation, Sink, TokenPrompt
from appliance.gateway.request.assembler import Assembler
from appliance.gateway.request.follower import Follower, RunProgress
from appliance.gateway.request.ledger import Reservation
from appliance.gateway.request.lifecycle import Lifecycle
from appliance.gateway.request.output import LocalText, OutputText, RemoteText
from appliance.gateway.request.prefetching import Prefetching
from appliance.gateway.request.prompt_report import MAX_NUMBERS, PromptReport
from appliance.gateway.request.read_text import ReadText
from appliance.gateway.request.splitting import COMPUTED, LATE, SplitPrompt, may_split
from appliance.gateway.request.suspects import fingerprint
from appliance.gateway.request.thinking_text import ThinkingMarks, ThinkingText
from appliance.gateway.sandboxes.engine_link import EngineFullError, EngineLink
from appliance.gateway.sandboxes.grammars import GrammarRun
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.model_sandboxes import EngineVisit
from appliance.gateway.sandboxes.output_reading import OutputReading
from appliance.gateway.sandboxes.stream import TokenStream
from appliance.gateway.sandboxes.text_client import TextClient
from isolation.ipc.engine import Submit
from isolation.ipc.grammar import GrammarKind
from isolation.ipc.messages import NO_TOKEN, EngineReady, Priority
from isolation.ipc.output import Thinking
from isolation.ipc.spill import KvTier
from policy.decision import Obligations
from policy.feature import Feature
from policy.model import Determinism, Tenant


class Session:
    """Runs one request for text."""

    def __init__(self, life: Lifecycle, request: GenerateRequest, prefiller: str = "") -> None:
        """``prefiller`` is the HOST:PORT that a router named to compute the prompt, or empty."""
        self.life = life
        self._prefiller = prefiller
        self._request = request
        self._thinking = Thinking.NONE
        self._marks: ThinkingMarks | None = None
        self._reads = False
        """Whether the output may hold calls or reasoning."""
        self._prompt: SplitPrompt | None = None
        """The prompt, where another host may compute it."""
        self._begun = False
        """Whether one has begun."""
        self._split = False
        """Whether one has computed it."""

    async def run(self, sink: Sink | None = None) -> AsyncGenerator[Event]:
        """Yield the request's events; deltas go into the sink instead, where there is one and the text can be decoded
        in this process.

        Raises:
            ApplianceError: typed, at any point.
        """
        life, request = self.life, self._request
        tenant = life.dependencies.ledger.policy.tenants.get(life.principal.tenant)
        reservation = await life.admit(request.max_tokens, request.choices, feature=_feature(request, tenant))
        await life.place(reservation)
        with life.encoding(reservation, request.max_tokens) as client:
            await self._check_calls(client)
            token_ids = await client.encode(request.prompt, life.until)
            self._thinking = client.thinking
            life.outcome.input_tokens = len(token_ids)
        # From here on, and for a replay, the ids are enough; the text may be megabytes.
        request = self._request = replace(request, prompt=TokenPrompt(token_ids, request.prompt.param))
        if request.logit_bias is not None:
            await life.limits(max(request.logit_bias.ids), "logit_bias")
        await self._reserve(reservation, token_ids, await life.limits(max(token_ids), request.prompt.param))
        await life.secure(reservation)
        submit = self._submit(reservation, token_ids)
        mark = fingerprint(life.principal.tenant, life.model.name, submit)
        with Prefetching(life.dependencies.next_id) as ahead:
            submit = replace(submit, coming=await self._compute_elsewhere(reservation, submit, ahead))
            for attempt in life.attempts(mark):
                async with (
                    self._grammar(reservation) as grammar,
                    attempt as visit,
                    self._follow(visit, reservation, submit, mark, grammar) as follower,
                    aclosing(follower.events(sink)) as events,
                ):
                    async for event in events:
                        yield event

    async def _reserve(self, reservation: Reservation, token_ids: array[int], ready: EngineReady) -> None:
        """Take the second decision, with exact counts, which reserves tokens."""
        request = self._request
        numbers = len(token_ids) * (1 + request.prompt_logprobs)
        if numbers > MAX_NUMBERS:
            raise InvalidRequestError(
                f"the log-probabilities of this prompt are {numbers} numbers; at most {MAX_NUMBERS} are given. Ask for "
                "fewer alternatives, or send a shorter prompt",
                param="prompt_logprobs",
            )
        left, asked = ready.max_context - len(token_ids), request.max_tokens
        if left < 1 or (asked is not None and asked > left):
            raise ContextLengthError(
                f"this model's context is {ready.max_context} tokens; the request has {len(token_ids)} in the "
                f"prompt" + (f" and asks for {asked} more" if asked is not None else ""),
                param=request.prompt.param,
                details={"max_context_tokens": str(ready.max_context), "input_tokens": str(len(token_ids))},
            )
        await self.life.reserve(reservation, len(token_ids), asked, left)

    async def _compute_elsewhere(self, reservation: Reservation, submit: Submit, ahead: Prefetching) -> bool:
        """Have the prompt computed by another host, where it is long, the policy lets it and one answers in time;
        returns whether one has. While it does, the local engine takes what is computed."""
        life, prefiller = self.life, self.life.dependencies.prefiller
        engine = life.pair.engine.engine
        if prefiller is None or engine is None:
            return False
        if not may_split(life.dependencies.ledger, life.principal.tenant, submit, external=life.call.external):
            return False
        if self._public(engine, reservation, submit):
            return False
        prompt = self._prompt = self._split_prompt(reservation, submit, engine)
        if not prefiller.wants(prompt):
            return False
        began, outcome = time.monotonic(), LATE

        def begun() -> None:
            self._begun = True
            ahead.begin(engine, submit)

        try:
            with life.waiting():
                outcome = await prefiller.compute(prompt, begun)
        finally:
            if outcome != COMPUTED:
                ahead.end()
            # A caller that leaves pays too: otherwise other hosts would compute its prompts uncharged.
            life.outcome.elsewhere = self._begun and outcome in (COMPUTED, LATE)
        life.trace.annotate(split_outcome=outcome, split_ms=round((time.monotonic() - began) * 1_000))
        self._split = outcome == COMPUTED
        return self._split

    def _split_prompt(self, reservation: Reservation, submit: Submit, engine: EngineLink) -> SplitPrompt:
        life = self.life
        return SplitPrompt(
            request_id=life.call.request_id,
            tenant=life.principal.tenant,
            model=life.model.name,
            alias=life.call.alias,
            model_digest=life.model.digest,
            policy_digest=reservation.decision.policy_digest,
            namespace=submit.namespace,
            token_ids=submit.token_ids,
            block_size=engine.ready.block_size,
            priority=Priority(submit.priority),
            until=life.until,
            traceparent=life.trace.traceparent,
            chosen=self._prefiller,
        )

    def _submit(self, reservation: Reservation, token_ids: array[int]) -> Submit:
        request, obligations = self._request, reservation.obligations
        return Submit(
            request=0,
            namespace=reservation.namespace,
            group=reservation.group,
            user=reservation.user.key,
            token_ids=token_ids,
            max_tokens=reservation.grant,
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            ignore_eos=request.ignore_eos,
            retain=reservation.keeps,
            logprobs=request.logprobs,
            weight=obligations.weight,
            prompt_logprobs=request.prompt_logprobs,
            choices=request.choices,
            deterministic=self._deterministic(obligations),
            priority=self.life.priority(obligations.priority),
            structured=self._followed() is not None,
            logit_bias=request.logit_bias,
            adapter=self.life.adapter,
        )

    def _deterministic(self, obligations: Obligations) -> bool:
        """Decide whether the request runs in the deterministic class. Fails closed: nobody gets less than was
        promised."""
        granted, asked = obligations.deterministic, self._request.deterministic
        if granted is Determinism.NEVER and asked:
            raise DeterministicNotAllowedError(
                "this tenant may not ask for deterministic answers; leave deterministic out, or have the operator "
                "grant it in the policy",
                param="deterministic",
            )
        # Where the policy allows external models by name, it takes back what the class promises of them.
        waived = obligations.external and self.life.model.runner == EXTERNAL
        wanted = asked or (granted is Determinism.ALWAYS and not waived)
        ready = self.life.pair.engine.capacity
        if wanted and ready is not None and not ready.deterministic:
            remedy = "leave deterministic out, or ask for another model" if asked else "ask for another model"
            raise DeterministicUnavailableError(
                f"this model cannot be computed deterministically on this machine; {remedy}",
                param="deterministic" if asked else "model",
            )
        return wanted

    async def _check_calls(self, client: TextClient) -> None:
        """Find out whether the text sandbox reads the output.

        Raises:
            ApplianceError: the model has no calls, and the request has tools.
        """
        request = self._request
        if request.operation is not Operation.CHAT:
            return
        ready = await client.capabilities(self.life.until)
        if request.tools is not None and not ready.calls:
            raise InvalidRequestError(
                "this model's outputs have no calls of tools, or none that are known here; leave tools out, or get "
                "the arguments with response_format",
                param=request.tools.param,
            )
        if request.tools is not None:
            self.life.trace.annotate(tools=len(request.tools.names))
        # What follows a grammar of the caller's is the answer from its first token on, wherever the prompt leaves off.
        self._reads = request.tools is not None or (ready.thinks and request.grammar is None)
        if ready.think_begins != NO_TOKEN:
            self._marks = ThinkingMarks(ready.think_begins, ready.think_ends)

    def _followed(self) -> Grammar | None:
        """Return the grammar that the output follows, if any."""
        tools = self._request.tools
        if tools is None or not tools.held:
            return self._request.grammar
        return Grammar(GrammarKind.TOOLS, tools.source, thinking=self._thinking, param=tools.param)

    @asynccontextmanager
    async def _grammar(self, reservation: Reservation) -> AsyncIterator[GrammarRun | None]:
        """Have the request's grammar compiled for one attempt, where it has one."""
        grammar = self._followed()
        if grammar is None:
            yield None
            return
        client, owner, user = self.life.text_client(), reservation.namespace, reservation.user.key
        with self.life.waiting():
            run = await client.follow(grammar, owner, self.life.enter_by, keep=reservation.keeps, user=user)
        try:
            yield run
        finally:
            run.close()

    @asynccontextmanager
    async def _follow(
        self, visit: EngineVisit, reservation: Reservation, submit: Submit, mark: bytes, grammar: GrammarRun | None
    ) -> AsyncIterator[Follower]:
        """Submit the request to one engine; whatever is unfinished at the end of the block is aborted and charged."""
        life = self.life
        # No other request draws an id in between: those of the choices follow each other. A grammar's run has its own.
        ids = [grammar.request] if grammar is not None else [life.dependencies.next_id() for _ in range(submit.choices)]
        public = self._public(visit.engine, reservation, submit)
        submit = replace(submit, request=ids[0], deadline_us=life.left_us(), public=public)
        every_step = reservation.obligations.isolation_class.pads
        try:
            streams = visit.engine.submit_all(submit, mark, every_step=every_step, grammar=grammar)
        except EngineFullError as error:
            raise UnavailableError("the engine's queue is full", retry_after_s=RETRY_AFTER_S) from error
        timer = asyncio.get_running_loop().call_later(max(0.0, life.until - time.monotonic()), _expire, streams)
        progress = RunProgress(visit, life.outcome, life.trace, self._learn)
        make_text = partial(self._read_text, reservation) if self._reads else self._output_text
        texts: list[OutputText] = [make_text(choice) for choice in range(len(streams))]
        prompt = self._prompt_report(submit.token_ids, streams[0])
        follower = Follower(streams, texts, life.outcome, progress, visit.engine.abort, prompt)
        try:
            with life.following(streams, visit.engine.abort_all):
                yield follower
        finally:
            timer.cancel()
            for text in texts:
                text.close()
            visit.engine.abort_all(streams)
            follower.charge()
            self._learn()

    def _learn(self) -> None:
        """Tell who asks other hosts, once, what the local engine has of the prompt. Told when the request starts: of a
        host of whose prompts nothing comes others would be computed for as long as the answer is written."""
        outcome, prefiller = self.life.outcome, self.life.dependencies.prefiller
        if prefiller is None or self._prompt is None or not outcome.started:
            return
        prompt, self._prompt = self._prompt, None
        prefiller.learn(prompt)
        if self._split:
            again = prompt.recomputed_blocks(outcome.cached_tokens)
            store_tokens = outcome.restored_tokens[KvTier.STORE]
            prefiller.taken(prompt, store_tokens, again, gap=outcome.store_gap)
            self.life.trace.annotate(split_recomputed_blocks=again)

    def _public(self, engine: EngineLink, reservation: Reservation, submit: Submit) -> bytes:
        """Choose the public prefix that the request begins with in this engine; returns its key, empty for none."""
        # A prompt that is scored is computed from its start, and its choices follow that.
        scored = submit.prompt_logprobs >= 0
        names = () if scored else reservation.obligations.public_prefixes
        return self.life.dependencies.publications.choose(names, submit.token_ids, engine) if names else b""

    def _prompt_report(self, token_ids: array[int], stream: TokenStream) -> PromptReport | None:
        request = self._request
        if not request.echo and stream.scores is None:
            return None
        text = self._output_text(0, stops=()) if request.echo else None
        return PromptReport(token_ids, stream.scores, self.life.pair.text.table, text)

    def _read_text(self, reservation: Reservation, choice: int) -> OutputText:
        life, request = self.life, self._request
        shown, table = reservation.obligations.reasoning, life.pair.text.table
        tools, marks = request.tools, self._marks
        if tools is None and marks is not None and table is not None:
            return ThinkingText(table, request.stop, marks, self._thinking, choice, shows_reasoning=shown)
        reading = OutputReading(
            life.text_client(),
            life.dependencies.next_id(),
            tools.source if tools is not None else b"",
            self._thinking,
            life.until,
        )
        names = tools.names if tools is not None else frozenset[str]()
        return ReadText(reading, names, request.stop, table, choice, shows_reasoning=shown)

    def _output_text(self, choice: int, stops: tuple[str, ...] | None = None) -> OutputText:
        text = self.life.pair.text
        table, stops = text.table, self._request.stop if stops is None else stops
        if table is None or (text.text is not None and not text.text.ready.exact_vocabulary):
            return RemoteText(self.life.text_client().decode, stops, table, choice)
        return LocalText(Assembler(table, stops), table, choice)


def _feature(request: GenerateRequest, tenant: Tenant | None) -> Feature | None:
    """Return what the policy may withhold of a request; of two, one that it withholds from the tenant."""
    tools = request.tools
    if tools is None:
        return None if request.grammar is None else Feature.STRUCTURED_OUTPUT
    if tools.answer_param is not None and tenant is not None and tenant.features.tools:
        return Feature.TOOLS if tenant.features.structured_output else Feature.STRUCTURED_OUTPUT
    return Feature.TOOLS


def _expire(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream.expired = True
        stream.wake.set()
