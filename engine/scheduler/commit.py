"""Takes the tokens of a step back: what each request gets, and which of them end."""

from __future__ import annotations

from array import array

from engine.kv.prefix_cache import PrefixCache
from engine.request import Request
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.live import LiveRequests
from engine.scheduler.plan import FAILED, NO_ROWS, StepPlan, StepResult
from isolation.ipc.messages import FailureCode, Finish, RequestFailure


class Commits:
    """Turns sampled ids into a ``StepResult``.

    As long as none of a step's ids can stop anybody, the decoding requests are served as columns: one append a
    request, and nothing else but for those that fill a block or reach their limit.
    """

    def __init__(self, limits: SchedulerLimits, cache: PrefixCache, live: LiveRequests) -> None:
        self._limits = limits
        self._cache = cache
        self._live = live
        self._running = live.running
        self._decoding = live.running.decoding
        self._foreign = NO_ROWS
        """Rows of the step that is being taken whose tables named blocks of others."""

    def take(
        self, plan: StepPlan, token_ids: list[int], result: StepResult, foreign: frozenset[int] = NO_ROWS
    ) -> None:
        """Take one id for each of the plan's ``sample_rows``, ``FAILED`` for a broken row; of rows that are ``foreign``
        nothing was computed."""
        self._foreign = foreign
        num_decodes = len(plan.decode_rows)
        if num_decodes:
            self._live.accounts.charge_step()
            decoded = token_ids if len(token_ids) == num_decodes else token_ids[:num_decodes]
            if self._decoding.may_stop(decoded):
                self._take_each(decoded, result)
            else:
                self._take_columns(decoded, result)
        place = num_decodes
        for chunk in plan.prefills:
            request = self._running.at(chunk.row)
            if chunk.row in foreign:
                self._fail(request, place if chunk.last else None, result)
                place += chunk.last
                continue
            request.num_prefilled += chunk.length
            self._register(request)
            if chunk.num_scored:
                result.scored.append(request.request_id)
            if chunk.last:
                if self._running.windowed:
                    self._running.settle(request)
                self._live.release_siblings(request)
                self._take_first(request, token_ids[place], place, result)
                place += 1
        assert place == len(token_ids), "one token for each row that samples"
        for request in list(self._decoding.structured):
            self._live.hold(request)
        self._decoding.advance()

    def _take_columns(self, token_ids: list[int], result: StepResult) -> None:
        decoding = self._decoding
        for append, token_id in zip(decoding.appends, token_ids, strict=True):
            append(token_id)
        for request in decoding.filling_blocks():
            self._register(request)
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
                self._register(request)
            self._report(request, token_id, result, at_limit=request in ending)

    def _take_first(self, request: Request, token_id: int, place: int, result: StepResult) -> None:
        """Take the token that the end of a prompt, or of what was computed again, gave."""
        if token_id == FAILED:
            self._fail(request, place, result)
            return
        if request.silent:
            result.broken.append(place)
            self._live.end(request)
            return
        request.token_ids.append(token_id)
        request.account.charge_first_token(request)
        if not self._report(request, token_id, result, at_limit=request.num_tokens >= request.limit):
            self._running.begin_decoding(request)

    def _report(self, request: Request, token_id: int, result: StepResult, *, at_limit: bool) -> bool:
        """Put a token into the result, and end its request if it is the last. Says whether it is."""
        result.requests.append(request.request_id)
        result.token_ids.append(token_id)
        if token_id in request.stop_ids:
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
        if not request.silent:
            result.failures.append(RequestFailure(request.request_id, code))
        if code is FailureCode.INTEGRITY and request.public is not None:
            request.public.doubted = True
        if place is not None:
            result.broken.append(place)
        if self._running.windowed:
            self._cache.disown(request)
        self._live.end(request, poisoned=True)

    def _register(self, request: Request) -> None:
        self._cache.register(request)
