"""What tenants have used, as the gateway tells it: asked for once, told to all who ask, forgotten in time."""

from __future__ import annotations

import asyncio

import pytest

from appliance.common.control import Control
from appliance.common.control_usage import UsageQuery, Used
from appliance.common.errors import RateLimitedError, UnavailableError
from appliance.gateway.request import tenant_use as module
from appliance.gateway.request.tenant_use import FRESH_S, TenantUses
from appliance.gateway.sandboxes.questions import Questions
from appliance.gateway.tenant_account import ModelUse, PeriodUse, UserUse

DAY, MONTH = 20_000, 2024 * 12 + 9
"""2024-10-04."""


class Supervised:
    """A gateway's questions, answered at once by a supervisor that counts them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.now = 0.0
        self.problem = ""
        self.answers = True
        self._questions = Questions[Used](self._answer, "account of usage")
        self.uses = TenantUses(self._questions, lambda: self.now)

    def _answer(self, message: Control) -> None:
        assert isinstance(message, UsageQuery)
        self.asked.append(message.tenant)
        if self.answers:
            sums = {"small": [1, 10, 0, 5, 7, 4], "": [1, 2, 1, 1, 0, 0]}
            users = {message.user or "aa11": [1, 10, 0, 5, 7, 4]}
            told = Used(message.request, DAY, MONTH, {"small": sums["small"]}, sums, users, {}, self.problem)
            asyncio.get_running_loop().call_soon(self._questions.take, told)


async def test_an_answer_is_a_day_and_a_month_with_their_ends() -> None:
    """Unix times of both periods, and a row for each model."""
    found = await Supervised().uses.of("alpha", "EUR")
    row, rest = ModelUse("small", 1, 10, 0, 5, 7, 4), ModelUse("", 1, 2, 1, 1, 0)
    assert (found.tenant, found.currency) == ("alpha", "EUR")
    assert found.day == PeriodUse(DAY * 86_400, (DAY + 1) * 86_400, (row,), (UserUse("aa11", 1, 10, 0, 5, 7, 4),))
    assert found.month == PeriodUse(1_727_740_800, 1_730_419_200, (row, rest))


async def test_many_callers_are_one_question() -> None:
    """Ten at once and one a little later ask once; one after the time asks again; another tenant has its own."""
    one = Supervised()
    await asyncio.gather(*(one.uses.of("alpha", "") for _ in range(10)))
    one.now = FRESH_S - 0.1
    await one.uses.of("alpha", "")
    assert one.asked == ["alpha"]
    one.now = FRESH_S
    await asyncio.gather(one.uses.of("alpha", ""), one.uses.of("beta", ""))
    assert one.asked == ["alpha", "alpha", "beta"]


async def test_a_caller_that_leaves_takes_no_answer_from_others() -> None:
    """The first of two is cancelled; the second gets the answer of the one question."""
    one = Supervised()
    first, second = (asyncio.create_task(one.uses.of("alpha", "")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).tenant == "alpha"
    assert one.asked == ["alpha"]


async def test_a_failure_is_not_kept() -> None:
    """The next caller asks again, and gets what there is then."""
    one = Supervised()
    one.problem = "the usage book cannot be read now"
    with pytest.raises(UnavailableError, match="cannot be read now"):
        await one.uses.of("alpha", "")
    one.problem = ""
    assert (await one.uses.of("alpha", "")).tenant == "alpha"


async def test_answers_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tenants two are kept; the one asked first is asked anew. Stale ones go together."""
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    one = Supervised()
    for number, tenant in enumerate(("alpha", "beta", "gamma")):
        one.now = float(number)
        await one.uses.of(tenant, "")
    await one.uses.of("gamma", "")
    assert set(one.uses._kept) == {("beta", ""), ("gamma", "")}
    one.now = 60.0
    await one.uses.of("alpha", "")
    assert set(one.uses._kept) == {("alpha", "")}


async def test_end_users_asked_about_by_name_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names in the time, each asked once, a third refused with the time to wait; all end users, the names that are
    known and another tenant are answered meanwhile, and after the time the third is."""
    monkeypatch.setattr(module, "MAX_NAMED", 2)
    one = Supervised()
    for number, name in enumerate("aabb"):
        one.now = float(number)
        assert (await one.uses.of("alpha", "", name)).day.users[0].user == name
    with pytest.raises(RateLimitedError) as refused:
        await one.uses.of("alpha", "", "c")
    assert refused.value.retry_after_s == FRESH_S - one.now
    await asyncio.gather(one.uses.of("alpha", ""), one.uses.of("alpha", "", "b"), one.uses.of("beta", "", "c"))
    assert one.asked == ["alpha", "alpha", "alpha", "beta"]
    one.now = FRESH_S
    await one.uses.of("alpha", "", "c")
