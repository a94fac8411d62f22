"""End users in the usage book: rows of their own under pseudonyms, and what a shred leaves of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from appliance.common.audit.entry import Entry, entry
from appliance.common.errors import ConfigError
from appliance.common.usage import users
from appliance.common.usage.book import FOLDER, UsageBook, open_book
from appliance.common.usage.pseudonyms import name_digest, pseudonym
from appliance.common.usage.report import By, Filter, sums
from tests.appliance.common.usage.test_book import NOON_MS, request, rows


def of_user(number: int, user: str, tenant: str = "alpha") -> Entry:
    """The entry of a request for an end user."""
    one = request(number, tenant)
    return Entry(one.kind, one.fields | {"end_user": user})


def user_rows(book: UsageBook) -> list[tuple[object, ...]]:
    """Tenant, end user, requests, output and cost of every row."""
    query = "SELECT tenant, user, requests, output, cost FROM used_by_user ORDER BY day, tenant, user"
    return book._connection.execute(query).fetchall()


def test_end_users_have_rows_by_day_and_the_rest_shares_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that name an end user count in its row, others in none; beyond the bound all further end users of a day
    share one row, which is the bound's too, and another tenant or day begins anew."""
    monkeypatch.setattr(users, "MAX_USERS", 2)
    book, _ = open_book(tmp_path)
    names = ["ann", "bob", "ann", "cid", "dan", ""]
    book.apply("log", 0, [(NOON_MS, of_user(number, name)) for number, name in enumerate(names)])
    book.apply("log", 6, [(NOON_MS, of_user(9, "cid", "beta")), (NOON_MS + 86_400_000, of_user(10, "cid"))])
    assert user_rows(book) == [
        ("alpha", "ann", 2, 10, 200),
        ("alpha", "bob", 1, 5, 100),
        ("alpha", "others", 2, 10, 200),
        ("beta", "cid", 1, 5, 100),
        ("alpha", "cid", 1, 5, 100),
    ]
    assert sum(int(str(row[3])) for row in rows(book)) == 8


def test_a_shred_forgets_a_tenants_end_users(tmp_path: Path) -> None:
    """The entry of a shred or a rotation destroys a tenant's rows by end user and the key of its pseudonyms, in a book
    that is made again from the log too; bills stay, a failed order destroys nothing, and neither does another's."""
    book, _ = open_book(tmp_path)
    key, other = book.user_key("alpha"), book.user_key("beta")
    assert book.user_key("alpha") == key
    batch = [(NOON_MS, of_user(1, "ann")), (NOON_MS, of_user(2, "bob", "beta"))]
    order = {"tenant": "alpha", "user": 0, "count": 1}
    refused = entry("order", what="shred", outcome="KEYS", **order)
    rewrap = entry("order", what="rewrap", outcome="OK", **order | {"tenant": ""})
    book.apply("log", 0, [*batch, (NOON_MS, refused), (NOON_MS, rewrap)])
    assert [row[:2] for row in user_rows(book)] == [("alpha", "ann"), ("beta", "bob")]
    book.apply("log", 4, [(NOON_MS, entry("order", what="shred", outcome="OK", **order)), (NOON_MS, of_user(3, "ann"))])
    assert user_rows(book) == [("alpha", "ann", 1, 5, 100), ("beta", "bob", 1, 5, 100)]
    assert (book.user_key("alpha") != key, book.user_key("beta")) == (True, other)
    assert sum(int(str(row[3])) for row in rows(book)) == 3


@pytest.mark.parametrize("how", ["renamed", "rotated"])
def test_what_is_destroyed_is_overwritten(tmp_path: Path, how: str) -> None:
    """A tenant that becomes a pseudonym takes nothing of its end users along, and neither that key nor that of a
    rotated tenant is found in the book's files; control: before, it is, and another tenant's stays."""
    book, _ = open_book(tmp_path)
    book.apply("log", 0, [(NOON_MS, of_user(1, "ann")), (NOON_MS, of_user(2, "bob", "beta"))])
    key, other = book.user_key("alpha"), book.user_key("beta")

    def found(part: bytes) -> bool:
        return any(part in path.read_bytes() for path in (tmp_path / FOLDER).iterdir())

    assert found(key) and found(other)
    if how == "renamed":
        book.rename(NOON_MS / 1000, "alpha", "anon.00")
    else:
        order = entry("order", what="rotate", outcome="OK", tenant="alpha", user=0, count=1)
        book.apply("log", 2, [(NOON_MS, order)])
    assert [row[:2] for row in user_rows(book)] == [("beta", "bob")]
    assert not found(key) and found(other)


def test_a_book_of_the_first_form_gets_end_users(tmp_path: Path) -> None:
    """A book without the tables of end users keeps its rows, and counts end users from then on."""
    book, _ = open_book(tmp_path)
    book.apply("log", 0, [(NOON_MS, request(1))])
    book._connection.executescript("DROP TABLE used_by_user; DROP TABLE user_keys; PRAGMA user_version = 1;")
    book.close()
    book, damaged = open_book(tmp_path)
    assert not damaged
    book.apply("log", 1, [(NOON_MS, of_user(2, "ann"))])
    assert (len(rows(book)), [row[1] for row in user_rows(book)]) == (1, ["ann"])


def test_pseudonyms_differ_between_tenants_and_after_a_shred(tmp_path: Path) -> None:
    """One name has two pseudonyms under two keys, none of which is its digest; by name and key the row is found."""
    book, _ = open_book(tmp_path)
    digest = name_digest("ann@example.org")
    alpha, beta = (pseudonym(book.user_key(tenant), digest) for tenant in ("alpha", "beta"))
    assert len({alpha, beta, digest}) == 3
    book.apply("log", 0, [(NOON_MS, of_user(1, alpha)), (NOON_MS, of_user(2, beta, "beta"))])
    day = datetime(2026, 3, 15, tzinfo=UTC)
    chosen = Filter(day, day + timedelta(hours=1), users=("ann@example.org",))
    assert {one.keys for one in sums(tmp_path, [By.TENANT, By.USER], chosen)} == {("alpha", alpha), ("beta", beta)}
    only = Filter(day, day + timedelta(hours=1), tenants=("beta",), users=("ann@example.org",))
    assert [one.keys for one in sums(tmp_path, [By.USER], only)] == [(beta,)]
    nobody = Filter(day, day + timedelta(hours=1), users=("bob@example.org",))
    assert sums(tmp_path, [By.USER], nobody) == []
    with pytest.raises(ConfigError):
        sums(tmp_path, [By.USER, By.HOUR], chosen)
