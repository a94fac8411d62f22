"""The page of usage without a browser: what is shaped from the supervisor's sums, who is refused, what is bounded."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from typing import Any

import httpx
import pytest

from appliance.common.control_usage import Overview, OverviewQuery, UsageTable, UsageTableQuery
from appliance.common.errors import UnavailableError
from appliance.common.operator_roles import NEEDED, OperatorRole
from appliance.common.usage.report import By
from appliance.gateway.console.budgets import budgets
from appliance.gateway.console.usage import ConsoleUsage, csv_text
from appliance.gateway.console.usage_look import MAX_BUDGETS, MAX_DETAIL_ROWS, MAX_TENANT_ROWS, Budget, UsageAsked
from appliance.gateway.console.usage_routes import usage_routes
from appliance.gateway.request.spend import SpendParts
from appliance.gateway.sandboxes.questions import SupervisorQuestions
from policy.loader import Source, load_policy
from tests.appliance.gateway.console.conftest import Console
from tests.appliance.gateway.console.usage_pictures import FakeUsage

UNIT = 1_000_000_000

POLICY = load_policy(
    [
        Source(
            "p.yaml",
            """
version: 1
prices: {currency: EUR, rules: [{models: ["*"], input: 1, output: 2}]}
tenants:
  alpha:
    credentials: ["key:a"]
    models: ["*"]
    limits: {spend_per_day: 10, spend_per_month: 100}
    class: strict
    kv: {reservation: 20%}
  beta: {credentials: ["key:b"], models: ["*"], limits: {spend_per_month: 100}}
  gamma: {credentials: ["key:g"], models: ["*"]}
""",
        )
    ]
)

SPENT = {"alpha": SpendParts(2 * UNIT, 90 * UNIT, UNIT), "beta": SpendParts(0, 20 * UNIT, 0)}

OVERVIEW = Overview(
    request="",
    since=1_000,
    until=4_600,
    step_s=3_600,
    total=[3, 300, 100, 200, 5, 20],
    models={"m": [2, 200, 50, 150, 5, 20], "e": [1, 100, 50, 0, 0, 0]},
    classes={"strict": [3, 300, 100, 200, 5, 20]},
    steps={"m": [3, 500, 5]},
    unusual={"alpha": [1, 2, 3, 4]},
    hours=2.0,
    price_per_hour=2.5,
    currency="EUR",
    problem="",
)


class Supervisor:
    """Answers each question at once, from rows that a test may exchange."""

    def __init__(self) -> None:
        self.overview = OVERVIEW
        self.rows = {"alpha": [2, 200, 100, 150, 5, 20], "gone": [1, 100, 0, 50, 0, 0]}
        self.at_once = 200
        self.overviews = 0
        self.read_between: Overview | None = None
        """Overview of the reading that comes before the next table; None: there is none."""
        self.asked: list[UsageTableQuery] = []
        self.questions = SupervisorQuestions.to(self.tell)

    def tell(self, message: Any) -> None:
        """Take a question."""
        if isinstance(message, OverviewQuery):
            self.overviews += 1
            self.questions.overviews.take(replace(self.overview, request=message.request))
            return
        self.asked.append(message)
        if self.read_between is not None:
            self.overview, self.read_between = self.read_between, None
        rows = dict(list(self.rows.items())[message.offset :][: self.at_once])
        self.questions.tables.take(UsageTable(message.request, rows, len(self.rows), "", self.overview.reading))


@pytest.fixture
def supervisor() -> Supervisor:
    """One with two tenants."""
    return Supervisor()


def opened(supervisor: Supervisor) -> ConsoleUsage:
    """The page's source over this supervisor."""
    return ConsoleUsage(supervisor.questions, lambda: POLICY, lambda tenant: SPENT[tenant], lambda: 4_000.0)


