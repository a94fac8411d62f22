"""Dashboard and alert rules: every query is run by a real Prometheus that has scraped a real appliance."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ruamel.yaml import YAML

from appliance.operator.demo import choose_ports
from tests.observers import observer
from tests.system.conftest import PLAIN, Appliance

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

CONFIG = """\
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%s]
scrape_configs:
  - job_name: athanor
    static_configs: [{targets: ["%s"]}]
"""

NOT_YET = (
    "athanor_failures_total",
    "athanor_sandbox_starts_total",
    "athanor_spill_bytes",
    "athanor_spill_blocks_total",
    "athanor_split_asked_total",
    "athanor_split_recomputed_blocks_total",
    "athanor_split_served_total",
    "athanor_split_taken_total",
    "athanor_split_waited_seconds_total",
    "athanor_certificate_end_seconds",
    "athanor_gpu_watched",
    "athanor_gpu_lost",
    "athanor_gpu_out",
    "athanor_gpu_unplaced",
    "athanor_gpu_failing",
    "athanor_gpu_throttled",
    "athanor_gpu_busy_percent",
    "athanor_gpu_temperature_celsius",
    "athanor_gpu_memory_used_bytes",
    "athanor_gpu_model_memory_bytes",
    "athanor_fleet_store_away",
    "athanor_fleet_keys_held",
    "athanor_kv_store_away",
    "athanor_batch_stuck_batches",
    "athanor_checkpoint_size_bytes",
)
"""What a healthy appliance without spill, certificate, GPU, fleet and batches does not have: nothing is counted."""

LATE = "athanor_refusals_total|athanor:slow_burn:3d|athanor_sandbox_memory_bytes|athanor_kv_resident_blocks"
"""What comes last: once each of these has samples, everything has."""

PAGES = ("overview", "tenants", "kv", "sandboxes", "slo")
"""Pages whose queries all go to Prometheus; tests/system/test_traces.py has those of traces."""


def queries(root: Path, page: str) -> dict[str, str]:
    """Panel to expression, with Grafana's interval and the page's choices filled in."""
    panels = json.loads((root / f"docs/monitoring/{page}.json").read_text())["panels"]
    return {
        f"{panel['title']} {target['refId']}": re.sub(
            r"\$(?:model|tenant)", ".*", target["expr"].replace("$__rate_interval", "30s")
        )
        for panel in panels
        for target in panel.get("targets", ())
    }


def rules(root: Path) -> dict[str, str]:
    """Alert, or recorded series, to expression."""
    groups = YAML(typ="safe").load((root / "docs/monitoring/alerts.yaml").read_text())["groups"]
    return {rule.get("alert") or rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def traffic(appliance: Appliance) -> None:
    """Answers for both tenants, one found in KV, one mistake, one refusal. They have more tokens than come at once,
    since those would have no time between them."""
    for tenant in ("alpha", "beta", "alpha"):
        appliance.openai(tenant).chat.completions.create(
            model="athanor-mini", messages=[{"role": "user", "content": "What is a sandbox? " * 8}], max_tokens=32
        )
    with pytest.raises(openai.NotFoundError):
        appliance.openai("alpha").completions.create(model="none", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        appliance.openai("alpha").with_options(api_key="nobody").completions.create(model="athanor-mini", prompt="x")


@pytest.fixture(scope="module")
def with_quotas(appliance: Appliance) -> Iterator[Appliance]:
    """The shared appliance with prices and a share of the KV memory for each tenant, and afterwards as it was."""
    path = appliance.state / "policy.yaml"
    before = path.read_text()

    def put(text: str) -> None:
        path.write_text(text)
        httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).raise_for_status()

    prices = 'prices: {currency: EUR, rules: [{models: ["*"], input: 1, output: 2}]}\n'
    put(before.replace('    models: ["*"]\n', '    models: ["*"]\n    kv: {reservation: 20%}\n') + prices)
    try:
        yield appliance
    finally:
        put(before)


def test_metrics_that_are_asked_for_exist(with_quotas: Appliance, root: Path) -> None:
    """Every name in a panel or a rule is one that the appliance gives, or one that it gives once something is wrong."""
    traffic(with_quotas)
    deadline, given = time.monotonic() + 30, set[str]()
    late = {"athanor_kv_resident_blocks", "athanor_sandbox_memory_bytes", "athanor_output_token_latency_seconds_bucket"}
    while not late <= given:
        assert time.monotonic() < deadline, "gauges are told every few seconds, and requests when they have ended"
        text = httpx.get(with_quotas.ready["admin"] + "/metrics", verify=PLAIN).text
        given = set(re.findall(r"^(\w+)[{ ]", text, re.MULTILINE))
        time.sleep(0.2)
    pages = [one for page in PAGES for one in queries(root, page).values()]
    asked = " ".join((*pages, *rules(root).values()))
    names = set(re.findall(r"\b((?:athanor|gen_ai|process)_\w+)", re.sub(r"\{.*?\}|by \(.*?\)|\".*?\"", "", asked)))
    assert len(names) > 30
    assert names - given <= set(NOT_YET)


@pytest.fixture(scope="module")
def prometheus(with_quotas: Appliance, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that has scraped the appliance while it worked."""
    program = observer("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    address = f"127.0.0.1:{choose_ports((0,))[0]}"
    target = with_quotas.ready["admin"].removeprefix("http://")
    # Recorded every second, not every half minute: the test has no time.
    quick = (root / "docs/monitoring/alerts.yaml").read_text().replace("interval: 30s", "interval: 1s")
    (folder / "rules.yml").write_text(quick)
    (folder / "prometheus.yml").write_text(CONFIG % (folder / "rules.yml", target))
    argv = [
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
        "--log.level=error",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while samples(address) < 3:
            assert time.monotonic() < deadline and process.poll() is None, (folder / "log").read_text()[-2000:]
            traffic(with_quotas)
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def samples(address: str) -> float:
    """Scrapes that succeeded so far."""
    try:
        found = ask(address, f"min(count_over_time({{__name__=~'{LATE}'}}[5m]))")
    except (httpx.HTTPError, AssertionError, ValueError):
        return 0
    return float(found[0]["value"][1]) if found else 0


def ask(address: str, query: str) -> list[dict[str, Any]]:
    """The result of an instant query."""
    answer = httpx.get(f"http://{address}/api/v1/query", params={"query": query}, timeout=10, verify=PLAIN).json()
    assert answer["status"] == "success", answer
    return list(answer["data"]["result"])


@pytest.mark.parametrize("page", PAGES)
def test_every_panel_has_data(prometheus: str, root: Path, page: str) -> None:
    """No query of a dashboard is empty or without a number; one with a name that does not exist would be, and one that
    is no query is refused."""
    empty = [title for title, query in queries(root, page).items() if not numbers(ask(prometheus, query))]
    assert empty == []
    assert ask(prometheus, "sum(athanor_no_such_metric)") == []
    with pytest.raises(AssertionError, match="parse error"):
        ask(prometheus, "sum(athanor_requests_total")


def numbers(found: list[dict[str, Any]]) -> list[float]:
    """Values that are numbers."""
    return [value for value in (float(one["value"][1]) for one in found) if math.isfinite(value)]


def test_no_alert_is_raised_by_a_healthy_appliance(prometheus: str, root: Path) -> None:
    """Every rule is loaded and evaluated without an error, and none fires; a threshold turned round would."""
    groups = httpx.get(f"http://{prometheus}/api/v1/rules", timeout=10, verify=PLAIN).json()["data"]["groups"]
    loaded = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert set(loaded) == set(rules(root))
    assert {rule["health"] for rule in loaded.values()} <= {"ok", "unknown"}
    raised = {name: rule["state"] for name, rule in loaded.items() if rule.get("state", "inactive") != "inactive"}
    assert raised == {}
    turned = rules(root)["AthanorSandboxDown"].replace("== 0", "== 1")
    assert len(ask(prometheus, turned)) == 2
