"""Lines of waiting requests: order, bounds, leaving, reloads, deadlines, drain; and that rates hold meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from appliance.common.errors import (
    ApplianceError,
    DeadlineExceededError,
    InvalidRequestError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
    UnavailableError,
)
from appliance.gateway.request.ledger import Ledger, Reservation, first_access
from appliance.gateway.request.waiting import Gate, Patience
from policy.decision import Decision
from policy.loader import Source, load_policy
from policy.model import PolicySet, Priority
from tests.appliance.gateway.request.virtual_time import run_virtually, virtual_now

NAMESPACES = {"alpha": b"k" * 32, "beta": b"l" * 32}
EPSILON = 0.002
"""Seconds by which a timer may be late: the loop's resolution."""


def policy(**limits: Any) -> PolicySet:
    """A policy of two tenants with these limits; ``models`` is not a limit."""
    models = limits.pop("models", ["m"])
    usual = {"max_context_tokens": 1_000, "max_output_tokens": 500, "tokens_per_minute": 1_000_000}
    tenants = {
        name: {"credentials": [f"key:{name}"], "models": models, "limits": usual | limits} for name in NAMESPACES
    }
    return load_policy([Source("p.yaml", json.dumps({"version": 1, "tenants": tenants}))])


QUEUE: dict[str, Any] = {"requests_per_minute": {"rate": 60, "burst": 1, "exceeded": "queue"}}
"""One request a second, one at once."""
ONE_AT_ONCE: dict[str, Any] = {"concurrency": {"at_once": 1, "exceeded": "queue"}}


class Caller:
    """Requests on one ledger, as lifecycles make them."""

    def __init__(self, **limits: Any) -> None:
        self.ledger = Ledger(policy(**limits), NAMESPACES, virtual_now)
        self.order: list[str] = []
        self.began = virtual_now()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return virtual_now() - self.began

    async def admit(
        self,
        name: str,
        tenant: str = "alpha",
        *,
        model: str = "m",
        choices: int = 1,
        until: float = 1e6,
        user: str = "",
    ) -> Reservation:
        """Admit one request, after a wait where the policy says so."""
        held: list[Reservation] = []
        access = first_access(tenant, model, 1, choices, None)

        def attempt(takes: bool, queued: int) -> Decision:
            found = self.ledger.try_admit(access, queued, takes=takes)
            if isinstance(found, Decision):
                return found
            held.append(found)
            return found.decision

        await self._take(tenant, Gate.ADMISSION, attempt, until, user)
        self.order.append(name)
        return held[0]

    async def reserve(self, one: Reservation, prompt: int, output: int, tenant: str = "alpha") -> None:
        """Reserve tokens, after a wait where the policy says so."""

        def attempt(takes: bool, queued: int) -> Decision:
            return one.try_reserve(prompt, output, 1_000, queued=queued, takes=takes)

        await self._take(tenant, Gate.TOKENS, attempt, 1e6)

    async def _take(
        self, tenant: str, gate: Gate, attempt: Callable[[bool, int], Decision], until: float, user: str = ""
    ) -> None:
        decision = self.ledger.lines.decide(tenant, gate, attempt)
        if not decision.allowed:
            longest = virtual_now() + self.ledger.limits(tenant).max_queue_s
            patience = Patience(min(longest, until), until < longest)
            await self.ledger.lines.wait(tenant, gate, attempt, decision, patience, user)


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in virtual time."""

    def run() -> None:
        run_virtually(test())

    run.__doc__ = test.__doc__
    run.__name__ = test.__name__
    return run


def begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Begin a request."""
    return asyncio.ensure_future(work)


