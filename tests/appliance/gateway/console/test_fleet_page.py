"""The page of the fleet in a real Chromium, at a real listener, over looks that the tests choose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.appliance.gateway.console.browser import Page
from tests.appliance.gateway.console.conftest import Console
from tests.appliance.gateway.console.fleet_pictures import OTHER, TROUBLED, host, silent
from tests.appliance.gateway.console.pictures import HOSTILE
from tests.appliance.gateway.console.test_page import OpenPage, looks

WORDS = "UTC."
"""What the page says once it shows something."""

WELL = "All hosts serve, and none differs"


def opened(open_page: OpenPage, **options: Any) -> Page:
    """The page of the fleet."""
    page: Page = open_page(name="fleet.html", words=WORDS, **options)
    return page


def texts(page: Page, where: str) -> list[str]:
    """What the elements that a selector finds say."""
    return list(page.run(f"[...document.querySelectorAll('{where}')].map((one) => one.innerText)"))


def test_a_fleet_that_is_well(open_page: OpenPage, console: Console) -> None:
    """Three hosts with role, policy, keys and store, and no problem; no complaint of the browser, and no other host is
    asked by it."""
    page = opened(open_page)
    assert texts(page, "#problems .what") == [WELL]
    assert texts(page, "#serving, #policy, #keys, #shreds") == ["3", "equal", "3", "0"]
    assert texts(page, "#hosts tr th") == ["host-a", "host-b", "host-c"]
    assert "no problem" in texts(page, "#hosts tr")[0]
    assert page.run("document.querySelectorAll('.odd').length") == 0
    assert page.complaints() == []
    assert all(url.startswith(f"{console.url}/console/") for url in page.requests())


def test_what_is_not_well_is_told(open_page: OpenPage, console: Console) -> None:
    """A silent host, another policy, a host without keys, one whose store is away, one that drains, and shreds under
    way; the cells that are not as most hosts' are marked, and those alone."""
    console.gateway.fleet.hosts = TROUBLED
    page = opened(open_page)
    told = texts(page, "#problems .what")
    assert told == [
        "host-e does not answer",
        "Policy differs between hosts",
        "host-c has no keys of the fleet's shared KV",
        "The store of the limits is away from host-c",
        "host-d drains",
    ]
    for words in ("no answer within 3 s", f"{OTHER[:24]}: host-c", "athanor fleet drain host-d --resume"):
        assert words in page.text()
    assert texts(page, "#serving, #policy, #keys, #shreds") == ["3", "2 different", "3", "2"]
    assert texts(page, "#hosts .odd") == [OTHER[:12], "none", "away"]
    assert texts(page, "#hosts .state") == ["serving", "serving", "serving", "draining", "silent"]
    console.gateway.fleet.reset()
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait(lambda: texts(page, "#problems .what") == [WELL], "the problems to be gone")
    assert page.run("document.querySelectorAll('.odd').length") == 0


def test_without_a_list_the_row_is_its_own(open_page: OpenPage, console: Console) -> None:
    """The page says which key would show all hosts; a list that cannot be used is shown with its line."""
    console.gateway.fleet.hosts, console.gateway.fleet.listed = (host("this host", kv_keys="", hosts=()),), False
    page = opened(open_page)
    assert "fleet_hosts in athanor.yaml" in page.text()
    assert texts(page, "#keys") == ["none"]
    console.gateway.fleet.problem = "fleet.yaml:3:5: hosts.0.admin: 'x' is no admin address"
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_text("is no admin address")
    assert page.run("document.getElementById('hosts-part').hidden") is True


def test_names_are_text(open_page: OpenPage, console: Console) -> None:
    """What other hosts say is shown as what it is, markup included: they may be taken over."""
    hosts = (host(HOSTILE, HOSTILE, role=HOSTILE, store=HOSTILE, kv_keys=HOSTILE), silent("host-b", HOSTILE))
    console.gateway.fleet.hosts = hosts
    page = opened(open_page)
    assert page.text().count(HOSTILE) >= 4
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    assert page.complaints() == []


def test_a_gateway_that_is_gone_is_told(open_page: OpenPage, console: Console) -> None:
    """What is below is grey and from before."""
    page = opened(open_page)
    page.run("window.fetch = () => Promise.reject(new TypeError('gone'))")
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_text("No contact with the gateway")
    assert page.run("document.documentElement.hasAttribute('data-lost')") is True
    assert texts(page, "#hosts tr th") == ["host-a", "host-b", "host-c"]


@pytest.mark.parametrize(("width", "scheme"), [(1_280, "light"), (1_280, "dark"), (390, "dark"), (360, "light")])
def test_everything_can_be_read(open_page: OpenPage, console: Console, scheme: str, width: int) -> None:
    """Text has 4.5:1 against its ground, marks 3:1; names and roles are as they should be; nothing sticks out."""
    console.gateway.fleet.hosts = TROUBLED
    page = opened(open_page, width=width, prefers_color_scheme=scheme)
    text = looks(page, "contrast")
    assert text["looked"] > 40
    assert text["poor"] == []
    assert looks(page, "marks")["poor"] == []
    assert looks(page, "semantics") == []
    assert looks(page, "overflow") == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth") is True
