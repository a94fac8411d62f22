"""Dashboard and alert rules: every query is run by a real Prometheus that has scraped a real appliance."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ruamel.yaml import YAML

from appliance.demo import choose_ports

from .conftest import Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

CONFIG = """\
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%s]
scrape_configs:
  - job_name: athanor
    static_configs: [{targets: ["%s"]}]
"""

NOT_YET = ("athanor_failures_total", "athanor_telemetry_dropped_spans_total", "athanor_policy_reloads_total",
           "athanor_sandbox_restarts_total")
"""Counters that a healthy appliance does not have: there is nothing to count."""


def queries(root: Path) -> dict[str, str]:
    """Panel to expression, with Grafana's interval filled in."""
    panels = json.loads((root / "docs/monitoring/dashboard.json").read_text())["panels"]
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "30s")
        for panel in panels
        for target in panel.get("targets", ())
    }


def rules(root: Path) -> dict[str, str]:
    """Alert to expression."""
    groups = YAML(typ="safe").load((root / "docs/monitoring/alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def traffic(appliance: Appliance) -> None:
    """Answers for both tenants, one found in KV, one refusal, one that a second client left."""
    for tenant in ("alpha", "beta", "alpha"):
        appliance.openai(tenant).chat.completions.create(
            model="athanor-mini", messages=[{"role": "user", "content": "What is a sandbox? " * 8}], max_tokens=8
        )
    with pytest.raises(openai.NotFoundError):
        appliance.openai("alpha").completions.create(model="none", prompt="x")


def test_metrics_that_are_asked_for_exist(appliance: Appliance, root: Path) -> None:
    """Every name in a panel or a rule is one that the appliance gives, or one that it gives once something is wrong."""
    traffic(appliance)
    given = set(re.findall(r"^(\w+)[{ ]", httpx.get(appliance.ready["admin"] + "/metrics").text, re.MULTILINE))
    asked = " ".join((*queries(root).values(), *rules(root).values()))
    names = set(re.findall(r"\b((?:athanor|gen_ai|process)_\w+)", re.sub(r"\{.*?\}|by \(.*?\)", "", asked)))
    assert len(names) > 12
    assert names - given <= set(NOT_YET)


@pytest.fixture(scope="module")
def prometheus(appliance: Appliance, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that has scraped the appliance while it worked."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus on this machine (Debian has it)")
    folder = tmp_path_factory.mktemp("prometheus")
    address = f"127.0.0.1:{choose_ports((0,))[0]}"
    target = appliance.ready["admin"].removeprefix("http://")
    (folder / "prometheus.yml").write_text(CONFIG % (root / "docs/monitoring/alerts.yaml", target))
    argv = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}", "--log.level=error"]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while samples(address) < 5:
            assert time.monotonic() < deadline and process.poll() is None, (folder / "log").read_text()[-2000:]
            traffic(appliance)
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def samples(address: str) -> float:
    """Scrapes that succeeded so far."""
    try:
        found = ask(address, 'count_over_time(athanor_refusals_total[5m])')
    except (httpx.HTTPError, AssertionError, ValueError):
        return 0
    return float(found[0]["value"][1]) if found else 0


def ask(address: str, query: str) -> list[dict[str, Any]]:
    """The result of an instant query."""
    answer = httpx.get(f"http://{address}/api/v1/query", params={"query": query}, timeout=10).json()
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


def test_every_panel_has_data(prometheus: str, root: Path) -> None:
    """No query of the dashboard is empty; one with a name that does not exist would be."""
    empty = [title for title, query in queries(root).items() if not ask(prometheus, query)]
    assert empty == []
    assert ask(prometheus, "sum(athanor_no_such_metric)") == []


def test_no_alert_is_raised_by_a_healthy_appliance(prometheus: str, root: Path) -> None:
    """Every rule is loaded and evaluated without an error, and none fires; a threshold turned round would."""
    groups = httpx.get(f"http://{prometheus}/api/v1/rules", timeout=10).json()["data"]["groups"]
    loaded = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(loaded) == set(rules(root))
    assert {rule["health"] for rule in loaded.values()} <= {"ok", "unknown"}
    assert {name: rule["state"] for name, rule in loaded.items() if rule["state"] != "inactive"} == {}
    turned = rules(root)["AthanorSandboxDown"].replace("== 0", "== 1")
    assert len(ask(prometheus, turned)) == 2
