"""The comparison of APIs over the whole host: its turns and its figures, without an appliance."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from bench.host_apis import ApiCost, compare, orders, spread, table

APIS = ("chat", "responses", "messages")


def test_every_api_has_each_place_and_follows_each_other_equally_often() -> None:
    """Over six rounds, so that no API has a better place than another."""
    found = orders(APIS, 6)
    assert Counter(order[place] for order in found for place in range(3)) == dict.fromkeys(APIS, 6)
    for place in range(3):
        assert Counter(order[place] for order in found) == dict.fromkeys(APIS, 2)
    assert set(Counter(pair for order in found for pair in pairwise(order)).values()) == {2}


def test_a_turn_is_divided_by_chat_of_its_own_round() -> None:
    """A host that becomes slower from turn to turn, by half over the run, changes no ratio by much; failures are added
    up."""
    turns: list[str] = []
    cost = {"chat": 10.0, "responses": 12.0, "messages": 14.0}

    def turn(api: str) -> dict[str, Any]:
        turns.append(api)
        slower = 1 + len(turns) / 36 / 2
        spent = {"gateway": cost[api] * slower, "text": 1.0}
        return {"us_per_token": spent, "tokens_per_chunk": 2.0, "failures": int(api == "messages")}

    chat, responses, messages = compare(APIS, 12, turn)
    assert len(turns) == 36 and set(chat.ratios) == {1.0}
    assert spread(responses.ratios)[1] == pytest.approx(13 / 11, abs=0.02)
    assert (responses.verdict, messages.verdict, chat.verdict) == ("met", "missed", "")
    assert (messages.failures, chat.failures) == (12, 0)
    lines = table([chat, responses, messages], 64, "free running")
    assert len(lines) == 5 and lines[-1].endswith("missed") and lines[3].endswith("met")


def test_too_few_rounds_decide_nothing() -> None:
    """Where the interval encloses the bar the verdict is none; without chat there are no ratios."""
    few = ApiCost("responses", [1.0, 1.0], [1.0, 1.0], [1.2, 1.4], [1.0, 1.0], 0)
    assert few.verdict == "not resolved" and spread([1.5]) == (1.5, 1.5, 1.5)
    turn = {"us_per_token": {"gateway": 1.0}, "tokens_per_chunk": 1.0, "failures": 0}
    (alone,) = compare(["responses"], 1, lambda _api: turn)
    assert alone.ratios == [] and alone.verdict == "" and "-" in table([alone], 1, "free running")[2]
