"""One engine in one process: requests in, steps, tokens out; one thread, no IO (the channel is in ``engine.serve``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from engine.core.backend import Backend, VectorSource
from engine.core.kv.spill import LOOK_S, SpillTier
from engine.core.scheduler.plan import StepResult, row_masks
from engine.core.scheduler.scheduler import Scheduler
from engine.core.specification import SILENT_ID
from engine.core.stages import (
    CollectedEmbeddings,
    Embeddings,
    Entrance,
    Publishing,
    Spilling,
    TierSpilling,
    UsageReports,
    as_submit,
)
from isolation.ipc.embed import Embed, Embedding
from isolation.ipc.engine import RequestFailure, StepOutput, Submit
from isolation.ipc.grammar import Masks
from isolation.ipc.kv import KvQuotas, KvUsage
from isolation.ipc.logprob import PromptLogprobs, TokenLogprobs
from isolation.ipc.messages import EngineReady, FailureCode, WeightForm
from isolation.ipc.prefetch import Prefetch
from isolation.ipc.public import PublicPrefixes, PublicUsage
from isolation.ipc.wiping import wipe


class Engine:
    """Scheduler and backend, driven by ``step``."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Backend,
        *,
        vectors: VectorSource | None = None,
        spill: SpillTier | None = None,
        publisher: Publishing | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Put the stages that were given around the scheduler.

        Args:
            scheduler: requests and their KV blocks.
            runner: executes the plans.
            vectors: where the backend of an engine that embeds leaves its vectors.
            spill: where KV blocks go that lose their place.
            publisher: computes public prefixes.
            clock_ns: monotonic time.
        """
        self.scheduler = scheduler
        self.runner = runner
        self.spill = spill
        self._clock_ns = clock_ns
        self._entrance = Entrance(scheduler)
        self._spilling = Spilling() if spill is None else TierSpilling(spill, self._entrance)
        self._publishing = publisher or Publishing()
        self._embeddings = Embeddings() if vectors is None else CollectedEmbeddings(vectors)
        self._usage = UsageReports(scheduler)
        stages = (self._usage, self._spilling, self._publishing, self._embeddings)
        # Only the work that stages have: an idle call costs a step as much as a busy one.
        self._before_schedule = [one.before_schedule for one in stages if one.overrides("before_schedule")]
        self._before_execute = [one.before_execute for one in stages if one.overrides("before_execute")]
        self._after_commit = [one.after_commit for one in stages if one.overrides("after_commit")]
        self.urgent = True
        """Whether a reader waits for something in the last output: a start, a first token, an end."""
        self._stalled = False
        """Whether requests could go on, and the last step had nothing of them to compute: there is no room for them."""
        self.form = 0
        """Number of the form in which the backend computes, as the host is told it (``EngineReady.form``)."""
        self.weights = WeightForm.UNKNOWN
        """Form in which the backend holds the weights."""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to say."""
        return bool(
            self._publishing.has_work
            or self._entrance.failures
            or self.scheduler.has_work
            or self._spilling.num_waiting
        )

    def look(self) -> None:
        """Take what the supervisor has sent and end the requests past their deadline, while there is nothing else to
        do: live requests may all wait for masks, and then no step looks at deadlines before a mask comes."""
        now_ns = self._clock_ns()
        self._spilling.before_schedule(now_ns)
        self._expire(now_ns)

    def idle_wait_s(self, longest: float) -> float:
        """Seconds, at most ``longest``, that an idle engine may sleep: blocks may be on their way out, a last
        report of usage or the deadline of a request that waits for its mask may be due."""
        now_ns = self._clock_ns()
        deadline_s = max(0, self.scheduler.next_deadline_ns - now_ns) / 1e9
        return min(longest, deadline_s, self._usage.due_s(now_ns), self._spilling.longest_sleep_s)

    @property
    def rest_s(self) -> float:
        """Seconds to sleep after a step that gave nothing: requests may wait for what is on its way, or for blocks of
        requests that wait for their masks."""
        if self._stalled:
            return LOOK_S
        return 0.0 if self.scheduler.has_work else self._spilling.rest_s

    @property
    def has_live_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.scheduler.num_waiting or self.scheduler.num_running or self._spilling.num_waiting)

    def ready(self) -> EngineReady:
        """What the engine says about itself once it is warm."""
        limits = self.scheduler.limits
        return EngineReady(
            vocab_size=limits.vocab_size,
            max_context=limits.max_context,
            block_size=limits.block_size,
            num_blocks=self.runner.storage.layout.num_blocks,
            deterministic=self.runner.capabilities.deterministic,
            publishes=self._publishing.supported,
            form=self.form,
            adapters=len(limits.adapters),
            weights=self.weights,
        )

    def add(self, submit: Submit) -> None:
        """Queue a request; one that cannot be served is answered by a failure in the next output."""
        now_ns = self._clock_ns()
        if submit.request + submit.choices > SILENT_ID:
            self.refuse_all(submit, FailureCode.INVALID)
        elif not self._spilling.add(submit, now_ns):
            self._entrance.enter(submit, now_ns)

    def prefetch(self, message: Prefetch) -> None:
        """Take blocks of a prompt that another host computes, as they come into the store; nothing answers this."""
        self._spilling.prefetch(message, self._clock_ns())

    def refuse_all(self, message: Submit | Embed, code: FailureCode) -> None:
        """Answer every output that a message asks for by a failure in the next output."""
        self._entrance.refuse_all(message, code)

    @property
    def embeds(self) -> bool:
        """Whether requests get vectors instead of tokens."""
        return self._embeddings.enabled

    def embed(self, message: Embed) -> None:
        """Queue a text to be pooled; see ``add``."""
        self.add(as_submit(message))

    def take_embeddings(self) -> list[Embedding]:
        """The vectors of the last step, each once; they go out before its output, which ends their requests."""
        return self._embeddings.take()

    def set_quotas(self, message: KvQuotas) -> None:
        """Put another table of quotas of KV in force; requests whose tokens no longer fit are answered by a failure."""
        self._publishing.make_room(message.quotas)
        for request_id in self.scheduler.set_quotas(message.quotas):
            if request_id != SILENT_ID:
                self._entrance.refuse(request_id, FailureCode.TOO_LONG)
        self._publishing.try_again()
        self._forget()
        self._usage.want()

    def set_public(self, message: PublicPrefixes) -> None:
        """Put another table of public prefixes in force."""
        self._publishing.set(message.prefixes)

    def take_public(self) -> PublicUsage | None:
        """What became of the public prefixes, when that has changed."""
        return self._publishing.take_usage(self._clock_ns())

    def take_usage(self) -> KvUsage | None:
        """What the accounts of KV have, when a report is due; only for a host that has sent a table of quotas."""
        return self._usage.take(self._clock_ns())

    def set_masks(self, masks: Masks) -> None:
        """Take the masks for the next tokens of structured requests."""
        for request_id, position, mask in row_masks(masks):
            if not self._spilling.set_mask(request_id, mask):
                self.scheduler.set_mask(request_id, position, mask)

    def abort(self, request_id: int) -> None:
        """End a request, if it is live; its blocks are free at once, the answer comes with the next output."""
        if self.scheduler.abort(request_id):
            self._entrance.refuse(request_id, FailureCode.ABORTED)
            self._forget()
        else:
            self._spilling.abort(request_id)

    def step(self) -> StepOutput | None:
        """Run one step. Gives what it produced, or None when there was nothing to do or nothing to say."""
        now_ns = self._clock_ns()
        for prepare in self._before_schedule:
            for request_id in prepare(now_ns):
                self._entrance.refuse(request_id, FailureCode.TOO_LONG)
        self._expire(now_ns)
        plan = self.scheduler.schedule(now_ns=now_ns)
        self.urgent, self._stalled = True, False
        if plan is None:
            self._forget()
            return self._output(StepResult(), ()) if self._entrance.failures else None
        for use_memory in self._before_execute:
            use_memory()
        samples = self.runner.execute(plan)
        for admission in plan.admissions:
            wipe(admission.token_ids)
        result = self.scheduler.commit(plan, samples.token_ids, samples.foreign, samples.counts)
        for take_up in self._after_commit:
            take_up(result)
        self._forget()
        if not plan.num_tokens and not self._entrance.failures:
            self._stalled = not plan.zero_blocks
            return None
        # A structured request sits out until its token has been answered by a mask.
        told = plan.masks or result.starts or result.failures or self._entrance.failures
        self.urgent = plan.completes_prompt or bool(told or any(result.finishes))
        prompts = zip(samples.prompts, result.scored, strict=True)
        scored = tuple(replace(entry, request=request) for entry, request in prompts)
        return self._output(result, samples.placed(result.broken) if samples.logprobs else (), scored)

    def _expire(self, now_ns: int) -> None:
        """End the requests past their deadline; the next output answers each by a failure."""
        for request_id in self.scheduler.expire(now_ns=now_ns):
            self._entrance.refuse(request_id, FailureCode.DEADLINE)

    def _forget(self) -> None:
        """Have the backend overwrite what it keeps of requests that are no longer there."""
        rows = self.scheduler.take_vacated()
        if rows:
            self.runner.forget(rows)

    def _output(
        self, result: StepResult, logprobs: tuple[TokenLogprobs, ...], prompts: tuple[PromptLogprobs, ...] = ()
    ) -> StepOutput:
        failures: tuple[RequestFailure, ...] = ()
        if self._entrance.failures or result.failures:
            failures = (*self._entrance.failures, *result.failures)
            self._entrance.failures.clear()
            self._spilling.note_failures(failures)
        return StepOutput(
            requests=result.requests,
            token_ids=result.token_ids,
            finishes=bytes(result.finishes),
            starts=self._spilling.note_starts(result.starts),
            logprobs=logprobs,
            prompts=prompts,
            failures=failures,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting + self._spilling.num_waiting,
            free_blocks=self.scheduler.num_available_blocks,
            defects=self.scheduler.num_defects,
        )
