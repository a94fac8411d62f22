"""The usage book: counted once, released once, made again from the log."""

from __future__ import annotations

import random
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.common.audit.entry import Entry, entry
from appliance.common.audit.log import open_log
from appliance.common.errors import UsageError
from appliance.common.usage import book as module
from appliance.common.usage.book import (
    FOLDER,
    NAME,
    Released,
    Reserved,
    SpentNow,
    UsageAccessError,
    UsageBook,
    open_book,
)
from appliance.common.usage.host_cost import host_cost
from appliance.common.usage.periods import MOST, date_of, first_day, month_start, period_of
from appliance.common.usage.replay import replay
from appliance.common.usage.report import By, Filter, Sum, hours_awake, sums

NOON = datetime(2026, 3, 15, 12, tzinfo=UTC).timestamp()
NOON_MS = int(NOON * 1000)


def request(number: int, tenant: str = "alpha", cost: int = 100, model: str = "m") -> Entry:
    """The entry of one request."""
    return entry(
        "request",
        request=f"req_{number}",
        tenant=tenant,
        principal="key:k",
        model=model,
        alias="",
        operation="chat",
        rule="r",
        policy="p",
        outcome="OK",
        input_tokens=10,
        cached_tokens=4,
        output_tokens=5,
        reasoning_tokens=0,
        cost=cost,
        queued_ms=0,
        cut_rule="",
        cut_policy="",
        downgraded="",
        adapter="",
        adapter_digest="",
        listener="",
        runner="model",
        end_user="",
        batch="",
    )


def rows(book: UsageBook) -> list[tuple[object, ...]]:
    """All rows of usage."""
    return book._connection.execute("SELECT * FROM used").fetchall()


def test_requests_are_counted_by_hour_tenant_and_model(tmp_path: Path) -> None:
    """Sums by hour, tenant and model; what is no request counts nothing, and moves the position."""
    book, damaged = open_book(tmp_path)
    assert not damaged
    other = entry("refused", outcome="UNAUTHENTICATED", reason="absent", count=3)
    hour = NOON_MS // 3_600_000
    book.apply("log", 0, [(NOON_MS, request(1)), (NOON_MS + 1, request(2)), (NOON_MS, other)])
    book.apply(
        "log", 3, [(NOON_MS + 3_600_000, request(3)), (NOON_MS, request(4, "beta")), (NOON_MS, request(5, model="n"))]
    )
    assert rows(book) == [
        (hour, "alpha", "m", 2, 20, 8, 10, 200, 0),
        (hour, "alpha", "n", 1, 10, 4, 5, 100, 0),
        (hour, "beta", "m", 1, 10, 4, 5, 100, 0),
        (hour + 1, "alpha", "m", 1, 10, 4, 5, 100, 0),
    ]
    assert (book.position("log"), book.position("another")) == (6, 0)


def test_a_request_releases_what_was_reserved_for_it(tmp_path: Path) -> None:
    """A reservation counts until the request's entry comes, whose cost then counts, and no more than was reserved; one
    without an entry counts until its day is over."""
    book, _ = open_book(tmp_path)
    reservations = [Reserved("req_1", "alpha", 500), Reserved("req_2", "alpha", 50), Reserved("req_3", "alpha", 7)]
    book.reserve(NOON, reservations)
    assert book.spent(NOON, ["alpha", "beta"]) == {"alpha": SpentNow(0, 0, 557)}
    book.apply("log", 0, [(NOON_MS, request(1)), (NOON_MS, request(2))])
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(150, 150, 7)}
    tomorrow, next_month = NOON + 86_400, datetime(2026, 4, 1, tzinfo=UTC).timestamp()
    assert book.spent(tomorrow, ["alpha"]) == {"alpha": SpentNow(0, 150, 0, 7)}
    assert book.spent(next_month, ["alpha"]) == {}
    book.forget_reservations(tomorrow)
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(150, 150, 7)}
    book.forget_reservations(next_month)
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(150, 150, 0)}