async def settled() -> None:
    """Let everything run that need not wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def error_of(task: asyncio.Task[Any]) -> ApplianceError:
    """The error that a request ends with."""
    with pytest.raises(ApplianceError) as raised:
        await task
    return raised.value


@virtual
async def test_requests_pass_in_the_order_of_their_arrival_at_the_rate() -> None:
    """One passes at once and five a second apart, first come, first served; then nobody waits and no timer is left."""
    caller = Caller(**QUEUE)
    times: list[float] = []

    async def one(name: str) -> None:
        await caller.admit(name)
        times.append(caller.now)

    tasks = [begin(one(str(number))) for number in range(6)]
    await settled()
    assert (caller.order, len(caller.ledger.lines), caller.ledger.lines.of("alpha")) == (["0"], 5, 5)
    await asyncio.gather(*tasks)
    assert caller.order == [str(number) for number in range(6)]
    assert times == pytest.approx(range(6), abs=6 * EPSILON)
    assert (len(caller.ledger.lines), caller.ledger.lines._tenants) == (0, {})


@virtual
async def test_no_more_wait_than_may_and_none_longer() -> None:
    """With two places the third that would wait is refused with the time to wait. One for which the rate would take
    longer than it may wait is refused at once."""
    caller = Caller(**QUEUE, max_queued_requests=2)
    tasks = [begin(caller.admit(str(number))) for number in range(3)]
    await settled()
    error = await error_of(begin(caller.admit("late")))
    assert isinstance(error, RateLimitedError)
    assert (error.retry_after_s, error.details["rule"]) == (pytest.approx(1.0), "limits.requests_per_minute")
    await asyncio.gather(*tasks)
    slow = Caller(requests_per_minute={"rate": 1, "exceeded": "queue"}, max_queue_s=59)
    await slow.admit("first")
    error = await error_of(begin(slow.admit("second")))
    assert (type(error), slow.now) == (RateLimitedError, 0.0)
    assert error.retry_after_s == pytest.approx(60.0)


@virtual
async def test_who_waits_too_long_is_refused() -> None:
    """The last of the line is refused after its longest wait, with the time that the first would have to wait."""
    caller = Caller(requests_per_minute={"rate": 60, "burst": 1, "exceeded": "queue"}, max_queue_s=3)
    tasks = [begin(caller.admit(str(number))) for number in range(6)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [result for result in results if isinstance(result, RateLimitedError)]
    # The fourth passes at the very moment.
    assert len(refused) in (2, 3)
    assert caller.now == pytest.approx(3.0, abs=EPSILON)
    assert all(0 < (error.retry_after_s or 0) <= 1.0 for error in refused)


@virtual
async def test_a_request_that_leaves_frees_its_place_at_once() -> None:
    """The first of the line leaves, and the second passes when the first would have; a place is free for a newcomer."""
    caller = Caller(**QUEUE, max_queued_requests=2)
    await caller.admit("0")
    first, second = begin(caller.admit("1")), begin(caller.admit("2"))
    await settled()
    first.cancel()
    await settled()
    assert first.cancelled()
    third = begin(caller.admit("3"))
    await second
    assert caller.now == pytest.approx(1.0, abs=EPSILON)
    await third
    assert caller.order == ["0", "2", "3"]


@virtual
async def test_the_end_of_a_request_lets_the_next_run() -> None:
    """With one at once, each passes in the turn of the event loop in which the one before it ends, without a timer: a
    wait for a running request has no time."""
    caller = Caller(**ONE_AT_ONCE)
    running = await caller.admit("0")
    tasks = [begin(caller.admit(str(number))) for number in (1, 2)]
    await asyncio.sleep(7.5)
    assert caller.order == ["0"]
    running.settle(0, 0)
    (await tasks[0]).settle(0, 0)
    await tasks[1]
    assert caller.now == 7.5
    assert caller.ledger.concurrency("alpha") == 1


@virtual
async def test_a_small_request_does_not_overtake_a_large_one() -> None:
    """Three choices wait for three slots; a single one, for which there is room, waits behind them. Another tenant's
    passes (control)."""
    caller = Caller(concurrency={"at_once": 3, "exceeded": "queue"})
    running = await caller.admit("running")
    large = begin(caller.admit("large", choices=3))
    await settled()
    small = begin(caller.admit("small"))
    await settled()
    await caller.admit("other", "beta")
    assert caller.order == ["running", "other"]
    running.settle(0, 0)
    (await large).settle(0, 0)
    await small
    assert caller.order == ["running", "other", "large", "small"]


@virtual
async def test_what_can_never_pass_does_not_wait() -> None:
    """A request beyond the burst is refused at once, also while others wait."""
    caller = Caller(output_tokens_per_minute={"rate": 60, "exceeded": "queue"})
    one, two, three = [await caller.admit(name) for name in "abc"]
    await caller.reserve(one, 1, 60)
    waiting = begin(caller.reserve(two, 1, 30))
    await settled()
    error = await error_of(begin(caller.reserve(three, 1, 61)))
    assert (type(error), error.details["rule"]) == (InvalidRequestError, "limits.output_tokens_per_minute")
    await waiting
    assert caller.now == pytest.approx(30.0, abs=EPSILON)


@virtual
async def test_a_request_waits_for_kv_until_another_ends() -> None:
    """Beyond ``kv_tokens`` a counted request waits, for no time that a rate tells, until a running one gives back what
    it might have needed; a request that alone needs more is refused at once."""
    caller = Caller(kv_tokens={"at_once": 100, "exceeded": "queue"})
    one, two, three = [await caller.admit(name) for name in "abc"]
    await caller.reserve(one, 50, 20)
    waiting = begin(caller.reserve(two, 30, 10))
    await settled()
    assert not waiting.done()
    error = await error_of(begin(caller.reserve(three, 100, 1)))
    assert (type(error), error.details["rule"]) == (InvalidRequestError, "limits.kv_tokens")
    one.settle(50, 1)
    await waiting
    assert caller.now == pytest.approx(0.0, abs=EPSILON)


@virtual
async def test_a_refund_lets_the_next_run() -> None:
    """Tokens that a request did not use let the waiting one pass before the rate would."""
    caller = Caller(tokens_per_minute={"rate": 600, "exceeded": "queue"})
    one, two = await caller.admit("one"), await caller.admit("two")
    await caller.reserve(one, 100, 500)
    waiting = begin(caller.reserve(two, 100, 100))
    await asyncio.sleep(5.0)
    one.settle(100, 0)
    await waiting
    assert caller.now == 5.0


@virtual
async def test_deadlines() -> None:
    """A request whose deadline passes in the line ends then, as any whose deadline passes; the others stay."""
    caller = Caller(**ONE_AT_ONCE)
    running = await caller.admit("0")
    hurried = begin(caller.admit("hurried", until=virtual_now() + 2.0))
    patient = begin(caller.admit("patient"))
    assert isinstance(await error_of(hurried), DeadlineExceededError)
    assert caller.now == pytest.approx(2.0, abs=EPSILON)
    running.settle(0, 0)
    await patient


@virtual
async def test_a_reload_decides_on_everybody_anew() -> None:
    """A tenant that is gone, a model that was withdrawn, a limit that refuses now, and one that is wider: each waiting
    request ends with its error, or passes, in the turn of the reload."""
    empty = load_policy([Source("p.yaml", "version: 1\ntenants: {}\n")])
    for new, error in (
        (empty, UnauthenticatedError),
        (policy(**QUEUE, models=["other"]), PermissionDeniedError),
        (policy(requests_per_minute={"rate": 60, "burst": 1}), RateLimitedError),
        (policy(requests_per_minute={"rate": 60, "burst": 60, "exceeded": "downgrade"}), None),
    ):
        caller = Caller(**QUEUE)
        await caller.admit("0")
        tasks = [begin(caller.admit(str(number))) for number in (1, 2, 3)]
        await settled()
        caller.ledger.replace(new, NAMESPACES)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert caller.now == 0.0
        if error is not None:
            assert {type(result) for result in results} == {error}
        else:
            priorities = {result.obligations.priority for result in results}  # type: ignore[union-attr]
            assert priorities == {Priority.LOW}
        assert len(caller.ledger.lines) == 0


@virtual
async def test_a_drain_ends_every_wait() -> None:
    """All that wait, and those that would begin to, are told that the appliance shuts down; one that need not wait is
    admitted (control)."""
    caller = Caller(**QUEUE)
    await caller.admit("0")
    tasks = [begin(caller.admit(str(number))) for number in (1, 2)]
    await settled()
    caller.ledger.lines.drain()
    for task in tasks:
        assert isinstance(await error_of(task), UnavailableError)
    assert isinstance(await error_of(begin(caller.admit("3"))), UnavailableError)
    await caller.admit("control", "beta")
    assert len(caller.ledger.lines) == 0


@virtual
async def test_an_admission_in_the_turn_of_a_cancellation_is_kept_by_its_request() -> None:
    """A request that is let pass and cancelled in one turn has its reservation, which its end gives back."""
    caller = Caller(**ONE_AT_ONCE)
    running = await caller.admit("0")
    held: list[Reservation] = []
    access = first_access("alpha", "m", 1, 1, None)

    def attempt(takes: bool, queued: int) -> Decision:
        found = caller.ledger.try_admit(access, queued, takes=takes)
        if isinstance(found, Decision):
            return found
        held.append(found)
        return found.decision

    task = begin(caller._take("alpha", Gate.ADMISSION, attempt, 1e6))
    await settled()
    running.settle(0, 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [one.decision.allowed for one in held] == [True]
    held[0].settle(0, 0)
    assert caller.ledger.concurrency("alpha") == 0


@virtual
async def test_a_downgrade_has_a_bound() -> None:
    """A tenant that is downgraded beyond two requests at once has four, of which two have low priority; the fifth is
    refused. Its tokens go down to minus one burst and no further."""
    caller = Caller(
        concurrency={"at_once": 2, "exceeded": "downgrade"},
        output_tokens_per_minute={"rate": 600, "burst": 100, "exceeded": "downgrade"},
    )
    running = [await caller.admit(str(number)) for number in range(4)]
    priorities = [one.obligations.priority for one in running]
    assert priorities == [Priority.NORMAL] * 2 + [Priority.LOW] * 2
    assert isinstance(await error_of(begin(caller.admit("5"))), RateLimitedError)
    for one in running[:2]:
        await caller.reserve(one, 1, 100)
    assert [one.obligations.downgraded for one in running[:2]] == ["", "output_tokens_per_minute"]
    error = await error_of(begin(caller.reserve(running[2], 1, 100)))
    assert (type(error), error.details["rule"]) == (RateLimitedError, "limits.output_tokens_per_minute")
    await asyncio.sleep(10.0)
    await caller.reserve(running[2], 1, 100)
    # Low by its first decision, and by the second too.
    assert running[2].obligations.priority is Priority.LOW


STREAMS = {"refuse": 24, "queue": 64}
"""Clients: fewer where each that is refused tries again, which takes most of the time."""
PROMPT, OUTPUT = 20, 40
TOKEN_S = 0.01
"""Seconds between two tokens of a stream."""


async def load(caller: Caller, tenant: str, came: Counter[int], until: float) -> None:
    """One client: request after request, each with a prompt and as many tokens as it may have; tokens by second."""
    while caller.now < until:
        try:
            one = await caller.admit("", tenant)
        except RateLimitedError as error:
            await asyncio.sleep(error.retry_after_s or 1.0)
            continue
        produced = 0
        try:
            await caller.reserve(one, PROMPT, OUTPUT, tenant)
            while produced < OUTPUT:
                await asyncio.sleep(TOKEN_S)
                produced += 1
                came[int(caller.now)] += 1
        except RateLimitedError as error:
            await asyncio.sleep(error.retry_after_s or 1.0)
        finally:
            one.settle(PROMPT if produced else 0, produced)


@pytest.mark.parametrize(
    ("key", "exceeded"),
    [
        pytest.param("output_tokens_per_minute", "refuse", marks=pytest.mark.full),
        ("output_tokens_per_minute", "queue"),
        ("tokens_per_minute", "refuse"),
        ("tokens_per_minute", "queue"),
    ],
)
def test_token_limits_hold_under_many_streams(key: str, exceeded: str) -> None:
    """Clients of a tenant with 6,000 tokens a minute, 64 or 24: after the initial burst, no minute gives more than 1 %
    above the limit, and with a line it gives at least 97 % of it."""
    rate, minutes = 6_000, 2
    allowed = rate if key.startswith("output") else rate * OUTPUT / (PROMPT + OUTPUT)
    limits = {key: {"rate": rate, "burst": 600, "exceeded": exceeded}, "requests_per_minute": 1_000_000}

    async def measure() -> None:
        caller, came = Caller(**limits, max_queue_s=600), Counter[int]()
        tasks = [begin(load(caller, "alpha", came, 60 * (minutes + 1))) for _ in range(STREAMS[exceeded])]
        await asyncio.sleep(60 * (minutes + 1))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for minute in range(1, minutes + 1):
            tokens = sum(came[second] for second in range(60 * minute, 60 * minute + 60))
            assert tokens <= 1.01 * allowed
            if exceeded == "queue":
                assert tokens >= 0.97 * allowed
        assert caller.ledger.concurrency("alpha") == 0

    run_virtually(measure())


@virtual
async def test_without_a_limit_of_tokens_they_get_fifty_times_as_many() -> None:
    """Control: the same clients without a limit, for five seconds."""
    caller, came = Caller(requests_per_minute=1_000_000, tokens_per_minute=1_000_000_000), Counter[int]()
    await asyncio.gather(*[begin(load(caller, "alpha", came, 5)) for _ in range(STREAMS["queue"])])
    assert sum(came[second] for second in range(5)) * 12 > 50 * 6_000


@virtual
async def test_end_users_take_turns() -> None:
    """Four waiting requests of one end user do not hold up another's first, nor its second; the order of each one's own
    stays, as does that of requests without a name, which are one end user's."""
    caller = Caller(**ONE_AT_ONCE)
    held = await caller.admit("first", user="ann")
    waits = [begin(caller.admit(f"a{number}", user="ann")) for number in range(4)]
    await asyncio.sleep(0)
    waits += [begin(caller.admit(f"b{number}", user="bob")) for number in range(2)]
    waits += [begin(caller.admit("nameless")), begin(caller.admit("nameless too"))]
    await asyncio.sleep(0)
    held.settle(0, 0)
    for _ in range(8):
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            waits.remove(one)
            one.result().settle(0, 0)
    assert caller.order == ["first", "a0", "b0", "nameless", "a1", "b1", "nameless too", "a2", "a3"]


@virtual
async def test_an_end_user_who_comes_later_is_not_owed_turns() -> None:
    """Turns that passed before an end user came give it nothing: it stands behind one request of each other, and not
    before all of them."""
    caller = Caller(**ONE_AT_ONCE)
    held = await caller.admit("first")
    waits = [begin(caller.admit(f"a{number}", user="ann")) for number in range(3)]
    await asyncio.sleep(0)
    held.settle(0, 0)
    one = await waits.pop(0)
    waits += [begin(caller.admit(f"b{number}", user="bob")) for number in range(3)]
    await asyncio.sleep(0)
    one.settle(0, 0)
    while waits:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for found in done:
            waits.remove(found)
            found.result().settle(0, 0)
    assert caller.order == ["first", "a0", "a1", "b0", "a2", "b1", "b2"]
