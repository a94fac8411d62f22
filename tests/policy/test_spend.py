"""policy.prices, and limits of spend in policy.evaluate: a table, and properties of costs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.cases import found, load_cases, question
from policy.cases import load as case_load
from policy.decision import Effect
from policy.errors import PolicySchemaError
from policy.evaluate import evaluate
from policy.limits import Bucket
from policy.loader import Source, load_policy
from policy.model import IsolationClass, Price
from policy.prices import BILLIONTHS, affordable, cost, find_price
from policy.request import AccessRequest, Spend, Usage
from policy.simulate import decide

CASES = load_cases((Path(__file__).parent / "cases" / "spend.yaml").read_text(), "spend.yaml")
POLICY = load_policy([Source("p.yaml", CASES.content.policy)])
FULL = Bucket(1e9, 0.0)

PRICES = "prices: {currency: EUR, rules: [{models: ['*'], input: 1, output: 2}]}\n"
TENANT = "tenants: {a: {credentials: ['key:a'], models: ['*'], limits: {spend_per_day: %s}}}\n"


def spent(day: float = 0.0, month: float = 0.0) -> Usage:
    """Usage with so many units spent: an hour before midnight, a day and an hour before the month's end."""
    spend = Spend(
        day=round(day * BILLIONTHS), month=round(month * BILLIONTHS), day_left_s=3600.0, month_left_s=90_000.0
    )
    return Usage(concurrency=0, request_bucket=FULL, token_bucket=FULL, spend=spend)


def load(*texts: str):
    """The policy of files with these texts."""
    return load_policy([Source(f"{number}.yaml", "version: 1\n" + text) for number, text in enumerate(texts)])


@pytest.mark.parametrize("case", CASES.content.cases, ids=lambda case: case.name)
def test_table(case) -> None:
    """Each row of cases/spend.yaml gives its decision, and a denial no number that the row does not name."""
    decision = decide(POLICY, question(case.ask), case_load(case.use))
    result = found(decision)
    keys = result if case.expect.effect is Effect.DENY else case.expect.model_fields_set
    assert {key: result[key] for key in keys} == {key: getattr(case.expect, key) for key in keys}


def test_an_allowance_carries_price_and_duty() -> None:
    """The gateway learns from the obligations what a token costs, and whether it must reserve."""
    ask = {"input_tokens": None, "max_output_tokens": 1}
    bounded = evaluate(POLICY, AccessRequest(tenant="daily", model="big-1", **ask), spent(), 0.0).obligations
    free = evaluate(POLICY, AccessRequest(tenant="free", model="unpriced", **ask), spent(), 0.0).obligations
    assert bounded is not None
    assert free is not None
    assert (bounded.price, bounded.bounds_spend) == (Price(input=2000, cached_input=200, output=6000), True)
    assert (free.price, free.bounds_spend) == (Price(), False)


def test_the_first_price_that_matches_decides() -> None:
    """Class and model choose the rule; without a matching one there is no price."""
    assert find_price(POLICY, "big-2", IsolationClass.DEDICATED) == Price(
        input=20_000, cached_input=20_000, output=60_000
    )
    assert find_price(POLICY, "big-2", IsolationClass.SHARED) == Price(input=2000, cached_input=200, output=6000)
    assert find_price(POLICY, "other", IsolationClass.SHARED) is None


prices = st.builds(Price, input=st.integers(0, 10**9), cached_input=st.integers(0, 10**9), output=st.integers(0, 10**9))


@given(prices, st.integers(1, 10_000), st.integers(1, 8), st.integers(0, 10**15))
def test_what_is_affordable_is_the_most_that_the_money_gives(price, input_tokens, choices, left) -> None:
    """So many tokens cost no more than what is left, and one more for each choice would."""
    most = affordable(price, input_tokens, choices, left)
    if most < 0:
        assert cost(price, input_tokens, 0, 0) > left
    else:
        assert cost(price, input_tokens, 0, choices * most) <= left
        assert price.output == 0 or cost(price, input_tokens, 0, choices * (most + 1)) > left


@given(prices, st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_cached_tokens_cost_their_own_price(price, fresh, cached, output) -> None:
    """A cost is the sum over the three kinds of tokens."""
    expected = fresh * price.input + cached * price.cached_input + output * price.output
    assert cost(price, fresh + cached, cached, output) == expected


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        ((TENANT % 1,), "0.yaml:2:78: tenants.a.limits.spend_per_day: without prices nothing has a cost"),
        ((PRICES + TENANT % 1.234,), "0.yaml:3:78: tenants.a.limits.spend_per_day: must have at most 2 decimals"),
        ((PRICES + TENANT % -1,), "must be at least 0 and at most 1000000000"),
        ((PRICES + TENANT % "true",), "must be a number, such as 0.25"),
        ((PRICES.replace("1", "0.0001") + "tenants: {}",), "0.yaml:2:56: prices.rules[0].input: must have at most 3"),
        (
            (PRICES.replace("input: 1", "input: 1, cached_input: 1.5") + "tenants: {}",),
            "prices.rules[0].cached_input: a cached token must not cost more",
        ),
        ((PRICES.replace("EUR", "eur") + "tenants: {}",), "0.yaml:2:20: prices.currency: 'eur' does not fit"),
        ((PRICES.replace("output", "outptu") + "tenants: {}",), "unknown key; did you mean 'output'?"),
        ((PRICES.replace("rules", "rule") + "tenants: {}",), "unknown key; did you mean 'rules'?"),
        ((PRICES + "tenants: {}", PRICES + "tenants: {}"), "1.yaml:2:1: prices: prices stand in 0.yaml already"),
    ],
)
def test_wrong_prices_are_told_with_their_place(texts, problem) -> None:
    """A limit without prices, an amount that is none, an unknown key and a second file with prices are refused."""
    with pytest.raises(PolicySchemaError, match=re.escape(problem)):
        load(*texts)


def test_prices_change_the_digest() -> None:
    """Policies that differ in a price or in the currency are different; the same prices are the same."""
    tenants = "tenants: {}\n"
    one = load(PRICES + tenants).digest
    assert one == load(tenants, PRICES + tenants).digest
    others = {load(PRICES.replace(*change) + tenants).digest for change in (("EUR", "USD"), ("2", "3"))}
    assert len({one, load(tenants).digest, *others}) == 4
