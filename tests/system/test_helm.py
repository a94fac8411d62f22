"""The Helm chart: Helm renders it to the objects of ``deploy/kubernetes``, and its schema refuses wrong values."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from appliance.common.listen_config import ListenConfig
from appliance.gateway.process import DRAIN_S
from tests.observers import beside_helm
from tests.system.kubernetes_schemas import problems
from tests.system.test_kubernetes import FOREIGN, manifests

pytestmark = pytest.mark.full

CHART = "deploy/helm/athanor"
NOT_IN_A_CHART = {"Namespace", "Secret", "Kustomization"}
"""A release is kept in its namespace, so it cannot make it; Secrets are never values; the last is another tool's."""

TALLER = """
listen:
  http: 0.0.0.0:9080
  grpc: 0.0.0.0:9081
  admin: unix:/run/athanor/admin.sock
  metrics: 0.0.0.0:9090
  metrics_token: /etc/athanor/secret/metrics-token
  drain_notice_s: 30
  tls: {certificate: /etc/athanor/tls/tls.crt, key: /etc/athanor/tls/tls.key}
"""


def helm(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Helm with a home of its own: it asks no cluster, and no settings of this machine."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": "/dev/null"}
    line = [beside_helm("helm"), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment, check=False)


def rendered(root: Path, tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    """All objects of the chart."""
    done = helm(tmp_path, "template", "athanor", str(root / CHART), "--namespace", "athanor", *options)
    assert done.returncode == 0, done.stderr
    return [one for one in YAML(typ="safe").load_all(done.stdout) if one]


def one_of(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (one,) = [one for one in found if one["kind"] == kind]
    return one


def by_name(found: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Objects by kind and name, each once."""
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found)
    return named


def test_the_chart_renders_the_manifests(root: Path, tmp_path: Path) -> None:
    """Without values, and with the pool switched on, each object is that of ``deploy/kubernetes``, field by field, and
    keeps to its schema. The control: with another value the DaemonSet differs."""
    there = [one for one in manifests(root) if one["kind"] not in NOT_IN_A_CHART]
    own = by_name([one for one in there if one["kind"] not in FOREIGN])
    assert by_name(rendered(root, tmp_path)) == own
    every = rendered(root, tmp_path, "--set", "inferencePool.enabled=true")
    assert by_name(every) == by_name(there) and len(there) == len(own) + len(FOREIGN)
    assert [problems(one) for one in every] == [[]] * len(every)
    other = by_name(rendered(root, tmp_path, "--set", "updates.minReadySeconds=11"))
    assert [name for name in own if other[name] != own[name]] == [("DaemonSet", "athanor")]


def test_helm_lints_the_chart_and_shows_its_notes(root: Path, tmp_path: Path) -> None:
    """``helm lint --strict`` finds nothing, and the notes name the Secrets that these values name. The control: a
    template with a mistake does not pass. The chart has the appliance's version."""
    linted = helm(tmp_path, "lint", "--strict", str(root / CHART))
    assert linted.returncode == 0, linted.stdout + linted.stderr
    broken = tmp_path / "broken/athanor"
    shutil.copytree(root / CHART, broken)
    with (broken / "templates/service.yaml").open("a") as file:
        file.write('{{ include "athanor.ports" . }}\n')
    assert helm(tmp_path, "lint", "--strict", str(broken)).returncode != 0
    options = ("--namespace", "models", "--dry-run=client", "--set", "secrets.files=own-files")
    shown = helm(tmp_path, "install", "athanor", str(root / CHART), *options)
    assert shown.returncode == 0, shown.stderr
    notes = shown.stdout.partition("NOTES:")[2]
    assert "own-files" in notes and "athanor.example/serves=true" in notes and "kubectl -n models exec" in notes
    chart = YAML(typ="safe").load(root / CHART / "Chart.yaml")
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)
    assert YAML(typ="safe").load(root / CHART / "values.yaml")["image"]["tag"] == version


def test_ports_and_times_follow_from_the_configuration(root: Path, tmp_path: Path) -> None:
    """A configuration and a policy from files are in the ConfigMap word for word; ports of container, Service and pool
    are the configuration's, and the supervisor stays longer than its notice and the drain. The appliance itself takes
    that section: its longest notice."""
    ListenConfig.model_validate(YAML(typ="safe").load(TALLER)["listen"])
    policy = (
        "version: 1\ntenants:\n  alpha: {credentials: ['key:a'], models: ['*'], limits: {tokens_per_minute: 9000000}}\n"
    )
    (tmp_path / "own.yaml").write_text(TALLER)
    (tmp_path / "policy.yaml").write_text(policy)
    files = [f"configuration={tmp_path}/own.yaml", f"policy={tmp_path}/policy.yaml"]
    options = [word for one in files for word in ("--set-file", one)]
    found = rendered(root, tmp_path, *options, "--set", "inferencePool.enabled=true,fleet.hostFromNode=true")
    assert one_of(found, "ConfigMap")["data"] == {"athanor.yaml": TALLER, "policy.yaml": policy}
    pod = one_of(found, "DaemonSet")["spec"]["template"]["spec"]
    supervisor, gateway = pod["containers"]
    ports = {"http": 9080, "grpc": 9081, "metrics": 9090}
    assert {one["name"]: one["containerPort"] for one in gateway["ports"]} == ports
    assert {one["name"]: one["port"] for one in one_of(found, "Service")["spec"]["ports"]} == ports
    assert one_of(found, "InferencePool")["spec"]["targetPorts"] == [{"number": 9080}]
    stays = supervisor["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert stays > 30 + DRAIN_S and pod["terminationGracePeriodSeconds"] > stays + 60
    named = [
        [one["valueFrom"] for one in each["env"] if one["name"] == "ATHANOR_FLEET__HOST"] for each in pod["containers"]
    ]
    assert named == [[{"fieldRef": {"fieldPath": "spec.nodeName"}}]] * 2
    assert [problems(one) for one in found] == [[]] * len(found)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("image.digest=sha256:12", "digest"),
        ("image.repository=", "repository"),
        ("imgae.tag=1", "imgae"),
        ("updates.maxUnavailable=0", "maxUnavailable"),
        ("updates.minReadySeconds=soon", "minReadySeconds"),
        ("hostPaths.state=var/lib/athanor", "state"),
        ("secrets.files=My_Secret", "files"),
        ("supervisor.resources.limits.memory=16 GB", "memory"),
        ("inferencePool.endpointPicker.failureMode=Open", "failureMode"),
        ("policy=", "policy"),
        ("configuration=listen: [", "no YAML"),
        ("configuration=listen: {http: '127.0.0.1:8080'}", "listen.http must be 0.0.0.0:PORT"),
        ("configuration=" + TALLER.replace("\n  tls: {", "\n  tsl: {"), "listen.tls must name"),
        ("configuration=" + TALLER.replace("drain_notice_s: 30", "drain_notice_s: 1.5"), "whole seconds"),
        ("configuration=" + TALLER.replace("drain_notice_s: 30", "drain_notice_s: 31"), "30 at most"),
        ("configuration=" + TALLER.replace("unix:/run/athanor/admin.sock", "127.0.0.1:8082"), "must be unix:PATH"),
        ("configuration=" + TALLER.replace("metrics_token", "fleet_key"), "metrics_token must name"),
        ("networkPolicy.routers=null", "routers"),
        ("networkPolicy.monitoring=null", "monitoring"),
        ("networkPolicy=null", "networkPolicy"),
        ("nodeSelector=null", "nodeSelector"),
    ],
)
def test_wrong_values_are_refused(root: Path, tmp_path: Path, value: str, told: str) -> None:
    """By the schema, or by the templates where the text of the configuration is at fault; the message names the place.
    A selector that is taken away would select all namespaces, or all nodes.
    The control is the test above: right values are taken."""
    key, _, text = value.partition("=")
    (tmp_path / "value").write_text(text)
    option = ["--set-file", f"{key}={tmp_path}/value"] if key == "configuration" else ["--set", value]
    done = helm(tmp_path, "template", "athanor", str(root / CHART), *option)
    assert done.returncode != 0 and told in done.stderr, done.stderr
