"""The manifests of ``deploy/kubernetes``: they name what the appliance has, and keep to Kubernetes' schemas."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from appliance.common.config import ApplianceConfig
from appliance.common.config_loader import load_config
from appliance.gateway.process import DRAIN_S
from policy.files import read_sources
from policy.loader import load_policy
from tests.observers import beside_helm
from tests.system.kubernetes_schemas import problems

FOLDER = "deploy/kubernetes"


def manifests(root: Path) -> list[dict[str, Any]]:
    """All objects of the folder, those of other projects' kinds too."""
    found = []
    for path in sorted((root / FOLDER).glob("*.yaml")):
        found += [one for one in YAML(typ="safe").load_all(path) if one]
    return found


def of_kind(root: Path, kind: str, name: str = "athanor") -> dict[str, Any]:
    """One object."""
    (found,) = [one for one in manifests(root) if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def pod_of(root: Path) -> dict[str, Any]:
    """The pod's specification."""
    pod: dict[str, Any] = of_kind(root, "DaemonSet")["spec"]["template"]["spec"]
    return pod


def configured(root: Path, folder: Path) -> ApplianceConfig:
    """The ConfigMap's configuration, by the appliance's own parser."""
    path = folder / "athanor.yaml"
    path.write_text(of_kind(root, "ConfigMap")["data"]["athanor.yaml"])
    return load_config(path, environment={})


def mounts(container: dict[str, Any]) -> dict[str, bool]:
    """Folder to whether it may be written."""
    return {one["mountPath"]: not one.get("readOnly", False) for one in container["volumeMounts"]}


def mounted(container: dict[str, Any], path: Path) -> bool | None:
    """Whether what lies below a volume may be written; None where no volume has it."""
    return next((may for folder, may in mounts(container).items() if path.is_relative_to(folder)), None)


def test_every_path_of_the_configuration_is_in_a_volume_of_who_uses_it(root: Path, tmp_path: Path) -> None:
    """What the supervisor reads and writes, and what the gateway does, by the configuration that the ConfigMap has. The
    supervisor has neither credentials nor keys of TLS: its control. The policy is one that the loader takes."""
    config = configured(root, tmp_path)
    supervisor, gateway = pod_of(root)["containers"]
    assert config.audit is not None and config.digest_cache is not None and config.sandbox.checkpoints is not None
    written = (config.run_dir, config.audit.directory, config.digest_cache, config.sandbox.checkpoints)
    assert all(mounted(supervisor, one) is True for one in written)
    assert all(mounted(supervisor, model.folder) is False for model in config.models)
    tls = config.listen.tls
    assert tls is not None and config.listen.metrics_token is not None and config.listen.fleet_key is not None
    secret = (config.credentials, config.pepper, config.listen.metrics_token, config.listen.fleet_key)
    secret += (tls.certificate, tls.key)
    assert [mounted(gateway, one) for one in secret] == [False] * len(secret)
    assert [mounted(supervisor, one) for one in secret] == [None] * len(secret)
    assert mounted(gateway, Path(config.listen.admin.removeprefix("unix:"))) is True
    assert mounted(supervisor, config.policy) is False and mounted(gateway, config.policy) is False
    (tmp_path / "policy.yaml").write_text(of_kind(root, "ConfigMap")["data"]["policy.yaml"])
    load_policy(read_sources(tmp_path / "policy.yaml"))
    for container in (supervisor, gateway):
        named = container["command"][-1]
        assert Path(named).name in of_kind(root, "ConfigMap")["data"] and mounted(container, Path(named)) is False


def test_the_gateway_writes_nothing_that_the_supervisor_reads(root: Path) -> None:
    """Of the volumes that both containers have, the gateway may write none: bundles, from which runsc starts sandboxes,
    lie in the supervisor's run directory, and a kubelet makes such a volume open to all. Controls: both have that
    volume, and the supervisor writes there."""
    supervisor, gateway = (
        {one["name"]: one.get("readOnly", False) for one in container["volumeMounts"]}
        for container in pod_of(root)["containers"]
    )
    shared = supervisor.keys() & gateway.keys()
    assert "run-supervisor" in shared and not supervisor["run-supervisor"]
    assert all(gateway[name] for name in shared)


def test_no_budget_blocks_every_eviction(root: Path) -> None:
    """A PodDisruptionBudget over pods of a DaemonSet, which has no scale, may say ``minAvailable`` as a number alone:
    with anything else Kubernetes counts no pod, and refuses each eviction."""
    budgets = [one["spec"] for one in manifests(root) if one["kind"] == "PodDisruptionBudget"]
    assert all(type(one.get("minAvailable")) is int for one in budgets)


def test_secrets_are_in_secrets(root: Path, tmp_path: Path) -> None:
    """Each file of a Secret that the configuration names is in that Secret, and none of them is in the ConfigMap."""
    config = configured(root, tmp_path)
    keys = set(of_kind(root, "Secret")["stringData"])
    named = (config.credentials, config.pepper, config.listen.metrics_token, config.listen.fleet_key)
    assert {one.name for one in named if one is not None} == keys
    assert set(of_kind(root, "Secret", "athanor-tls")["stringData"]) == {"tls.crt", "tls.key"}
    assert set(of_kind(root, "ConfigMap")["data"]) == {"athanor.yaml", "policy.yaml"}
    text = json.dumps(of_kind(root, "ConfigMap"))
    assert not re.search(r"ath_[A-Za-z0-9-]+_|PRIVATE KEY|[0-9a-f]{64}", text)


def test_ports_and_probes_are_the_listeners_and_routes(root: Path, tmp_path: Path) -> None:
    """Ports by name over pod, Service and NetworkPolicy; each probe asks a route that the front end has without a
    credential. A drain's notice is longer than two failed probes, the supervisor
    stays longer than notice and drain, and the pod's grace is longer than all of it."""
    config = configured(root, tmp_path)
    pod, (supervisor, gateway) = pod_of(root), pod_of(root)["containers"]
    ports = {one["name"]: one["containerPort"] for one in gateway["ports"]}
    assert ports == {name: int(getattr(config.listen, name).rpartition(":")[2]) for name in ("http", "grpc", "metrics")}
    assert {one["targetPort"]: one["port"] for one in of_kind(root, "Service")["spec"]["ports"]} == ports
    allowed = [[one["port"] for one in rule["ports"]] for rule in of_kind(root, "NetworkPolicy")["spec"]["ingress"]]
    assert allowed == [["http", "grpc"], ["metrics"]]
    source = (root / "appliance/gateway/http/app.py").read_text()
    public = set(re.findall(r'Route\("GET", "([^"]+)", Auth\.PUBLIC', source))
    probes = [gateway[one]["httpGet"] for one in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert {one["path"] for one in probes} <= public and {(one["port"], one["scheme"]) for one in probes} == {
        ("http", "HTTPS")
    }
    ready = gateway["readinessProbe"]
    assert config.listen.drain_notice_s > ready["periodSeconds"] * ready["failureThreshold"]
    stays = supervisor["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert stays > config.listen.drain_notice_s + DRAIN_S and "lifecycle" not in gateway
    assert pod["terminationGracePeriodSeconds"] > stays + 60
    (pool,) = [one for one in manifests(root) if one["kind"] == "InferencePool"]
    assert [one["number"] for one in pool["spec"]["targetPorts"]] == [ports["http"]]
    labels = of_kind(root, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    for kind in ("InferencePool", "DaemonSet"):
        assert of_kind(root, kind)["spec"]["selector"]["matchLabels"] == labels


def test_the_pod_has_no_rights_but_those_it_needs(root: Path) -> None:
    """Neither root, capability, host's namespace nor the cluster's token; its processes may gain nothing."""
    pod = pod_of(root)
    assert (
        pod["automountServiceAccountToken"] is False
        and of_kind(root, "ServiceAccount")["automountServiceAccountToken"] is False
    )
    assert pod["securityContext"]["runAsNonRoot"] and not any(pod[one] for one in ("hostNetwork", "hostPID", "hostIPC"))
    users = set()
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["capabilities"] == {"drop": ["ALL"]} and context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] and "privileged" not in context
        users.add(context["runAsUser"])
    assert len(users) == 2 and 0 not in users
    profiles = [one["securityContext"]["seccompProfile"] for one in pod["containers"]]
    assert (root / FOLDER / "node" / profiles[0]["localhostProfile"]).exists() and profiles[1] == {
        "type": "RuntimeDefault"
    }


FOREIGN = {"InferencePool", "HTTPRoute", "BackendTLSPolicy"}
"""Kinds of other projects."""


def test_kubectl_renders_the_folder(root: Path) -> None:
    """By kubectl's own kustomize, where it is installed: every object but Secrets and other projects' kinds."""
    line = [beside_helm("kubectl"), "kustomize", str(root / FOLDER)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kinds = {one["kind"] for one in YAML(typ="safe").load_all(done.stdout)}
    assert kinds == {one["kind"] for one in manifests(root)} - {"Secret", "Kustomization", *FOREIGN}


def test_the_objects_keep_to_the_schemas_of_kubernetes(root: Path) -> None:
    """Every object, by the strict schemas of Kubernetes."""
    own = [one for one in manifests(root) if one["kind"] not in (*FOREIGN, "Kustomization")]
    assert len(own) >= 8
    for one in own:
        assert problems(one) == [], one["kind"]


def test_pool_route_and_its_tls_keep_to_their_schemas(root: Path, tmp_path: Path) -> None:
    """By schemas of the fields that we use. The route leads to the pool, whose selector and port are the pods', and the
    policy for TLS is about that pool."""
    found = {one["kind"]: one for one in manifests(root) if one["kind"] in FOREIGN}
    assert set(found) == FOREIGN
    for one in found.values():
        assert problems(one) == [], one["kind"]
    name = found["InferencePool"]["metadata"]["name"]
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}
    assert [one["backendRefs"] for one in found["HTTPRoute"]["spec"]["rules"]] == [[pool]]
    assert found["BackendTLSPolicy"]["spec"]["targetRefs"] == [pool]
    assert configured(root, tmp_path).listen.tls is not None


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("DaemonSet", "spec.template.spec.containers.0.securityContext.readOnlyRoot", True),
        ("DaemonSet", "spec.template.spec.terminationGracePeriodSeconds", "120"),
        ("NetworkPolicy", "spec.egres", []),
        ("ConfigMap", "data.athanor", {"listen": {}}),
        ("InferencePool", "spec.extensionRef", {"name": "athanor-endpoint-picker"}),
        ("InferencePool", "spec.endpointPickerRef.port", 9002),
        ("InferencePool", "spec.endpointPickerRef.failureMode", "Open"),
        ("HTTPRoute", "spec.rules.0.timeouts.request", "0"),
        ("HTTPRoute", "spec.rules.0.matches.0.path.type", "Prefix"),
        ("BackendTLSPolicy", "spec.validation.caCertificateRefs", []),
        ("BackendTLSPolicy", "spec.targetRef", {"kind": "InferencePool"}),
    ],
)
def test_the_schemas_refuse_what_is_wrong(root: Path, name: str, place: str, value: Any) -> None:
    """The control: one misspelt field, older field or wrong type, and the same object is refused at that place."""
    wrong = json.loads(json.dumps(of_kind(root, name)))
    assert problems(wrong) == []
    *path, last = place.split(".")
    inner = wrong
    for key in path:
        inner = inner[int(key) if key.isdigit() else key]
    inner[last] = value
    found = problems(wrong)
    assert len(found) == 1 and (place in found[0] or last in found[0]), found
