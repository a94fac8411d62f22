"""The supervisor's answers: one after the other, bounded, forgotten with the gateway that asked; and those of usage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from appliance.common.control import MAX_DATAGRAM_BYTES, Attest, Attested, Control, encode
from appliance.common.control_usage import UsageQuery, Used
from appliance.common.errors import ControlError
from appliance.common.usage.book import open_book
from appliance.common.usage.report import Sum
from appliance.common.usage.tenant_sums import MAX_MODELS, MAX_USERS, CurrentSums
from appliance.supervisor import answering as module
from appliance.supervisor import usage_answers
from appliance.supervisor.answering import Answering
from appliance.supervisor.usage_answers import UsageAnswers


class Echo:
    """Answers with the nonce; one that is "bad" is refused."""

    def check(self, message: Attest) -> None:
        """Refuse the bad one."""
        if message.nonce == "bad":
            raise ControlError("bad")

    def answer(self, message: Attest) -> Attested:
        """Return it."""
        return Attested(message.request, message.nonce, "")


def opened(told: list[Control], folder: Path | None = None) -> Answering:
    """Answering whose answers are kept in a list."""
    return Answering(lambda message, _: not told.append(message), {Attest: Echo(), UsageQuery: UsageAnswers(folder)})


async def told_of(told: list[Control], count: int) -> None:
    """Until there are so many answers."""
    async with asyncio.timeout(10):
        while len(told) < count:
            await asyncio.sleep(0.01)


async def test_questions_are_answered_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its answer, of its kind; more than can wait are not kept, and those of a gateway that left are
    forgotten."""
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    told: list[Control] = []
    asked = opened(told)
    asked.take(Attest("gone", "alpha", "small", "n"))
    asked.gateway_left()
    asked.take(UsageQuery("usage", "alpha", ""))
    for number in range(5):
        asked.take(Attest(f"req_{number}", "alpha", "small", "n"))
    task = asyncio.create_task(asked.run())
    await told_of(told, 3)
    asked.take(Attest("later", "alpha", "small", "n"))
    await told_of(told, 4)
    assert [type(one) for one in told] == [Used, Attested, Attested, Attested]
    assert [one.request for one in told if isinstance(one, Attested | Used)] == ["usage", "req_0", "req_1", "later"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "message",
    [
        Attest("r", "alpha", "small", "bad"),
        Attest("r" * 65, "alpha", "small", "n"),
        UsageQuery("r", "a" * 64, ""),
        UsageQuery("r", "a", "d" * 33),
    ],
)
async def test_what_no_gateway_asks_is_refused(message: Attest | UsageQuery) -> None:
    """What a kind refuses, an id and a tenant's name that are too long cost the attachment; right questions do not."""
    asked = opened([])
    asked.take(Attest("r", "alpha", "small", "n"))
    asked.take(UsageQuery("r", "a" * 63, "d" * 32))
    with pytest.raises(ControlError):
        asked.take(message)


def test_usage_is_told_from_the_book_or_a_reason(tmp_path: Path) -> None:
    """An empty book has no rows; without a book, and where no log is kept, the reason is told and no path."""
    missing = UsageAnswers(tmp_path).answer(UsageQuery("r", "alpha", ""))
    assert missing.problem == "the usage book cannot be read now"
    assert "no audit log" in UsageAnswers(None).answer(UsageQuery("r", "alpha", "")).problem
    open_book(tmp_path)
    found = UsageAnswers(tmp_path, lambda: 1_773_576_000.0).answer(UsageQuery("r", "alpha", ""))
    assert found == Used("r", 20_527, 2026 * 12 + 2, {}, {}, {}, {}, "")


@pytest.mark.parametrize(
    ("name", "amount", "whole"),
    [pytest.param("m", 1 << 53, True, id="usual"), pytest.param("\\", (1 << 63) - 1, False, id="invented")],
)
def test_the_largest_answer_fits_a_datagram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, amount: int, whole: bool
) -> None:
    """As many models and end users as are told, with the longest names and the largest sums, in both periods; with
    names that are all escaped fewer are told, and the others are in the last row, with every request."""
    rows = tuple(Sum((f"{number:03}" + name * (125 if whole else 253),), *[amount] * 6) for number in range(MAX_MODELS))
    users = tuple(Sum((f"{number:03}" + name * (29 if whole else 253),), *[amount] * 6) for number in range(MAX_USERS))
    last = (Sum(("",), *[amount] * 6),)
    found = CurrentSums(20_527, 24_314, rows + last, rows + last, users + last, users + last)
    monkeypatch.setattr(usage_answers, "tenant_sums", lambda *_: found)
    answer = UsageAnswers(tmp_path).answer(UsageQuery("r" * 64, "a", ""))
    assert len(encode(answer)) <= MAX_DATAGRAM_BYTES
    assert (len(answer.in_month) == MAX_MODELS + 1, len(answer.users_in_month) == MAX_USERS + 1) == (whole, whole)
    assert sum(one[0] for one in answer.in_month.values()) == amount * (MAX_MODELS + 1)
    assert (list(answer.in_day)[-1], list(answer.users_in_day)[-1]) == ("", "")
