"""Takes the tokens of a step back: what each request gets, and which of them end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.core.kv.prefix_cache import PrefixCache
from engine.core.request import Request, Status
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.live import LiveRequests
from engine.core.scheduler.plan import FAILED, NO_ROWS, Chunk, StepPlan, StepResult
from engine.core.scheduler.tenancy import Change, Tenancy
from isolation.ipc.engine import RequestFailure
from isolation.ipc.messages import FailureCode, Finish


class Commits:
    """Turns sampled ids into a ``StepResult``.

    As long as each row gets one token, and none can stop a request, the decoding requests are served as columns: one
    append a request, and nothing else but for those that fill a block or reach their limit.
    """

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache, live: LiveRequests, tenancy: Tenancy) -> None:
        self._limits = limits
        self._cache = cache
        self._live = live
        self._charge_step, self._charge_token = tenancy.charge(Change.STEP), tenancy.charge(Change.TOKEN)
        self._running = live.running
        self._decoding = live.running.decoding
        self._foreign = NO_ROWS
        """Rows of the step that is being taken whose tables named blocks of others."""
        self._empty: set[Request] = set()
        """Decoding requests that the step gave no token."""

    def take(
        self, plan: StepPlan, token_ids: list[int], result: StepResult, foreign: frozenset[int], counts: Sequence[int]
    ) -> None:
        """Take the ids for the plan's ``sample_rows``, ``FAILED`` for a broken row: as many of each row as ``counts``
        says, one where it is empty. Of rows that are ``foreign`` nothing was computed."""
        self._foreign = foreign
        num_decodes = len(plan.decode_rows)
        self._empty.clear()
        place = num_decodes
        if counts:
            place = self._take_counts(token_ids, counts[:num_decodes], result)
        elif num_decodes:
            self._charge_step()
            decoded = token_ids if len(token_ids) == num_decodes else token_ids[:num_decodes]
            if self._decoding.may_stop(decoded):
                self._take_each(decoded, result)
            else:
                self._take_columns(decoded, result)
        ends = iter(counts[num_decodes:])
        for chunk in plan.prefills:
            count = next(ends, 1) if chunk.last else 0
            self._take_chunk(chunk, token_ids[place : place + count], place, result)
            place += count
        assert place == len(token_ids), "one token for each row that samples, or as many as was said"
        for request in list(self._decoding.structured):
            if request not in self._empty:
                self._live.pause(request)
        self._decoding.advance()

    def _take_chunk(self, chunk: Chunk, token_ids: list[int], place: int, result: StepResult) -> None:
        """Take what a step computed of a prompt, with the token, if any, that its end gave at ``place``."""
        request = self._running.at(chunk.row)
        if chunk.row in self._foreign:
            self._fail(request, place if token_ids else None, result)
            return
        # Without a token the prompt's last one is computed once more, as that of a decoding request is.
        again = chunk.last and not token_ids and not request.spec.silent
        request.num_prefilled += chunk.length - again
        self._cache.register(request)
        if self._cache.noted is not None:
            self._cache.note(request)
        if chunk.num_scored:
            result.scored.append(request.spec.request_id)
        if not chunk.last:
            return
        if self._running.windowed:
            self._running.settle(request)
        self._live.release_siblings(request)
        if again:
            self._empty.add(request)
            self._running.begin_decoding(request)
        else:
            self._take_first(request, token_ids, place, result)

    def _take_counts(self, token_ids: list[int], counts: Sequence[int], result: StepResult) -> int:
        """Take any number of tokens for each decoding row; gives how many there were."""
        place = 0
        for request, count in zip(self._decoding.requests, counts, strict=True):
            assert count <= 1 or not request.spec.structured, "a mask is for one token"
            self._take_row(request, token_ids[place : place + count], place, result)
            if request.status is Status.DECODING and count != 1:
                self._running.move(request)
            if not count:
                self._empty.add(request)
            place += count
        return place

    def _take_row(self, request: Request, token_ids: list[int], place: int, result: StepResult) -> None:
        """Take one row's tokens up to the one that ends it; those behind count for nothing."""
        size = self._limits.block_size
        for index, token_id in enumerate(token_ids, place):
            if token_id == FAILED:
                self._fail(request, index, result)
            else:
                request.token_ids.append(token_id)
                self._charge_token(request)
                if request.num_computed // size > request.kv.num_registered:
                    self._cache.register(request)
                at_limit = request.num_tokens >= request.limit
                if not self._report(request, token_id, result, at_limit=at_limit):
                    continue
            result.broken += range(index + 1, place + len(token_ids))
            return

    def _take_columns(self, token_ids: list[int], result: StepResult) -> None:
        decoding = self._decoding
        for append, token_id in zip(decoding.appends, token_ids, strict=True):
            append(token_id)
        for request in decoding.filling_blocks():
            self._cache.register(request)
        result.requests = decoding.ids[:]
        result.token_ids = array("I", token_ids)
        result.finishes = bytearray(len(token_ids))
        for request in list(decoding.ending()):
            result.finishes[decoding.rows.index(request.row)] = Finish.LENGTH
            self._end(request)

    def _take_each(self, token_ids: list[int], result: StepResult) -> None:
        decoding = self._decoding
        ending = set(decoding.ending())
        filling = set(decoding.filling_blocks())
        for place, (request, token_id) in enumerate(zip(decoding.requests, token_ids, strict=True)):
            if token_id == FAILED:
                self._fail(request, place, result)
                continue
            request.token_ids.append(token_id)
            if request in filling:
                self._cache.register(request)
            self._report(request, token_id, result, at_limit=request in ending)

    def _take_first(self, request: Request, token_ids: list[int], place: int, result: StepResult) -> None:
        """Take the token that the end of a prompt, or of what was computed again, gave."""
        if FAILED in token_ids:
            self._fail(request, place, result)
            return
        if request.spec.silent:
            result.broken += range(place, place + len(token_ids))
            self._live.end(request)
            return
        (token_id,) = token_ids
        request.token_ids.append(token_id)
        self._charge_token(request)
        if not self._report(request, token_id, result, at_limit=request.num_tokens >= request.limit):
            self._running.begin_decoding(request)

    def _report(self, request: Request, token_id: int, result: StepResult, *, at_limit: bool) -> bool:
        """Put a token into the result, and end its request if it is the last. Says whether it is."""
        result.requests.append(request.spec.request_id)
        result.token_ids.append(token_id)
        if token_id in request.spec.stop_ids:
            finish = Finish.STOP
        else:
            finish = Finish.LENGTH if at_limit else Finish.NONE
        result.finishes.append(finish)
        if finish is Finish.NONE:
            return False
        self._end(request)
        return True

    def _end(self, request: Request) -> None:
        request.account.learn(request.num_output)
        self._live.end(request)

    def _fail(self, request: Request, place: int | None, result: StepResult) -> None:
        """End a request that got no token; ``place``: in the plan's ``sample_rows``, if it has one."""
        code = FailureCode.INTEGRITY if request.row in self._foreign else FailureCode.INTERNAL
        if not request.spec.silent:
            result.failures.append(RequestFailure(request.spec.request_id, code))
        if code is FailureCode.INTEGRITY and request.kv.public is not None:
            request.kv.public.doubted = True
        if place is not None:
            result.broken.append(place)
        if self._running.windowed:
            self._cache.disown(request)
        self._live.end(request, poisoned=True)
