"""Spend records: a request waits for its reservation, a new supervisor is told again, and silence is an error."""

from __future__ import annotations

import asyncio

import pytest

from appliance.common.control import (
    MAX_DATAGRAM_BYTES,
    MAX_RESERVATIONS,
    Control,
    ReserveSpend,
    SpendQuery,
    SpendReserved,
    Spent,
    Welcome,
    encode,
)
from appliance.common.errors import ControlError, UnavailableError
from appliance.common.usage.periods import MOST
from appliance.gateway.sandboxes import spend_records as module
from appliance.gateway.sandboxes.spend_records import ALONE_S, SpendRecords, spending, unaccountable
from policy.loader import Source, load_policy

WELCOME = Welcome(1, "s", "l", [])


async def test_a_reservation_waits_for_its_confirmation() -> None:
    """It returns when the confirmation comes, not before; a confirmation of another request changes nothing."""
    told: list[Control] = []
    records = SpendRecords(told.append, lambda _: None)
    task = asyncio.create_task(records.reserve("req_1", "alpha", 7))
    await asyncio.sleep(0)
    records.take_reserved(SpendReserved(["req_2"]))
    await asyncio.sleep(0.01)
    assert not task.done()
    records.attached(WELCOME)  # a supervisor that came anew does not know of it
    records.take_reserved(SpendReserved(["req_1", "req_1"]))
    await task
    assert told == [ReserveSpend({"alpha": {"req_1": 7}})] * 2
    records.attached(WELCOME)
    assert len(told) == 2


async def test_reservations_that_come_closely_are_told_together() -> None:
    """The first is told at once; those behind it wait for one short moment and are one message, without the one whose
    request has gone meanwhile; those behind several wait for a longer one. After a moment without any the next is told
    at once again, and of many each message fits a datagram."""
    told: list[Control] = []
    records = SpendRecords(told.append, lambda _: None)
    tasks = [
        asyncio.create_task(records.reserve(f"req_{number}", tenant, number)) for number, tenant in enumerate("abab")
    ]
    await asyncio.sleep(0)
    assert told == [ReserveSpend({"a": {"req_0": 0}})]
    tasks[3].cancel()
    while len(told) < 2:
        await asyncio.sleep(0.001)
    assert told[1] == ReserveSpend({"b": {"req_1": 1}, "a": {"req_2": 2}})
    assert records._timer is not None
    assert records._timer.when() - asyncio.get_running_loop().time() > ALONE_S
    while records._timer is not None:
        await asyncio.sleep(0.001)
    tasks.append(asyncio.create_task(records.reserve("req_4", "a", 4)))
    await asyncio.sleep(0)
    assert told[2:] == [ReserveSpend({"a": {"req_4": 4}})]
    names = [f"req_{number:024d}" for number in range(MAX_RESERVATIONS)]
    tasks += [asyncio.create_task(records.reserve(name, name[-1] * 64, MOST - 1)) for name in names]
    while len(told) < 4:
        await asyncio.sleep(0.001)
    assert len(encode(told[3])) < MAX_DATAGRAM_BYTES / 2
    records.take_reserved(SpendReserved(["req_0", "req_1", "req_2", "req_4", *names]))
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (records._waiting, len(told)) == ({}, 4)


async def test_an_account_that_stands_still_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a confirmation the request ends with a typed error that says why, and nothing is left waiting."""
    monkeypatch.setattr(module, "SPEND_CONFIRM_S", 0.01)
    records = SpendRecords(lambda _: None, lambda _: None)
    with pytest.raises(UnavailableError, match="cannot be recorded now") as refused:
        await records.reserve("req_1", "alpha", 7)
    assert refused.value.retry_after_s is not None
    assert records._waiting == {}


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request beyond the bound is refused at once; those that wait go on."""
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    records = SpendRecords(lambda _: None, lambda _: None)
    waiting = [asyncio.create_task(records.reserve(f"req_{number}", "alpha", 7)) for number in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await records.reserve("req_3", "alpha", 7)
    records.take_reserved(SpendReserved(["req_0", "req_1"]))
    await asyncio.gather(*waiting)


async def test_questions_fit_datagrams_and_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tenants are asked about in parts, a lost question is asked again, known tenants are not asked about, and a
    supervisor that never answers is an error."""
    monkeypatch.setattr(module, "ANSWER_S", 0.01)
    told: list[SpendQuery] = []
    taken: list[Spent] = []

    def answer(query: SpendQuery) -> None:
        told.append(query)
        if len(told) > 1:  # the first is lost
            records.take_spent(Spent(1, 2, query.tenants, {query.tenants[0]: [3, 4, 0, 0]}))

    records = SpendRecords(answer, taken.append)
    tenants = [f"t{number}" for number in range(1200)]
    await records.fetch(tenants)
    assert [len(query.tenants) for query in told] == [500, 500, 500, 200]
    assert [next(iter(spent.spent)) for spent in taken] == ["t0", "t500", "t1000"]
    await records.fetch(tenants)
    assert len(told) == 4
    records.attached(WELCOME)  # this gateway's own account is complete: a new supervisor is asked nothing
    assert len(told) == 4
    records.take_spent(Spent(1, 2, ["t0", "new"], {"t0": [9, 9, 9, 9], "new": [1, 1, 0, 0]}))
    assert taken[-1].spent == {"new": [1, 1, 0, 0]}
    silent = SpendRecords(lambda _: None, taken.append)
    with pytest.raises(ControlError, match="did not tell in time"):
        await silent.fetch(["a"], 0.02)


@pytest.mark.parametrize(
    ("limit", "audited", "lines"), [("", False, 0), ("spend_per_day: 1", True, 0), ("spend_per_day: 1", False, 1)]
)
def test_a_limit_without_an_account_is_refused(limit, audited, lines) -> None:
    """A limit of spend needs the audit log; without one the policy is refused, with what to do."""
    text = "version: 1\nprices: {currency: EUR, rules: [{models: ['*'], input: 1, output: 1}]}\n"
    policy = load_policy(
        [Source("p", text + f"tenants: {{a: {{credentials: ['key:a'], models: ['*'], limits: {{{limit}}}}}}}")]
    )
    assert spending(policy) == (["a"] if limit else [])
    found = unaccountable(policy, audited=audited)
    assert len(found) == lines
    assert not found or "audit.directory" in found[0]


async def test_tenants_with_reservations_left_are_asked_about_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was used is sent first, and the answer about a known tenant goes where later accounts go. Nothing is asked
    while nothing is held (control)."""
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    done: list[object] = []
    held: list[str] = []
    records = SpendRecords(done.append, lambda _: None, lambda message: done.append(message), lambda: held)
    records.take_spent(Spent(1, 2, ["a"], {"a": [0, 0, 5, 0]}))
    assert done == []
    task = asyncio.create_task(records.run(lambda: done.append("flush")))
    await asyncio.sleep(0.06)
    assert done == []
    held.append("a")
    while not done:
        await asyncio.sleep(0.005)
    task.cancel()
    assert done[:2] == ["flush", SpendQuery(["a"])]
    records.take_spent(Spent(1, 2, ["a", "b"], {"b": [1, 1, 0, 0]}))
    assert done[-1] == Spent(1, 2, ["a"], {"b": [1, 1, 0, 0]})
