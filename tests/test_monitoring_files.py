"""Dashboards and alert rules as files: made by their program, whole, each rule with a case in which it must fire."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from docs.monitoring import build, runbooks
from docs.monitoring.grafana import COLUMNS
from tests.observers import observer

GRAMMAR = Path(sys.prefix) / "share/traceql"
"""Where ``requirements/observers.py --traceql`` puts the grammar."""

FAILING = {
    'athanor_requests_total{athanor_outcome="ok"}': "0+98x45",
    'athanor_requests_total{athanor_outcome="failed"}': "0+2x45",
    'athanor_requests_total{athanor_outcome="refused"}': "0+900x45",
}
"""Two in a hundred by our fault, and many that were refused, which are no failures."""

SLOW = {
    'gen_ai_server_time_to_first_token_seconds_bucket{le="2.5"}': "0+2x45",
    "gen_ai_server_time_to_first_token_seconds_count{}": "0+10x45",
}
MODEL, KV_MODEL = 'gen_ai_request_model="m"', 'gen_ai_request_model="k"'
GPU = 'athanor_gpu="0", athanor_gpu_uuid="GPU-1"'
OTHER_GPU = 'athanor_gpu="1", athanor_gpu_uuid="GPU-2"'
SANDBOX = 'gen_ai_request_model="m", athanor_role="engine"'

CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "AthanorFailingFast": (FAILING, {**FAILING, 'athanor_requests_total{athanor_outcome="failed"}': "0x45"}),
    "AthanorFailingSlowly": (FAILING, {**FAILING, 'athanor_requests_total{athanor_outcome="failed"}': "0x45"}),
    "AthanorSlowFast": (SLOW, {**SLOW, 'gen_ai_server_time_to_first_token_seconds_bucket{le="2.5"}': "0+9.9x45"}),
    "AthanorSlowSlowly": (SLOW, {**SLOW, 'gen_ai_server_time_to_first_token_seconds_bucket{le="2.5"}': "0+9.9x45"}),
    "AthanorDown": ({'up{job="athanor"}': "0x45"}, {'up{job="athanor"}': "1x45"}),
    "AthanorSandboxDown": (
        {f"athanor_sandbox_ready{{{SANDBOX}}}": "0x45"},
        {f"athanor_sandbox_ready{{{SANDBOX}}}": "1x45"},
    ),
    "AthanorSandboxRestarts": (
        {f"athanor_sandbox_restarts_total{{{SANDBOX}}}": "0x35 1 2 3 4 5 6 7 8 9 10"},
        {f"athanor_sandbox_restarts_total{{{SANDBOX}}}": "0x40 1x4"},
    ),
    "AthanorSandboxOom": (
        {f'athanor_sandbox_losses_total{{{SANDBOX}, athanor_reason="oom"}}': "0x40 1x4"},
        {f'athanor_sandbox_losses_total{{{SANDBOX}, athanor_reason="ended"}}': "0x40 1x4"},
    ),
    "AthanorSandboxFault": (
        {f'athanor_sandbox_losses_total{{{SANDBOX}, athanor_reason="fault"}}': "0x40 1x4"},
        {f'athanor_sandbox_losses_total{{{SANDBOX}, athanor_reason="ended"}}': "0x40 1x4"},
    ),
    "AthanorSandboxMemory": (
        {
            f"athanor_sandbox_memory_bytes{{{SANDBOX}}}": "98x45",
            f"athanor_sandbox_memory_limit_bytes{{{SANDBOX}}}": "100x45",
        },
        {
            f"athanor_sandbox_memory_bytes{{{SANDBOX}}}": "90x45",
            f"athanor_sandbox_memory_limit_bytes{{{SANDBOX}}}": "100x45",
        },
    ),
    "AthanorGpuLost": ({f"athanor_gpu_lost{{{GPU}}}": "0x40 1x4"}, {f"athanor_gpu_lost{{{GPU}}}": "0x45"}),
    "AthanorGpuUnplaced": (
        {f"athanor_gpu_unplaced{{{MODEL}}}": "0x35 1x10"},
        # Placed within seconds.
        {f"athanor_gpu_unplaced{{{MODEL}}}": "0x43 1x2"},
    ),
    "AthanorGpuOut": (
        {f"athanor_gpu_out{{{OTHER_GPU}}}": "1x45"},
        # A trial of eight minutes.
        {f"athanor_gpu_out{{{OTHER_GPU}}}": "0x37 1x8"},
    ),
    "AthanorGpuMemory": (
        {f'athanor_sandbox_losses_total{{{SANDBOX}, athanor_reason="gpu_memory"}}': "0x40 1x4"},
        {f'athanor_sandbox_losses_total{{{SANDBOX}, athanor_reason="ended"}}': "0x40 1x4"},
    ),
    "AthanorGpuFailing": ({f"athanor_gpu_failing{{{GPU}}}": "0x40 1x4"}, {f"athanor_gpu_failing{{{GPU}}}": "0x45"}),
    "AthanorGpuHot": (
        {f'athanor_gpu_throttled{{{GPU}, athanor_reason="heat"}}': "0x30 1x15"},
        # Held down by its limit of power, and hot for a moment.
        {
            f'athanor_gpu_throttled{{{GPU}, athanor_reason="power"}}': "1x45",
            f'athanor_gpu_throttled{{{GPU}, athanor_reason="heat"}}': "0x42 1x3",
        },
    ),
    "AthanorGpuUnwatched": ({"athanor_gpu_watched": "0x45"}, {"athanor_gpu_watched": "1x45"}),
    "AthanorQuarantine": ({f"athanor_quarantined{{{MODEL}}}": "1x45"}, {f"athanor_quarantined{{{MODEL}}}": "0x45"}),
    "AthanorIntegrity": (
        {f"athanor_engine_integrity_failures_total{{{MODEL}}}": "0x40 1x4"},
        {f"athanor_engine_integrity_failures_total{{{MODEL}}}": "1x45"},
    ),
    "AthanorUnfair": (
        {f"athanor_engine_defects{{{MODEL}}}": "0x40 1x4"},
        {f"athanor_engine_defects{{{MODEL}}}": "0x45"},
    ),
    "AthanorAuditFailing": ({"athanor_audit_failing": "1x45"}, {"athanor_audit_failing": "0x45"}),
    "AthanorAuditUnwitnessed": ({"athanor_audit_unwitnessed": "1x45"}, {"athanor_audit_unwitnessed": "0x45"}),
    "AthanorDiskFilling": (
        {
            'athanor_disk_free_bytes{athanor_place="audit"}': "20000000000-200000000x45",
            'athanor_disk_size_bytes{athanor_place="audit"}': "100000000000x45",
        },
        {
            'athanor_disk_free_bytes{athanor_place="audit"}': "20000000000-1000000x45",
            'athanor_disk_size_bytes{athanor_place="audit"}': "100000000000x45",
            # A burst, and no more than nine minutes of figures.
            'athanor_disk_free_bytes{athanor_place="checkpoints"}': "_x36 20000000000-1000000000x9",
            'athanor_disk_size_bytes{athanor_place="checkpoints"}': "100000000000x45",
        },
    ),
    "AthanorDiskLow": (
        {
            'athanor_disk_free_bytes{athanor_place="spill"}': "1000000000x45",
            'athanor_disk_size_bytes{athanor_place="spill"}': "100000000000x45",
        },
        {
            'athanor_disk_free_bytes{athanor_place="spill"}': "1000000000x45",
            'athanor_disk_size_bytes{athanor_place="spill"}': "4000000000x45",
        },
    ),
    "AthanorFleetStoreAway": ({"athanor_fleet_store_away": "1x45"}, {"athanor_fleet_store_away": "1x40 0x5"}),
    "AthanorKvStoreAway": (
        {'athanor_kv_store_away{athanor_reason="store"}': "1x45"},
        {'athanor_kv_store_away{athanor_reason="store"}': "1x40 0x5"},
    ),
    "AthanorFleetKeys": ({"athanor_fleet_keys_held": "1x30 0x15"}, {"athanor_fleet_keys_held": "1x30 0x4 1x11"}),
    "AthanorBatchStuck": ({"athanor_batch_stuck_batches": "0x30 2x15"}, {"athanor_batch_stuck_batches": "2x41 0x4"}),
    "AthanorCertificate": (
        {"athanor_certificate_end_seconds": "1000000x45"},
        {"athanor_certificate_end_seconds": "2000000x45"},
    ),
    "AthanorQueue": (
        {
            f"athanor_engine_waiting_requests{{{MODEL}}}": "90x45",
            f"athanor_engine_running_requests{{{MODEL}}}": "64x45",
        },
        {f"athanor_engine_waiting_requests{{{MODEL}}}": "6x45", f"athanor_engine_running_requests{{{MODEL}}}": "1x45"},
    ),
    "AthanorKvFull": (
        {
            # As an engine with more requests than fit has them: each one that ends frees what it had.
            f"athanor_engine_kv_free_blocks{{{KV_MODEL}}}": " ".join(["2", "22"] * 23),
            f"athanor_engine_kv_blocks{{{KV_MODEL}}}": "100x45",
            f"athanor_engine_waiting_requests{{{KV_MODEL}}}": "3x45",
        },
        {
            f"athanor_engine_kv_free_blocks{{{KV_MODEL}}}": "1x45",
            f"athanor_engine_kv_blocks{{{KV_MODEL}}}": "100x45",
            f"athanor_engine_waiting_requests{{{KV_MODEL}}}": "0x45",
        },
    ),
    "AthanorPolicyNotLoaded": (
        {'athanor_policy_reloads_total{athanor_outcome="failed"}': "0x40 1x4"},
        {'athanor_policy_reloads_total{athanor_outcome="ok"}': "0x40 1x4"},
    ),
    "AthanorSpansLost": (
        {'athanor_telemetry_dropped_spans_total{athanor_reason="export_failed"}': "0+5x45"},
        {'athanor_telemetry_dropped_spans_total{athanor_reason="export_failed"}': "5x45"},
    ),
    "AthanorDescriptors": (
        {'process_open_fds{job="athanor"}': "900x45", 'process_max_fds{job="athanor"}': "1000x45"},
        {'process_open_fds{job="athanor"}': "90x45", 'process_max_fds{job="athanor"}': "1000x45"},
    ),
}
"""Of each alert, series of 45 minutes, a sample a minute, in which it fires, and series in which it does not."""

ELSEWHERE = {"AthanorTenantUnusual"}
"""Alerts that need more than 45 minutes; tests/test_unusual_tenants.py has their cases."""


@pytest.fixture(scope="module")
def rules(root: Path) -> dict[str, dict[str, Any]]:
    """The alerts by name."""
    groups = YAML(typ="safe").load((root / "docs/monitoring/alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def test_the_files_are_what_the_program_makes(root: Path) -> None:
    """Nobody has edited a dashboard or the page of the alerts by hand, or forgotten to write it."""
    for name, page in build.PAGES.items():
        assert (root / "docs/monitoring" / name).read_text() == build.text(page), "run docs/monitoring/build.py"
    assert runbooks.PLACE.read_text() == runbooks.page(), "run docs/monitoring/build.py"


def test_dashboards_are_whole(root: Path) -> None:
    """Panels lie beside each other without a gap or an overlap, each with a unit, words, queries and a legend; every
    page links to the others."""
    seen: set[str] = set()
    for name in build.PAGES:
        page = json.loads((root / "docs/monitoring" / name).read_text())
        seen.add(page["uid"])
        assert "athanor" in page["tags"] and page["links"][0]["tags"] == ["athanor"]
        cells: set[tuple[int, int]] = set()
        for panel in page["panels"]:
            at = panel["gridPos"]
            mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not mine & cells and at["x"] + at["w"] <= COLUMNS
            cells |= mine
            if panel["type"] != "row":
                assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"]
                source = panel["datasource"]["type"]
                assert panel["targets"] and all(whole(source, target) for target in panel["targets"])
        assert len(cells) == COLUMNS * (max(y for _, y in cells) + 1), "a row is not filled"
    assert len(seen) == len(build.PAGES)


def whole(source: str, target: dict[str, Any]) -> bool:
    """Whether a query has what its data source needs; what it finds is shown in tests/system/test_monitoring.py and
    test_traces.py."""
    if source == "prometheus":
        return bool(target["expr"] and target["legendFormat"])
    if target.get("queryType") == "search":
        return any(target[name] for name in ("operation", "tags", "minDuration")) and target["service"] == "$service"
    return bool(target["query"])


def test_the_grammar_of_grafana_s_editor_takes_every_query_of_traces(root: Path) -> None:
    """Each TraceQL query parses without an error by the grammar that Grafana's query editor uses; slips do not."""
    node = shutil.which("node")
    if node is None or not GRAMMAR.exists():
        pytest.skip("no grammar of TraceQL here: `make traceql` gets it from npm")
    asked = [
        target["query"].replace("$slow", "1s")
        for panel in json.loads(build.text(build.PAGES["traces.json"]))["panels"]
        for target in panel.get("targets", ())
        if panel["datasource"]["type"] == "tempo" and panel["type"] != "traces"
    ]
    slips = ["{ span.a = 1", "{ kind = foo }", '{ span.a ~= "x" }', "{ } | quantile_over_time(duration, .95)"]
    program = GRAMMAR / "parse.mjs"
    shutil.copyfile(root / "tests/traceql_grammar/parse.mjs", program)
    done = subprocess.run([node, program], input=json.dumps(asked + slips), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert dict(zip(asked, errors, strict=False)) == {query: [] for query in asked} and len(asked) > 12
    assert all(errors[len(asked) :]), "a slip is an error"


def test_every_alert_has_a_runbook_and_a_case(root: Path, rules: dict[str, dict[str, Any]]) -> None:
    """Each alert says what it means and what to do, leads to its paragraph, and is fired below. That the addresses open
    is shown in tests/appliance/gateway/watch/test_runbooks.py."""
    assert set(CASES) | ELSEWHERE == set(rules)
    text = (root / "docs/observability.md").read_text()
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    for name, rule in rules.items():
        assert rule["labels"]["severity"] in ("page", "warn", "info")
        assert rule["annotations"]["summary"] and rule["annotations"]["mend"]
        _, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert anchor == name.lower()
        assert f'<article id="{anchor}">' in runbooks.page()
        assert anchor in anchors, f"{name} has no paragraph in docs/observability.md"


def test_every_alert_fires_when_it_must_and_not_otherwise(root: Path, tmp_path: Path) -> None:
    """Prometheus' own unit tests: each rule over series in which it fires, and over series that are well."""

    asked = {name: f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)' for name in CASES}
    tests = [
        {
            "name": "all fire" if fires else "none fires",
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in merged(int(not fires)).items()],
            "promql_expr_test": [
                {"expr": ask, "eval_time": "45m", "exp_samples": [{"labels": "{}", "value": int(fires)}]}
                for ask in asked.values()
            ],
        }
        for fires in (True, False)
    ]
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": [str(root / "docs/monitoring/alerts.yaml")], "tests": tests}))
    argv = [observer("promtool"), "test", "rules", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def merged(side: int) -> dict[str, str]:
    """The series of all cases together, those that fire or those that do not."""
    found: dict[str, str] = {}
    for case in CASES.values():
        for series, values in case[side].items():
            assert found.setdefault(series, values) == values, f"two cases want different values of {series}"
    return found