async def test_a_look_is_shaped_from_the_sums(supervisor: Supervisor) -> None:
    """Sums go under their names; classes and currency are the policy's; the machine's cost is that of the command."""
    look = await opened(supervisor).look(UsageAsked("7d", find="A"), "p")
    alpha, gone = look.tenants.rows
    assert (alpha.isolation_class, gone.isolation_class) == ("strict", "")
    assert (alpha.input, alpha.cached, alpha.output, alpha.reasoning, alpha.cost) == (200, 100, 150, 20, 5)
    assert (look.currency, look.priced, look.total.reasoning) == ("EUR", True, 20)
    one, other = look.models
    assert (one.host_share, one.host_cost) == (pytest.approx(300 / 350), pytest.approx(5 * 300 / 350))
    assert (one.host_per_million, other.host_per_million) == (pytest.approx(5e6 * 300 / 350 / 150), None)
    assert look.machine is not None and look.machine.cost == 5.0
    assert look.unusual[0].usual_tokens == 4
    assert [one.tenant for one in look.budgets.rows] == ["alpha", "beta"]
    supervisor.overview = replace(OVERVIEW, price_per_hour=-1.0)
    look = await opened(supervisor).look(UsageAsked("7d"), "p")
    assert (look.machine, look.models[0].host_share) == (None, None)


async def test_a_page_is_from_one_reading(supervisor: Supervisor) -> None:
    """Where the book was read again between both questions, the overview is asked for once more, and the page has the
    later sums throughout. Control: with one reading there are two questions."""
    usage = opened(supervisor)
    await usage.look(UsageAsked("today", "", 0, ""), "page")
    assert (supervisor.overviews, len(supervisor.asked)) == (1, 1)
    supervisor.read_between = replace(OVERVIEW, total=[4, 400, 100, 200, 5, 20], reading=2)
    look = await usage.look(UsageAsked("today", "", 0, ""), "page")
    assert (supervisor.overviews, look.total.requests) == (3, 4)


async def test_a_look_is_bounded(supervisor: Supervisor) -> None:
    """A page of tenants, a part of one tenant's end users; how many there are in all is told."""
    supervisor.rows = {f"t{number:05}": [1] * 6 for number in range(10_000)}
    page = (await opened(supervisor).look(UsageAsked("7d", offset=40), "p")).tenants
    assert (len(page.rows), page.rows[0].name, page.matching) == (MAX_TENANT_ROWS, "t00040", 10_000)
    detail = await opened(supervisor).detail(UsageAsked("7d", tenant="alpha", offset=40), By.USER)
    assert (len(detail.rows), detail.matching) == (MAX_DETAIL_ROWS, 10_000)
    assert (supervisor.asked[-1].by, supervisor.asked[-1].tenant, supervisor.asked[-1].offset) == ("user", "alpha", 0)


def test_the_scarcer_limit_of_each_tenant_is_shown() -> None:
    """The one of two limits with less left is shown, reservations counted; those without a limit are in no row; the
    list is bounded and searched."""
    found = budgets(POLICY, lambda tenant: SPENT[tenant], "")
    assert found.rows == (
        Budget("alpha", "month", 100 * UNIT, 90 * UNIT, UNIT),
        Budget("beta", "month", 100 * UNIT, 20 * UNIT, 0),
    )
    assert [one.tenant for one in budgets(POLICY, lambda tenant: SPENT[tenant], "et").rows] == ["beta"]
    lines = "".join(
        f'  t{number}: {{credentials: ["key:{number}"], models: ["*"], limits: {{spend_per_day: 1}}}}\n'
        for number in range(30)
    )
    prices = 'prices: {currency: EUR, rules: [{models: ["*"], input: 1, output: 2}]}\n'
    many = load_policy([Source("p.yaml", f"version: 1\n{prices}tenants:\n{lines}")])
    found = budgets(many, lambda tenant: SpendParts(int(tenant[1:]), 0, 0), "")
    assert (len(found.rows), found.matching, found.rows[0].tenant) == (MAX_BUDGETS, 30, "t29")


