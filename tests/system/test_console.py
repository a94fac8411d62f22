"""The operator's page over the whole appliance: real traffic, read in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.appliance.gateway.console.browser import Page
from tests.appliance.gateway.console.conftest import browser  # noqa: F401 - the fixture
from tests.system.conftest import Appliance

pytestmark = pytest.mark.runsc

MARKER = "zebra-quarry-lantern"
"""A prompt's words that nobody else says: they may be nowhere in what the page is given."""


@pytest.fixture
def page(browser, appliance: Appliance) -> Iterator[Page]:  # noqa: F811
    """The console of the shared appliance."""
    page = browser.open(1_280, 900)
    page.goto(f"{appliance.ready['admin']}/console/")
    page.wait_text("since the start")
    yield page
    browser.call("Target.closeTarget", targetId=page.target)


def ask(appliance: Appliance, tenant: str, tokens: int) -> str:
    """One chat of this tenant; gives the id that the client saw."""
    answer = appliance.openai(tenant).chat.completions.create(
        model="athanor-mini",
        max_tokens=tokens,
        temperature=0,
        messages=[{"role": "user", "content": f"Tell me about {MARKER} and about sandboxes."}],
    )
    return str(answer.id)


def test_real_traffic_is_shown(appliance: Appliance, page: Page) -> None:
    """Tokens rise while requests run; each tenant's KV has its place; a finished request opens into its phases; and no
    word of a prompt is in anything that the page was given."""
    look = f"{appliance.ready['admin']}/console/look"
    before = httpx.get(look).json()["load"]["counts"]["output_tokens"]
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(lambda number: ask(appliance, ("alpha", "beta")[number % 2], 48), range(8)))
    page.wait(lambda: httpx.get(look).json()["load"]["counts"]["output_tokens"] > before, "tokens to be counted")
    short = ids[-1].rpartition("-")[2][:8]
    page.wait_text(short)
    legend = "[...document.querySelectorAll('.legend tbody th .name')].map((n) => n.textContent)"
    page.wait(lambda: {"alpha", "beta"} <= set(page.run(legend)), "both tenants in the map")
    assert page.run("document.querySelectorAll('.map rect.cached').length") > 0
    button = f"[...document.querySelectorAll('#requests .opener')].find((b) => b.textContent === '{short}')"
    page.run(f"{button}.click()")
    page.wait_text("prefill")
    phases = page.run("[...document.querySelectorAll('.waterfall .phase')].map((n) => n.textContent)")
    assert {"policy", "text", "queue", "prefill", "decode"} <= set(phases)
    given = httpx.get(look).text + httpx.get(f"{appliance.ready['admin']}/console/requests/{ids[-1]}").text
    assert "alpha" in given
    assert MARKER not in given and MARKER not in page.text()
    assert page.complaints() == []
    assert all(url.startswith(appliance.ready["admin"]) for url in page.requests())


@pytest.mark.full
def test_usage_is_shown_from_the_book(appliance: Appliance, page: Page) -> None:
    """What a request used is on the page of usage once the book has it: its tenant, its model, and nothing of its
    words; the download has the same numbers."""
    admin = appliance.ready["admin"]
    before = usage_of(admin, "beta")
    ask(appliance, "beta", 16)
    # More than one where requests of the test before were still on their way into the book, or in a kept result.
    page.wait(lambda: usage_of(admin, "beta")["requests"] > before["requests"], "the book to have the request")
    page.goto(f"{admin}/console/usage.html#7d")
    page.wait_text("beta")
    text = page.text()
    assert "athanor-mini" in text and MARKER not in text
    page.wait(lambda: downloaded(admin, "beta") == usage_of(admin, "beta"), "the download to have the same numbers")
    assert downloaded(admin, "beta")["output"] >= before["output"] + 16
    page.run("[...document.querySelectorAll('#tenants .opener')].find((b) => b.textContent === 'beta').click()")
    page.wait(lambda: page.run("document.querySelectorAll('.two tbody tr').length") >= 1, "the tenant's models")
    assert page.complaints() == []


NUMBERS = ("requests", "input", "cached", "output", "reasoning")


def usage_of(admin: str, tenant: str) -> dict[str, int]:
    """What the page of usage has of a tenant."""
    look = httpx.get(f"{admin}/console/usage?span=7d").json()
    rows = {one["name"]: one for one in look["tenants"]["rows"]}
    return {name: rows.get(tenant, {}).get(name, 0) for name in NUMBERS}


def downloaded(admin: str, tenant: str) -> dict[str, int]:
    """What the download of the page of usage has of a tenant."""
    lines = httpx.get(f"{admin}/console/usage.csv?span=7d").text.splitlines()
    (row,) = [line for line in lines if line.startswith(f"{tenant},")]
    return dict(zip(NUMBERS, map(int, row.split(",")[1:6]), strict=True))


def test_the_drawn_numbers_are_those_of_status(appliance: Appliance, page: Page) -> None:
    """What a person reads on the page, once nothing moves any more: tokens, requests, KV and restarts as status has
    them."""
    ask(appliance, "alpha", 16)
    page.wait(lambda: appliance.status()["load"]["in_flight"] == 0, "the request to end")
    load = appliance.status()["load"]
    kv = f"{load['kv_held']:,} of {load['kv_blocks']:,} blocks in use, {load['kv_free']:,} free"
    page.wait_text(f"{kv}, {load['kv_cached']:,} of these cached")
    page.wait_text(f"{load['counts']['output_tokens']:,} since the start")
    page.wait_text(f"{load['requests']:,} requests since the start")
    assert page.run("document.getElementById('running-now').textContent") == "0"
    free = "[...document.querySelectorAll('.legend tbody tr')].at(-1).lastChild.textContent"
    assert page.run(free) == f"{round(100 * load['kv_free'] / load['kv_blocks'])} %"
    restarts = "[...document.querySelectorAll('#boxes tr')].map((row) => Number(row.children[3].textContent))"
    assert sum(page.run(restarts)) == load["restarts"]
