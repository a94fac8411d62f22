"""Alerts under their real causes: an appliance in two processes, its gateway with the procfs of the shipped unit and
few descriptors, a real Prometheus that scrapes the metrics listener with a token, and the trouble that a rule is for.

Needs root: for the procfs, and for a small disk that fills up. What needs the appliance is of the full count: `make
test` has that every name asked for is in the scrape of a demo, and that no alert fires without its cause
(tests/system/test_monitoring.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.common.catalog import embedded_model
from appliance.common.credentials import new_pepper
from appliance.common.keys import KeyRecord, issue, serialise_records
from appliance.operator.demo import choose_ports, run_directory
from isolation.host.atomic_file import write_whole
from tests.appliance.gateway.front.pki import Pki
from tests.observers import observer
from tests.system.conftest import ATHANOR, PLAIN, as_demos
from tests.system.test_monitoring import NOT_YET, PAGES, ask, queries, rules
from tests.system.test_serve import trust

pytestmark = [
    pytest.mark.runsc,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a procfs and a small disk"),
]

PATIENCE_S = 120.0
"""How long an alert may take: a few scrapes, on a machine that has other work."""

DESCRIPTORS = 1_024
"""The gateway's limit."""

STEP_TIMEOUT_S = 8.0
LATE_S = 3.5
"""Seconds after which an engine counts as hung, and that one is stopped so that its first tokens are late."""

GPUS = {
    "AthanorGpuLost",
    "AthanorGpuUnplaced",
    "AthanorGpuOut",
    "AthanorGpuMemory",
    "AthanorGpuFailing",
    "AthanorGpuHot",
    "AthanorGpuUnwatched",
}
"""Need a card. ``tests/appliance/supervisor/cards`` has what leads to their series, from a pretended driver on."""

NOT_CAUSED = GPUS | {
    "AthanorDiskFilling",
    "AthanorSandboxOom",
    "AthanorSandboxMemory",
    "AthanorIntegrity",
    "AthanorUnfair",
    "AthanorTenantUnusual",
    "AthanorAuditUnwitnessed",
    "AthanorFleetStoreAway",
    "AthanorKvStoreAway",
    "AthanorFleetKeys",
    "AthanorBatchStuck",
}
"""A disk has to fill over half an hour; the next two need a memory cgroup, which not every machine of the tests has;
the next two need an engine with a defect, and the last six a tenant that was seen a day ago, a witness, a fleet, a
store of sealed KV, a key server and a quarter of an hour. ``tests/test_operators_week.py`` has all of them but ``GPUS``
and the last six, in a booted container: a tenant's days are in ``tests/test_unusual_tenants.py``, late witnesses in
``tests/appliance/operator/test_witnesses.py``, stores that are away in ``tests/system/test_fleet_limits.py`` and
``tests/system/test_kv_store.py``, keys of a fleet that are not held in
``tests/appliance/supervisor/test_fleet_share.py``, batches that are stuck in
``tests/appliance/gateway/batches/test_batches.py``."""

STATIC = {"AthanorCertificate", "AthanorDiskLow", "AthanorSpansLost"}
"""Caused by the configuration: a certificate that ends tomorrow, a small disk, a collector that is not there."""

GATEWAY = """
mount -t proc -o subset=pid,hidepid=invisible proc /proc
ulimit -n {descriptors}
exec {athanor} serve --role gateway --config {config}
"""
"""ProcSubset=pid and ProtectProc=invisible as the unit has them, and LimitNOFILE=."""

PROMETHEUS = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: athanor
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
"""

POLICY = """\
version: 1
tenants:
  alpha:
    credentials: ["key:a"]
    models: ["*"]