def test_only_what_ended_with_an_earlier_boot_is_released(tmp_path: Path) -> None:
    """Reservations of two days count on after another boot, in their day and month, until the tenant's are released:
    then those of its plain requests go. A batch's line, a loan, what came after the boot, what runs again under its id,
    and another tenant's stay (controls). Under the same boot nothing is released."""
    book, _ = open_book(tmp_path)
    yesterday = NOON - 86_400
    assert book.begin_boot("one") == 0
    book.reserve(yesterday, [Reserved("req_1", "alpha", 1)])
    book.reserve(NOON, [Reserved(name, "alpha", 20) for name in ("req_2", "req_3", "batch_1-7", "lease_1")])
    book.reserve(NOON, [Reserved("req_4", "beta", 300)])
    assert book.begin_boot("one") == 0
    assert book.release("alpha") == Released(0, 0), "control: under the same boot they may run"
    before = {"alpha": SpentNow(0, 0, 80, 1), "beta": SpentNow(0, 0, 300)}
    assert book.begin_boot("two") == 4
    book.reserve(NOON, [Reserved("req_3", "alpha", 20), Reserved("req_5", "alpha", 4_000)])
    before["alpha"] = SpentNow(0, 0, 4_080, 1)
    assert book.spent(NOON, ["alpha", "beta"]) == before, "a boot alone gives nothing back"
    assert book.release("alpha") == Released(2, 21)
    assert book.spent(NOON, ["alpha", "beta"]) == {"alpha": SpentNow(0, 0, 4_060), "beta": SpentNow(0, 0, 300)}
    assert book.release("alpha") == Released(0, 0)
    assert book.begin_boot("three") == 3


def test_what_ended_with_a_boot_ends_with_its_day_and_month_all_the_same(tmp_path: Path) -> None:
    """A request that began before midnight, the last of the month, and ended with the machine: released before midnight
    it counts in neither period; left alone it counts in no limit of the new month, and there is nothing to release once
    the old one is forgotten. Its late entry, from the log, is charged once, and the reservation is gone with it."""
    book, _ = open_book(tmp_path)
    midnight = datetime(2026, 4, 1, tzinfo=UTC).timestamp()
    book.begin_boot("one")
    book.reserve(midnight - 60, [Reserved(f"req_{number}", "alpha", 100) for number in range(3)])
    book.begin_boot("two")
    assert book.spent(midnight - 1, ["alpha"]) == {"alpha": SpentNow(0, 0, 300)}
    book.apply("log", 0, [(int(midnight * 1_000) - 1, request(0))])
    assert book.spent(midnight - 1, ["alpha"]) == {"alpha": SpentNow(100, 100, 200)}
    assert book.spent(midnight, ["alpha"]) == {}
    book.forget_reservations(midnight)
    assert (book.release("alpha"), book.begin_boot("three")) == (Released(0, 0), 0)
    book.reserve(midnight - 60, [Reserved("req_9", "alpha", 100)])
    book.begin_boot("four")
    assert book.release("alpha") == Released(1, 100)
    assert book.spent(midnight - 1, ["alpha"]) == {"alpha": SpentNow(100, 100, 0)}


def test_the_end_of_a_batch_releases_what_its_lines_reserved(tmp_path: Path) -> None:
    """A line that was cancelled between two attempts has no entry; the batch's end takes its place, and nothing else's.
    Control: the tenant's wish to cancel, while lines still run, releases nothing."""
    book, _ = open_book(tmp_path)
    names = ["batch_1-7", "batch_1-7.2", "batch_10-7", "batch_1", "req_1"]
    book.reserve(NOON, [Reserved(name, "alpha", 1) for name in names])
    fields = {"tenant": "alpha", "batch": "batch_1", "endpoint": "/v1/x", "lines": 9, "completed": 8, "failed": 0}
    wished, over = (entry("batch", event="cancelled", principal=who, **fields) for who in ("key:alpha-1", ""))
    book.apply("log", 0, [(NOON_MS, wished)])
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(0, 0, 5)}
    book.apply("log", 1, [(NOON_MS, over)])
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(0, 0, 3)}


