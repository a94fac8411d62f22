"""The addresses of the runbooks: a real Prometheus fills them in, and each is opened, by a client and by a browser."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from appliance.gateway.console.runbooks import FILE, policy
from appliance.operator.cli.app import app
from appliance.operator.demo import choose_ports
from appliance.operator.install import share
from tests.appliance.admin_server import FakeAppliance
from tests.appliance.gateway.console.browser import Browser, find_browser
from tests.appliance.gateway.watch.test_metrics_listener import TOKEN, listening
from tests.observers import observer, program

PATIENCE_S = 60.0
"""Longest wait for a rule that is looked at every second, on a crowded machine."""

CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: athanor
    authorization: {{credentials: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


def firing(root: Path) -> dict[str, Any]:
    """The shipped alerts with their annotations, each with a reason to fire at once."""
    document = YAML(typ="safe").load((root / "docs/monitoring/alerts.yaml").read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"] if "alert" in rule]
    return {"groups": [{"name": "all", "rules": [{**rule, "expr": "vector(1)", "for": "0s"} for rule in rules]}]}


async def addresses(prometheus: str, names: set[str], begin: str) -> dict[str, str]:
    """Alert to ``runbook_url``, once all fire with addresses that begin so."""
    deadline = time.monotonic() + PATIENCE_S
    async with httpx.AsyncClient() as client:
        while True:
            answer = await client.get(f"http://{prometheus}/api/v1/alerts")
            # It listens before it is ready, and says so in words.
            alerts = answer.json()["data"]["alerts"] if answer.status_code == 200 else []
            found = {
                one["labels"]["alertname"]: one["annotations"]["runbook_url"]
                for one in alerts
                if one["state"] == "firing"
            }
            if found.keys() == names and all(url.startswith(begin) for url in found.values()):
                return found
            assert time.monotonic() < deadline, found


@pytest.mark.full
async def test_every_address_opens(root: Path, tmp_path: Path) -> None:
    """Each alert's address, as Prometheus fills it in, answers 200 without the token and has the alert's paragraph;
    when nothing answers any more, the addresses lead to the file that an installation puts there. Control: without the
    token metrics are refused, and the page has no paragraph of an alert that there is not."""
    (tmp_path / "token").write_text(TOKEN)
    rules = firing(root)
    names = {rule["alert"] for rule in rules["groups"][0]["rules"]}
    assert len(names) > 20
    with (tmp_path / "rules.yml").open("w") as file:
        YAML(typ="safe").dump(rules, file)
    web = f"127.0.0.1:{choose_ports((0,))[0]}"
    installed = share.share_files(root, app, share.PACKAGE_SHARE)
    share.apply_share(tmp_path, share.find_share_changes(tmp_path, share.PACKAGE_SHARE, installed))
    async with contextlib.AsyncExitStack() as listener:
        url = await listener.enter_async_context(listening(FakeAppliance(), metrics_token=tmp_path / "token"))
        config = CONFIG.format(rules=tmp_path / "rules.yml", token=TOKEN, target=url.removeprefix("http://"))
        (tmp_path / "prometheus.yml").write_text(config)
        argv = [observer("prometheus"), f"--config.file={tmp_path}/prometheus.yml", "--log.level=error"]
        argv += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={web}"]
        with program(argv, tmp_path / "log", (int(web.rpartition(":")[2]),)):
            await open_each(await addresses(web, names, url))
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/metrics")).status_code == 401
            await listener.aclose()
            unserved = await addresses(web, names, "file:///usr/share/doc/athanor/")
    for name, address in unserved.items():
        path, _, anchor = address.removeprefix("file:///").partition("#")
        assert anchor == name.lower() and paragraph((tmp_path / path).read_text(), anchor)


async def open_each(served: dict[str, str]) -> None:
    """Open the address of each alert, and find its paragraph."""
    async with httpx.AsyncClient() as client:
        for name, address in served.items():
            answer = await client.get(address)
            assert (answer.status_code, address.partition("#")[2]) == (200, name.lower())
            assert answer.headers["content-type"].startswith("text/html")
            assert paragraph(answer.text, name.lower()) and not paragraph(answer.text, "athanornothing")


def paragraph(page: str, anchor: str) -> str:
    """What the page says about an alert, without markup; empty where it has none."""
    found = re.search(rf'<article id="{anchor}">(.*?)</article>', page, re.DOTALL)
    return re.sub(r"<[^>]+>", "", found[1]).strip() if found else ""


async def test_a_browser_shows_the_paragraph(tmp_path: Path) -> None:
    """A phone's browser scrolls to the alert and applies the page's own styles, from the listener and from the file; it
    loads nothing else and complains of nothing. Control: styles that are not the page's are refused by its policy."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here: `make setup-dev` gets it")
    browser = Browser(path, tmp_path / "profile")
    try:
        async with listening(FakeAppliance()) as url:
            for address in (f"{url}/runbooks#athanorkvfull", f"file://{FILE}#athanorkvfull"):
                page = browser.open(390, 800)
                await asyncio.to_thread(page.goto, address)
                top = page.run("document.querySelector(':target').getBoundingClientRect().top")
                assert -5 <= top <= 60, top
                assert page.run("getComputedStyle(document.querySelector(':target')).borderLeftWidth") == "4px"
                assert page.run("document.documentElement.scrollWidth") <= 390
                assert [one for one in page.requests() if not one.endswith(("/runbooks", "/runbooks.html"))] in (
                    [],
                    [f"{url}/favicon.ico"],
                )
                wrong = [one for one in page.complaints() if "favicon" not in one]
                assert wrong == []
    finally:
        browser.close()
    assert policy("<style>a{}</style>") != policy("<style>b{}</style>")
    assert "'none'" in policy("").partition("style-src")[2]
