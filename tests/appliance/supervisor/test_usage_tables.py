"""What the supervisor tells of the usage of all tenants: sums, steps, bounds, and how often the book is read."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from appliance.common.audit.entry import Entry, entry
from appliance.common.audit.log import open_log
from appliance.common.config_places import HostConfig
from appliance.common.control import MAX_DATAGRAM_BYTES, encode
from appliance.common.control_usage import Overview, OverviewQuery, UsageTable, UsageTableQuery
from appliance.common.errors import ControlError
from appliance.common.usage import report
from appliance.common.usage.book import UsageBook, open_book
from appliance.common.usage.report import Sum
from appliance.supervisor import usage_tables as module
from appliance.supervisor.audit import Recorder
from appliance.supervisor.metering import Metering
from appliance.supervisor.usage_tables import MAX_MODELS, MAX_ROWS, UsageTables
from tests.appliance.common.usage.test_tenant_sums import ms, request

NOW = ms(2026, 3, 15, 12, 30) / 1_000
CLASSES = {"alpha": "strict", "beta": "shared", "gamma": "shared"}


def opening() -> Entry:
    """The log was opened."""
    return entry("log", event="opened", detail="")


@pytest.fixture
def book(tmp_path: Path) -> UsageBook:
    """Two tenants on two models, today and before; one that the policy does not have any more."""
    made, _ = open_book(tmp_path)
    batch = [(ms(2026, 3, 15, 10, 30), opening())]
    for when, tenant, model, user in (
        ((2026, 3, 15, 0), "alpha", "m", "u1"),
        ((2026, 3, 15, 12), "alpha", "n", "u1"),
        ((2026, 3, 15, 12), "alpha", "m", "u2"),
        ((2026, 3, 15, 12), "beta", "m", ""),
        ((2026, 3, 9, 0), "beta", "m", ""),
        ((2026, 3, 8, 23), "gone", "m", ""),
        ((2026, 2, 13, 23), "beta", "m", ""),
    ):
        batch.append((ms(*when), request(tenant, model, end_user=user)))
    made.apply("log", 0, sorted(batch, key=lambda one: one[0]))
    return made


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def tables(folder: Path, clock: Clock | None = None) -> UsageTables:
    """Answers from this folder, with a price of the machine."""
    host = HostConfig(price_per_hour=2.5, currency="EUR")
    return UsageTables(folder, lambda: CLASSES, host, lambda: NOW, clock or Clock())


def overview(found: UsageTables, span: str) -> Overview:
    """The overview of a span."""
    told = found.answer(OverviewQuery("r", span))
    assert isinstance(told, Overview)
    return told


def table(found: UsageTables, by: str = "tenant", tenant: str = "", find: str = "", offset: int = 0) -> UsageTable:
    """A table of the day."""
    told = found.answer(UsageTableQuery("r", "today", by, tenant, find, offset))
    assert isinstance(told, UsageTable)
    return told


@pytest.mark.parametrize(
    ("span", "since", "requests", "steps"),
    [("today", (2026, 3, 15), 4, 24), ("7d", (2026, 3, 9), 5, 168), ("30d", (2026, 2, 14), 6, 30)],
)
def test_a_span_is_whole_days_up_to_the_hour_that_runs(
    book: UsageBook, tmp_path: Path, span: str, since: tuple[int, ...], requests: int, steps: int
) -> None:
    """The first hour of a span counts and the one before does not; each step has its own, and all add up."""
    told = overview(tables(tmp_path), span)
    assert told.problem == ""
    assert (told.since, told.until) == (ms(*since) // 1_000, ms(2026, 3, 15, 13) // 1_000)
    assert told.total[0] == requests
    assert {len(one) for one in told.steps.values()} == {3 * steps}
    assert sum(sum(one[0::3]) for one in told.steps.values()) == requests
    last = 12 if span == "today" else 156 if span == "7d" else 29
    assert told.steps["m"][3 * last :][:3] == ([2, 30, 200] if span != "30d" else [3, 45, 300])


def test_an_overview_has_models_classes_and_the_machine(book: UsageBook, tmp_path: Path) -> None:
    """Models by cost, tenants' classes of now, and two hours in which the appliance ran."""
    told = overview(tables(tmp_path), "30d")
    assert told.models == {"m": [5, 50, 20, 25, 500, 15], "n": [1, 10, 4, 5, 100, 3]}
    assert {name: one[0] for name, one in told.classes.items()} == {"strict": 3, "shared": 2, "": 1}
    assert (told.hours, told.price_per_hour, told.currency) == (2.0, 2.5, "EUR")


