"""The appliance's processes as the pods of ``deploy/kubernetes`` let them run: an imitation of a pod (``pods``)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import select
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.common.catalog import embedded_model
from appliance.common.keys import KeyRecord, issue, serialise_records
from appliance.operator.demo import run_directory
from tests.system.pods import ask, end, execute, put, script, start
from tests.system.routers import Certificates, free_port
from tests.system.test_kubernetes import of_kind, pod_of

pytestmark = [pytest.mark.runsc, pytest.mark.full, pytest.mark.timeout(600)]

ALLOWED = "version: 1\ntenants:\n  alpha: {credentials: ['key:alpha-1', 'key:alpha-2'], models: ['*']}\n"
NOBODY = "version: 1\ntenants: {}\n"
NULL = "    runner: 'null'\n    step_us: 1000\n"
"""Added to the entry of the model: the null engine, where what is shown is the pod, and gVisor in it."""

RELOAD = "/usr/bin/athanor reload --admin unix:/run/athanor/admin.sock"

IN_FORCE_S = 20.0
"""Until changed keys are in force, on a busy machine."""


@contextlib.contextmanager
def network() -> Iterator[int]:
    """A process with a network of its own, as the pod's sandbox has."""
    line = ["unshare", "--net", "sh", "-c", "ip link set lo up && exec sleep 600"]
    with subprocess.Popen(line, stdin=subprocess.DEVNULL) as process:
        try:
            yield process.pid
        finally:
            process.kill()


@dataclass(frozen=True)
class Pod:
    """A pod that serves."""

    net: int
    """A process in its network."""
    volumes: dict[str, Path]
    group: int
    keys: tuple[str, str]
    records: dict[str, KeyRecord]
    files: dict[str, str]
    """Those of the ConfigMap."""
    specification: dict[str, Any]
    gateway: subprocess.Popen[bytes]

    def ask(self, key: str, **options: Any) -> tuple[int, str]:
        """A completion."""
        body = {"model": "athanor-mini", "prompt": "Count", "max_tokens": 4, **options}
        return ask(self.net, 8080, "/v1/completions", key, body)

    def put_config(self, policy: str, step_timeout_s: int = 30) -> None:
        """Change the ConfigMap; the kubelet swaps the link."""
        text = self.files["athanor.yaml"].replace("sandbox:\n", f"sandbox:\n  step_timeout_s: {step_timeout_s}\n")
        put(self.volumes["config"], {"athanor.yaml": text, "policy.yaml": policy}, self.group, 0o444)

    def put_keys(self, *ids: str) -> None:
        """Change the Secret, so that these keys are left."""
        text = serialise_records({name: self.records[name] for name in ids})
        names = ("pepper", "fleet.key", "metrics-token")
        rest = {name: (self.volumes["secret"] / name).read_text() for name in names}
        put(self.volumes["secret"], {**rest, "credentials.json": text}, self.group, 0o440)

    def reload(self) -> subprocess.CompletedProcess[str]:
        """As docs/kubernetes.md says: `kubectl exec POD -c gateway -- athanor reload`."""
        return execute(self.specification, self.specification["containers"][1], self.gateway, RELOAD)


def volumes_of(pod: dict[str, Any], folder: Path, group: int) -> dict[str, Path]:
    """A folder for each volume, with the owner and mode that node and kubelet give it."""
    volumes = {one["name"]: folder / one["name"] for one in pod["volumes"]}
    for one in pod["volumes"]:
        volumes[one["name"]].mkdir()
        os.chown(volumes[one["name"]], 64001 if one["name"] == "state" else 0, group)
        volumes[one["name"]].chmod(0o2777 if "emptyDir" in one else 0o755)
    shutil.copytree(embedded_model(), volumes["models"] / "athanor-mini")
    return volumes


@contextlib.contextmanager
def serving(root: Path, tmp_path: Path, engine: str) -> Iterator[Pod]:
    """Both containers with the manifest's users, capabilities, volumes, commands and ports, in namespaces of their own,
    until the readiness probe succeeds; ``engine`` is what the entry of the model has besides."""
    if os.geteuid() != 0:
        pytest.skip("only root makes the namespaces of a pod")
    pod, files = pod_of(root), dict(of_kind(root, "ConfigMap")["data"])
    group, pepper = pod["securityContext"]["fsGroup"], base64.b64encode(secrets.token_bytes(48))
    issued = {name: issue(name, pepper) for name in ("alpha-1", "alpha-2")}
    records = {name: KeyRecord(digest, datetime.now(UTC)) for name, (_, digest) in issued.items()}
    where = "    path: /var/lib/athanor/models/athanor-mini\n"
    assert where in files["athanor.yaml"]
    files |= {"athanor.yaml": files["athanor.yaml"].replace(where, where + engine), "policy.yaml": ALLOWED}
    with tempfile.TemporaryDirectory(prefix="pod-") as name, network() as net:
        folder = Path(name)
        folder.chmod(0o755)
        volumes, certificates = volumes_of(pod, folder, group), Certificates.create(folder)
        put(volumes["config"], files, group, 0o444)
        secret = {"pepper": pepper.decode(), "fleet.key": "5a" * 32, "metrics-token": "t" * 32}
        put(volumes["secret"], {**secret, "credentials.json": serialise_records(records)}, group, 0o440)
        tls = {
            f"tls.{new}": (certificates.folder / f"host.{old}").read_text()
            for new, old in (("crt", "pem"), ("key",) * 2)
        }
        put(volumes["tls"], tls, group, 0o440)
        logs = [tmp_path / f"{one['name']}.log" for one in pod["containers"]]
        processes = [
            start(script(pod, one, volumes, folder / f"scratch-{one['name']}"), log, net)
            for one, log in zip(pod["containers"], logs, strict=True)
        ]
        try:
            wait_ready(net, processes, logs)
            keys = issued["alpha-1"][0], issued["alpha-2"][0]
            yield Pod(net, volumes, group, keys, records, files, pod, processes[1])
        finally:
            for one in processes:
                end(one)