async def test_a_download_has_every_tenant_once(supervisor: Supervisor) -> None:
    """All parts of the table in one file, amounts exact; a table that changes while it is read is no file."""
    supervisor.rows = {f"t{number}": [1, 2, 3, 4, 1_500_000_001, 6] for number in range(450)}
    lines = list(csv.DictReader(io.StringIO(await opened(supervisor).csv(UsageAsked("7d")))))
    assert [one["tenant"] for one in lines] == list(supervisor.rows)
    assert lines[0] | {"tenant": ""} == {
        "tenant": "",
        "requests": "1",
        "input_tokens": "2",
        "cached_tokens": "3",
        "output_tokens": "4",
        "reasoning_tokens": "6",
        "cost": "1.500000001",
    }
    asked = supervisor.tell

    def changing(message: Any) -> None:
        asked(message)
        supervisor.rows = dict(reversed(supervisor.rows.items()))

    supervisor.questions.tables._tell = changing
    with pytest.raises(UnavailableError, match="changed while it was read"):
        await opened(supervisor).csv(UsageAsked("7d"))


def test_a_spreadsheet_computes_no_name() -> None:
    """A name that is a formula is text; control: another one is as it is."""
    lines = list(csv.reader(io.StringIO(csv_text({'=cmd|"x"!A1,': [0] * 6, "alpha": [0] * 6}))))
    assert [line[0] for line in lines] == ["tenant", '\'=cmd|"x"!A1,', "alpha"]


async def test_without_a_supervisor_nothing_is_told() -> None:
    """A gateway that asks nobody says so."""
    usage = ConsoleUsage(None, lambda: POLICY, lambda tenant: SPENT[tenant])
    with pytest.raises(UnavailableError):
        await usage.look(UsageAsked("7d"), "p")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("usage?span=year", id="span"),
        pytest.param("usage?offset=-1", id="offset"),
        pytest.param(f"usage?find={'x' * 65}", id="find"),
        pytest.param(f"usage/users?tenant={'x' * 64}", id="tenant"),
        pytest.param("usage/users", id="no-tenant"),
    ],
)
def test_odd_questions_are_refused_in_words(console: Console, path: str) -> None:
    """Bad input is a 400 that says which field; nothing is asked."""
    answer = httpx.get(f"{console.url}/console/{path}")
    field = path.partition("?")[2].partition("=")[0] or "tenant"
    assert (answer.status_code, field in answer.json()["error"]["message"]) == (400, True)
    assert console.gateway.usage.asked == []


@pytest.mark.parametrize("name", ["usage", "usage/models?tenant=a", "usage/users?tenant=a", "usage.csv"])
def test_pages_of_others_get_nothing(console: Console, name: str) -> None:
    """Another origin is refused, the page itself answered, with the headers of all of the console; a supervisor that
    does not tell is a 503 with its reason."""
    url = f"{console.url}/console/{name}"
    answer = httpx.get(url, headers={"origin": console.url})
    assert (answer.status_code, answer.headers["cache-control"]) == (200, "no-store")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert httpx.get(url, headers={"origin": "http://evil.example"}).status_code == 403
    assert httpx.post(url).status_code == 405
    console.gateway.usage.problem = "no audit log"
    refused = httpx.get(url)
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "no audit log")


def test_a_download_is_a_file(console: Console) -> None:
    """The browser saves it under a name."""
    answer = httpx.get(f"{console.url}/console/usage.csv?span=30d&find=a")
    assert answer.headers["content-disposition"] == 'attachment; filename="athanor-usage-30d.csv"'
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert console.gateway.usage.asked == [UsageAsked("30d", "a")]


def test_end_users_need_the_role_security() -> None:
    """A viewer from elsewhere sees tenants, whose totals metrics have as well; who their end users are, not."""
    needed = {route.path: NEEDED[f"GET {route.path}"] for route in usage_routes(FakeUsage(), "p")}
    assert needed.pop("/console/usage/users") is OperatorRole.SECURITY
    assert set(needed.values()) == {OperatorRole.VIEWER}
