"""``athanor usage``: sums, times and formats over a real book."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from appliance.common.usage.book import open_book
from appliance.operator.cli.usage_view import BAR_COLUMNS, bar_of
from tests.appliance.common.audit.entries import filled
from tests.appliance.operator.cli.conftest import Run

ALL = ("--since", "2026-01", "--until", "2026-12")


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """An audit folder whose book has two tenants, two models, and requests on two days."""
    found, _ = open_book(tmp_path)
    batch = []
    for number, (day, hour, tenant, model, cost) in enumerate(
        [
            (14, 9, "alpha", "m", 1_500_000_000),
            (14, 9, "alpha", "m", 250_000_001),
            (14, 23, "alpha", "n", 0),
            (15, 0, "beta", "m", 3_000_000_000),
        ]
    ):
        sums = {"input_tokens": 100, "cached_tokens": 40, "output_tokens": 7, "cost": cost}
        moment = int(datetime(2026, 11, day, hour, 59, tzinfo=UTC).timestamp() * 1000)
        one = filled("request", request=f"r{number}", tenant=tenant, model=model, **sums)
        batch.append((moment, one))
    found.apply("log", 0, batch)
    found.close()
    return tmp_path


def rows(run: Run, book: Path, *arguments: str) -> list[dict[str, object]]:
    """The rows in JSON."""
    told = run("usage", "--from", str(book), "-o", "json", *arguments)
    assert told.exit_code == 0, told.output
    return list(json.loads(told.stdout)["rows"])


def test_by_tenant_the_most_first_with_exact_costs(run: Run, book: Path) -> None:
    """Tenants in the order of their cost, all numbers, and no amount rounded."""
    found = rows(run, book, *ALL)
    assert [(row["tenant"], row["requests"], row["cost"]) for row in found] == [
        ("beta", 1, "3.00"),
        ("alpha", 3, "1.750000001"),
    ]
    assert [found[1][name] for name in ("input_tokens", "cached_tokens", "output_tokens")] == [300, 120, 21]


def test_the_book_of_a_configuration(run: Run, book: Path, tmp_path: Path) -> None:
    """Without a folder the book is the one that the configuration names; without a log there is none."""
    values = {"run_dir": "run", "policy": "p.yaml", "models": [{"name": "m", "path": str(tmp_path)}]}
    values |= {"credentials": "keys", "pepper": "pepper", "audit": {"directory": str(book)}}
    (tmp_path / "athanor.yaml").write_text(json.dumps(values))
    told = run("usage", "--config", str(tmp_path / "athanor.yaml"), "-o", "json", *ALL)
    assert [row["tenant"] for row in json.loads(told.stdout)["rows"]] == ["beta", "alpha"]
    del values["audit"]
    (tmp_path / "athanor.yaml").write_text(json.dumps(values))
    told = run("usage", "--config", str(tmp_path / "athanor.yaml"), *ALL)
    assert (told.exit_code, "no section audit" in told.stderr) == (1, True)


def test_reasoning_is_shown_where_there_is_some(run: Run, book: Path) -> None:
    """The table has the column where a model reasoned, and not otherwise; documents and files always have it."""
    assert "REASONING" not in run("usage", "--from", str(book), *ALL).stdout
    assert [row["reasoning_tokens"] for row in rows(run, book, *ALL)] == [0, 0]
    found, _ = open_book(book)
    moment = int(datetime(2026, 11, 15, 3, tzinfo=UTC).timestamp() * 1000)
    one = filled("request", tenant="beta", model="m", output_tokens=9, reasoning_tokens=6)
    found.apply("log", 4, [(moment, one)])
    found.close()
    shown = run("usage", "--from", str(book), *ALL, "--tenant", "beta").stdout.split("\n")
    assert shown[0].split() == ["TENANT", "REQUESTS", "INPUT", "CACHED", "OUTPUT", "REASONING", "COST"]
    assert "6" in shown[1].split()
    lines = list(csv.reader(io.StringIO(run("usage", "--from", str(book), "-o", "csv", *ALL).stdout)))
    assert lines[0][-2:] == ["reasoning_tokens", "cost"]


def test_by_time_in_its_order(run: Run, book: Path) -> None:
    """Days and hours come in order, each with its models; a filter leaves out the others."""
    found = rows(run, book, *ALL, "--by", "day,model")
    assert [(row["day"], row["model"]) for row in found] == [
        ("2026-11-14", "m"),
        ("2026-11-14", "n"),
        ("2026-11-15", "m"),
    ]
    found = rows(run, book, *ALL, "--by", "hour", "--tenant", "alpha", "--model", "m")
    assert [(row["hour"], row["requests"]) for row in found] == [("2026-11-14T09:00Z", 2)]
    assert [row["month"] for row in rows(run, book, *ALL, "--by", "month")] == ["2026-11"]


def test_the_end_of_the_time_is_left_out(run: Run, book: Path) -> None:
    """Midnight belongs to the new day: a time from day to day has the hours from the first midnight to the second."""
    found = rows(run, book, "--since", "2026-11-14", "--until", "2026-11-15")
    assert [row["tenant"] for row in found] == ["alpha"]
    found = rows(run, book, "--since", "2026-11-15", "--until", "2026-11-15T01")
    assert [row["tenant"] for row in found] == ["beta"]
    assert rows(run, book, "--since", "2026-11-15T01", "--until", "2026-11-16") == []


def test_the_table_and_the_spreadsheet(run: Run, book: Path) -> None:
    """The table has titles, rows, a total and the time; the CSV reads back with exact amounts; nothing used says so."""
    told = run("usage", "--from", str(book), *ALL)
    lines = told.stdout.splitlines()
    assert lines[0].split() == ["TENANT", "REQUESTS", "INPUT", "CACHED", "OUTPUT", "COST"]
    assert lines[1].split()[:6] == ["beta", "1", "100", "40", "7", "3.0000"]
    assert lines[3].split() == ["all", "4", "400", "160", "28", "4.7500"]
    assert "2026-01-01 00:00 to 2026-12-01 00:00 UTC" in lines[5]
    told = run("usage", "--from", str(book), *ALL, "-o", "csv")
    read = list(csv.DictReader(io.StringIO(told.stdout)))
    assert [(row["tenant"], row["cost"]) for row in read] == [("beta", "3.00"), ("alpha", "1.750000001")]
    assert "nothing was used" in run("usage", "--from", str(book), "--since", "2025-01", "--until", "2025-02").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--by", "colour"), "summed by tenant, model, month, day, hour"),
        (("--by", "day,day"), "names something twice"),
        (("--since", "tomorrow"), "--since 'tomorrow' is no time"),
        (("--since", "2026-13"), "is no time"),
        (("--since", "now", "--until", "2026-01"), "ends before it begins"),
    ],
)
def test_wrong_options_are_told(run: Run, book: Path, arguments: tuple[str, ...], says: str) -> None:
    """Each ends with the status of wrong usage and says what is possible."""
    told = run("usage", "--from", str(book), *arguments)
    assert told.exit_code == 2
    assert says in told.stderr


def test_without_a_book_it_says_where_it_looked(run: Run, tmp_path: Path) -> None:
    """A folder without a book is an error with a hint, and no empty bill."""
    told = run("usage", "--from", str(tmp_path))
    assert told.exit_code == 1
    assert "there is no usage book" in told.stderr
    assert "--from names another folder" in told.stderr


@pytest.mark.parametrize(
    ("value", "bar"),
    [(0, ""), (1, "▏"), (500, "█" * (BAR_COLUMNS // 2)), (1000, "█" * BAR_COLUMNS), (531, "████████▍")],
)
def test_bars_are_in_proportion(value: int, bar: str) -> None:
    """A bar has its share of the columns, in eighths, and what is not 0 is seen."""
    assert bar_of(value, 1000) == bar


def test_by_end_user(run: Run, book: Path) -> None:
    """Rows of end users by tenant and pseudonym in each format, in whole days; by model or hour they are refused with
    the reason."""
    found = rows(run, book, *ALL, "--by", "tenant,user")
    assert [(row["tenant"], row["user"], row["requests"]) for row in found] == [("beta", "x", 1), ("alpha", "x", 3)]
    assert rows(run, book, "--by", "day,user", "--since", "2026-11-14T09:00Z", "--until", "2026-11-14T10:00Z") == [
        {
            "day": "2026-11-14",
            "user": "x",
            "requests": 3,
            "input_tokens": 300,
            "cached_tokens": 120,
            "output_tokens": 21,
            "reasoning_tokens": 0,
            "cost": "1.750000001",
        }
    ]
    told = run("usage", "--from", str(book), "-o", "csv", *ALL, "--by", "user")
    assert told.stdout.splitlines() == [
        "user,requests,input_tokens,cached_tokens,output_tokens,reasoning_tokens,cost",
        "x,4,400,160,28,0,4.750000001",
    ]
    assert "USER" in run("usage", "--from", str(book), *ALL, "--by", "tenant,user").stdout
    assert rows(run, book, *ALL, "--by", "user", "--user", "nobody") == []
    refused = run("usage", "--from", str(book), *ALL, "--by", "user,model")
    assert refused.exit_code == 1
    assert "end users are summed by tenant, day and month" in refused.output


def test_the_cost_of_the_machine(run: Run, book: Path, tmp_path: Path) -> None:
    """Cost by model as a table with its method, as CSV and JSON; without a price of the machine the command says what
    to write, and a filter is a usage error."""
    path = tmp_path / "athanor.yaml"
    text = "models: [{name: m, path: m}]\npolicy: p.yaml\ncredentials: k\npepper: s\nrun_dir: r\n"
    path.write_text(text)
    call = ("usage", "--cost", "--from", str(book), "--config", str(path), *ALL)
    refused = run(*call)
    assert refused.exit_code == 1
    assert "host: {price_per_hour: 2.5" in refused.output
    path.write_text(text + "host: {price_per_hour: 2, currency: EUR}\n")
    kept, _ = open_book(book)
    begin = int(datetime(2026, 11, 14, 0, tzinfo=UTC).timestamp() * 1_000)
    runs = [(begin, filled("log", event="opened")), (begin + 36_000_000, filled("refused"))]
    kept.apply("log", 4, runs)
    kept.close()
    told = json.loads(run(*call, "-o", "json").stdout)
    assert (told["hours_awake"], told["cost"], told["currency"]) == (10.0, 20.0, "EUR")
    assert [(row["model"], row["share"], row["cost"]) for row in told["rows"]] == [("m", 0.75, 15.0), ("n", 0.25, 5.0)]
    lines = run(*call, "-o", "csv").stdout.splitlines()
    assert lines[0].startswith("model,requests,") and len(lines) == 3
    table = run(*call).stdout
    assert "10.00 hours awake x 2 EUR = 20.0000 EUR" in " ".join(table.split())
    assert run(*call, "--tenant", "alpha").exit_code == 2


def plotted(run: Run, book: Path, *arguments: str, columns: int = 120) -> list[str]:
    """The lines of a plot."""
    told = run("usage", "--from", str(book), "-o", "plot", *arguments, columns=columns)
    assert told.exit_code == 0, told.output
    return told.stdout.splitlines()


def test_a_plot_has_a_column_for_each_step_and_a_line_for_each_tenant(run: Run, book: Path) -> None:
    """Two days in hours: three columns at the hours in which something was used, the empty hours between them, the
    highest with its cost at the axis, and tenants below with their sums, the largest first."""
    lines = plotted(run, book, "--since", "2026-11-14", "--until", "2026-11-16")
    assert "hour by hour" in lines[0]
    top = next(line for line in lines if line.lstrip().startswith("3.0000"))
    lowest = lines[lines.index(top) + 7]
    start = lowest.index("█")
    assert (top.count("█"), lowest[start:].rstrip()) == (1, f"█{' ' * 14}█")
    axis = next(line for line in lines if "2026-11-14T00:00Z" in line)
    assert start - axis.index("2026-11-14T00:00Z") == 9
    assert axis.rstrip().endswith("2026-11-15T23:00Z")
    names = [line.split()[0] for line in lines if line.startswith(("alpha", "beta"))]
    assert names == ["beta", "alpha"]
    assert [line.split()[-1] for line in lines if line.startswith(("alpha", "beta"))] == ["3.0000", "1.7500"]
    assert "4.7500 in all" in lines[-1]


def test_a_plot_takes_the_shortest_step_that_has_room(run: Run, book: Path) -> None:
    """Eleven months are plotted by months, a narrow terminal gets days of what a wide one gets in hours, --by day asks
    for days, and hours of a year have no room and are told so."""
    assert "month by month" in plotted(run, book, *ALL)[0]
    week = ("--since", "2026-11-13", "--until", "2026-11-16")
    assert "hour by hour" in plotted(run, book, *week)[0]
    assert "day by day" in plotted(run, book, *week, columns=80)[0]
    assert "day by day" in plotted(run, book, *week, "--by", "day,model")[0]
    told = run("usage", "--from", str(book), "-o", "plot", "--by", "hour", *ALL)
    assert (told.exit_code, "more steps than" in told.stderr) == (2, True)
    told = run("usage", "--from", str(book), "-o", "plot", "--by", "hour,day", *week)
    assert (told.exit_code, "has one time" in told.stderr) == (2, True)
    told = run("usage", "--from", str(book), "-o", "plot", "--cost", *ALL)
    assert (told.exit_code, "has no plot" in told.stderr) == (2, True)
    assert plotted(run, book, "--since", "2025-01", "--until", "2025-02")[0] == "nothing was used"
    last = ("--since", "9999-12", "--until", "9999-12-31T23", "--by")
    assert {plotted(run, book, *last, step)[0] for step in ("month", "day")} == {"nothing was used"}


def test_a_plot_folds_what_is_beyond_its_lines_and_loses_none_of_it(run: Run, tmp_path: Path) -> None:
    """Of twenty tenants the twelve largest have lines, and the rest share one whose sum is what they used; without
    prices the amounts are tokens."""
    found, _ = open_book(tmp_path)
    moment = int(datetime(2026, 11, 14, 9, tzinfo=UTC).timestamp() * 1000)
    batch = [
        (moment, filled("request", request=f"r{number}", tenant=f"t{number:02}", model="m", input_tokens=100 + number))
        for number in range(20)
    ]
    found.apply("log", 0, batch)
    found.close()
    lines = plotted(run, tmp_path, "--since", "2026-11-14", "--until", "2026-11-15")
    names = [line.split()[0] for line in lines if line.startswith("t")]
    assert names == [f"t{number:02}" for number in range(19, 7, -1)]
    rest = next(line for line in lines if line.startswith("all others"))
    assert rest.rstrip().endswith(f"{sum(100 + number for number in range(8))} tokens")
    assert "prompt and output tokens" in lines[0]


def test_a_plot_of_end_users_has_their_days(run: Run, book: Path) -> None:
    """End users are in the book by days, so their plot has days where others have hours; a user's line has its sum."""
    found, _ = open_book(book)
    moment = int(datetime(2026, 11, 15, 3, tzinfo=UTC).timestamp() * 1000)
    one = filled("request", tenant="beta", model="m", cost=2_000_000_000, end_user="ann")
    found.apply("log", 4, [(moment, one)])
    found.close()
    lines = plotted(run, book, "--by", "user", "--since", "2026-11-14", "--until", "2026-11-16")
    assert "day by day" in lines[0]
    assert [(line.split()[0], line.split()[-1]) for line in lines if line.startswith(("x", "ann"))] == [
        ("x", "4.7500"),
        ("ann", "2.0000"),
    ]
