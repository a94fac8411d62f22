"""Accounts: what is taken is given back, limits hold, reloads keep levels."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.common.errors import (
    ContextLengthError,
    FeatureNotAllowedError,
    InvalidRequestError,
    PermissionDeniedError,
    RateLimitedError,
    UnauthenticatedError,
)
from appliance.gateway.request.ledger import NO_RATES, Ledger, Reservation, first_access
from policy.loader import Source, load_policy
from policy.model import PolicySet

TEXT = """
version: 1
tenants:
  alpha:
    credentials: ["key:a"]
    models: ["m"]
    limits: {{requests_per_minute: {rpm}, tokens_per_minute: {tpm}, concurrency: {concurrency},
              max_context_tokens: 100, max_output_tokens: 50}}
"""


def policy(rpm: int = 60, tpm: int = 600, concurrency: int = 2) -> PolicySet:
    """A policy with one tenant."""
    return load_policy([Source("p.yaml", TEXT.format(rpm=rpm, tpm=tpm, concurrency=concurrency))])


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def ledger(clock: Clock, **limits: int) -> Ledger:
    """A ledger under that policy."""
    return Ledger(policy(**limits), {"alpha": b"k" * 32}, clock)


def test_concurrency_is_a_slot_until_settled() -> None:
    """The third request at once is refused with a retry time; a settled one makes room."""
    book = ledger(Clock())
    first = book.admit("alpha", "m", None)
    book.admit("alpha", "m", None)
    with pytest.raises(RateLimitedError) as raised:
        book.admit("alpha", "m", None)
    assert raised.value.retry_after_s is not None
    first.settle(0, 0)
    first.settle(0, 0)
    assert book.concurrency("alpha") == 1
    book.admit("alpha", "m", None)


def test_request_rate_refills_with_time() -> None:
    """A minute's worth may burst; afterwards one a second at sixty a minute."""
    clock = Clock()
    book = ledger(clock, rpm=2)
    for _ in range(2):
        book.admit("alpha", "m", None).settle(0, 0)
    with pytest.raises(RateLimitedError) as raised:
        book.admit("alpha", "m", None)
    clock.now += raised.value.retry_after_s or 0
    book.admit("alpha", "m", None)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 50), st.integers(0, 50)), max_size=10))
def test_reserved_tokens_come_back_but_for_what_was_used(requests: list[tuple[int, int, int]]) -> None:
    """After any sequence of requests the bucket has lost exactly what was used."""
    book = ledger(Clock(), rpm=1_000, tpm=100_000)
    used = 0
    for prompt, asked, output in requests:
        reservation = book.admit("alpha", "m", asked)
        reservation.reserve(prompt, asked, 100)
        reservation.settle(prompt, min(asked, output))
        used += prompt + min(asked, output)
    assert book.rates("alpha").remaining_tokens == 100_000 - used


def test_a_grant_is_never_more_than_anybody_allows() -> None:
    """Without a number asked for, the grant is the least of tenant's output, tenant's context and model's room."""
    for prompt, room, grant in ((10, 1_000, 50), (80, 1_000, 20), (10, 7, 7)):
        reservation = ledger(Clock()).admit("alpha", "m", None)
        reservation.reserve(prompt, None, room)
        assert reservation.grant == grant


def test_what_slept_when_its_request_came_is_awake_for_the_second_decision() -> None:
    """A reload with ``wake: false`` after the wake denies neither the request nor a prompt that nobody counted; one
    that comes then for a model that sleeps is denied."""
    book = ledger(Clock())
    asleep = replace(first_access("alpha", "m", None, 1, None), asleep=True)
    reservation = book.try_admit(asleep)
    assert isinstance(reservation, Reservation)
    text = TEXT.format(rpm=60, tpm=600, concurrency=2) + "    features: {wake: false}\n"
    book.replace(load_policy([Source("p.yaml", text)]), {"alpha": b"k" * 32})
    reservation.reserve(10, None, 100)
    with pytest.raises(ContextLengthError):
        reservation.refuse_uncounted(101, None)
    with pytest.raises(FeatureNotAllowedError):
        book.try_admit(asleep)