def lease(what: str, cost: int, name: str = "lease_1", day: int = period_of(NOON).day) -> Entry:
    """The entry of a part of a budget that was lent or borrowed."""
    return entry("lease", what=what, tenant="alpha", host="b", lease=name, day=day, cost=cost)


def test_what_is_lent_counts_as_spent_and_is_on_no_bill(tmp_path: Path) -> None:
    """A loan's entry takes the place of its reservation, on the day that it is of; what is borrowed counts the other
    way. No row of usage has either, and a book that is made again from the log has the same."""
    audit = open_log(tmp_path)
    book, _ = open_book(tmp_path)
    book.reserve(NOON, [Reserved("lease_1", "alpha", 500)])
    batch = [(NOON_MS, request(1)), (NOON_MS, lease("lent", 500)), (NOON_MS, lease("borrowed", 30, "lease_2"))]
    yesterday = period_of(NOON).day - 1
    batch.append((NOON_MS, lease("borrowed", 1, "lease_3", yesterday)))
    first = audit.append(batch)
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(0, 0, 500)}
    book.apply(audit.name, first, batch)
    spent = {"alpha": SpentNow(100 + 500 - 30, 100 + 500 - 30 - 1, 0)}
    assert book.spent(NOON, ["alpha"]) == spent
    assert [row[-2:] for row in rows(book)] == [(100, 0)]
    book.reserve(NOON, [Reserved("lease_1", "alpha", 500)])  # behind its entry
    assert book.spent(NOON, ["alpha"]) == spent
    book.close()
    audit.close()
    (tmp_path / FOLDER / NAME).unlink()
    for left in (tmp_path / FOLDER).glob(f"{NAME}-*"):
        left.unlink()
    again, _ = open_book(tmp_path)
    replay(again, tmp_path, audit.name)
    assert again.spent(NOON, ["alpha"]) == spent


def test_it_survives_a_crash_and_is_made_again_from_the_log(tmp_path: Path) -> None:
    """Entries that the log has and the book has not are counted once; a lost and a damaged book have the same rows."""
    audit = open_log(tmp_path)
    first = audit.append([(NOON_MS, request(number)) for number in range(5)])
    book, _ = open_book(tmp_path)
    book.apply(audit.name, first, [(NOON_MS, request(number)) for number in range(5)])
    audit.append([(NOON_MS, request(number)) for number in range(5, 9)])  # the process is killed here
    book.close()
    audit.close()
    book, _ = open_book(tmp_path)
    assert replay(book, tmp_path, audit.name).entries == 4
    assert replay(book, tmp_path, audit.name).entries == 0
    expected = rows(book)
    assert expected[0][3] == 9
    book.close()
    path = tmp_path / module.FOLDER / NAME
    path.unlink()
    book, damaged = open_book(tmp_path)
    assert (replay(book, tmp_path, audit.name).entries, damaged, rows(book)) == (9, False, expected)
    book.close()
    path.write_bytes(b"SQLite format 3\0" + b"no" * 5000)
    book, damaged = open_book(tmp_path)
    assert (replay(book, tmp_path, audit.name).entries, damaged, rows(book)) == (9, True, expected)
    assert (path.parent / f"damaged-{NAME}").exists()


