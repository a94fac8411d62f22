"""The page in a real Chromium, at a real listener, over looks that the tests choose."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.common.status import Alert, ApplianceLoad
from appliance.gateway.console.look import Requests, Tenants
from tests.appliance.gateway.console.browser import Page
from tests.appliance.gateway.console.conftest import Console
from tests.appliance.gateway.console.pictures import (
    HOSTILE,
    LOAD,
    batch,
    card,
    model,
    picture,
    queue,
    sandbox,
    tenant,
    traces,
)

OpenPage = Callable[..., Page]

SCRIPT = (Path(__file__).parent / "looks.js").read_text()

ALERTS = tuple(
    Alert(
        key=level,
        level=level,
        what=f"Something is {level}",
        who="All tenants",
        do="Do this.",
        command="athanor doctor",
        since=time.time() - 4_000,
    )
    for level in ("broken", "degraded", "note")
)

LOOK_NOW = "document.dispatchEvent(new Event('visibilitychange'))"
"""Makes the page ask at once, as it does when it comes back into sight: tests need not wait for its next second."""


def looks(page: Page, question: str) -> Any:
    """What ``looks.js`` finds in the page."""
    if not page.run("Boolean(window.looks)"):
        page.run(SCRIPT)
    return page.run(f"looks.{question}()")


def load(output_tokens: int, **changes: Any) -> ApplianceLoad:
    """The picture's load with so many output tokens since the start."""
    return replace(LOAD, counts=replace(LOAD.counts, output_tokens=output_tokens), **changes)


def busy(console: Console, **changes: Any) -> None:
    """All states at once: alerts, a sandbox that is down, tenants at their limits, one request of each outcome."""
    boxes = (sandbox("engine", state="failed", restarts=3, pid=None), sandbox("text", state="booting"))
    console.gateway.shown = picture(alerts=ALERTS, models=(model(sandboxes=boxes),), **changes)


def test_the_page_loads_in_peace_and_asks_nobody_else(open_page: OpenPage, console: Console) -> None:
    """No error, warning, broken policy or other issue in the browser's log; every address is the listener's own."""
    page = open_page()
    page.run("document.querySelector('#requests .opener').click()")
    page.wait_text("prefill")
    page.pause(0.2)
    assert page.complaints() == []
    asked = page.requests()
    assert len(asked) > 10
    assert all(url.startswith(f"{console.url}/") for url in asked)
    assert page.run("document.cookie") == ""


def test_an_attack_would_be_seen(open_page: OpenPage) -> None:
    """Control: a style attribute, markup and code from strings, and another host are refused, the refusals noted."""
    page = open_page()
    page.run("document.querySelector('h1').setAttribute('style', 'color: red')")
    refused = "(() => { try { DO; return false; } catch { return true; } })()"
    assert page.run(refused.replace("DO", "document.body.innerHTML = '<b>'")) is True
    assert page.run(refused.replace("DO", "Function('1')")) is True
    assert page.run("fetch('http://127.0.0.1:9/').then(() => 'went', () => 'refused')") == "refused"
    page.pause(0.3)
    assert len(page.complaints()) >= 3


def test_numbers_follow_the_appliance(open_page: OpenPage, console: Console) -> None:
    """The next look's numbers are there a second later; what has not changed keeps its elements, places and focus."""
    page = open_page()
    page.run("document.querySelector('#tenants .opener').focus()")
    page.run("window.kept = document.querySelector('#tenants tr')")
    parts = "[...document.querySelectorAll('.tile, .panel, thead th')]"
    boxes = f"JSON.stringify({parts}.map((n) => n.getBoundingClientRect()))"
    before = page.run(boxes)
    shown = console.gateway.shown
    many = replace(shown.models[0], running=128, waiting=37)
    assert shown.requests is not None
    long = replace(shown.requests.rows[0], request_id="req_1", error="a_reason_with_a_long_name", duration_s=3_725.0)
    rows = (long, *shown.requests.rows[1:])
    console.gateway.shown = replace(
        shown,
        load=load(1_234_567, running=128, waiting=37),
        models=(many,),
        requests=replace(shown.requests, recorded=9, rows=rows),
    )
    page.run(LOOK_NOW)
    page.wait_text("1,234,567 since the start")
    assert page.run("document.getElementById('running-now').textContent") == "128"
    assert page.run("document.getElementById('waiting-now').textContent") == "37"
    assert page.run("window.kept === document.querySelector('#tenants tr')") is True
    assert page.run("document.activeElement.textContent") == "alpha"
    assert page.run(boxes) == before


