"""One engine in one process: requests in, steps, tokens out. Single thread, no IO; the channel is in ``serve``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from engine.embedding import VectorSource, as_submit, pair_vectors
from engine.errors import RequestRejectedError
from engine.kv.spill import LOOK_S, SpillTier
from engine.masks import rows_of
from engine.publishing import Publisher, supports
from engine.request import SILENT_ID
from engine.scheduler.plan import RowMask, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.step_runner import StepRunner
from engine.warmup import warm_up
from isolation.ipc.grammar_messages import Masks
from isolation.ipc.kv_messages import KvQuotas, KvUsage
from isolation.ipc.messages import (
    Embed,
    Embedding,
    EngineReady,
    FailureCode,
    PromptLogprobs,
    RequestFailure,
    StepOutput,
    Submit,
    TokenLogprobs,
)
from isolation.ipc.public_messages import PublicPrefixes, PublicUsage
from isolation.ipc.wiping import wipe

IDLE_LOOK_S = 1.0
"""Seconds after which an idle engine hears that a tenant is to be forgotten."""
USAGE_PERIOD_NS = 1_000_000_000
"""Time between two reports of what accounts of KV have: as often as somebody looks at a gauge."""


class Engine:
    """Scheduler and runner, driven by ``step``."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        vectors: VectorSource | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """``vectors``: where the runner leaves what an engine that embeds gives."""
        self.scheduler = scheduler
        self.runner = runner
        self._clock_ns = clock_ns
        self._vectors = vectors
        self._embeddings: list[Embedding] = []
        self._failures: list[RequestFailure] = []
        self.spill: SpillTier | None = None
        """Where blocks go that find no place, if anywhere."""
        self._early_masks: dict[int, RowMask] = {}
        """For the first tokens of requests that wait for their prefixes."""
        self.publisher: Publisher | None = None
        """What computes public prefixes; none in an engine that embeds."""
        self._usage_wanted = False
        self._usage_stale = False
        """Whether accounts of KV may have changed since they were last told."""
        self._next_usage_ns = 0
        self.urgent = True
        """Whether the last output has something that its reader waits for: a start, a first token, an end."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to say."""
        if self.publisher is not None and self.publisher.has_work:
            return True
        return bool(self._failures) or self.scheduler.has_work or self._awaits_spill

    @property
    def _awaits_spill(self) -> bool:
        return self.spill is not None and self.spill.num_waiting > 0

    def look(self) -> None:
        """Take what the supervisor has to say, while there is nothing else to do."""
        if self.spill is not None:
            for one in self.spill.take(self._clock_ns()):
                self._enter(one.submit, one.arrival_ns)
                wipe(one.submit.token_ids)
                for request_id in _ids_of(one.submit):
                    if (mask := self._early_masks.pop(request_id, None)) is not None:
                        self.scheduler.set_mask(request_id, 0, mask)

    def idle_wait_s(self, longest: float) -> float:
        """How long an idle engine may sleep: the supervisor cannot ring, and what accounts have is told once more."""
        if self._usage_stale:
            longest = min(longest, max(0, self._next_usage_ns - self._clock_ns()) / USAGE_PERIOD_NS)
        return longest if self.spill is None else min(longest, IDLE_LOOK_S)

    @property
    def rest_s(self) -> float:
        """Seconds to sleep after a step that gave nothing: requests may wait for what is on its way."""
        return LOOK_S if self._awaits_spill and not self.scheduler.has_work else 0.0

    @property
    def has_live_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.num_waiting or self.scheduler.num_running or self._awaits_spill)

    def ready(self) -> EngineReady:
        """What the engine says about itself once it is warm."""
        limits = self.scheduler.limits
        return EngineReady(
            vocab_size=limits.vocab_size,
            max_context=limits.max_context,
            block_size=limits.block_size,
            num_blocks=self.runner.storage.layout.num_blocks,
            deterministic=self.runner.deterministic,
            publishes=self.publisher is not None and supports(self.scheduler),
        )

    def warm_up(self) -> None:
        """Run the largest steps once; only while no request is live."""
        assert not self.has_live_requests, "warm-up overwrites rows"
        warm_up(self.runner)

    def add(self, submit: Submit) -> None:
        """Queue a request; one that cannot be served is answered by a failure in the next output."""
        now_ns = self._clock_ns()
        if submit.request + submit.choices > SILENT_ID:
            self.refuse_all(submit, FailureCode.INVALID)
            return
        if self.spill is not None:
            clash = next(filter(None, map(self.spill.holding, _ids_of(submit))), None)
            if clash is not None:
                # As the scheduler has it: whoever reuses an id loses both.
                self._drop_parked(self.spill, clash, FailureCode.INVALID)
                self.refuse_all(submit, FailureCode.INVALID)
                return
            if self.spill.park(submit, now_ns):
                return
        self._enter(submit, now_ns)

    def _drop_parked(self, spill: SpillTier, parked: Submit, code: FailureCode) -> None:
        spill.abort(parked)
        wipe(parked.token_ids)
        for request_id in _ids_of(parked):
            self._early_masks.pop(request_id, None)
        self.refuse_all(parked, code)

    def _enter(self, submit: Submit, now_ns: int) -> None:
        try:
            self.scheduler.add(submit, now_ns=now_ns)
        except RequestRejectedError as error:
            self.refuse_all(submit, error.code)

    def refuse_all(self, message: Submit | Embed, code: FailureCode) -> None:
        """Answer every output that a message asks for by a failure in the next output."""
        for index in range(message.choices if isinstance(message, Submit) else 1):
            self.refuse(message.request + index, code)

    @property
    def embeds(self) -> bool:
        """Whether requests get vectors instead of tokens."""
        return self._vectors is not None

    def embed(self, message: Embed) -> None:
        """Queue a text to be pooled; see ``add``."""
        self.add(as_submit(message))

    def take_embeddings(self) -> list[Embedding]:
        """The vectors of the last step, each once; they go out before its output, which ends their requests."""
        taken, self._embeddings = self._embeddings, []
        return taken

    def refuse(self, request_id: int, code: FailureCode) -> None:
        """Answer a request by a failure in the next output."""
        self._failures.append(RequestFailure(request_id, code))

    def set_quotas(self, message: KvQuotas) -> None:
        """Put another table of quotas of KV in force; requests whose tokens no longer fit are answered by a failure."""
        if self.publisher is not None:
            self.publisher.make_room(message.quotas)
        for request_id in self.scheduler.set_quotas(message.quotas):
            if request_id != SILENT_ID:
                self.refuse(request_id, FailureCode.TOO_LONG)
        if self.publisher is not None:
            self.publisher.try_again()
        self._forget()
        self._usage_wanted = self._usage_stale = True

    def set_public(self, message: PublicPrefixes) -> None:
        """Put another table of public prefixes in force."""
        if self.publisher is not None:
            self.publisher.set(message.prefixes)

    def take_public(self) -> PublicUsage | None:
        """What became of the public prefixes, when that has changed."""
        return None if self.publisher is None else self.publisher.take_usage(self._clock_ns())

    def take_usage(self) -> KvUsage | None:
        """What the accounts of KV have, every ``USAGE_PERIOD_NS`` while steps change it, the last one included. Only
        for a host that has sent a table of quotas."""
        now_ns = self._clock_ns()
        if not self._usage_stale or now_ns < self._next_usage_ns:
            return None
        self._usage_stale = False
        self._next_usage_ns = now_ns + USAGE_PERIOD_NS
        return self.scheduler.kv_usage()

    def set_masks(self, masks: Masks) -> None:
        """Take the masks for the next tokens of structured requests."""
        for request_id, position, mask in rows_of(masks):
            if self._awaits_spill and self.spill is not None and self.spill.holding(request_id) is not None:
                self._early_masks[request_id] = mask
            else:
                self.scheduler.set_mask(request_id, position, mask)

    def abort(self, request_id: int) -> None:
        """End a request, if it is live; its blocks are free at once, the answer comes with the next output."""
        if self.scheduler.abort(request_id):
            self.refuse(request_id, FailureCode.ABORTED)
            self._forget()
        elif self.spill is not None and (parked := self.spill.holding(request_id)) is not None:
            self._drop_parked(self.spill, parked, FailureCode.ABORTED)

    def step(self) -> StepOutput | None:
        """Run one step. Gives what it produced, or None when there was nothing to do or nothing to say."""
        now_ns = self._clock_ns()
        self._usage_stale = self._usage_wanted
        self.look()
        for request_id in self.scheduler.expire(now_ns=now_ns):
            self.refuse(request_id, FailureCode.DEADLINE)
        if self.publisher is not None:
            for request_id in self.publisher.advance():
                self.refuse(request_id, FailureCode.TOO_LONG)
        plan = self.scheduler.schedule(now_ns=now_ns)
        self.urgent = True
        if plan is None:
            self._forget()
            return self._output(StepResult(), ()) if self._failures else None
        if self.spill is not None:
            self.spill.save()
        samples = self.runner.execute(plan)
        for admission in plan.admissions:
            wipe(admission.token_ids)
        result = self.scheduler.commit(plan, samples.token_ids, samples.foreign)
        if self.publisher is not None:
            self.publisher.settle()
        self._forget()
        if self._vectors is not None:
            self._embeddings += pair_vectors(result, self._vectors.take_vectors())
        if not plan.num_tokens and not self._failures:
            return None
        first = len(samples.token_ids) > len(plan.decode_rows)
        # A structured request sits out until its token has been answered by a mask.
        told = plan.masks or result.starts or result.failures or self._failures
        self.urgent = first or bool(told or any(result.finishes))
        prompts = zip(samples.prompts, result.scored, strict=True)
        scored = tuple(replace(entry, request=request) for entry, request in prompts)
        return self._output(result, samples.placed(result.broken) if samples.logprobs else (), scored)

    def _forget(self) -> None:
        """Have the runner overwrite what it keeps of requests that are no longer there."""
        rows = self.scheduler.take_vacated()
        if rows:
            self.runner.forget(rows)

    def _output(
        self, result: StepResult, logprobs: tuple[TokenLogprobs, ...], prompts: tuple[PromptLogprobs, ...] = ()
    ) -> StepOutput:
        failures: tuple[RequestFailure, ...] = ()
        if self._failures or result.failures:
            failures = (*self._failures, *result.failures)
            self._failures.clear()
        return StepOutput(
            requests=result.requests,
            token_ids=result.token_ids,
            finishes=bytes(result.finishes),
            starts=tuple(result.starts),
            logprobs=logprobs,
            prompts=prompts,
            failures=failures,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting + (self.spill.num_waiting if self.spill is not None else 0),
            free_blocks=self.scheduler.num_available_blocks,
            defects=self.scheduler.num_defects,
        )


def _ids_of(submit: Submit) -> range:
    """Of all outputs that a message asks for."""
    return range(submit.request, submit.request + submit.choices)
