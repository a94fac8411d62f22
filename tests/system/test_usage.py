"""Usage and spend of a real appliance: a bill that equals the audit log after kills, and a limit that holds."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from decimal import ROUND_UP, Decimal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import CompletionUsage
from ruamel.yaml import YAML

from appliance.common.usage.book import FOLDER, NAME
from appliance.common.usage.periods import period_of
from tests.system.audit_files import written
from tests.system.commands import athanor
from tests.system.conftest import PLAIN, Appliance, Batterable
from tests.system.test_deaths import host_pid

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

PRICES = {"input": 10, "cached_input": 1, "output": 20}
"""Units for a million tokens."""

NUMBERS = ("input_tokens", "cached_tokens", "output_tokens")
BILLIONTHS = 1_000_000_000
SPEND_A_KILL = Decimal("0.0025")
"""Limit of spend for each kill, in units: some five requests, so that it is reached at the end and not before."""

SETTLED_S = 20.0
"""Seconds within which an entry is in the log and in the book: half a second in the gateway, one in the supervisor."""


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Batterable]:
    """Demos of this module, one after the other as each is stopped."""
    kept = Batterable(tmp_path_factory)
    yield kept
    kept.stop()


@pytest.fixture
def billed(demos: Batterable) -> Appliance:
    """A demo whose every request is one of these tests: the log and the book have no other."""
    return demos.whole()


def use_policy(appliance: Appliance, **limits: float) -> None:
    """Put prices, and limits of spend of alpha, in force."""
    path, yaml = appliance.state / "policy.yaml", YAML()
    policy = yaml.load(path)
    policy["prices"] = {"currency": "EUR", "rules": [{"models": ["*"], **PRICES}]}
    policy["tenants"]["alpha"]["limits"].update(limits)
    with path.open("w") as file:
        yaml.dump(policy, file)
    told = athanor("reload", "--admin", appliance.ready["admin"])
    assert told.returncode == 0, told.stderr


def usage(appliance: Appliance, *arguments: str) -> list[dict[str, Any]]:
    """What `athanor usage` says, by tenant."""
    told = athanor("usage", "--from", str(appliance.state / "audit"), "--since", "1d", "-o", "json", *arguments)
    assert told.returncode == 0, told.stderr
    return list(json.loads(told.stdout)["rows"])


def logged(appliance: Appliance) -> list[dict[str, Any]]:
    """All entries of requests in the audit log."""
    return [one for one in written(appliance.state / "audit") if one["kind"] == "request"]


def cost_of(used: Any) -> int:
    """The cost of a response's usage in billionths, computed here by hand."""
    cached = used.prompt_tokens_details.cached_tokens if used.prompt_tokens_details else 0
    fresh = used.prompt_tokens - cached
    return 1000 * (
        fresh * PRICES["input"] + cached * PRICES["cached_input"] + used.completion_tokens * PRICES["output"]
    )


Row = tuple[int, int, int, int, Decimal]
"""Requests, prompt, cached and output tokens, and the cost in units, of one tenant."""


def told_of(entries: list[dict[str, Any]]) -> dict[str, Row]:
    """Sums of the log's entries by tenant."""
    found: dict[str, Counter[str]] = {}
    for one in entries:
        found.setdefault(one["tenant"], Counter()).update({name: one[name] for name in (*NUMBERS, "cost")}, requests=1)
    return {
        tenant: (sums["requests"], *(sums[name] for name in NUMBERS), Decimal(sums["cost"]) / BILLIONTHS)
        for tenant, sums in found.items()
    }


def told(rows: list[dict[str, Any]]) -> dict[str, Row]:
    """Sums that `athanor usage` shows."""
    return {row["tenant"]: (row["requests"], *(row[name] for name in NUMBERS), Decimal(row["cost"])) for row in rows}