def test_a_request_opens_into_its_waterfall_by_keyboard_alone(open_page: OpenPage) -> None:
    """Tab leads there, the first stop is the way past everything; Enter opens, the phases are read, Enter closes."""
    page = open_page()
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    for _ in range(60):
        page.press("Tab")
        if page.run("document.activeElement.matches('#requests button')"):
            break
    assert page.run("document.activeElement.getAttribute('aria-expanded')") == "false"
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter")
    page.wait(lambda: page.run("document.querySelectorAll('.waterfall li').length") == 7, "the waterfall")
    assert page.run("document.activeElement.getAttribute('aria-expanded')") == "true"
    phases = page.run("[...document.querySelectorAll('.waterfall .phase')].map((n) => n.textContent)")
    assert phases == ["request", "chat", "policy", "text", "queue", "prefill", "decode"]
    places = "[...document.querySelectorAll('.span')].map((n) => n.getBoundingClientRect())"
    spread = page.run(f"{places}.map((box) => [box.left, box.right])")
    track = page.run("document.querySelector('.waterfall .track').getBoundingClientRect().width")
    assert spread[5][1] == pytest.approx(spread[6][0], abs=1.0), "decode begins where prefill ends"
    assert (spread[6][1] - spread[6][0]) == pytest.approx(track * (842 - 113) / 842, abs=2.0)
    page.press("Enter")
    assert page.run("document.querySelector('#requests .detail').hidden") is True


@pytest.mark.full
def test_an_open_request_stands_still(open_page: OpenPage, console: Console) -> None:
    """While one is read, new ones do not push it away; closed, the list goes on."""
    page = open_page()
    page.run("document.querySelector('#requests .opener').click()")
    page.wait_text("prefill")
    shown = console.gateway.shown
    assert shown.requests is not None
    newer = replace(shown.requests.rows[0], request_id="req_beef00000000000000000009")
    rows = (newer, *shown.requests.rows)
    console.gateway.shown = replace(shown, requests=Requests(mark="", recorded=4, kept=4, rows=rows))
    page.run(LOOK_NOW)
    page.wait_text("The list stands still")
    assert "beef0000" not in page.text()
    page.run("document.querySelector('#requests .opener').click()")
    page.run(LOOK_NOW)
    page.wait_text("beef0000")


@pytest.mark.full
def test_rows_that_swap_keep_places_and_focus(open_page: OpenPage, console: Console) -> None:
    """Tenants that overtake each other stay where they are for a while; a new page's rows come in its order."""
    page = open_page()
    page.run("document.querySelectorAll('#tenants .opener')[1].focus()")
    shown = console.gateway.shown
    rows = tuple(reversed(shown.tenants.rows))
    console.gateway.shown = replace(shown, load=load(5), tenants=replace(shown.tenants, rows=rows))
    page.run(LOOK_NOW)
    page.wait_text("; 5 since the start")
    names = "[...document.querySelectorAll('#tenants .opener')].map((n) => n.textContent)"
    assert page.run(names) == ["alpha", "beta"]
    rows = (tenant("gamma"), *rows)
    console.gateway.shown = replace(shown, load=load(6), tenants=replace(shown.tenants, rows=rows))
    page.run(LOOK_NOW)
    page.wait_text("; 6 since the start")
    assert page.run(names) == ["gamma", "beta", "alpha"]
    assert page.run("document.activeElement.textContent") == "beta"


@pytest.mark.full
def test_a_tenant_that_begins_to_work_comes_first_at_once(open_page: OpenPage, console: Console) -> None:
    """The order is what the caption says also while rows keep their places: none at work stands below an idle one."""
    shown = console.gateway.shown
    one, other = tenant("alpha"), tenant("beta", in_flight=0, output_tokens_per_s=0.0)
    console.gateway.shown = replace(shown, tenants=replace(shown.tenants, active=1, rows=(one, other)))
    page = open_page()
    names = "[...document.querySelectorAll('#tenants .opener')].map((n) => n.textContent)"
    page.wait_text("1 at work, these first")
    assert page.run(names) == ["alpha", "beta"]
    console.gateway.shown = replace(
        shown, tenants=replace(shown.tenants, active=1, rows=(tenant("beta"), replace(one, in_flight=0))), load=load(5)
    )
    page.run(LOOK_NOW)
    page.wait_text("; 5 since the start")
    assert page.run(names) == ["beta", "alpha"]