prices: {currency: EUR, rules: [{models: ["*"], input: 1, output: 2}]}
"""


@dataclass
class Troubled:
    """The appliance, and the Prometheus that looks at it."""

    folder: Path
    http: str
    admin: str
    metrics: str
    token: str
    key: str
    prometheus: str
    gateway: subprocess.Popen[bytes]
    verify: Any
    callers: list[threading.Thread] = field(default_factory=list)

    def complete(self, prompt: str = "What is a sandbox?", timeout_s: float = 60.0, **words: Any) -> int:
        """Ask for a completion; gives the status, 0 where there is no answer."""
        body = {"model": "athanor-mini", "prompt": prompt, "max_tokens": 2, **words}
        headers = {"authorization": f"Bearer {self.key}"}
        url = self.http + "/v1/completions"
        try:
            return httpx.post(url, json=body, headers=headers, verify=self.verify, timeout=timeout_s).status_code
        except httpx.TransportError:
            return 0

    def call(self, **words: Any) -> threading.Thread:
        """Ask in a thread of its own."""
        thread = threading.Thread(target=self.complete, kwargs=words, daemon=True)
        thread.start()
        self.callers.append(thread)
        return thread

    def engine(self) -> dict[str, Any]:
        """The engine as status has it."""
        return dict(httpx.get(self.admin + "/status", timeout=30, verify=PLAIN).json()["models"][0]["engine"])

    def in_flight(self) -> int:
        """Requests that run or wait."""
        return int(httpx.get(self.admin + "/status", timeout=30, verify=PLAIN).json()["tenants"][0]["in_flight"])

    def next_engine(self, after: int = 0) -> int:
        """Wait for an engine of a later generation; gives its process."""
        until(lambda: self.engine()["state"] == "ready" and self.engine()["generation"] > after, "an engine")
        return int(self.engine()["pid"])

    def scrape(self) -> httpx.Response:
        """What Prometheus gets."""
        headers = {"authorization": f"Bearer {self.token}"}
        return httpx.get(self.metrics + "/metrics", headers=headers, timeout=30, verify=PLAIN)

    def fired(self) -> set[str]:
        """Alerts that have fired so far."""
        query = 'count by (alertname) (count_over_time(ALERTS{alertstate="firing"}[1h]))'
        return {one["metric"]["alertname"] for one in ask(self.prometheus, query)}

    def until_fired(self, *names: str, cause: Callable[[], object] = lambda: None) -> None:
        """Do what causes the alerts, again and again until they have fired; before, none of them has."""
        assert not set(names) & self.fired(), "fired without a cause"
        deadline = time.monotonic() + PATIENCE_S
        while missing := set(names) - self.fired():
            assert time.monotonic() < deadline, f"{missing} did not fire\n{self.tail()}"
            cause()
            time.sleep(0.5)
        print(f"fired under its cause: {', '.join(names)}")

    def tail(self) -> str:
        """The ends of the logs."""
        return "\n".join((self.folder / f"{role}.log").read_text()[-2_000:] for role in ("supervisor", "gateway"))


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(httpx.TransportError, LookupError, ValueError):
            if holds():
                return
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path, root: Path) -> Iterator[Troubled]:
    """Supervisor, gateway and Prometheus, each a process of its own, and the audit log on a disk of 1 MiB."""
    program = observer("prometheus")
    folder = tmp_path_factory.mktemp("troubled")
    (folder / "audit").mkdir()
    disk = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(folder / "audit")]
    done = subprocess.run(disk, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    with contextlib.ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "--lazy", str(folder / "audit")], check=False)
        found = configure(folder, stack)
        # Before Prometheus looks: a start that takes its time is no alert.
        until(lambda: found.scrape().status_code == 200 and found.complete() == 200, "the first answer")
        watch(found, root, program, stack)
        until(lambda: bool(ask(found.prometheus, "athanor_requests_total")), "the first scrape")
        yield found


def start(folder: Path, stack: contextlib.ExitStack, name: str, *argv: str, **environment: str) -> Any:
    """Start a program that ends with the stack; its output is in a log of its name."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **environment})
    stack.callback(end, process)
    return process


def watch(found: Troubled, root: Path, program: str, stack: contextlib.ExitStack) -> None:
    """Start a Prometheus with the shipped rules, which look and fire as soon as there is something."""
    folder = found.folder
    text = (root / "docs/monitoring/alerts.yaml").read_text()
    quick = re.sub(r"\bfor: \w+", "for: 1s", text.replace("interval: 30s", "interval: 1s"))
    quick = quick.replace("kv_free_blocks[5m]", "kv_free_blocks[10s]")
    (folder / "rules.yml").write_text(quick)
    words = {"rules": folder / "rules.yml", "token": folder / "token", "target": found.metrics.removeprefix("http://")}
    (folder / "prometheus.yml").write_text(PROMETHEUS.format(**words))
    options = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", "--log.level=error")
    start(folder, stack, "prometheus", program, *options, f"--web.listen-address={found.prometheus}")


