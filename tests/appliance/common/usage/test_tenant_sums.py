"""A tenant's sums of a day and a month, from the book of all tenants."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from appliance.common.audit.entry import Entry, entry
from appliance.common.errors import ConfigError
from appliance.common.usage import tenant_sums as module
from appliance.common.usage.book import open_book
from appliance.common.usage.pseudonyms import name_digest, pseudonym
from appliance.common.usage.report import Sum
from appliance.common.usage.tenant_sums import OTHERS, tenant_sums


def ms(*when: int) -> int:
    """A time in milliseconds."""
    return int(datetime(*when, tzinfo=UTC).timestamp() * 1_000)


NOW = ms(2026, 3, 15, 12) / 1_000


def request(tenant: str, model: str, tokens: int = 10, end_user: str = "") -> Entry:
    """The entry of one request."""
    return entry(
        "request",
        request="r",
        tenant=tenant,
        principal="key:k",
        model=model,
        alias="",
        operation="chat",
        rule="r",
        policy="p",
        outcome="OK",
        input_tokens=tokens,
        cached_tokens=4,
        output_tokens=5,
        reasoning_tokens=3,
        cost=100,
        queued_ms=0,
        cut_rule="",
        cut_policy="",
        downgraded="",
        adapter="",
        adapter_digest="",
        listener="",
        runner="model",
        end_user=end_user,
        batch="",
    )


def test_day_and_month_are_told_apart(tmp_path: Path) -> None:
    """Requests of the month's first hour and of yesterday's last are in the month alone, those of today's first and of
    this hour in both; the last of the month before, another tenant's, and later ones are in neither."""
    book, _ = open_book(tmp_path)
    times = [ms(2026, 2, 28, 23, 59), ms(2026, 3, 1), ms(2026, 3, 14, 23, 59), ms(2026, 3, 15), ms(2026, 3, 15, 12, 30)]
    others = [(ms(2026, 3, 15, 1), request("beta", "m")), (ms(2026, 3, 15, 13), request("alpha", "m"))]
    book.apply("log", 0, [*((one, request("alpha", "m")) for one in times), *others])
    found = tenant_sums(tmp_path, "alpha", NOW)
    assert found.in_day == (Sum(("m",), 2, 20, 8, 10, 200, 6),)
    assert found.in_month == (Sum(("m",), 4, 40, 16, 20, 400, 12),)
    assert (found.day, found.month) == (20_527, 2026 * 12 + 2)
    assert tenant_sums(tmp_path, "gamma", NOW).in_month == ()


def test_models_come_by_tokens_and_the_rest_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model with the most tokens first; those beyond the bound are one row, so that nothing is missing."""
    monkeypatch.setattr(module, "MAX_MODELS", 2)
    book, _ = open_book(tmp_path)
    tokens = {"a": 1, "b": 40, "c": 30, "d": 2}
    book.apply("log", 0, [(ms(2026, 3, 15, 3), request("alpha", name, count)) for name, count in tokens.items()])
    found = tenant_sums(tmp_path, "alpha", NOW)
    assert [one.keys for one in found.in_day] == [("b",), ("c",), (OTHERS,)]
    assert found.in_day[-1] == Sum((OTHERS,), 2, 3, 8, 10, 200, 6)
    assert found.in_month == found.in_day


def test_end_users_are_a_tenants_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of day and month by pseudonym, the most tokens first, those beyond the bound and the book's own row of
    others as one; never another tenant's, though it has an end user of the same name. The digest of a name finds its
    row, under this tenant's key alone."""
    monkeypatch.setattr(module, "MAX_USERS", 2)
    book, _ = open_book(tmp_path)
    digest = name_digest("ann")
    keys = {tenant: book.user_key(tenant) for tenant in ("alpha", "beta")}
    ann, other = (pseudonym(keys[tenant], digest) for tenant in ("alpha", "beta"))
    today, before = ms(2026, 3, 15, 3), ms(2026, 3, 2)
    entries = [
        (before, request("alpha", "m", 50, ann)),
        (today, request("alpha", "m", 10, ann)),
        (today, request("beta", "m", 70, other)),
        (today, request("alpha", "m", 80)),
        *((today, request("alpha", "m", tokens, name)) for name, tokens in (("b", 20), ("c", 5), ("others", 90))),
    ]
    book.apply("log", 0, entries)
    found = tenant_sums(tmp_path, "alpha", NOW)
    assert [(one.keys[0], one.input) for one in found.users_in_day] == [("b", 20), (ann, 10), (OTHERS, 95)]
    assert [(one.keys[0], one.input) for one in found.users_in_month] == [(ann, 60), ("b", 20), (OTHERS, 95)]
    assert found.in_day[0].input == 205
    assert [one.reasoning for one in found.users_in_day] == [3, 3, 6]
    named = tenant_sums(tmp_path, "alpha", NOW, digest)
    assert [(one.keys[0], one.input) for one in named.users_in_month] == [(ann, 60)]
    assert named.in_day == found.in_day
    assert [one.keys for one in tenant_sums(tmp_path, "beta", NOW, digest).users_in_day] == [(other,)]
    for tenant, name in (("alpha", name_digest("nobody")), ("gamma", digest)):
        assert tenant_sums(tmp_path, tenant, NOW, name).users_in_month == ()
    book.forget_users("alpha")
    assert tenant_sums(tmp_path, "alpha", NOW).users_in_month == ()
    assert tenant_sums(tmp_path, "beta", NOW).users_in_month != ()


def test_the_key_of_the_book_finds_each_hour(tmp_path: Path) -> None:
    """SQLite looks hours and days up and scans no other tenant's rows, as its plans say."""
    book, _ = open_book(tmp_path)
    values = {"first": 1, "last": 2, "tenant": "alpha"}
    plan = [row[3] for row in book._connection.execute("EXPLAIN QUERY PLAN " + module._QUERY, values)]
    assert any(line.startswith("SEARCH used USING PRIMARY KEY (hour=? AND tenant=?)") for line in plan), plan
    assert not any(line.startswith("SCAN used") for line in plan)
    values |= {"user": None, "others": "others"}
    plan = [row[3] for row in book._connection.execute("EXPLAIN QUERY PLAN " + module._QUERY_USERS, values)]
    assert any(line.startswith("SEARCH used_by_user USING PRIMARY KEY (day=? AND tenant=?)") for line in plan), plan


def test_without_a_book_the_reason_is_told(tmp_path: Path) -> None:
    """A folder in which none was begun."""
    with pytest.raises(ConfigError, match="no usage book"):
        tenant_sums(tmp_path, "alpha", NOW)