@pytest.mark.full
def test_a_set_clock_leaves_charts_and_ages_alone(open_page: OpenPage, console: Console) -> None:
    """The gateway's machine is set three days ahead, then back: what is drawn and how long ago things were stays."""
    page = open_page()
    page.wait_text("since the start")
    drawn = "[...document.querySelectorAll('.spark path')].map((n) => n.getAttribute('d'))"
    before = page.run(drawn)
    assert any(len(path) > 1_000 for path in before)
    for number, step_s in ((5, 3 * 86_400.0), (6, -3 * 86_400.0)):
        console.gateway.clock_step_s = step_s
        console.gateway.shown = replace(console.gateway.shown, load=load(number))
        page.run(LOOK_NOW)
        page.wait_text(f"; {number} since the start")
        assert page.run(drawn) == before
    assert page.run("document.getElementById('about').textContent").endswith("up 2 h 05 min")


def test_requests_are_chosen_by_outcome(open_page: OpenPage) -> None:
    """A button leaves those that failed; where there are none it says so."""
    page = open_page()
    page.run("[...document.querySelectorAll('#outcomes button')].find((b) => b.textContent === 'Failed').click()")
    page.wait(lambda: page.run("document.querySelectorAll('#requests .opener').length") == 1, "the failed one")
    assert page.run("document.querySelector('#outcomes [aria-pressed=true]').textContent") == "Failed"
    page.run("[...document.querySelectorAll('#outcomes button')].find((b) => b.textContent === 'Cancelled').click()")
    page.wait_text("None of the last 3 requests ended like this.")


def test_names_are_text(open_page: OpenPage, console: Console) -> None:
    """A tenant, a model, a cause and a request's fields that are markup are shown as what they are."""
    (newest, *_) = traces()
    hostile = replace(newest.summary, tenant=HOSTILE, model=HOSTILE, error=HOSTILE)
    row = tenant(HOSTILE, group=HOSTILE)
    boxes = (sandbox("engine", state=HOSTILE, cause=HOSTILE),)
    console.gateway.shown = picture(
        alerts=(Alert(key=HOSTILE, level="broken", what=HOSTILE, who=HOSTILE, do=HOSTILE, command=HOSTILE),),
        models=(model(name=HOSTILE, sandboxes=boxes),),
        sandbox=HOSTILE,
        limits=HOSTILE,
        tenants=Tenants(total=1, matching=1, offset=0, active=1, rows=(row,)),
        requests=Requests(mark="", recorded=1, kept=1, rows=(hostile,)),
    )
    page = open_page()
    page.run("document.querySelector('#tenants .opener').click()")
    page.pause(0.2)
    assert page.text().count(HOSTILE) >= 10
    assert page.run("document.querySelectorAll('img, main script').length") == 0
    assert "pwned" not in page.run("document.title")
    assert page.complaints() == []


@pytest.mark.parametrize(("width", "scheme"), [(1_280, "light"), (400, "dark")])
def test_everything_can_be_read(open_page: OpenPage, console: Console, scheme: str, width: int) -> None:
    """Text has 4.5:1 against its ground and marks 3:1, in both schemes, with all states on the page and details open;
    and nothing sticks out."""
    busy(console)
    page = open_page(width, 900, prefers_color_scheme=scheme)
    page.wait_text("Something is degraded")
    page.run("document.querySelectorAll('.opener').forEach((button) => button.click())")
    page.wait_text("prefill")
    text = looks(page, "contrast")
    assert text["looked"] > 150
    assert text["poor"] == []
    marks = looks(page, "marks")
    assert marks["looked"] > 100
    assert marks["poor"] == []
    assert looks(page, "overflow") == []
    assert page.run("document.documentElement.scrollWidth <= innerWidth") is True
    ground = page.run("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(15, 17, 19)") == (scheme == "dark")


