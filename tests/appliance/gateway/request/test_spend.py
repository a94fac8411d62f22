"""Spend in the gateway: reserved at admission, settled at the end, limits that hold, periods that begin anew."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.common.control import Spent
from appliance.common.errors import InvalidRequestError, PermissionDeniedError, SpendLimitError
from appliance.common.usage.periods import period_of
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.spend import SpendParts, Spends
from policy.loader import Source, load_policy
from policy.prices import amount_text

EVENING = datetime(2026, 3, 31, 23, 59, tzinfo=UTC).timestamp()
POLICY = load_policy(
    [
        Source(
            "p.yaml",
            """
version: 1
prices: {currency: EUR, rules: [{models: ["m"], input: 1, cached_input: 0.1, output: 2}]}
tenants:
  alpha:
    credentials: ["key:a"]
    models: ["*"]
    limits: {spend_per_day: 0.01, spend_per_month: 0.02, max_context_tokens: 9000, max_output_tokens: 4000}
  beta: {credentials: ["key:b"], models: ["*"]}
""",
        )
    ]
)
KEYS = {"alpha": b"a" * 32, "beta": b"b" * 32}


class Clock:
    """Unix time that a test moves."""

    def __init__(self, now: float = EVENING) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def ledger(clock: Clock) -> Ledger:
    """A ledger under that policy."""
    return Ledger(POLICY, KEYS, spends=Spends(clock))


def test_the_largest_cost_is_reserved_and_the_cost_is_settled() -> None:
    """Input and all output are reserved at their prices; what was not used, and what was cached, flows back."""
    book = ledger(Clock())
    one = book.admit("alpha", "m", 1000)
    one.reserve(2000, 1000, 5000)
    assert one.reserved_cost == 2000 * 1000 + 1000 * 2000
    assert (book.spends.of("alpha").day, book.spends.of("alpha").month) == (4_000_000, 4_000_000)
    assert one.cost(2000, 500, 100) == 1500 * 1000 + 500 * 100 + 100 * 2000
    one.settle(2000, 100, cached_tokens=500)
    one.settle(2000, 100, cached_tokens=500)
    assert book.spends.of("alpha").day == 1_750_000


def test_requests_beyond_the_limit_are_refused_until_the_period_ends() -> None:
    """A second request that does not fit beside the reservation of the first is refused with amounts and the time until
    midnight, and passes once the first has ended; one that costs more than all of it is a mistake."""
    book = ledger(Clock())
    one = book.admit("alpha", "m", 4000)
    one.reserve(1000, 4000, 8000)
    two = book.admit("alpha", "m", 1000)
    with pytest.raises(SpendLimitError) as refused:
        two.reserve(1000, 1000, 8000)
    assert refused.value.retry_after_s == 60.0
    told = {"rule": "limits.spend_per_day", "policy": book.policy.digest}
    assert refused.value.details == {"limit": "0.01", "actual": "0.012", **told}
    two.settle(0, 0)
    one.settle(1000, 10)
    three = book.admit("alpha", "m", 1000)
    three.reserve(1000, 1000, 8000)
    with pytest.raises(InvalidRequestError) as mistake:
        book.admit("alpha", "m", 1600).reserve(7000, 1600, 8000)
    assert mistake.value.param == "max_tokens"


def test_without_a_number_a_request_gets_what_the_money_gives() -> None:
    """The grant is what is affordable, below the policy's own limit of output."""
    book = ledger(Clock())
    one = book.admit("alpha", "m", None)
    one.reserve(5000, None, 8000)
    assert (one.grant, one.reserved_cost) == (2500, 10_000_000)
    with pytest.raises(SpendLimitError, match="has spent what it may spend in a day"):
        book.admit("alpha", "m", None)
    free = book.admit("beta", "m", None)
    free.reserve(3000, None, 8000)
    assert free.reserved_cost == 0


def test_a_model_without_a_price_is_denied_where_spend_is_limited() -> None:
    """The limit could not be evaluated; a tenant without one may use the model."""
    book = ledger(Clock())
    with pytest.raises(PermissionDeniedError, match="no price") as denied:
        book.admit("alpha", "unpriced", 1)
    assert denied.value.param == "model"
    book.admit("beta", "unpriced", 1)