def test_segments_and_another_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay goes over segments, from the middle of one; a log with another name is counted from its start."""
    monkeypatch.setattr("appliance.common.audit.log.SEGMENT_BYTES", 2_000)
    audit = open_log(tmp_path)
    book, _ = open_book(tmp_path)
    for start in range(0, 40, 4):
        batch = [(NOON_MS, request(number)) for number in range(start, start + 4)]
        first = audit.append(batch)
        if start < 20:
            book.apply(audit.name, first, batch)
    assert len(list(tmp_path.glob("*.log"))) > 3
    assert replay(book, tmp_path, audit.name).entries == 20
    assert rows(book)[0][3] == 40
    assert replay(book, tmp_path, "athanor.audit/another").entries == 0
    assert book.position(audit.name) == 40


def test_a_newer_book_is_refused(tmp_path: Path) -> None:
    """A book of a newer form is left as it is, and the message says what to do; so is a folder that cannot be made."""
    book, _ = open_book(tmp_path)
    book._connection.execute("PRAGMA user_version = 99")
    book.close()
    with pytest.raises(UsageError, match=r"has the form 99, and this version knows 3.*move the file away"):
        open_book(tmp_path)
    assert sqlite3.connect(tmp_path / module.FOLDER / NAME).execute("PRAGMA user_version").fetchone() == (99,)
    with pytest.raises(UsageError, match="cannot use"):
        open_book(tmp_path / "absent")


def test_reasoning_is_told_apart_from_an_older_book_on(tmp_path: Path) -> None:
    """A book of the form before is read as it is, without reasoning; once opened to be written it has the column in
    both tables, what it had is unchanged, and what comes is counted as a part of the output. Opened again, nothing
    changes."""
    book, _ = open_book(tmp_path)
    thinks = request(2)
    thinks.fields["reasoning_tokens"] = 3
    thinks.fields["end_user"] = "ann"
    book.apply("log", 0, [(NOON_MS, request(1))])
    for table in ("used", "used_by_user"):
        book._connection.execute(f"ALTER TABLE {table} DROP COLUMN reasoning")
    book._connection.execute("PRAGMA user_version = 2")
    book.close()
    month = Filter(datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC))
    before = sums(tmp_path, [By.TENANT], month)
    assert before == [Sum(("alpha",), 1, 10, 4, 5, 100, 0)]
    for _ in range(2):
        book, damaged = open_book(tmp_path)
        assert not damaged
        assert sums(tmp_path, [By.TENANT], month) == before
        book.close()
    book, _ = open_book(tmp_path)
    book.apply("log", 1, [(NOON_MS, thinks)])
    assert sums(tmp_path, [By.MODEL], month) == [Sum(("m",), 2, 20, 8, 10, 200, 3)]
    assert [one.reasoning for one in sums(tmp_path, [By.USER], month)] == [3]
    book.rename(NOON, "alpha", "pseudonym")
    assert sums(tmp_path, [By.TENANT], month) == [Sum(("pseudonym",), 2, 20, 8, 10, 200, 3)]


def test_ten_thousand_tenants_are_exact(tmp_path: Path) -> None:
    """As many tenants as a policy may have: each one's row is its own sum to the unit, none is folded into another, and
    what each has spent is found."""
    book, _ = open_book(tmp_path)
    draw, expected = random.Random(22), {}
    entries = []
    for number in range(12_000):
        tenant, cost, reasoning = f"t-{number % 10_000}", draw.randrange(1 << 40), draw.randrange(6)
        one = request(number, tenant, cost)
        one.fields["reasoning_tokens"] = reasoning
        entries.append((NOON_MS + draw.randrange(3_000_000), one))
        known = expected.get(tenant, (0, 0, 0))
        expected[tenant] = known[0] + 1, known[1] + cost, known[2] + reasoning
    for first in range(0, len(entries), 4_000):
        book.apply("log", first, entries[first : first + 4_000])
    month = Filter(datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC))
    found = {one.keys[0]: (one.requests, one.cost, one.reasoning) for one in sums(tmp_path, [By.TENANT], month)}
    assert len(found) == 10_000
    assert found == expected
    spent = book.spent(NOON, list(expected))
    assert {tenant: one.month for tenant, one in spent.items()} == {name: row[1] for name, row in expected.items()}


def test_a_change_that_fails_changes_nothing(tmp_path: Path) -> None:
    """While the file cannot be written the position stays, and afterwards the same entries are counted once."""
    book, _ = open_book(tmp_path)
    book.apply("log", 0, [(NOON_MS, request(1))])
    book._connection.execute("PRAGMA query_only = ON")
    with pytest.raises(UsageAccessError, match="cannot be read or written"):
        book.apply("log", 1, [(NOON_MS, request(2))])
    book._connection.execute("PRAGMA query_only = OFF")
    assert (book.position("log"), rows(book)[0][3]) == (1, 1)
    book.apply("log", 1, [(NOON_MS, request(2))])
    assert (book.position("log"), rows(book)[0][3]) == (2, 2)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 1000), st.booleans()), max_size=20))
def test_spent_is_the_sum_of_costs_and_open_reservations(tmp_path_factory, events) -> None:
    """In any order of reservations and entries the account equals a plain sum."""
    book, _ = open_book(tmp_path_factory.mktemp("usage"))
    reserved: dict[int, int] = {}
    ended: set[int] = set()
    costs = position = 0
    for number, amount, ends in events:
        if ends:
            book.apply("log", position, [(NOON_MS, request(number, cost=amount))])
            position += 1
            costs += min(amount, reserved.pop(number, amount))
            ended.add(number)
        else:
            book.reserve(NOON, [Reserved(f"req_{number}", "alpha", amount)])
            if number not in ended:
                reserved[number] = amount
    found = book.spent(NOON, ["alpha"]).get("alpha", SpentNow(0, 0, 0))
    assert found == SpentNow(costs, costs, sum(reserved.values()))
    book.close()


def test_a_reservation_behind_its_entry_is_not_recorded(tmp_path: Path) -> None:
    """A request that gave up waiting has its entry first: the reservation that comes then would never be released.
    Control: another request's is recorded."""
    book, _ = open_book(tmp_path)
    book.apply("log", 0, [(NOON_MS, request(1, cost=10))])
    book.reserve(NOON, [Reserved("req_1", "alpha", 70), Reserved("req_2", "alpha", 5)])
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(10, 10, 5)}


