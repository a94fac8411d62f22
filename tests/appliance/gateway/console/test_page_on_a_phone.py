"""Tables of the page on a phone, in a real Chromium: what is cut off is seen to be."""

from __future__ import annotations

import base64

import pytest

from tests.appliance.gateway.console.browser import Page
from tests.appliance.gateway.console.conftest import Console
from tests.appliance.gateway.console.test_page import OpenPage, busy


def strip(page: Page, title: str, edge: str) -> bytes:
    """A picture of one edge of the table below a title, with what is drawn behind its text or without."""
    script = (
        f"(() => {{ const box = document.querySelector('[aria-labelledby={title}].scroll').getBoundingClientRect(); "
        "return {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height}; })()"
    )
    box = page.run(script)
    left = box["x"] if edge == "left" else box["x"] + box["width"] - 16
    clip = {"x": left, "y": box["y"], "width": 16, "height": box["height"], "scale": 1}
    return base64.b64decode(
        page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]
    )


def shaded(page: Page, title: str, edge: str) -> bool:
    """Whether an edge of a table looks otherwise than it would without its shade. The page shows live figures, so
    pictures between which one has changed are taken again."""
    table = f"document.querySelector('[aria-labelledby={title}].scroll')"
    for _ in range(10):
        with_shade = strip(page, title, edge)
        page.run(f"{table}.style.background = 'none'")
        without = strip(page, title, edge)
        page.run(f"{table}.style.background = ''")
        if strip(page, title, edge) == with_shade:
            return with_shade != without
    raise AssertionError("the page never stood still")


def edges(page: Page, title: str) -> tuple[bool, bool]:
    """Whether the left and the right edge of the table below a title are shaded."""
    return shaded(page, title, "left"), shaded(page, title, "right")


@pytest.mark.full
def test_tables_on_a_phone_scroll_visibly(open_page: OpenPage, console: Console) -> None:
    """At 390 pixels a table that is wider than the screen has a line and a shade at the edge behind which there is
    more: at the right end at first, at the left one when it is scrolled to its end. Control: a table that fits has
    none, and on a wide screen no table has."""
    busy(console)
    page = open_page(390, 844)
    page.wait_text("Something is degraded")
    assert page.run("document.documentElement.scrollWidth <= innerWidth") is True
    wide = "document.querySelector('[aria-labelledby=h-boxes].scroll')"
    assert page.run(f"{wide}.scrollWidth > {wide}.clientWidth + 16") is True
    assert page.run(
        "(e => e.scrollWidth <= e.clientWidth)(document.querySelector('[aria-labelledby=h-tenants].scroll'))"
    )
    page.wait(lambda: edges(page, "h-boxes") == (False, True), "the shades")
    page.wait(lambda: edges(page, "h-tenants") == (False, False), "the shades")
    page.run(f"{wide}.scrollLeft = {wide}.scrollWidth")
    page.wait(lambda: edges(page, "h-boxes") == (True, False), "the shades")
    ends = "[...document.querySelectorAll('#outcomes button')].map(one => one.getBoundingClientRect().right)"
    assert page.run(f"Math.max(...{ends}) < innerWidth - 12") is True, "every outcome can be chosen"
    page.resize(1_280, 900)
    for title in ("h-boxes", "h-tenants", "h-requests"):
        page.wait(lambda title=title: edges(page, title) == (False, False), "the shades")