def wait_ready(net: int, processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """The readiness probe succeeds."""
    until, status = time.monotonic() + 300, (0, "")
    while status[0] != 200:
        told = "\n".join(f"{log.name}: {log.read_text()[-2_500:]}" for log in logs)
        assert time.monotonic() < until and all(one.poll() is None for one in processes), told
        time.sleep(1)
        status = ask(net, 8080, "/health/ready")


def becomes(pod: Pod, key: str, status: int) -> None:
    """A key is answered so, within a while."""
    until = time.monotonic() + IN_FORCE_S
    while (seen := pod.ask(key)[0]) != status:
        assert time.monotonic() < until, seen
        time.sleep(0.2)


def test_the_processes_serve_as_the_pod_lets_them(root: Path, tmp_path: Path) -> None:
    """runsc works there, and a tenant gets an answer. A swapped link of the ConfigMap changes nothing before a
    reload in the container, which puts the new policy and configuration in force; one with a mistake is refused and
    changes nothing. A swapped link of the Secret ends a revoked key without a reload, and not the other one."""
    with serving(root, tmp_path, NULL) as pod:
        first, second = pod.keys
        assert (pod.ask(first)[0], pod.ask(second)[0]) == (200, 200)
        pod.put_config(NOBODY)
        assert pod.ask(first)[0] == 200
        done = pod.reload()
        assert done.returncode == 0, done.stderr
        assert pod.ask(first)[0] == 401
        pod.put_config(ALLOWED, step_timeout_s=77)
        done = pod.reload()
        assert done.returncode == 0 and "step_timeout_s" in done.stdout and "77" in done.stdout, done
        assert pod.ask(first)[0] == 200
        pod.put_config(ALLOWED.replace("models:", "modles:"))
        refused = pod.reload()
        assert refused.returncode == 1 and "modles" in refused.stderr, refused
        assert pod.ask(first)[0] == 200
        pod.put_keys("alpha-2")
        becomes(pod, first, 401)
        assert pod.ask(second)[0] == 200
        pod.put_keys("alpha-1", "alpha-2")
        becomes(pod, first, 200)


PROMPTS = ("Count", "What is a sandbox?", "Why is the sky", "Once upon a time")


PLAIN_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
PLAIN_TLS.check_hostname, PLAIN_TLS.verify_mode = False, ssl.CERT_NONE
"""For a client that asks by an address."""


@contextlib.contextmanager
def outside(pod: Pod, folder: Path) -> Iterator[str]:
    """An appliance outside of the pod, of the same files, without compiled kernels as there: their sums differ in
    the last bits. Gives its address."""
    state, run = folder / "state", run_directory(folder)
    assert "kernels" not in pod.files["athanor.yaml"]
    state.mkdir()
    ports = {name: free_port() for name in ("8080", "8081", "9464")}
    text = pod.files["athanor.yaml"].replace("unix:/run/athanor/admin.sock", f"127.0.0.1:{free_port()}")
    for old, new in ports.items():
        text = text.replace(f"0.0.0.0:{old}", f"127.0.0.1:{new}")
    for name in ("config", "secret", "tls"):
        text = text.replace(f"/etc/athanor/{name}/", f"{pod.volumes[name]}/")
    text = text.replace("/var/lib/athanor/models", str(pod.volumes["models"]))
    text = text.replace("/var/lib/athanor-supervisor", str(state)).replace("/run/athanor-supervisor", str(run))
    (folder / "outside.yaml").write_text(text)
    line = [sys.executable, "-m", "appliance.operator.cli", "serve", "--config", str(folder / "outside.yaml")]
    with (folder / "outside.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=log, cwd=Path(__file__).parents[2])
    try:
        assert process.stdout is not None
        ready = process.stdout.readline() if select.select([process.stdout], [], [], 200)[0] else b""
        assert ready, (folder / "outside.log").read_text()[-3_000:]
        yield str(json.loads(ready)["http"])
    finally:
        process.terminate()
        process.wait(60)


def test_the_real_engine_answers_in_a_pod_as_outside(root: Path, tmp_path: Path) -> None:
    """The engine and athanor-mini: answers that are drawn greedily, and with a seed, are those of an appliance outside
    of the pod, text, reasons of their ends and usage. Each prompt has another."""
    asked = [{"max_tokens": 32, "temperature": 0}, {"max_tokens": 32, "temperature": 0.8, "seed": 7}]
    every = [{"prompt": prompt, **one} for prompt in PROMPTS for one in asked]
    with serving(root, tmp_path, "") as pod:
        key = pod.keys[0]
        inside = [answered(json.loads(pod.ask(key, **one)[1])) for one in every]
        with tempfile.TemporaryDirectory(prefix="outside-") as name, outside(pod, Path(name)) as url:
            headers = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=url, headers=headers, timeout=60, verify=PLAIN_TLS) as client:
                bodies = [{"model": "athanor-mini", **one} for one in every]
                seen = [answered(client.post("/v1/completions", json=body).json()) for body in bodies]
    assert inside == seen and len({text for text, _, _ in inside}) >= len(PROMPTS)


def answered(document: dict[str, Any]) -> tuple[str, str, dict[str, int]]:
    """Text, reason of the end and usage of an answer."""
    usage = {name: document["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return document["choices"][0]["text"], document["choices"][0]["finish_reason"], usage