def test_tables_are_searched_and_paged(book: UsageBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants by cost, a part of a name in any case, the rest from an offset; one tenant's models and end users."""
    found = tables(tmp_path)
    assert list(table(found).rows) == ["alpha", "beta"]
    assert (table(found, find="BET").rows, table(found, find="x").matching) == ({"beta": [1, 10, 4, 5, 100, 3]}, 0)
    monkeypatch.setattr(module, "MAX_ROWS", 1)
    assert (list(table(found).rows), table(found).matching) == (["alpha"], 2)
    assert list(table(found, offset=1).rows) == ["beta"]
    monkeypatch.setattr(module, "MAX_ROWS", MAX_ROWS)
    assert table(found, "model", "alpha").rows == {"m": [2, 20, 8, 10, 200, 6], "n": [1, 10, 4, 5, 100, 3]}
    assert {name: one[0] for name, one in table(found, "user", "alpha").rows.items()} == {"u1": 2, "u2": 1}
    assert table(found, "user", "beta").rows == {}


def test_the_book_is_read_once_for_all_pages(book: UsageBook, tmp_path: Path) -> None:
    """What comes within seconds of a reading is not seen, and then is: however many ask, the book is read once."""
    clock = Clock()
    found = tables(tmp_path, clock)
    assert overview(found, "today").total[0] == 4
    book.apply("log", 8, [(ms(2026, 3, 15, 12, 1), request("beta", "m"))])
    clock.now = module.FRESH_S - 0.1
    assert (overview(found, "today").total[0], table(found).rows["beta"][0]) == (4, 1)
    clock.now = module.FRESH_S
    assert (overview(found, "today").total[0], table(found).rows["beta"][0]) == (5, 2)


def test_all_of_a_page_is_from_one_state_of_the_book(
    book: UsageBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry that is counted while a span is read is in both sums or in neither, so totals, models and table agree;
    the answers of one reading have one number, those of the next another. Control: the next reading has the entry."""
    clock, report_sums = Clock(), report._sums

    def counted_behind(*given: object) -> list[Sum]:
        found = report_sums(*given)  # type: ignore[arg-type]
        if len(given[1]) == 1:  # type: ignore[arg-type]
            position = book.position("log")
            book.apply("log", position, [(ms(2026, 3, 15, 12, 1), request("beta", "m"))])
        return found

    monkeypatch.setattr(report, "_sums", counted_behind)
    found = tables(tmp_path, clock)
    told, shown = overview(found, "today"), table(found)
    assert (
        told.total[0] == sum(one[0] for one in told.models.values()) == sum(one[0] for one in shown.rows.values()) == 4
    )
    assert told.reading == shown.reading == 1
    clock.now = module.FRESH_S
    told = overview(found, "today")
    assert (told.reading, told.total[0], sum(one[0] for one in told.models.values())) == (2, 5, 5)
    assert table(found, "model", "alpha").reading == 0


def test_a_tenant_that_was_unlinked_is_named_no_more(
    book: UsageBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read before a shred is not told after it, nor what was being read meanwhile; the tenant's sums stay,
    under its pseudonym. Control: without a shred what was read is told again."""
    found, log = tables(tmp_path), open_log(tmp_path)
    metering = Metering(book, tmp_path, lambda *_: True, lambda: NOW)
    recorder = Recorder(log, lambda _state: None, metering=metering)
    recorder.on_renamed = found.forget
    assert list(table(found).rows) == ["alpha", "beta"]
    book.rename(NOW, "alpha", "t-1")
    assert list(table(found).rows) == ["alpha", "beta"], "read again: the control shows nothing"
    log.names.hidden(request("beta", "m"))
    pseudonym = log.names.pseudonym("beta")
    assert recorder._unlink(log, "beta") == pseudonym
    assert set(table(found).rows) == {"t-1", pseudonym}
    now = found._now

    def shredded_meanwhile(span: module.Span, folder: Path) -> module._Read:
        read = now(span, folder)
        monkeypatch.setattr(found, "_now", now)
        book.rename(NOW, "t-1", "t-3")
        found.forget()
        return read

    monkeypatch.setattr(found, "_now", shredded_meanwhile)
    found.forget()
    assert set(table(found).rows) == {"t-3", pseudonym}
    assert "t-1" not in repr(found._read)


def test_reasons_why_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No log, no book, and a book that takes too long to read, each in words and without a path; control: in time."""
    assert "no audit log" in overview(UsageTables(None, dict, None), "today").problem
    assert overview(tables(tmp_path), "today").problem == "the usage book cannot be read now"
    book, _ = open_book(tmp_path)
    with book._change() as connection:
        rows = ((ms(2026, 3, 15) // 3_600_000, f"t{number}", "m") for number in range(20_000))
        connection.executemany("INSERT INTO used VALUES (?, ?, ?, 1, 1, 0, 1, 0, 0)", rows)
    clock = Clock()
    found = tables(tmp_path, clock)
    monkeypatch.setattr(module, "WITHIN_S", 0.0)
    assert overview(found, "today").problem == "reading the usage book took more than 0 s"
    monkeypatch.setattr(module, "WITHIN_S", 30.0)
    assert overview(found, "today").problem == "reading the usage book took more than 0 s", "not read again at once"
    clock.now = module.FRESH_S
    assert overview(found, "today").total[0] == 20_000


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(OverviewQuery("r", "year"), id="span"),
        pytest.param(UsageTableQuery("r", "7d", "hour", "", "", 0), id="by"),
        pytest.param(UsageTableQuery("r", "7d", "user", "", "", 0), id="all-users"),
        pytest.param(UsageTableQuery("r", "7d", "tenant", "alpha", "", 0), id="tenant-of-one"),
        pytest.param(UsageTableQuery("r", "7d", "tenant", "", "f" * 65, 0), id="find"),
        pytest.param(UsageTableQuery("r", "7d", "model", "t" * 64, "", 0), id="name"),
        pytest.param(UsageTableQuery("r", "7d", "tenant", "", "", -1), id="offset"),
    ],
)
def test_what_no_gateway_asks_is_refused(message: OverviewQuery | UsageTableQuery) -> None:
    """A span, a sum, a name or an offset that is none costs the attachment; right questions do not."""
    found = UsageTables(None, dict, None)
    found.check(OverviewQuery("r", "30d"))
    found.check(UsageTableQuery("r", "30d", "user", "t" * 63, "f" * 64, 0))
    with pytest.raises(ControlError):
        found.check(message)


def test_the_largest_answers_fit_a_datagram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows, models, steps and unusual tenants as are told, with the longest names and the largest sums; names
    that are all escaped make the rows fewer."""
    most = [1 << 53] * 6
    hours = [datetime.fromtimestamp(NOW - 3_600 * ago, UTC).strftime("%Y-%m-%dT%H:00Z") for ago in range(156)]
    rows = {
        1: [Sum((f"{number:063}",), *most) for number in range(10_000)],
        2: [Sum((hour, f"{number:0256}"), *most) for hour in hours for number in range(MAX_MODELS + 2)],
    }
    odd = [module.Unusual(f"{number:063}", *most[:4]) for number in range(20)]
    monkeypatch.setattr(module, "sums_together", lambda _folder, groups, *_: [rows[len(by)] for by in groups])
    monkeypatch.setattr(module, "unusual", lambda *_: odd)
    monkeypatch.setattr(module, "hours_awake", lambda *_: 168.123456789)
    open_book(tmp_path)
    found = tables(tmp_path)
    told = overview(found, "7d")
    assert (len(told.models), len(told.steps)) == (MAX_MODELS + 1, module.MAX_SERIES + 1)
    assert len(encode(told)) <= MAX_DATAGRAM_BYTES
    table_of_all = found.answer(UsageTableQuery("r" * 64, "7d", "tenant", "", "", 0))
    assert len(table_of_all.rows) == MAX_ROWS  # type: ignore[union-attr]
    assert len(encode(table_of_all)) <= MAX_DATAGRAM_BYTES
    monkeypatch.setattr(
        module, "tenant_table", lambda *_: [Sum((chr(99 + n) * 255 + "\u2028",), *most) for n in range(400)]
    )
    users = found.answer(UsageTableQuery("r", "7d", "user", "alpha", "", 0))
    assert 0 < len(users.rows) < MAX_ROWS  # type: ignore[union-attr]
    assert len(encode(users)) <= MAX_DATAGRAM_BYTES


@pytest.mark.parametrize("amount", [pytest.param(1 << 53, id="usual"), pytest.param((1 << 63) - 1, id="largest")])
def test_an_overview_of_invented_names_is_cut_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amount: int
) -> None:
    """Names that are all escaped, of full length, with sums of 19 digits: an overview has fewer models, plots fewer,
    and what is left out is in the row of all others, with every request; control: usual names are all told."""
    hours = [datetime.fromtimestamp(NOW - 3_600 * ago, UTC).strftime("%Y-%m-%dT%H:00Z") for ago in range(156)]
    number = MAX_MODELS + 60
    for name, whole in (("\\", False), ("m", True)):
        names = [f"{index:03}" + name * (253 if not whole else 100) for index in range(number)]
        rows = {
            1: [Sum((f"{index:063}",), *[amount] * 6) for index in range(1_000)],
            2: [Sum((hour, one), *[amount] * 6) for hour in hours for one in names],
        }
        odd = [module.Unusual(one, *[amount] * 4) for one in names[:20]]
        made = [rows[1], rows[2]]
        monkeypatch.setattr(module, "sums_together", lambda *_, made=made: made)
        monkeypatch.setattr(module, "unusual", lambda *_, odd=odd: odd)
        monkeypatch.setattr(module, "hours_awake", lambda *_: 168.123456789)
        open_book(tmp_path)
        told = overview(tables(tmp_path), "7d")
        assert len(encode(told)) <= MAX_DATAGRAM_BYTES
        assert sum(one[0] for one in told.models.values()) == amount * number * len(hours)
        assert sum(sum(one[0::3]) for one in told.steps.values()) == amount * number * len(hours)
        assert (len(told.models) == MAX_MODELS + 1, len(told.unusual) == 20) == (whole, whole)
        assert list(told.models)[-1] == ""