def test_a_new_day_and_a_new_month_begin_at_zero() -> None:
    """Midnight ends the day's spend, the first of the month both; a request that runs on is settled in the new ones."""
    clock = Clock(EVENING - 86_400)
    book = ledger(clock)
    one = book.admit("alpha", "m", 1000)
    one.reserve(1000, 1000, 8000)
    one.settle(1000, 1000)
    clock.now += 61
    assert (book.spends.of("alpha").day, book.spends.of("alpha").month) == (0, 3_000_000)
    two = book.admit("alpha", "m", 1000)
    two.reserve(1000, 1000, 8000)
    clock.now = EVENING + 61
    assert (book.spends.of("alpha").day, book.spends.of("alpha").month) == (3_000_000, 3_000_000)
    two.settle(1000, 500)
    assert (book.spends.of("alpha").day, book.spends.of("alpha").month) == (2_000_000, 2_000_000)
    clock.now -= 3_600
    assert book.spends.of("alpha").day == 2_000_000


def test_what_the_supervisor_knows_is_the_beginning() -> None:
    """A fresh gateway goes on from the account on disk, with what was reserved for requests that never ended; an
    account of yesterday says nothing of today, its reservations count in the month, and one that lags sets nothing
    back."""
    clock = Clock()
    spends = Spends(clock)
    now = period_of(clock.now)
    spends.take(Spent(now.day, now.month, ["alpha"], {"alpha": [5, 70, 30, 0]}))
    assert (spends.of("alpha").day, spends.of("alpha").month) == (35, 100)
    spends.reserve("alpha", 30)
    spends.settle("alpha", 30, 20)
    assert (spends.of("alpha").day, spends.of("alpha").month) == (55, 120)
    spends.take(Spent(now.day - 1, now.month, ["alpha"], {"alpha": [900, 95, 900, 0]}))
    assert (spends.of("alpha").day, spends.of("alpha").month) == (55, 125 + 900)


def test_what_never_ended_counts_until_its_periods_are_over() -> None:
    """Reservations of a gateway that was killed: against both limits today, against the month's until that ends; so do
    those of earlier days, in a gateway that runs over midnight and in one that begins after it."""
    clock = Clock(EVENING - 2 * 86_400)
    spends = Spends(clock)
    now = period_of(clock.now)
    spends.take(Spent(now.day, now.month, ["alpha"], {"alpha": [1, 2, 100, 30]}))
    assert (spends.of("alpha").day, spends.of("alpha").month) == (101, 132)
    clock.now += 61
    assert (spends.of("alpha").day, spends.of("alpha").month) == (0, 132)
    later = Spends(clock)
    later.take(Spent(now.day + 1, now.month, ["alpha"], {"alpha": [0, 2, 0, 130]}))
    assert later.of("alpha") == spends.of("alpha")
    assert later.parts("alpha") == spends.parts("alpha") == SpendParts(0, 2, 0, 130)
    late = Spends(clock)
    late.take(Spent(now.day, now.month, ["alpha"], {"alpha": [1, 2, 100, 30]}))
    assert late.of("alpha") == spends.of("alpha"), "an answer that was made before midnight"
    clock.now += 2 * 86_400
    assert period_of(clock.now).month == now.month + 1
    assert (spends.of("alpha").day, spends.of("alpha").month) == (0, 0)


