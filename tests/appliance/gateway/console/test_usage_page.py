"""The page of usage in a real Chromium, at a real listener, over looks that the tests choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from appliance.gateway.console.usage_look import Budgets, TenantUsagePage, UnusualTenant
from tests.appliance.gateway.console.browser import Page
from tests.appliance.gateway.console.conftest import Console
from tests.appliance.gateway.console.pictures import HOSTILE
from tests.appliance.gateway.console.test_page import OpenPage, looks
from tests.appliance.gateway.console.usage_pictures import model_row, row, tenant_row, usage_look

WORDS = "by cost"
"""What the page says once it shows something."""


def opened(open_page: OpenPage, span: str = "7d", **options: Any) -> Page:
    """The page of usage, with a span."""
    page: Page = open_page(name=f"usage.html#{span}", words=WORDS, **options)
    return page


def click(page: Page, where: str, title: str) -> None:
    """Press the button with this title."""
    page.run(f"[...document.querySelectorAll('{where} button')].find((b) => b.textContent === '{title}').click()")


def test_it_shows_what_was_used(open_page: OpenPage, console: Console) -> None:
    """Cost, tokens with their parts, the machine's cost, tenants, models, classes, limits and who is unusual; no
    complaint of the browser, and no other host is asked."""
    page = opened(open_page)
    for words in (
        "1,284.56 EUR",
        "37 % cached: 302 M",
        "23 % reasoning: 21.8 M",
        "378.00 EUR",
        "3.93 per million output tokens",
        "globex sends ten times what is usual for it",
        "umbrella-research",
        "tenants that left",
        "99 % of 40.00",
    ):
        assert words in page.text()
    assert page.run("document.querySelectorAll('.plot rect.c0').length") > 100
    assert page.run("document.querySelector('#budgets .limit').className") == "limit full"
    assert page.complaints() == []
    assert all(url.startswith(f"{console.url}/console/") for url in page.requests())


def test_another_time_and_another_measure_are_chosen(open_page: OpenPage, console: Console) -> None:
    """Thirty days are asked for and plotted by day; requests take the place of cost; the address and the download are
    those of the time."""
    page = opened(open_page)
    click(page, "#spans", "30 days")
    page.wait_text("Cost by model, each day")
    assert console.gateway.usage.asked[-1].span == "30d"
    assert page.run("location.hash") == "#30d"
    assert "span=30d" in page.run("document.getElementById('download').href")
    click(page, "#measures", "Requests")
    page.wait_text("Requests by model, each day")


def test_the_plot_is_read_by_keyboard(open_page: OpenPage) -> None:
    """Arrow keys go from bar to bar and say its time and amount; Escape gives the whole time back."""
    page = opened(open_page)
    told = "document.querySelector('.plot .field').getAttribute('aria-valuetext')"
    assert page.run(told).startswith("In all: ")
    page.run("document.querySelector('.plot .field').focus()")
    for key in ("Home", "ArrowRight"):
        page.run(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))")
    assert ", 01:00: " in page.run(told)
    assert page.run("document.querySelectorAll('.plot rect.column.at').length") == 1
    page.press("Escape")
    assert page.run(told).startswith("In all: ")


def test_a_tenant_opens_into_models_and_end_users(open_page: OpenPage, console: Console) -> None:
    """Models at once, end users when they are asked for; a refusal is shown in its words."""
    page = opened(open_page)
    page.run("document.querySelector('#tenants .opener').click()")
    page.wait_text("athanor usage --by model --tenant acme")
    assert [one.tenant for one in console.gateway.usage.asked if one.tenant] == ["acme"]
    click(page, ".two", "Show")
    page.wait_text("5f1c0b9a7d3e4f60815a2b3c4d5e6f70")
    console.gateway.usage.problem = "this needs the role security"
    page.run("document.querySelectorAll('#tenants .opener')[1].click()")
    page.wait_text("this needs the role security")


def test_ten_thousand_tenants_are_pages_and_a_search(open_page: OpenPage, console: Console) -> None:
    """The first page says of how many it is; Later and a word ask for others."""
    rows = tuple(tenant_row(f"t{number:05}", 0.01) for number in range(20))
    console.gateway.usage.changes = {"tenants": TenantUsagePage(rows, 0, 10_000)}
    page = opened(open_page)
    page.wait_text("1 to 20 of 10,000 tenants")
    page.run("document.getElementById('later').click()")
    page.wait(lambda: console.gateway.usage.asked[-1].offset == 20, "the second page to be asked for")
    page.run("document.getElementById('find').focus()")
    page.press("x")
    page.wait(lambda: console.gateway.usage.asked[-1].find == "x", "the word to be asked for")
    assert console.gateway.usage.asked[-1].offset == 0


def test_names_are_text(open_page: OpenPage, console: Console) -> None:
    """Tenants, models, end users, limits and classes that are markup are shown as what they are."""
    shown = usage_look("7d")
    (limit, *_) = shown.budgets.rows
    console.gateway.usage.users = (row(HOSTILE, 0.1),)
    console.gateway.usage.changes = {
        "tenants": TenantUsagePage((replace(tenant_row(HOSTILE, 0.5), isolation_class=HOSTILE),), 0, 1),
        "models": (model_row(HOSTILE, 1.0),),
        "classes": (row(HOSTILE),),
        "steps": {HOSTILE: shown.steps["mistral-small"]},
        "budgets": Budgets((replace(limit, tenant=HOSTILE),), 1),
        "unusual": (UnusualTenant(HOSTILE, 1, 1, 1, 1),),
        "currency": HOSTILE,
    }
    page = opened(open_page)
    page.run("document.querySelector('#tenants .opener').click()")
    page.wait_text("Show")
    click(page, ".two", "Show")
    page.wait_text("Pseudonym")
    assert page.text().count(HOSTILE) >= 10
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    assert page.run("document.title") == "Usage - Athanor"
    assert page.complaints() == []


@pytest.mark.parametrize(
    ("width", "scheme"),
    [(1_280, "light"), *(pytest.param(width, "dark", marks=pytest.mark.full) for width in (390, 360))],
)
def test_everything_can_be_read(open_page: OpenPage, console: Console, scheme: str, width: int) -> None:
    """Text has 4.5:1 against its ground, bars 3:1; names and roles are as they should be; nothing sticks out."""
    page = opened(open_page, width=width, prefers_color_scheme=scheme)
    page.run("document.querySelector('#tenants .opener').click()")
    page.wait_text("athanor usage --by model")
    text = looks(page, "contrast")
    assert text["looked"] > 100
    assert text["poor"] == []
    assert looks(page, "marks")["poor"] == []
    assert looks(page, "semantics") == []
    assert looks(page, "overflow") == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth") is True
    broken = """[...document.querySelectorAll("code")].filter((one) => {
        const right = Math.max(...[...one.getClientRects()].map((box) => box.right));
        return right > one.parentElement.getBoundingClientRect().right + 0.5;
    }).map((one) => one.textContent)"""
    assert page.run(broken) == [], "a command sticks out of its line"


def test_without_prices_tokens_take_the_place_of_cost(open_page: OpenPage, console: Console) -> None:
    """No cost is shown where the policy has no prices, no machine's cost without a price, and nothing as an error."""
    shown = usage_look("7d")
    models = tuple(replace(one, host_per_million=None, host_share=None, host_cost=None) for one in shown.models)
    none = {"priced": False, "machine": None, "budgets": Budgets((), 0), "unusual": (), "models": models}
    console.gateway.usage.changes = none
    page = open_page(name="usage.html#7d", words="by tokens")
    for words in (
        "the policy has no prices",
        "Tokens by model, each hour",
        "No tenant has a limit of spend",
        "price_per_hour",
    ):
        assert words in page.text()
    assert page.run("[...document.querySelectorAll('#measures button')].at(-1).hidden") is True
    assert page.run("document.getElementById('unusual-part').hidden") is True


def test_a_reason_is_shown_and_forgiven(open_page: OpenPage, console: Console) -> None:
    """Where no usage book is kept the page says why, and goes on by itself once one is."""
    console.gateway.usage.problem = "no overview of usage can be made: this appliance keeps no audit log"
    page = open_page(name="usage.html", words="keeps no audit log")
    assert page.run("document.getElementById('whole').hidden") is True
    console.gateway.usage.reset()
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_text(WORDS)
    assert page.run("document.getElementById('problem').hidden") is True
