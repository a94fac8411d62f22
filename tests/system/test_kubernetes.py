"""The manifests of ``deploy/kubernetes``: they name what the appliance has, and its processes serve under them."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from appliance.common.catalog import embedded_model
from appliance.common.config import ApplianceConfig
from appliance.common.config_loader import load_config
from appliance.common.keys import KeyRecord, issue, serialise_records
from appliance.gateway.process import DRAIN_S
from policy.files import read_sources
from policy.loader import load_policy
from tests.system.pods import ask, put, script, start
from tests.system.routers import Certificates

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


def test_kubectl_renders_the_folder(root: Path) -> None:
    """By kubectl's own kustomize, where it is installed: every object but Secrets and other projects' kinds."""
    kubectl = shutil.which("kubectl") or pytest.skip("kubectl is not installed")
    done = subprocess.run([kubectl, "kustomize", str(root / FOLDER)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kinds = {one["kind"] for one in YAML(typ="safe").load_all(done.stdout)}
    assert kinds == {one["kind"] for one in manifests(root)} - {"Secret", "InferencePool", "HTTPRoute", "Kustomization"}


def test_the_objects_keep_to_the_schemas_of_kubernetes(root: Path) -> None:
    """By the schemas of kubernetes-validate, where it is installed. Control: a misspelt key is refused."""
    validate = pytest.importorskip("kubernetes_validate")
    own = [one for one in manifests(root) if one["kind"] not in ("InferencePool", "HTTPRoute", "Kustomization")]
    for one in own:
        validate.validate(one, "1.37", strict=True)
    wrong = json.loads(json.dumps(of_kind(root, "DaemonSet")))
    wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRoot"] = True
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.37", strict=True)


@contextlib.contextmanager
def network() -> Iterator[int]:
    """A process with a network of its own, as the pod's sandbox has."""
    line = ["unshare", "--net", "sh", "-c", "ip link set lo up && exec sleep 600"]
    with subprocess.Popen(line, stdin=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.runsc
@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_processes_serve_as_the_pod_lets_them(root: Path, tmp_path: Path) -> None:
    """Both containers with the manifest's users, capabilities, volumes, commands and ports, in namespaces of their own:
    runsc works there, and a tenant gets an answer; after a swap of the ConfigMap's link as well, since nothing reads it
    before a reload."""
    if os.geteuid() != 0:
        pytest.skip("only root makes the namespaces of a pod")
    pod, config = pod_of(root), of_kind(root, "ConfigMap")["data"]
    group = pod["securityContext"]["fsGroup"]
    pepper = base64.b64encode(secrets.token_bytes(48))
    key, digest = issue("alpha-1", pepper)
    record = KeyRecord(digest, datetime.now(UTC))
    allowed = "version: 1\ntenants:\n  alpha: {credentials: ['key:alpha-1'], models: ['*']}\n"
    with tempfile.TemporaryDirectory(prefix="pod-") as name, network() as net:
        folder = Path(name)
        folder.chmod(0o755)
        volumes = {one["name"]: folder / one["name"] for one in pod["volumes"]}
        for one in pod["volumes"]:
            volumes[one["name"]].mkdir()
            os.chown(volumes[one["name"]], 64001 if one["name"] == "state" else 0, group)
            volumes[one["name"]].chmod(0o2777 if "emptyDir" in one else 0o755)
        shutil.copytree(embedded_model(), volumes["models"] / "athanor-mini")
        certificates = Certificates.create(folder)
        where = "    path: /var/lib/athanor/models/athanor-mini\n"
        assert where in config["athanor.yaml"]
        # The null engine: what is shown is the pod, and gVisor in it.
        config |= {
            "athanor.yaml": config["athanor.yaml"].replace(where, where + "    runner: 'null'\n    step_us: 1000\n")
        }
        put(volumes["config"], {**config, "policy.yaml": allowed}, group, 0o444)
        secret = {
            "credentials.json": serialise_records({"alpha-1": record}),
            "pepper": pepper.decode(),
            "fleet.key": "5a" * 32,
            "metrics-token": "t" * 32,
        }
        put(volumes["secret"], secret, group, 0o440)
        tls = {
            "tls.crt": (certificates.folder / "host.pem").read_text(),
            "tls.key": (certificates.folder / "host.key").read_text(),
        }
        put(volumes["tls"], tls, group, 0o440)
        logs = [tmp_path / f"{one['name']}.log" for one in pod["containers"]]
        processes = [
            start(script(pod, one, volumes, folder / f"scratch-{one['name']}"), log, net)
            for one, log in zip(pod["containers"], logs, strict=True)
        ]
        try:
            wait_ready(net, processes, logs)
            body = {"model": "athanor-mini", "prompt": "Count", "max_tokens": 4}
            assert ask(net, 8080, "/v1/completions", key, body)[0] == 200
            put(volumes["config"], {**config, "policy.yaml": "version: 1\ntenants: {}\n"}, group, 0o444)
            assert ask(net, 8080, "/v1/completions", key, body)[0] == 200  # nothing reads it before a reload
        finally:
            for one in processes:
                one.kill()
                one.wait(30)


def wait_ready(net: int, processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """The readiness probe succeeds."""
    until, status = time.monotonic() + 300, (0, "")
    while status[0] != 200:
        told = "\n".join(f"{log.name}: {log.read_text()[-2_500:]}" for log in logs)
        assert time.monotonic() < until and all(one.poll() is None for one in processes), told
        time.sleep(1)
        status = ask(net, 8080, "/health/ready")