def test_denials_have_their_own_errors() -> None:
    """Each reason of the policy is one typed error: 401, 403, 400 and 429."""
    book = ledger(Clock(), tpm=60)
    with pytest.raises(UnauthenticatedError):
        book.admit("nobody", "m", None)
    with pytest.raises(PermissionDeniedError):
        book.admit("alpha", "other", None)
    with pytest.raises(InvalidRequestError) as raised:
        book.admit("alpha", "m", 51)
    assert raised.value.param == "max_tokens"
    with pytest.raises(ContextLengthError):
        book.admit("alpha", "m", None).reserve(101, None, 1_000)
    big = book.admit("alpha", "m", None)
    with pytest.raises(InvalidRequestError):
        big.reserve(50, 50, 1_000)


def test_a_reload_that_leaves_the_limits_alone_leaves_the_levels_alone() -> None:
    """What is left rises by the clock through a reload with the same limits just as without one, debt included.
    Control: a reload with others rescales."""
    clocks = Clock(), Clock()
    kept, reloaded = (ledger(clock, tpm=600) for clock in clocks)
    for book in (kept, reloaded):
        book.admit("alpha", "m", None).reserve(50, 50, 100)
    for _ in range(3):
        for clock in clocks:
            clock.now += 1.5
        reloaded.replace(policy(tpm=600), {"alpha": b"k" * 32})
        assert reloaded.rates("alpha") == kept.rates("alpha")
    reloaded.replace(policy(tpm=1_200), {"alpha": b"k" * 32})
    assert reloaded.rates("alpha").remaining_tokens == 2 * kept.rates("alpha").remaining_tokens


POLICIES = tuple(policy(rpm=rpm, tpm=tpm) for rpm, tpm in ((60, 600), (600, 6_000), (6, 150)))
GONE = load_policy([Source("p.yaml", "version: 1\ntenants: {}\n")])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "settle", "reload", "take away", "wait"]),
            st.sampled_from(range(len(POLICIES))),
            st.sampled_from([0.25, 3.0, 40.0]),
        ),
        max_size=12,
    )
)
def test_levels_are_rescaled_as_of_the_reload_whenever_that_is_done(acts: list[tuple[str, int, float]]) -> None:
    """A tenant whose levels are rescaled at its next call has what one has whose levels were at once, whatever time
    and further reloads lie between."""
    clocks = Clock(), Clock()
    at_once, late = (ledger(clock) for clock in clocks)
    running: tuple[list[Reservation], list[Reservation]] = [], []
    for act, number, seconds in acts:
        for book, clock, mine in zip((at_once, late), clocks, running, strict=True):
            clock.now += seconds
            if act in ("reload", "take away"):
                new = POLICIES[number] if act == "reload" else GONE
                book.replace(new, dict.fromkeys(new.tenants, b"k" * 32))
            elif act == "settle" and mine:
                mine.pop().settle(20, 7)
            elif act == "admit":
                with contextlib.suppress(RateLimitedError, UnauthenticatedError):
                    mine.append(book.admit("alpha", "m", 10))
                    mine[-1].reserve(30, 10, 100)
        assert not at_once.catch_up(1)
    assert late.rates("alpha") == at_once.rates("alpha")
    assert late.at_work == at_once.at_work


def test_tenants_that_do_not_call_are_rescaled_a_few_at_a_time() -> None:
    """After a reload the accounts that nobody asked for follow in as many turns as it takes."""
    names = [f"t{number}" for number in range(5)]

    def of_rate(rpm: int) -> PolicySet:
        limits = {"requests_per_minute": rpm}
        tenants = {name: {"credentials": [f"key:{name}"], "models": ["m"], "limits": limits} for name in names}
        return load_policy([Source("p.yaml", json.dumps({"version": 1, "tenants": tenants}))])

    book = Ledger(of_rate(60), dict.fromkeys(names, b"k" * 32), Clock())
    for name in names:
        book.rates(name)
    assert not book.catch_up(1)
    book.replace(of_rate(120), dict.fromkeys(names, b"k" * 32))
    assert book.rates("t3").remaining_requests == 120
    assert [book.catch_up(2) for _ in range(3)] == [True, False, False]
    assert {book.rates(name).remaining_requests for name in names} == {120}


def test_a_reload_keeps_levels_and_running_requests() -> None:
    """A new policy rescales what is left and does not refill; a running request settles as before."""
    clock = Clock()
    book = ledger(clock, tpm=600)
    running = book.admit("alpha", "m", None)
    running.reserve(50, 50, 100)
    assert book.rates("alpha").remaining_tokens == 500
    book.replace(policy(tpm=1_200), {"alpha": b"k" * 32})
    assert book.rates("alpha").remaining_tokens == 1_000
    running.settle(50, 0)
    assert book.concurrency("alpha") == 0