def until_counted(appliance: Appliance, requests: int) -> list[dict[str, Any]]:
    """The rows by tenant once so many requests are counted."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        rows = usage(appliance)
        if sum(row["requests"] for row in rows) >= requests:
            return rows
        assert time.monotonic() < deadline, rows
        time.sleep(0.4)  # each look is a command of its own


def test_spend_ends_where_the_policy_says_and_the_bill_is_right(billed: Appliance) -> None:
    """Answers come until the day's spend is used up, then 429 `insufficient_quota` with the time until midnight; the
    sum of the responses' usage at the policy's prices is what `athanor usage` and the audit log say, to the billionth,
    is within the limit, and is what a statement says that the tenant verifies. Another tenant goes on, and a raised
    limit lets the first go on."""
    use_policy(billed, spend_per_day=0.02)
    client, spent, answers = billed.openai(), 0, 0
    with pytest.raises(openai.RateLimitError) as refused:
        while answers < 500:
            answer = client.completions.create(model="athanor-mini", prompt=f"Number {answers}", max_tokens=100)
            spent += cost_of(answer.usage)
            answers += 1
    assert answers > 3
    assert spent <= 0.02 * BILLIONTHS
    error = refused.value
    assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")
    assert 0 < int(error.response.headers["retry-after"]) <= 86_400
    assert "in a day" in error.message
    billed.openai("beta").completions.create(model="athanor-mini", prompt="Hello", max_tokens=5)
    rows = told(until_counted(billed, answers + 1))
    assert rows["alpha"][0] == answers
    assert Decimal(rows["alpha"][4]) * BILLIONTHS == spent
    assert told_of(logged(billed)) == rows
    the_tenant_verifies(billed, rows["alpha"])
    use_policy(billed, spend_per_day=100)
    client.completions.create(model="athanor-mini", prompt="Hello", max_tokens=5)


def the_tenant_verifies(appliance: Appliance, row: Row) -> None:
    """The statement of alpha verifies with the public key, has the sums of its row, and the log has exactly that."""
    audit, path = str(appliance.state / "audit"), str(appliance.state / "alpha.statement")
    made = athanor(
        "statement", "create", "--tenant", "alpha", "--since", "1d", "--until", "now", "--from", audit, "--out", path
    )
    assert made.returncode == 0, made.stderr
    verified = athanor("statement", "verify", path, "--key", f"{audit}/public.key", "--log", audit, "-o", "json")
    assert verified.returncode == 0, verified.stderr
    found = json.loads(verified.stdout)
    assert (found["requests"], *(found[name] for name in NUMBERS), Decimal(found["cost"])) == row


def keep_asking(
    appliance: Appliance, tenant: str, stop: threading.Event, answered: list[int], costs: list[int]
) -> None:
    """Ask as a tenant, one request after the other, whatever becomes of them."""
    draw = random.Random()
    with httpx.Client(verify=PLAIN, timeout=20) as client:
        while not stop.is_set():
            body = {"model": "athanor-mini", "prompt": f"Say {draw.random()}", "max_tokens": draw.randint(1, 40)}
            try:
                answer = client.post(
                    appliance.ready["http"] + "/v1/completions",
                    json=body,
                    headers={"authorization": f"Bearer {appliance.key(tenant)}"},
                )
                answered.append(answer.status_code)
            except httpx.HTTPError:
                time.sleep(0.05)
            else:
                if answer.status_code != 200:
                    time.sleep(0.05)
                elif tenant == "alpha":
                    costs.append(cost_of(CompletionUsage.model_validate(answer.json()["usage"])))


@pytest.mark.full
@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=pytest.mark.timeout(3600))])
def test_kills_charge_nothing_twice_and_no_limit_is_exceeded(billed: Appliance, kills: int) -> None:
    """Gateway and supervisor are killed under load, in turn: at the end usage equals the audit log, each request is in
    it once, and alpha has come to its limit: what it was served, by its own count, is within it. Beta, without a limit,
    is served to the end."""
    earlier = spent_so_far(billed)
    whole = (earlier + SPEND_A_KILL * kills).quantize(Decimal("0.01"), ROUND_UP)  # as a policy has it
    limit = float(whole - earlier)
    use_policy(billed, spend_per_month=float(whole), spend_per_day=100)
    stop, answered, costs = threading.Event(), [], []
    askers = [
        threading.Thread(target=keep_asking, args=(billed, tenant, stop, answered, costs))
        for tenant in ("alpha", "beta") * 2
    ]
    for asker in askers:
        asker.start()
    draw, began, forgotten = random.Random(kills), period_of(time.time()).month, 0
    try:
        for number in range(kills):
            if period_of(time.time()).month == began:
                forgotten = booked(billed.state / "audit")[1]
            before = answered.count(200)
            deadline = time.monotonic() + 60
            while answered.count(200) < before + 3:
                assert time.monotonic() < deadline, billed.tail()
                time.sleep(0.02)
            time.sleep(draw.random())
            os.kill(host_pid(billed, ("gateway", "supervisor")[number % 2]), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while 429 not in answered:
            assert time.monotonic() < deadline, billed.tail()
            time.sleep(0.02)
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    entries = logged(billed)
    assert 3 * kills <= answered.count(200)
    ids = Counter(one["request"] for one in entries)
    assert max(ids.values()) == 1
    deadline = time.monotonic() + SETTLED_S
    while told(usage(billed)) != told_of(logged(billed)):
        assert time.monotonic() < deadline, (usage(billed), told_of(logged(billed)))
        time.sleep(0.2)
    billed.stop()
    assert told(usage(billed)) == told_of(logged(billed))
    spent, reserved = booked(billed.state / "audit")
    spent -= int(earlier * BILLIONTHS)
    assert 0 < spent <= limit * BILLIONTHS
    # A month's end forgets what is reserved for requests whose entries went with a killed supervisor (docs/usage.md).
    assert sum(costs) <= limit * BILLIONTHS + (0 if period_of(time.time()).month == began else forgotten)
    assert spent + reserved >= 0.8 * limit * BILLIONTHS


def spent_so_far(appliance: Appliance) -> Decimal:
    """Units that alpha has spent in tests before."""
    row = told(usage(appliance)).get("alpha")
    return Decimal(0) if row is None else row[4]


def booked(folder: Path) -> tuple[int, int]:
    """Costs in the book, and reservations that were never released."""
    with sqlite3.connect(folder / FOLDER / NAME) as connection:
        (spent,) = connection.execute("SELECT COALESCE(SUM(cost), 0) FROM spent WHERE tenant = 'alpha'").fetchone()
        (reserved,) = connection.execute("SELECT COALESCE(SUM(cost), 0) FROM reserved").fetchone()
    return int(spent), int(reserved)
