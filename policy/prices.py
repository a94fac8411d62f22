"""Costs of requests, in whole billionths of the currency's unit. Pure.

A price is written in the policy as an amount for a million tokens with at most three decimals, which is a whole number
of billionths for one token: sums are exact, and no cost is ever rounded.
"""

from __future__ import annotations

from policy.match import first_match
from policy.model import IsolationClass, Limits, PolicySet, Price
from policy.request import Spend

BILLIONTHS = 1_000_000_000
"""Parts in which one unit of the currency is counted."""

BILLIONTHS_A_TOKEN = 1_000
"""Price of one token in billionths, where a million tokens cost one unit."""

MILLION = 1_000_000
"""Tokens for which the policy states a price."""

MAX_AFFORDABLE = 1 << 40
"""Output tokens that can be had where they cost nothing: more than any request may have."""


def find_price(policy: PolicySet, model: str, isolation_class: IsolationClass, *, batch: bool = False) -> Price | None:
    """Return the price of the first rule for requests of this class to this model, of a line of a ``batch`` where the
    rule has one; None without a rule."""
    for rule in policy.prices:
        if rule.isolation_class in (None, isolation_class) and first_match(rule.models, model) is not None:
            return rule.price if not batch or rule.batch is None else rule.batch
    return None


def cost(price: Price, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """Return the cost of a request in billionths; ``cached_tokens`` are part of ``input_tokens``."""
    fresh = input_tokens - cached_tokens
    return fresh * price.input + cached_tokens * price.cached_input + output_tokens * price.output


def affordable(price: Price, input_tokens: int, choices: int, left: int) -> int:
    """Return the output tokens that each of ``choices`` outputs can have for ``left`` billionths beside a prompt of
    which nothing is cached; below 0 where the prompt alone costs more."""
    room = left - input_tokens * price.input
    if price.output:
        return room // (choices * price.output)
    return MAX_AFFORDABLE if room >= 0 else -1


def spend_left(limits: Limits, spend: Spend | None) -> int | None:
    """Return what may still be spent under both limits, in billionths; below 0 when more was spent, None without a
    limit."""
    day, month = (spend.day, spend.month) if spend is not None else (0, 0)
    left = [
        limit - spent
        for limit, spent in ((limits.spend_per_day, day), (limits.spend_per_month, month))
        if limit is not None
    ]
    return min(left, default=None)


def amount_text(billionths: int) -> str:
    """Return an amount as an exact decimal number of units, with two decimals or as many as it needs."""
    units, rest = divmod(abs(billionths), BILLIONTHS)
    decimals = f"{rest:09d}".rstrip("0").ljust(2, "0")
    return f"{'-' if billionths < 0 else ''}{units}.{decimals}"