def apart(input: int | None, output: int | None) -> PolicySet:  # noqa: A002
    """The policy with rates of input and output tokens."""
    limits = {"max_context_tokens": 100, "max_output_tokens": 50, "requests_per_minute": 1_000}
    own = {"input_tokens_per_minute": input, "output_tokens_per_minute": output}
    limits |= {name: value for name, value in own.items() if value is not None}
    tenant = {"credentials": ["key:a"], "models": ["m"], "limits": limits}
    return load_policy([Source("p.yaml", json.dumps({"version": 1, "tenants": {"alpha": tenant}}))])


def levels(book: Ledger) -> tuple[float | None, float | None]:
    """What is left of the rates of input and of output."""
    account = book.account("alpha")
    assert account is not None
    return tuple(None if one is None else one.level for one in (account.input, account.output))  # type: ignore[return-value]


def test_input_and_output_are_reserved_and_settled_apart() -> None:
    """The exact prompt and the largest output are taken, and what was not used comes back; a refused prompt is charged
    as input alone, and embeddings take no output."""
    book = Ledger(apart(200, 100), {"alpha": b"k" * 32}, Clock())
    one = book.admit("alpha", "m", 30)
    one.reserve(40, 30, 60)
    assert levels(book) == (160, 70)
    one.settle(40, 12)
    assert levels(book) == (160, 88)
    gone = book.admit("alpha", "m", 30)
    gone.reserve(40, 30, 60)
    gone.settle(0, 0)
    assert levels(book) == (160, 88)
    book.admit("alpha", "m", 30).settle(0, 0, refused_tokens=50)
    assert levels(book) == (110, 88)
    vectors = book.admit("alpha", "m", 0)
    vectors.reserve(10, 0, 0, longest=10)
    vectors.settle(10, 0)
    assert levels(book) == (100, 88)
    with pytest.raises(RateLimitedError) as raised:
        book.admit("alpha", "m", 50).reserve(1, 50, 60)
        book.admit("alpha", "m", 50).reserve(1, 50, 60)
    assert raised.value.rule == "tenants.alpha.limits.output_tokens_per_minute"


def test_a_prompt_is_counted_up_to_its_own_rate() -> None:
    """A prompt longer than the burst of input tokens can never be served, and is counted up to twice that."""
    book = Ledger(apart(30, None), {"alpha": b"k" * 32}, Clock())
    one = book.admit("alpha", "m", None)
    assert one.most_counted() == 60
    with pytest.raises(InvalidRequestError, match="at least 61 input tokens"):
        one.refuse_uncounted(61, None)


def test_a_rate_that_comes_with_a_reload_counts_what_runs() -> None:
    """A new rate begins with a full bucket, less what running requests have reserved; so taking a limit away and
    putting it back refills nothing of those. A rate that changes keeps its level in proportion."""
    book = Ledger(apart(None, None), {"alpha": b"k" * 32}, Clock())
    one = book.admit("alpha", "m", 30)
    one.reserve(40, 30, 60)
    assert levels(book) == (None, None)
    book.replace(apart(200, 100), {"alpha": b"k" * 32})
    assert levels(book) == (160, 70)
    book.replace(apart(400, 100), {"alpha": b"k" * 32})
    assert levels(book) == (320, 70)
    book.replace(apart(400, None), {"alpha": b"k" * 32})
    book.replace(apart(400, 100), {"alpha": b"k" * 32})
    assert levels(book) == (320, 70)
    one.settle(40, 10)
    assert levels(book) == (320, 90)


def test_a_tenant_taken_out_of_the_policy_is_refused_and_settles_quietly() -> None:
    """Removing a tenant ends its admission at once; what ran still ends well."""
    book = ledger(Clock())
    running = book.admit("alpha", "m", None)
    empty = load_policy([Source("p.yaml", "version: 1\ntenants: {}\n")])
    book.replace(empty, {})
    with pytest.raises(UnauthenticatedError):
        book.admit("alpha", "m", None)
    running.settle(1, 1)


def test_a_tenant_taken_out_has_no_rates_and_its_last_answer_goes_out_all_the_same() -> None:
    """Rates are asked for when an answer or an error is sent, which may be after a reload without the tenant."""
    book = ledger(Clock())
    assert book.rates("alpha").limit_requests == 60
    book.replace(load_policy([Source("p.yaml", "version: 1\ntenants: {}\n")]), {})
    assert book.rates("alpha") == NO_RATES