def test_hostile_amounts_overflow_nothing(tmp_path: Path) -> None:
    """Thousands of the largest costs, loans and reservations: sums stay whole numbers within the bound, and later
    requests are counted on. A loan of a day to come counts on the day of its entry."""
    book, _ = open_book(tmp_path)
    huge = (1 << 53) - 1
    book.apply("log", 0, [(NOON_MS, request(number, cost=huge)) for number in range(1_100)])
    book.reserve(NOON, [Reserved(f"other_{number}", "alpha", huge) for number in range(1_100)])
    assert book.spent(NOON, ["alpha"]) == {"alpha": SpentNow(MOST, MOST, MOST)}
    book.apply("log", 1_100, [(NOON_MS, request(5_000, tenant="beta"))])
    assert book.spent(NOON, ["beta"]) == {"beta": SpentNow(100, 100, 0)}
    assert all(type(value) is int for row in rows(book) for value in row[3:])
    (tmp_path / "other").mkdir()
    other, _ = open_book(tmp_path / "other")
    other.apply("log", 0, [(NOON_MS, lease("borrowed", huge, f"lease_{number}")) for number in range(1_100)])
    told = other.spent(NOON, ["alpha"])
    assert told == {"alpha": SpentNow(-MOST, -MOST, 0)} and type(told["alpha"].day) is int
    other.apply("log", 1_100, [(NOON_MS, lease("lent", huge, "lease_x", 1 << 40))])
    assert -MOST < other.spent(NOON, ["alpha"])["alpha"].month == other.spent(NOON, ["alpha"])["alpha"].day