def configure(folder: Path, stack: contextlib.ExitStack) -> Troubled:
    """Write the files and start supervisor and gateway."""
    authority, pepper, token = Pki.create(folder).authority, new_pepper(), secrets.token_hex(32)
    key, digest = issue("a", pepper)
    write_whole(folder / "pepper", pepper)
    write_whole(folder / "credentials.json", serialise_records({"a": KeyRecord(digest, datetime.now(UTC))}).encode())
    (folder / "policy.yaml").write_text(POLICY)
    write_whole(folder / "token", token.encode())
    http, rpc, admin, metrics, web = choose_ports((0,) * 5)
    config = {
        "listen": {
            **{name: f"127.0.0.1:{port}" for name, port in (("http", http), ("grpc", rpc), ("admin", admin))},
            "metrics": f"127.0.0.1:{metrics}",
            "metrics_token": "token",
            "tls": {"certificate": "server.pem", "key": "server.key"},
        },
        # Of 8 KiB of KV a token: three long answers fill it.
        "models": [
            {"name": "athanor-mini", "path": str(embedded_model()), "dtype": "float32", "kv_bytes": 24 << 20}
            | {"max_context": 1_024}
        ],
        "pepper": "pepper",
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "run_dir": str(run_directory(folder)),
        "audit": {"directory": "audit"},
        "sandbox": {**as_demos(), "step_timeout_s": STEP_TIMEOUT_S},
    }
    (folder / "athanor.yaml").write_text(json.dumps(config))
    supervisor = (ATHANOR, "serve", "--role", "supervisor", "--config", str(folder / "athanor.yaml"))
    start(folder, stack, "supervisor", *supervisor)
    script = GATEWAY.format(descriptors=DESCRIPTORS, athanor=ATHANOR, config=folder / "athanor.yaml")
    nobody = "http://127.0.0.1:1"
    command = ("unshare", "--mount", "sh", "-ec", script)
    gateway = start(folder, stack, "gateway", *command, OTEL_EXPORTER_OTLP_ENDPOINT=nobody)
    return Troubled(
        folder=folder,
        http=f"https://127.0.0.1:{http}",
        admin=f"http://127.0.0.1:{admin}",
        metrics=f"http://127.0.0.1:{metrics}",
        token=token,
        key=key,
        prometheus=f"127.0.0.1:{web}",
        gateway=gateway,
        verify=trust(authority),
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End a program that a test has started."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.mark.full
def test_every_series_is_there_under_the_shipped_unit(troubled: Troubled, root: Path) -> None:
    """With the unit's procfs, over the metrics listener, each name that a panel or a rule asks for is in the scrape,
    but those for which there is nothing to count. Control: that procfs has no boot time, which prometheus_client's
    collector needs, and the listener asks for its token."""
    last = [line for line in Path(f"/proc/{troubled.gateway.pid}/mounts").read_text().splitlines() if " /proc " in line]
    assert "subset=pid" in last[-1] and "hidepid=invisible" in last[-1]
    boot = Path(f"/proc/{troubled.gateway.pid}/root/proc/stat")
    assert not boot.exists() and boot.parent.is_dir()
    assert httpx.get(troubled.metrics + "/metrics", verify=PLAIN).status_code == 401
    given = {"authorization": f"Bearer {troubled.token}"}
    assert httpx.post(troubled.metrics + "/reload", verify=PLAIN).status_code == 401
    assert httpx.post(troubled.metrics + "/reload", headers=given, verify=PLAIN).status_code == 404
    assert httpx.post(troubled.metrics + "/metrics", headers=given, verify=PLAIN).status_code == 405
    assert httpx.get(troubled.admin + "/metrics", verify=PLAIN).status_code == 200
    pages = [one for page in PAGES for one in queries(root, page).values()]
    asked = " ".join((*pages, *rules(root).values()))
    names = set(re.findall(r"\b((?:athanor|gen_ai|process)_\w+)", re.sub(r"\{.*?\}|by \(.*?\)|\".*?\"", "", asked)))
    assert {name for name in names if name.startswith("process_")} >= {"process_open_fds", "process_max_fds"}
    rare = {*NOT_YET, "athanor_refusals_total", "athanor_sandbox_memory_bytes", "athanor_sandbox_memory_limit_bytes"}
    rare |= {name for name in names if name.startswith("athanor_kv_")}
    rare -= {"athanor_certificate_end_seconds"}

    def missing() -> set[str]:
        assert troubled.complete(max_tokens=64) == 200  # its tokens come in more than one pass
        return names - set(re.findall(r"^(\w+)[{ ]", troubled.scrape().text, re.MULTILINE)) - rare

    with contextlib.suppress(AssertionError):
        until(lambda: not missing(), "every name")
    assert missing() == set()
    found = ask(troubled.prometheus, "process_max_fds")
    assert [float(one["value"][1]) for one in found] == [DESCRIPTORS]


def test_the_rules_are_all_caused_or_named(root: Path) -> None:
    """No alert is left out unseen: each is in a test of this module, or in the list of those that are not."""
    text = Path(__file__).read_text()
    alerts = {name for name in rules(root) if name.startswith("Athanor")}
    caused = {name for name in alerts if f'"{name}"' in text}
    assert caused == alerts and alerts > NOT_CAUSED


@pytest.mark.full
def test_what_the_configuration_causes(troubled: Troubled) -> None:
    """A certificate that ends tomorrow, a small disk, and traces that nobody takes; once a slow start is over, nothing
    else is wrong."""
    deadline = time.monotonic() + PATIENCE_S
    while troubled.fired() != STATIC:
        assert time.monotonic() < deadline, troubled.fired()
        assert troubled.complete() == 200
        time.sleep(0.5)


@pytest.mark.full
def test_a_failed_reload(troubled: Troubled) -> None:
    """A policy with a mistake in it: the old one stays, and the alert fires."""
    policy = troubled.folder / "policy.yaml"
    policy.write_text(POLICY.replace("models", "modells"))
    reload = troubled.admin + "/reload"
    try:
        assert httpx.post(reload, timeout=60, verify=PLAIN).status_code == 409
        troubled.until_fired("AthanorPolicyNotLoaded")
    finally:
        policy.write_text(POLICY)
    assert httpx.post(reload, timeout=60, verify=PLAIN).status_code == 200


@pytest.mark.full
def test_descriptors_run_out(troubled: Troubled) -> None:
    """A limit that leaves no room: strangers cannot cause it, since the gateway keeps descriptors from its clients."""
    pid = troubled.gateway.pid

    def tighten() -> None:
        used = len(os.listdir(f"/proc/{pid}/fd"))
        # With none left the scraper could not connect either.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (int(used / 0.9), DESCRIPTORS))

    try:
        troubled.until_fired("AthanorDescriptors", cause=tighten)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    until(lambda: troubled.complete() == 200, "an answer")


@pytest.mark.full
def test_late_first_tokens(troubled: Troubled) -> None:
    """An engine that does nothing for some seconds while requests come: their first tokens are late."""

    def delay() -> None:
        pid = troubled.next_engine()
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(24):
                troubled.call()
            time.sleep(LATE_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_idle(troubled)

    troubled.until_fired("AthanorSlowFast", "AthanorSlowSlowly", cause=delay)


@pytest.mark.full
def test_more_requests_than_fit(troubled: Troubled) -> None:
    """Long answers for more callers than the KV memory holds: they wait, and the memory is full."""

    def ask_much() -> None:
        troubled.callers = [one for one in troubled.callers if one.is_alive()]
        for _ in range(30 - len(troubled.callers)):
            troubled.call(prompt=f"{secrets.token_hex(8)} Count:", max_tokens=900, ignore_eos=True, timeout_s=300)

    troubled.until_fired("AthanorQueue", "AthanorKvFull", cause=ask_much)


@pytest.mark.full
def test_an_engine_that_dies_again_and_again(troubled: Troubled) -> None:
    """Killed while it works, each time that it is back: the model is not served, it is restarted too often, answers
    that were begun fail by our fault, and a request that was alone in it at two deaths is in quarantine."""
    wait_idle(troubled)
    poison = f"poison {secrets.token_hex(8)} " + "very " * 100

    def kill() -> None:
        pid = troubled.next_engine()
        os.kill(pid, signal.SIGSTOP)  # it takes the request in, and gives nothing
        die(pid, troubled.call(prompt=poison, timeout_s=30))
        pid = troubled.next_engine()
        caller = troubled.call(prompt="Count:", max_tokens=900, ignore_eos=True, stream=True)
        until(lambda: troubled.engine()["running"] > 0 or not caller.is_alive(), "the request")
        die(pid, caller)

    def die(pid: int, caller: threading.Thread) -> None:
        before = troubled.engine()["generation"]
        until(lambda: troubled.in_flight() > 0 or not caller.is_alive(), "the request")
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        troubled.next_engine(before)
        wait_idle(troubled)

    deaths = ("AthanorQuarantine", "AthanorSandboxRestarts", "AthanorSandboxDown")
    troubled.until_fired(*deaths, "AthanorFailingFast", "AthanorFailingSlowly", cause=kill)


@pytest.mark.full
def test_an_engine_that_hangs(troubled: Troubled) -> None:
    """An engine that is stopped in the middle of its work, and finishes no step, is ended as one that broke its
    promise."""
    pid = troubled.next_engine()

    def stop() -> None:
        if not troubled.in_flight():
            troubled.call(max_tokens=900, ignore_eos=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)

    troubled.until_fired("AthanorSandboxFault", cause=stop)


def wait_idle(troubled: Troubled) -> None:
    """Wait until no request runs."""
    until(lambda: troubled.in_flight() == 0, "the end of the requests")


@pytest.mark.full
def test_a_full_disk_under_the_audit_log(troubled: Troubled) -> None:
    """The audit log's disk is full: it is not written, and requests are served all the same, as configured."""
    filler = troubled.folder / "audit/filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    try:
        troubled.until_fired("AthanorAuditFailing", cause=lambda: troubled.complete(model="none"))
    finally:
        filler.unlink()


@pytest.mark.full
def test_a_gateway_that_is_gone(troubled: Troubled) -> None:
    """Nothing answers any more at the address that is scraped."""
    query = 'ALERTS{alertname="AthanorDown", alertstate="firing"}'
    assert ask(troubled.prometheus, query) == []
    end(troubled.gateway)
    until(lambda: bool(ask(troubled.prometheus, query)), "AthanorDown")