def test_poor_contrast_would_be_seen(open_page: OpenPage) -> None:
    """Control: grey on grey is found by the same look, and so are a button without a name and a second id."""
    page = open_page()
    page.run(
        "{ const p = document.createElement('p'); p.textContent = 'faint'; p.style.color = '#999';"
        " p.style.background = '#aaa'; p.id = 'find';"
        " document.querySelector('main').append(p, document.createElement('button')); }"
    )
    assert len(looks(page, "contrast")["poor"]) == 1
    assert {"an id is there twice", "no name: button."} <= set(looks(page, "semantics"))


def test_who_cannot_see_it_can_use_it(open_page: OpenPage, console: Console) -> None:
    """Names, roles, references, headings, landmarks, tab order and targets are as they should be, details open too."""
    busy(console)
    page = open_page()
    page.run("document.querySelectorAll('.opener').forEach((button) => button.click())")
    page.wait_text("prefill")
    assert looks(page, "semantics") == []
    assert page.run("document.getElementById('alert-list').getAttribute('aria-live')") == "polite"
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    names = {node["name"]["value"] for node in tree if "name" in node and node["name"].get("value")}
    assert any("blocks in use" in name for name in names), "the map says in words what it shows"


@pytest.mark.full
def test_the_theme_is_chosen_and_kept(open_page: OpenPage) -> None:
    """The button goes from the system's to light to dark; the choice is there after a reload."""
    page = open_page(prefers_color_scheme="light")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.run(ground)
    for _ in range(2):
        page.run("document.getElementById('theme').click()")
    assert page.run(ground) != light
    page.call("Page.reload")
    page.wait_text("Theme: dark")
    assert page.run(ground) != light


def test_alerts_come_first_and_in_words(open_page: OpenPage, console: Console) -> None:
    """What, since when, who, what to do and what to type; the title counts what is broken; in the end all is well."""
    busy(console)
    page = open_page()
    page.wait_text("Something is broken")
    alerts = page.run("document.getElementById('alerts').innerText")
    for words in ("Something is broken", "1 h ", "All tenants", "Do this.", "athanor doctor"):
        assert words in alerts
    assert "1 broken" in page.run("document.title")
    assert page.run("document.getElementById('alerts').getBoundingClientRect().top") < 120
    console.gateway.reset()
    page.run(LOOK_NOW)
    page.wait_text("All is well")
    assert page.run("document.title") == "Athanor"


@pytest.mark.full
def test_nothing_moves_for_who_wants_it_still(open_page: OpenPage) -> None:
    """With reduced motion no element has a transition or an animation; control: without, some have."""
    moving = (
        "[...document.querySelectorAll('*')].filter((n) => getComputedStyle(n).transitionDuration !== '0s'"
        " || getComputedStyle(n).animationName !== 'none').length"
    )
    assert open_page(prefers_reduced_motion="reduce").run(moving) == 0
    assert open_page(prefers_reduced_motion="no-preference").run(moving) > 0


@pytest.mark.full
def test_a_hidden_page_asks_nothing(open_page: OpenPage, console: Console) -> None:
    """Behind another tab the page is silent; back in front it is current at once."""
    page = open_page()
    behind = page.hide()
    page.wait(lambda: page.run("document.hidden"), "the page to be hidden")
    page.pause(0.2)
    before = len(console.gateway.questions)
    page.pause(1.6)
    assert len(console.gateway.questions) == before
    console.gateway.shown = replace(console.gateway.shown, load=load(777))
    page.show(behind)
    page.wait_text("777 since the start")
    assert len(console.gateway.questions) > before


def test_a_gateway_that_is_gone_is_said_and_forgiven(open_page: OpenPage, console: Console) -> None:
    """No contact: the page says since when and what to type, keeps what it knew in grey, and goes on by itself."""
    other = Console(console.gateway, 0)
    with other.serving():
        page = open_page()
        page.goto(f"{other.url}/console/")
        page.wait_text("since the start")
    page.run(LOOK_NOW)
    page.wait_text("No contact with the gateway")
    assert "systemctl status athanor-gateway" in page.text()
    assert "no contact" in page.run("document.title")
    assert "alpha" in page.text()
    assert "grayscale" in page.run("getComputedStyle(document.querySelector('.tiles')).filter")
    with other.serving():
        page.run(LOOK_NOW)
        page.wait_text("All is well")
        assert page.run("getComputedStyle(document.querySelector('.tiles')).filter") == "none"