@pytest.mark.parametrize("harm", ["a line", "a segment"])
def test_what_cannot_be_read_is_passed_over_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """A line that is none, and a segment that is none, in the middle of an old log: everything else is counted, and the
    position is the log's end, so that what comes is counted too."""
    monkeypatch.setattr("appliance.common.audit.log.SEGMENT_BYTES", 2_000)
    audit = open_log(tmp_path)
    for start in range(0, 40, 4):
        audit.append([(NOON_MS, request(number)) for number in range(start, start + 4)])
    path = sorted(tmp_path.glob("*.log"))[1]
    lines = path.read_bytes().split(b"\n")
    before = len(lines) - 2
    if harm == "a line":
        lines[2] = b"x" * len(lines[2])
        path.write_bytes(b"\n".join(lines))
    else:
        path.write_bytes(b"no header at all\n")
    book, _ = open_book(tmp_path)
    done = replay(book, tmp_path, audit.name)
    assert len(done.unreadable) == 1
    assert path.name in done.unreadable[0]
    assert rows(book)[0][3] == 40 - (1 if harm == "a line" else before)
    assert book.position(audit.name) == audit.size


@given(st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(2200, 1, 1), timezones=st.just(UTC)))
def test_periods_are_calendar_days_and_months(moment: datetime) -> None:
    """Day and month are those of the calendar in UTC, and end where the next begins."""
    period = period_of(moment.timestamp())
    assert date_of(period.day).date() == moment.date()
    assert month_start(period.month).strftime("%Y-%m-01") == moment.strftime("%Y-%m-01")
    assert date_of(first_day(period.month)) == month_start(period.month)
    assert datetime.fromtimestamp(period.day_ends, UTC) == date_of(period.day + 1)
    assert datetime.fromtimestamp(period.month_ends, UTC) == month_start(period.month + 1)


def test_runs_last_from_the_opening_of_the_log_to_the_last_entry(tmp_path: Path) -> None:
    """Hours awake are those between the opening of the log and its last entry, of each run within the time, also where
    one batch has several runs; the last goes on until now where the appliance runs, and time between counts nothing."""
    book, _ = open_book(tmp_path)
    hour = 3_600_000
    opened, came = (
        entry("log", event="opened", detail="went on"),
        entry("refused", outcome="X", reason="absent", count=1),
    )
    recovered = entry("log", event="recovered", detail="")
    batch = [(NOON_MS, opened), (NOON_MS + hour, came), (NOON_MS + 2 * hour, came), (NOON_MS + 5 * hour, recovered)]
    book.apply("log", 0, batch)
    book.apply("log", 4, [(NOON_MS + 6 * hour, came)])
    noon = datetime.fromtimestamp(NOON, UTC)

    def hours(first: float, last: float, now: float | None = None) -> float:
        chosen = Filter(noon + timedelta(hours=first), noon + timedelta(hours=last))
        return hours_awake(tmp_path, chosen, None if now is None else noon + timedelta(hours=now))

    assert hours(-10, 24) == 3.0
    assert hours(-10, 24, now=8) == 5.0
    assert (hours(1, 24), hours(1, 5.5), hours(3, 4), hours(3, 4, now=8), hours(7, 24)) == (2.0, 1.5, 0.0, 0.0, 0.0)


def test_models_share_the_cost_of_the_machine_by_computed_tokens() -> None:
    """Shares are of tokens without cached ones and add up to the whole; a million output tokens cost a model's part
    over its output, nothing computed bears nothing, and vectors have no such number."""
    by_model = [Sum(("m",), 2, 100, 40, 20, 0), Sum(("n",), 1, 240, 0, 0, 0), Sum(("idle",), 1, 0, 0, 0, 0)]
    found = host_cost(10.0, 2.0, "EUR", by_model)
    assert [(one.model, one.share, one.cost) for one in found.models] == [
        ("n", 0.75, 15.0),
        ("m", 0.25, 5.0),
        ("idle", 0, 0),
    ]
    assert [one.per_million for one in found.models] == [None, 250_000.0, None]
    assert sum(one.cost for one in found.models) == found.cost == 20.0
    assert host_cost(10.0, 2.0, "", []).cost == 20.0