def test_reservations_of_an_earlier_gateway_end_with_their_requests() -> None:
    """A later account takes back what is recorded no longer, of both kinds, and brings what was charged; it never takes
    what still stands, nor believes an account of another day, nor takes more than was held (controls)."""
    clock = Clock(EVENING - 5 * 86_400)
    spends = Spends(clock)
    now = period_of(clock.now)
    spends.take(Spent(now.day, now.month, ["alpha"], {"alpha": [1, 2, 100, 30]}))
    spends.reserve("alpha", 50)
    assert spends.held() == ["alpha"]
    spends.lower(Spent(now.day, now.month, ["alpha", "beta"], {"alpha": [1, 2, 150, 30], "beta": [0, 0, 9, 9]}))
    assert spends.parts("alpha") == SpendParts(1, 2, 150, 30)
    assert spends.parts("beta") == SpendParts(0, 0, 0, 0)
    for account in (
        Spent(now.day - 1, now.month, ["alpha"], {}),
        Spent(now.day, now.month, ["alpha"], {"alpha": [500, 500, 150, 30]}),  # a loan is not in the book yet
    ):
        spends.lower(account)
        assert spends.parts("alpha") == SpendParts(1, 2, 150, 30)
    spends.lower(Spent(now.day, now.month, ["alpha"], {"alpha": [8, 9, 60, 0]}))
    assert spends.parts("alpha") == SpendParts(8, 9, 110, 0)
    spends.lower(Spent(now.day, now.month, ["alpha"], {}))
    assert spends.parts("alpha") == SpendParts(8, 9, 50, 0)
    assert spends.held() == []


def test_a_busy_tenant_gets_back_all_but_the_least_that_it_had_in_flight() -> None:
    """The book has nothing of an earlier gateway any more, and the tenant has requests in flight at every look: what is
    held falls to the least that these had reserved, and never rises again. A gateway that begins then holds nothing,
    and one whose tenant rests at a look holds nothing from then on (controls)."""
    clock = Clock(EVENING - 5 * 86_400)
    spends = Spends(clock)
    now = period_of(clock.now)
    spends.take(Spent(now.day, now.month, ["alpha"], {"alpha": [0, 0, 100, 50]}))
    held = []
    for in_flight in (400, 80, 30, 60, 200):
        spends.reserve("alpha", in_flight)
        spends.lower(Spent(now.day, now.month, ["alpha"], {"alpha": [0, 0, in_flight, 0]}))
        held.append(spends.parts("alpha").reserved + spends.parts("alpha").reserved_before - in_flight)
        spends.settle("alpha", in_flight, 0)
    assert held == [100, 80, 30, 30, 30]
    assert spends.held() == ["alpha"]
    anew = Spends(clock)
    anew.take(Spent(now.day, now.month, ["alpha"], {}))
    assert anew.held() == []
    spends.lower(Spent(now.day, now.month, ["alpha"], {}))
    assert spends.held() == []


def test_a_clock_that_was_far_ahead_keeps_no_period_for_ever() -> None:
    """A jump of a month and back: the amounts stay, and the day ends when the calendar says so."""
    clock = Clock(EVENING - 5 * 86_400)
    spends = Spends(clock)
    spends.settle("alpha", 0, 10)
    clock.now += 40 * 86_400
    spends.settle("alpha", 0, 5)
    clock.now -= 40 * 86_400
    assert spends.of("alpha").day == 5
    assert 0 < spends.of("alpha").day_left_s <= 86_400
    clock.now += 86_400
    assert spends.of("alpha").day == 0


@given(st.lists(st.tuples(st.integers(1, 3000), st.none() | st.integers(1, 2000), st.booleans()), max_size=30))
def test_a_limit_is_never_exceeded(requests) -> None:
    """Whatever is asked and however much of it is used, settled costs and reservations stay within the limit."""
    book = ledger(Clock())
    running = []
    for input_tokens, asked, ends in requests:
        try:
            one = book.admit("alpha", "m", asked)
        except SpendLimitError:
            continue
        try:
            one.reserve(input_tokens, asked, 8000)
        except (SpendLimitError, InvalidRequestError):
            one.settle(0, 0)
        else:
            running.append((one, input_tokens))
        assert book.spends.of("alpha").day <= 10_000_000
        if ends and running:
            ending, used = running.pop(0)
            ending.settle(used, ending.grant, cached_tokens=used // 2)


@pytest.mark.parametrize(
    ("billionths", "text"),
    [(0, "0.00"), (10_000_000, "0.01"), (1, "0.000000001"), (1_500_000_000, "1.50"), (-20_000_000, "-0.02")],
)
def test_amounts_are_exact_decimals(billionths, text) -> None:
    """An amount is shown with two decimals, or with all that it has."""
    assert amount_text(billionths) == text