@pytest.mark.full
def test_a_page_of_an_older_version_says_so(open_page: OpenPage, console: Console) -> None:
    """After an upgrade the files are others than those that were loaded."""
    page = open_page()
    assert "upgraded" not in page.text()
    console.gateway.page = "another"
    page.run(LOOK_NOW)
    page.wait_text("upgraded since this page was opened")


@pytest.mark.full
def test_gpus_are_shown_where_models_have_some(open_page: OpenPage, console: Console) -> None:
    """No part for them without any; then a row each, and one that is lost has no numbers."""
    page = open_page()
    assert page.run("document.getElementById('gpus-part').hidden")
    lost = card(index=1, state="lost", figures={}, models=())
    console.gateway.shown = replace(console.gateway.shown, cards=(card(), lost))
    page.run(LOOK_NOW)
    page.wait_text("61 of 80 GiB")
    rows = page.run("[...document.querySelectorAll('#gpus tr')].map((row) => row.innerText).join('|')")
    for words in ("athanor-mini", "93 %", "61 °C", "512 W", "lost"):
        assert words in rows
    assert page.complaints() == []


@pytest.mark.full
def test_batches_are_shown_where_files_are_kept(open_page: OpenPage, console: Console) -> None:
    """Each open batch with its tenant, what holds it up and what is left, one that stands still marked; what is kept
    below. Where no files are kept (control) the part is hidden."""
    page = open_page()
    assert page.run("document.getElementById('batches-part').hidden")
    still = batch(id="batch_8", tenant="beta", obstacle="limit", still_s=1_000.0, running=0, ended=0)
    console.gateway.shown = replace(console.gateway.shown, batches=queue(still, batch()))
    page.run(LOOK_NOW)
    page.wait_text("other requests use half of a limit")
    rows = page.run("[...document.querySelectorAll('#batches tr')].map((row) => row.innerText).join('|')")
    for words in ("beta", "400 of 400", "16 min 40 s", "alpha", "280 of 400", "lines run"):
        assert words in rows
    marks = page.run("[...document.querySelectorAll('#batches .state')].map((one) => one.className).join('|')")
    assert marks == "state degraded|state well"
    note = page.run("document.getElementById('batches-note').innerText")
    assert note.startswith("680 lines left, 16 running, the oldest 53 min 20 s old. 12 files: 5.0 MiB of 16 GiB")
    console.gateway.shown = replace(console.gateway.shown, batches=queue())
    page.run(LOOK_NOW)
    page.wait_text("No batch is open")
    assert page.complaints() == []


def test_an_engine_that_boots_is_an_empty_state(open_page: OpenPage, console: Console) -> None:
    """Nothing is known yet: each part says so in words, and nothing is a bare zero or an error."""
    shown = console.gateway.shown
    boot = sandbox("engine", state="booting", pid=None, since=time.time() - 3)
    console.gateway.shown = replace(
        shown,
        ready=False,
        load=load(0),
        points=(),
        models=(model(state="starting", kv=None, sandboxes=(boot,)),),
        latency=replace(shown.latency, requests=0, first_token=None, each_token=None, total=None),
        requests=Requests(mark="", recorded=0, kept=0, rows=()),
        alerts=(Alert(key="b", level="note", what="The engine sandbox of athanor-mini is booting"),),
    )
    page = open_page()
    for words in ("is booting", "No request has ended yet", "no memory yet", "no request was answered", "not ready"):
        assert words in page.text()
    assert page.complaints() == []


@pytest.mark.full
def test_tenants_go_page_by_page(open_page: OpenPage, console: Console) -> None:
    """Later and Earlier ask for other offsets, a word typed asks for a part of the name."""
    rows = tuple(tenant(f"t{number:04}") for number in range(12))
    tenants = Tenants(total=1_000, matching=1_000, offset=0, active=2, rows=rows)
    console.gateway.shown = picture(tenants=tenants)
    page = open_page()
    page.wait_text("1 to 12 of 1,000; 2 at work")
    assert page.run("document.getElementById('earlier').disabled") is True
    page.run("document.getElementById('later').click()")
    page.wait(lambda: console.gateway.questions[-1].offset == 12, "the second page to be asked for")
    page.run("document.getElementById('find').focus()")
    for key in "t00":
        page.press(key)
    page.wait(lambda: console.gateway.questions[-1].find == "t00", "the word to be asked for")
    assert console.gateway.questions[-1].offset == 0