def test_a_reload_between_admission_and_reservation_refuses_nothing_unasked() -> None:
    """Without a number asked for, the grant follows the limits in force, also when they shrank a moment ago."""
    book = ledger(Clock())
    reservation = book.admit("alpha", "m", None)
    text = TEXT.format(rpm=60, tpm=600, concurrency=2).replace("max_output_tokens: 50", "max_output_tokens: 5")
    book.replace(load_policy([Source("p.yaml", text)]), {"alpha": b"k" * 32})
    reservation.reserve(10, None, 100)
    assert reservation.grant == 5


def test_a_tenant_taken_out_and_put_back_gets_no_more_than_its_new_limits() -> None:
    """A level kept over the absence, since a request was running, is cut to the new limit."""
    book = ledger(Clock(), tpm=100_000)
    running = book.admit("alpha", "m", None)
    book.replace(load_policy([Source("p.yaml", "version: 1\ntenants: {}\n")]), {})
    book.replace(policy(tpm=60), {"alpha": b"k" * 32})
    assert book.rates("alpha").remaining_tokens == 60
    running.settle(0, 0)
    assert book.concurrency("alpha") == 0


def test_choices_take_a_slot_and_a_grant_each_and_the_prompt_once() -> None:
    """Three choices hold three slots and three grants beside one prompt; settled, all of it is as before."""
    book = ledger(Clock(), concurrency=4)
    before = book.rates("alpha").remaining_tokens
    three = book.admit("alpha", "m", None, 3)
    assert book.concurrency("alpha") == 3
    three.reserve(20, None, 1_000)
    assert three.grant == 50 // 3
    assert before - book.rates("alpha").remaining_tokens == 20 + 3 * three.grant
    with pytest.raises(RateLimitedError):
        book.admit("alpha", "m", None, 2)
    three.settle(20, 7)
    assert book.concurrency("alpha") == 0
    assert before - book.rates("alpha").remaining_tokens == 27


def test_refused_prompts_use_the_tokens_up() -> None:
    """Prompts that are refused for their length make debt, after which the tenant is refused before any work, told when
    to come again, and then admitted. As many requests that cost nothing are all admitted (control)."""
    clock = Clock()
    book = ledger(clock, rpm=1_000, tpm=600)
    for _ in range(50):
        book.admit("alpha", "m", None).settle(0, 0)
    for _ in range(4):
        book.admit("alpha", "m", None).settle(0, 0, refused_tokens=200)
    with pytest.raises(RateLimitedError, match="200 tokens more than the 600") as raised:
        book.admit("alpha", "m", None)
    assert raised.value.rule == "tenants.alpha.limits.tokens_per_minute"
    assert raised.value.retry_after_s == pytest.approx(20.0)
    assert book.rates("alpha").remaining_tokens == 0
    clock.now += raised.value.retry_after_s or 0
    book.admit("alpha", "m", None)


def test_a_refused_prompt_is_charged_besides_what_was_reserved() -> None:
    """The reservation comes back whole, and once."""
    book = ledger(Clock(), rpm=1_000, tpm=600)
    reservation = book.admit("alpha", "m", 50)
    reservation.reserve(40, 50, 60)
    assert book.rates("alpha").remaining_tokens == 510
    reservation.settle(0, 0, refused_tokens=40)
    reservation.settle(0, 0, refused_tokens=40)
    assert book.rates("alpha").remaining_tokens == 560


@pytest.mark.parametrize(("tpm", "most"), [(600, 200), (80, 160)])
def test_a_prompt_is_counted_up_to_what_the_tenant_may_have(tpm: int, most: int) -> None:
    """Twice its context, or its tokens of a minute where those are fewer."""
    assert ledger(Clock(), tpm=tpm).admit("alpha", "m", None).most_counted() == most


def test_a_prompt_that_nobody_counted_is_denied_by_the_policy() -> None:
    """With the policy's rule and limit, as if it had been counted; where the policy agrees nothing is raised and
    nothing taken (control)."""
    reservation = ledger(Clock(), tpm=600).admit("alpha", "m", None)
    reservation.refuse_uncounted(99, None)
    with pytest.raises(ContextLengthError, match="at least 202 tokens") as raised:
        reservation.refuse_uncounted(201, None)
    assert raised.value.rule == "tenants.alpha.limits.max_context_tokens"
    assert raised.value.details["limit"] == "100"
