"""An operator's week in a booted Debian: the real package, its units under a real systemd, a real Prometheus with the
shipped rules. From Monday to Friday every step takes no longer than docs/operate.md promises, and every failure is one
that the documents describe; on Saturday every alert fires under its cause; on Sunday everything is removed.

Needs root, dpkg-deb, mmdebstrap and systemd-nspawn, as tests/test_systemd_boot.py does, and a Prometheus.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator

import pytest
from cryptography import x509

from tests.appliance.gateway.front.pki import Authority
from tests.booted_debian import ROOT, booted, build_package
from tests.observed_debian import CONFIG, CREDENTIALS, FACTOR, MODEL, POLICY, TAKE_SPANS, TOKEN, Operator, held_s, rules

pytestmark = [pytest.mark.full, pytest.mark.runsc, pytest.mark.timeout(1500)]

DROP_INS = "/etc/athanor/policy.d"
AUDIT = "/var/lib/athanor-supervisor/audit"

BUSY_POLICY = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["*"]
    limits: {concurrency: 64, requests_per_minute: 1000000, tokens_per_minute: 1000000000}
  beta:
    credentials: ["key:beta-1"]
    models: ["*"]
    limits: {concurrency: 64, requests_per_minute: 1000000, tokens_per_minute: 1000000000}
"""
"""For the alerts, whose causes are not limits of tenants."""

LOOK_S = 12.0
"""Seconds for which an alert is looked at, to see that it is silent: eight scrapes."""

ALERT_AFTER_S = 120.0
"""An alert fires at most so long after its condition has held for its `for:`, as docs/operate.md says."""


def blocks(document: str, kind: str) -> list[str]:
    """Blocks of commands of a document."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / "docs" / document).read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package, built by the document's own command."""
    return build_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def container(runsc_path, package):
    """A booted container that has the package's file and nothing of it installed."""
    with booted(runsc_path, package) as container:
        container.give_controllers()
        yield container


@pytest.fixture(scope="module")
def operator(container) -> Operator:
    """What the operator works with."""
    return Operator(container)


# Monday: installed, and looked at.


def test_monday_it_is_installed(container, operator) -> None:
    """docs/install.md up to the first answers, each step within its time; the doctor and the status agree on what
    bounds and isolates the sandboxes."""
    install, keys, policy, doctor, start = blocks("install.md", "sh")[:5]
    with operator.within("`apt-get install` of the package"):
        container.shell(install)
    container.shell(keys)
    container.shell(policy)
    with operator.within("`athanor doctor`"):
        assert "0 problems" in container.shell(doctor)
    with operator.within("the first start, until a request is answered"):
        container.shell(start)
        operator.answered("alpha")
    operator.answered("beta")
    status = operator.status()
    (cgroups,) = [one for one in operator.findings() if one["check"] == "cgroups"]
    assert status["cgroup"] in cgroups["what"]
    assert status["sandbox"] == "gvisor/systrap"
    assert operator.problems() == []


def test_monday_a_policy_that_the_service_cannot_read(container, operator) -> None:
    """Root reads it, the services do not: the doctor tells it while everything still serves, names file and remedy; the
    restart that is made all the same fails with the reason, the doctor does not blame the socket that systemd keeps for
    the gateway, and the remedy and a start bring it back. Control: before, no problem."""
    assert operator.problems() == []
    container.run("sh", "-c", f"chown root:root {POLICY}; chmod 600 {POLICY}")
    found = operator.problems()
    assert {one["what"].split()[0] for one in found} == {"athanor-gateway", "athanor-supervisor"}
    assert all(f"cannot read {POLICY}" in one["what"] and "next start" in one["means"] for one in found)
    operator.answered()
    assert operator.attempt("systemctl", "restart", "athanor-gateway")[0] != 0
    assert f"cannot read {POLICY}: permission denied" in container.journal("-u", "athanor-gateway", "-n", "20")
    told = {one["check"]: one for one in operator.findings()}
    assert told["http address"]["level"] == "ok", told["http address"]
    assert "kept by systemd" in told["http address"]["what"]
    assert {one["check"] for one in operator.problems()} == {"policy"}
    container.shell(found[0]["mend"])
    with operator.within("a restart of the gateway, until a request is answered"):
        operator.restart("athanor-gateway")
    assert operator.problems() == []


# Tuesday: traces.


def test_tuesday_traces_reach_a_collector(container, operator) -> None:
    """A drop-in names a collector: the doctor tells that systemd has not read it, then that nobody listens there, then
    that it does; after a restart spans of a request arrive in time. Control: before, no collector is named."""
    told = {one["check"]: one for one in operator.findings()}
    assert "none named" in told["collector"]["what"]
    folder = operator.path("/etc/systemd/system/athanor-gateway.service.d")
    folder.mkdir()
    where = "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318"
    (folder / "tracing.conf").write_text(f'[Service]\nEnvironment="{where}"\n')
    assert "has changed on disk" in json.dumps(operator.findings())
    container.run("systemctl", "daemon-reload")
    told = {one["check"]: one for one in operator.findings()}
    assert told["traces to"]["level"] == "warning", told["traces to"]
    operator.path("/root/take.py").write_text(TAKE_SPANS)
    operator.succeed("systemd-run", "--quiet", "--unit=collector", "python3", "/root/take.py")
    container.until(lambda: {one["check"]: one for one in operator.findings()}["traces to"]["level"] == "ok", 30)
    operator.restart("athanor-gateway")
    with operator.within("spans of a request, until the collector has them"):
        operator.answered()
        container.until(lambda: operator.path("/root/spans").exists(), 60)
    assert "/v1/traces" in operator.path("/root/spans").read_text()


# Wednesday: changes.


def test_wednesday_a_new_address(container, operator) -> None:
    """An address that another program has: the doctor tells it before the restart, which fails with the reason; the
    way back loses nothing. A free one: the reload says what needs a restart, which succeeds; the old one is closed, the
    new one answers, the unit never fails."""
    operator.succeed(
        "systemd-run", "--quiet", "--unit=other", "python3", "-m", "http.server", "-b", "127.0.0.1", "8099"
    )
    container.until(
        lambda: "8099" in container.run("cat", "/proc/net/tcp") or "1FA3" in container.run("cat", "/proc/net/tcp"), 30
    )
    before = operator.edit(CONFIG, ("http: 127.0.0.1:8080", "http: 127.0.0.1:8099"))
    (found,) = operator.problems()
    assert (found["check"], found["means"]) == ("http address", "the next start of the gateway fails"), found
    assert "127.0.0.1:8099 is taken by process" in found["what"]
    assert operator.attempt("systemctl", "restart", "athanor-gateway")[0] != 0
    assert "127.0.0.1:8099" in container.journal("-u", "athanor-gateway", "-n", "12", "-o", "cat")
    operator.path(CONFIG).write_text(before)
    with operator.within("a restart of the gateway, until a request is answered"):
        operator.restart("athanor-gateway")
    container.run("systemctl", "stop", "other")
    operator.edit(CONFIG, ("http: 127.0.0.1:8080", "http: 127.0.0.1:8090"))
    with operator.within("`athanor reload`, also of a bad file"):
        said = operator.succeed("athanor", "reload")
    assert "needs a restart: listen.http (127.0.0.1:8080 -> 127.0.0.1:8090)" in said
    assert "systemctl restart athanor-gateway" in said
    operator.answered()
    operator.port = 8090
    restarts = container.run("systemctl", "show", "-p", "NRestarts", "--value", "athanor-gateway")
    with operator.within("a restart of the gateway, until a request is answered"):
        operator.restart("athanor-gateway")
    assert container.run("systemctl", "show", "-p", "NRestarts", "--value", "athanor-gateway") == restarts
    operator.port = 8080
    assert operator.call() == {"ConnectionRefusedError": 1}
    operator.path(CONFIG).write_text(before)
    operator.restart("athanor-gateway")


def test_wednesday_a_reload_of_the_configuration(container, operator) -> None:
    """A live key is in force at once, another one is told with what it needs. Control: back again, both are told."""
    before = operator.edit(CONFIG, ("sandbox:\n", "sandbox:\n  step_timeout_s: 250\n  own_texts: 3\n"))
    said = operator.succeed("athanor", "reload")
    assert "applied sandbox.step_timeout_s (300 -> 250)" in said
    assert "needs a restart: sandbox.own_texts (4 -> 3)" in said
    operator.path(CONFIG).write_text(before)
    assert "applied sandbox.step_timeout_s (250 -> 300)" in operator.succeed("athanor", "reload")


@pytest.mark.parametrize(
    ("file", "old", "new", "place", "reason"),
    [
        (CONFIG, "  grpc: 127", "  grcp: 127", r"athanor\.yaml:\d+:\d+: ", "grcp"),
        (CONFIG, "8081", "the door", r"athanor\.yaml:\d+:\d+: ", "grpc"),
        (CONFIG, "models:", "models: [", r"athanor\.yaml:\d+:\d+", ""),
        (POLICY, "concurrency: 16", "concurrency: -16", r"policy\.yaml:\d+:\d+: ", "concurrency"),
        (POLICY, "concurrency: 16", "concurency: 16", r"policy\.yaml:\d+:\d+: ", "concurrency"),
        (POLICY, 'models: ["*"]', 'models: ["*"', r"policy\.yaml:\d+:\d+", ""),
        (POLICY, "  beta:", "  alpha:", r"policy\.yaml:\d+:\d+: ", "alpha"),
        (CREDENTIALS, "{", "[", r"credentials\.json", ""),
    ],
)
def test_wednesday_bad_files_change_nothing(container, operator, file, old, new, place, reason) -> None:
    """A reload of a bad file fails with place and reason, from the command, and by systemctl in the journal; status and
    answers are as before. Control: of the good file it succeeds."""
    digest = operator.status()["policy"]["digest"]
    before = operator.edit(file, (old, new))
    try:
        with operator.within("`athanor reload`, also of a bad file"):
            status, said = operator.attempt("athanor", "reload")
        assert status == 1
        assert re.search(place, said) and reason in said, said
        assert "what was in force before stays so" in said
        assert operator.attempt("systemctl", "reload", "athanor-gateway")[0] != 0
        assert re.search(place, container.journal("-u", "athanor-gateway", "-n", "20", "-o", "cat"))
        assert operator.status()["policy"]["digest"] == digest
        assert operator.status()["policy"]["last_error"]
        assert operator.call() == {"answered": 1}
    finally:
        operator.path(file).write_text(before)
    operator.succeed("systemctl", "reload", "athanor-gateway")
    assert not operator.status()["policy"]["last_error"]


def test_wednesday_the_policy_is_checked(container, operator) -> None:
    """`policy check` warns of a model that is not served and of a key that is not there; `--strict` refuses them.
    Control: the policy in force has neither."""
    operator.succeed("athanor", "policy", "check", "--strict", POLICY)
    before = operator.edit(POLICY, ('["athanor-mini"]', '["athanor-maxi"]'), ("key:beta-1", "key:beta-9"))
    try:
        warned = operator.succeed("athanor", "policy", "check", POLICY)
        status, refused = operator.attempt("athanor", "policy", "check", "--strict", POLICY)
        assert status == 1
        for word in ("athanor-maxi", "beta-9"):
            assert word in warned and word in refused
    finally:
        operator.path(POLICY).write_text(before)


# Thursday: tenants, certificates, metrics.


def test_thursday_a_tenant_comes_and_goes(container, operator) -> None:
    """A tenant of a drop-in with a key of its own is served after a reload; a stray file is told. Its key is rotated:
    both work, then the old one is refused. With the file the tenant goes. Control: nothing changes before a reload."""
    words = ("athanor", "key", "create", "gamma", "--credentials", CREDENTIALS, "--id")
    keys = [re.findall(r"ath_\S+", operator.succeed(*words, one))[0] for one in ("gamma-1", "gamma-2")]
    folder = operator.path(DROP_INS)

    def grant(*ids: str) -> None:
        listed = json.dumps([f"key:{one}" for one in ids])
        (folder / "20-gamma.yaml").write_text(
            f'version: 1\ntenants:\n  gamma: {{credentials: {listed}, models: ["*"]}}\n'
        )

    def outcomes() -> list[str]:
        found = []
        for key in keys:
            container.keys["gamma"] = key
            found += operator.call("gamma")
        return [one.split()[0] for one in found]

    grant("gamma-1")
    (folder / "30-more.yml").write_text("version: 1\n")
    # As files that an editor makes: root's own.
    container.run("sh", "-c", f"chmod 640 {DROP_INS}/*; chgrp athanor {DROP_INS}/*")
    assert outcomes() == ["401", "401"]
    assert "30-more.yml" in operator.succeed("athanor", "reload")
    assert outcomes() == ["answered", "401"]
    (folder / "30-more.yml").unlink()
    grant("gamma-1", "gamma-2")
    operator.succeed("systemctl", "reload", "athanor-gateway")
    assert outcomes() == ["answered", "answered"]
    grant("gamma-2")
    operator.succeed("systemctl", "reload", "athanor-gateway")
    assert outcomes() == ["401", "answered"]
    (folder / "20-gamma.yaml").unlink()
    operator.succeed("systemctl", "reload", "athanor-gateway")
    assert outcomes() == ["401", "401"]


def test_thursday_a_revoked_key_ends_its_stream(container, operator) -> None:
    """A key is taken out of the policy in the middle of an answer: it ends within the promised time after the reload.
    Control: the answer would have taken far longer, and another tenant is answered."""
    before = operator.edit(POLICY, ("key:alpha-1", "key:alpha-9"))
    operator.path(POLICY).write_text(before)
    with operator.calling(callers=4, times=1, max_tokens=512, ignore_eos=True, stream=True) as counts:
        container.until(lambda: operator.sandbox()["running"] > 0, 30)
        operator.edit(POLICY, ("key:alpha-1", "key:alpha-9"))
        operator.succeed("systemctl", "reload", "athanor-gateway")
        with operator.within("the last byte to a caller whose key a reload revoked"):
            container.until(lambda: operator.sandbox()["running"] == 0, 30)
    operator.path(POLICY).write_text(before)
    operator.succeed("systemctl", "reload", "athanor-gateway")
    assert set(counts) <= {"stream ended by an error", "401 invalid_api_key"}, counts
    assert operator.call("beta") == {"answered": 1}


def test_thursday_a_certificate_is_renewed(container, operator) -> None:
    """TLS with a certificate that ends tomorrow: status and doctor warn. The renewed one is there after a restart, and
    the warnings are gone; a key that does not fit is told before the restart."""
    authority = Authority.create("week")
    before = operator.path(CONFIG).read_text()
    folder = operator.path("/etc/athanor/tls")
    folder.mkdir()

    def put(days: int, *, fitting: bool = True) -> None:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        (key, certificate), (other, _) = (authority.issue(address, days=days) for _ in range(2))
        (folder / "server.pem").write_bytes(certificate)
        (folder / "server.key").write_bytes(key if fitting else other)
        container.run("sh", "-c", "cd /etc/athanor/tls; chgrp athanor . *; chmod 750 .; chmod 640 *")

    def certificate() -> dict[str, str]:
        return next(one for one in operator.findings() if one["check"] == "certificate")

    put(1)
    tls = "listen:\n  tls: {certificate: /etc/athanor/tls/server.pem, key: /etc/athanor/tls/server.key}\n"
    operator.edit(CONFIG, ("listen:\n", tls))
    operator.tls = True
    operator.restart("athanor-gateway")
    assert certificate()["level"] == "warning"
    assert "certificate" in json.dumps(operator.status()["alerts"])
    put(90, fitting=False)
    assert certificate()["level"] == "problem"
    operator.answered()
    put(90)
    with operator.within("a restart of the gateway, until a request is answered"):
        operator.restart("athanor-gateway")
    assert certificate()["level"] == "ok", certificate()
    assert "certificate" not in json.dumps(operator.status()["alerts"])
    operator.path(CONFIG).write_text(before)
    operator.tls = False
    operator.restart("athanor-gateway")


def test_thursday_metrics_without_the_keys_of_the_house(container, operator) -> None:
    """The metrics listener, with a token: it serves metrics, `process_` series among them under the unit's ProcSubset=,
    and changes nothing. Controls: without the token nothing is served, and the admin socket takes a reload."""
    operator.path(TOKEN).write_text(secrets.token_hex(32) + "\n")
    container.run("sh", "-c", f"chgrp athanor {TOKEN}; chmod 640 {TOKEN}")
    listener = f"  metrics: 127.0.0.1:9464\n  metrics_token: {TOKEN}"
    operator.edit(CONFIG, ("  # metrics: 127.0.0.1:9464", listener))
    operator.restart("athanor-gateway")
    assert operator.problems() == []
    ask = f'curl -s -o /dev/null -w "%{{http_code}} " -H "authorization: Bearer $(cat {TOKEN})"'
    base = "http://127.0.0.1:9464"
    said = container.run(
        "sh",
        "-c",
        f"{ask} {base}/metrics; {ask} -X POST {base}/reload; {ask} -X POST {base}/metrics;"
        f"{ask} {base}/traces; {ask} {base}/health/ready; curl -s -o /dev/null -w '%{{http_code}}' {base}/metrics",
    )
    assert said.split() == ["200", "404", "405", "404", "200", "401"]
    text = container.run("sh", "-c", f'curl -s -H "authorization: Bearer $(cat {TOKEN})" {base}/metrics')
    assert container.run("systemctl", "show", "-p", "ProcSubset", "--value", "athanor-gateway") == "pid"
    for name in ("process_open_fds", "process_max_fds", "process_resident_memory_bytes", "process_cpu_seconds_total"):
        assert f"\n{name}" in text, name
    reloads = container.run(
        "curl", "-s", "-X", "POST", "--unix-socket", "/run/athanor/admin.sock", "http://localhost/reload"
    )
    assert "digest" in reloads, reloads


# Friday: what dies, and a backup.


@pytest.mark.parametrize("who", ["engine", "gateway", "supervisor"])
def test_friday_what_dies_comes_back(container, operator, who) -> None:
    """Killed while two clients ask: requests are answered again in time, and what fails meanwhile fails as the
    documents say: with a 503 to be retried, or, of the gateway, with a connection that ends. Control: some are
    answered before."""

    def living() -> str:
        return str(operator.sandbox()["pid"]) if who == "engine" else container.main_pid(f"athanor-{who}")

    documented = {"503 server_is_overloaded"}
    if who == "gateway":
        documented |= {"ConnectionResetError", "RemoteDisconnected", "ConnectionRefusedError"}
    with operator.calling(callers=2) as counts:
        operator.answered()
        pid = living()
        with operator.within(f"{'an' if who == 'engine' else 'a'} {who} that dies, until a request is answered"):
            operator.kill(pid)
            container.until(lambda: operator.status() and living() not in (pid, "0", "None"), 60)
            operator.answered()
    print(f"{who} killed: {counts}")
    assert counts.pop("answered") > 0
    assert set(counts) <= documented, counts
    container.until(lambda: container.states() == ["active", "active"], 30)
    # What failed meanwhile is a problem for a minute, as `athanor status` says; then nothing is.
    container.until(lambda: operator.problems() == [], 90)


def test_friday_a_backup_is_restored(container, operator) -> None:
    """docs/operate.md: backed up, purged, installed again and restored, tenants' keys work and the audit log is one
    chain. Control: between, the key is refused, since the installation made a pepper of its own."""
    (backup,), (restore,) = blocks("operate.md", "sh backup"), blocks("operate.md", "sh restore")
    number = json.loads(container.run("athanor", "audit", "verify", "-o", "json"))["entries"]
    container.shell(backup)
    kept = container.run("sha256sum", POLICY, CREDENTIALS, "/etc/athanor/pepper", CONFIG)
    container.shell("systemctl stop athanor.target; apt-get purge --yes athanor")
    with operator.within("`apt-get install` of the package"):
        container.shell(blocks("install.md", "sh")[0])
    assert container.run("sha256sum", POLICY, CREDENTIALS, "/etc/athanor/pepper", CONFIG) != kept
    said = container.shell(restore)
    assert "0 problems" in said and "the log is whole" in said, said
    operator.answered()
    assert container.run("sha256sum", POLICY, CREDENTIALS, "/etc/athanor/pepper", CONFIG) == kept
    report = json.loads(container.run("athanor", "audit", "verify", "-o", "json"))
    assert report["ok"] and report["entries"] > number


# Saturday: every alert under its cause.


class Alerts:
    """What fires, and whether it should."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.caused: dict[str, float] = {}
        """Of each alert, seconds from the begin of its cause until it fired."""
        self._episodes: dict[str, int] = {}

    @contextlib.contextmanager
    def cause(self, *names: str, patience_s: float = 0.0, again: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Each of these is silent before and fires in the course of the block, or within its `for:` and the promised
        time afterwards, as they are shortened; nothing else begins to fire. ``again`` is repeated until all have fired;
        ``patience_s``: what the cause itself needs to come about."""
        before = self.operator.firing()
        assert not set(names) & before, f"{before} fire without a cause"
        assert not set(names) & set(self.caused), "caused twice"
        begin = time.monotonic()
        yield
        missing = set(names)
        deadline = time.monotonic() + patience_s + max(map(held_s, names)) + ALERT_AFTER_S / FACTOR
        while missing:
            firing = self.operator.firing()
            for name in sorted(missing & firing):
                self.caused[name] = time.monotonic() - begin
                print(f"{name}: fired {self.caused[name]:.0f} s after the begin of its cause")
            missing -= firing
            assert not firing - before - set(names), f"{firing - before - set(names)} fire without a cause"
            assert not missing or time.monotonic() < deadline, (missing, firing, self.operator.pending())
            again()
            time.sleep(1)

    def silent(self, *names: str, seconds: float = 120.0) -> None:
        """Wait until these are silent again, since their cause is gone."""
        self.operator.container.until(lambda: not set(names) & self.operator.firing(), seconds)

    def look_anew(self) -> None:
        """Forget what stays in windows of hours: a Prometheus that has seen nothing finds nothing."""
        self._count()
        self.operator.watch()
        end = time.monotonic() + LOOK_S
        while time.monotonic() < end:
            assert self.operator.firing() == set(), "fires though the cause is gone"
            time.sleep(1)

    def restart_unseen(self) -> None:
        """Restart the supervisor while no Prometheus looks: what an alert counts begins at nothing."""
        self._count()
        self.operator.container.run("systemctl", "stop", "prometheus")
        self.operator.restart("athanor-supervisor")
        self.operator.watch()

    def episodes(self) -> dict[str, int]:
        """How many times each alert has begun to fire, since the first look."""
        self._count()
        return self._episodes

    def _count(self) -> None:
        for name, times in self.operator.episodes().items():
            self._episodes[name] = self._episodes.get(name, 0) + times


@pytest.fixture(scope="module")
def alerts(operator) -> Alerts:
    """A Prometheus that looks at an appliance with small memory, which is served by a policy without rates."""
    operator.path(POLICY).write_text(BUSY_POLICY)
    small = "kv_bytes: 25165824\n    max_context: 1024\n    max_num_seqs: 32\n    dtype: float32\n"
    operator.edit(CONFIG, (f"/models/{MODEL}\n", f"/models/{MODEL}\n    {small}"))
    operator.restart()
    operator.watch()
    return Alerts(operator)


def test_saturday_a_healthy_appliance_is_silent(operator, alerts) -> None:
    """With requests that are answered nothing fires and nothing is pending, for many scrapes."""
    assert operator.call(callers=2, times=5) == {"answered": 10}
    end = time.monotonic() + 2 * LOOK_S
    while time.monotonic() < end:
        assert (operator.firing(), operator.pending()) == (set(), set())
        time.sleep(1)


def test_saturday_more_requests_than_fit(operator, alerts) -> None:
    """AthanorQueue, AthanorKvFull, AthanorSlowFast and AthanorSlowSlowly, of more callers with long prompts than memory
    and processor are enough for: all of them are answered, late."""
    prompt = "NONCE " + "very " * 300
    names = ("AthanorQueue", "AthanorKvFull", "AthanorSlowFast", "AthanorSlowSlowly")
    with (
        operator.calling(callers=64, prompt=prompt, max_tokens=24, ignore_eos=True) as counts,
        alerts.cause(*names, patience_s=60),
    ):
        pass
    print(f"more requests than fit: {counts}")
    assert set(counts) == {"answered"}
    alerts.look_anew()


def test_saturday_a_failed_reload(operator, alerts) -> None:
    """AthanorPolicyNotLoaded, of a policy with a mistake."""
    before = operator.edit(POLICY, ("models", "modells"))
    with alerts.cause("AthanorPolicyNotLoaded"):
        assert operator.attempt("systemctl", "reload", "athanor-gateway")[0] != 0
    operator.path(POLICY).write_text(before)
    operator.succeed("systemctl", "reload", "athanor-gateway")


def test_saturday_a_lost_collector(container, operator, alerts) -> None:
    """AthanorSpansLost, when the collector that Tuesday's drop-in names is gone. Control: until now it took them."""
    assert container.run("systemctl", "is-active", "collector") == "active"
    with alerts.cause("AthanorSpansLost", patience_s=90, again=operator.call):
        container.run("systemctl", "stop", "collector")
    operator.succeed("systemd-run", "--quiet", "--unit=collector", "python3", "/root/take.py")
    alerts.silent("AthanorSpansLost")


def test_saturday_few_descriptors(container, operator, alerts) -> None:
    """AthanorDescriptors, of a limit that leaves little room."""
    pid = container.main_pid("athanor-gateway")
    used = len(container.run("ls", f"/proc/{pid}/fd").split())
    limit = container.run("prlimit", f"--pid={pid}", "--nofile", "--noheadings", "--output=HARD")
    with alerts.cause("AthanorDescriptors"):
        operator.succeed("prlimit", f"--pid={pid}", f"--nofile={int(used / 0.9)}:")
    operator.succeed("prlimit", f"--pid={pid}", f"--nofile={limit}:")
    alerts.silent("AthanorDescriptors")


def test_saturday_a_certificate_that_ends(container, operator, alerts) -> None:
    """AthanorCertificate, of one that ends tomorrow."""
    authority = Authority.create("saturday")
    key, certificate = authority.issue(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    folder = operator.path("/etc/athanor/tls")
    folder.mkdir(exist_ok=True)
    (folder / "server.pem").write_bytes(certificate)
    (folder / "server.key").write_bytes(key)
    container.run("sh", "-c", "cd /etc/athanor/tls; chgrp athanor . *; chmod 750 .; chmod 640 *")
    tls = "listen:\n  tls: {certificate: /etc/athanor/tls/server.pem, key: /etc/athanor/tls/server.key}\n"
    before = operator.edit(CONFIG, ("listen:\n", tls))
    operator.tls = True
    with alerts.cause("AthanorCertificate"):
        operator.restart("athanor-gateway")
    operator.path(CONFIG).write_text(before)
    operator.tls = False
    operator.restart("athanor-gateway")
    alerts.silent("AthanorCertificate")


def test_saturday_an_engine_that_hangs(container, operator, alerts) -> None:
    """AthanorSandboxFault, of an engine that stands still with work to do; a reload has put a short limit for a step in
    force. Its request is answered by the next engine."""
    before = operator.edit(CONFIG, ("sandbox:\n", "sandbox:\n  step_timeout_s: 5\n"))
    assert "applied sandbox.step_timeout_s (300 -> 5)" in operator.succeed("athanor", "reload")
    pid = operator.sandbox()["pid"]
    with alerts.cause("AthanorSandboxFault", patience_s=30), operator.calling(times=1) as counts:
        operator.kill(pid, "STOP")
        container.until(lambda: operator.ready() and operator.sandbox()["pid"] != pid, 60)
    assert counts == {"answered": 1}
    operator.path(CONFIG).write_text(before)
    operator.succeed("athanor", "reload")


def test_saturday_an_engine_that_leaks(container, operator, alerts) -> None:
    """AthanorSandboxMemory, of an engine that keeps 8 MiB of every long prompt, as an edit of it makes it, when it has
    nearly used up the limit of its cgroup; AthanorSandboxOom, when it goes on. The kernel ends it, and the next one
    answers."""
    cgroup = operator.status()["cgroup"]
    assert "memory" in cgroup and "not enforced" not in cgroup, cgroup
    stamped = "            self.stamps[blocks] = stamps\n"
    kept = "type(self).kept = (*getattr(type(self), 'kept', ()), b'1' * (8 << 20))"
    leak = f"{stamped}            if len(blocks) > 30:\n                {kept}\n"
    before = operator.edit(CONFIG, ("sandbox:\n", f"sandbox:\n  memory_bytes: {768 << 20}\n"))
    long = {"prompt": "NONCE " + "very " * 300, "max_tokens": 1}

    def share() -> float:
        time.sleep(7)  # told every five seconds, and scraped
        of_limit = 'athanor_sandbox_memory_bytes{athanor_role="engine"} / athanor_sandbox_memory_limit_bytes'
        return float(operator.query(of_limit)[0]["value"][1])

    with operator.defect("engine/backends/common/batch.py", (stamped, leak)):
        alerts.restart_unseen()
        with alerts.cause("AthanorSandboxMemory", patience_s=180):
            while (now := share()) < 0.955:
                assert operator.call(times=10 if now < 0.8 else 2, **long).keys() == {"answered"}
        pid = operator.sandbox()["pid"]
        with alerts.cause("AthanorSandboxOom", patience_s=60):
            while operator.sandbox()["pid"] == pid:
                # Where a start takes longer than the eight seconds that a request waits, the caller has to come again.
                assert operator.call(**long).keys() <= {"answered", "503 server_is_overloaded"}
            container.until(operator.ready, 60)
            assert operator.call(callers=4, times=100, max_tokens=1) == {"answered": 400}
    operator.path(CONFIG).write_text(before)
    alerts.restart_unseen()
    alerts.silent("AthanorSandboxMemory")


def test_saturday_a_model_that_has_changed(container, operator, alerts) -> None:
    """AthanorSandboxDown and, since starts are tried again, AthanorSandboxRestarts, of an engine that died and is not
    started, since a file of its model has changed. With the file as it was it starts by itself, within the half minute
    of the longest delay."""
    weights = f"/var/lib/athanor/models/{MODEL}/config.json"
    before = operator.path(weights).read_text()
    try:
        with alerts.cause("AthanorSandboxDown", "AthanorSandboxRestarts", patience_s=30):
            operator.path(weights).write_text(before + "\n")
            operator.kill(operator.sandbox()["pid"])
            container.until(lambda: operator.sandbox()["state"] != "ready", 30)
        assert "config.json" in json.dumps(operator.status()), "status names the file"
    finally:
        operator.path(weights).write_text(before)
    container.until(operator.ready, 90)  # not by asking: a request that fails is a cause of other alerts
    operator.answered()
    alerts.silent("AthanorSandboxDown")


def test_saturday_a_request_that_kills(container, operator, alerts) -> None:
    """AthanorQuarantine, AthanorFailingFast and AthanorFailingSlowly, of an engine that dies in the middle of the same
    request twice: both answers, of few, are cut by our fault, and the third try is refused. Control: the gateway that
    is started again knows nothing of it, and answers."""
    poison = {"prompt": f"poison {secrets.token_hex(8)}", "max_tokens": 900, "ignore_eos": True}
    alerts.restart_unseen()  # an engine that has died before is started late, which makes late first tokens besides
    with alerts.cause("AthanorQuarantine", "AthanorFailingFast", "AthanorFailingSlowly", patience_s=60):
        for _ in range(2):
            with operator.calling(times=1, **poison) as counts:
                container.until(lambda: operator.ready() and operator.sandbox()["running"] > 0, 30)
                pid = operator.sandbox()["pid"]
                operator.kill(pid)
                container.until(lambda: operator.ready() and operator.sandbox()["pid"] != pid, 60)
            print(f"a request that kills: {counts}")
            assert "answered" not in counts
        refused = operator.call(**poison)
        assert "answered" not in refused, refused
        print(f"and again: {refused}")
    operator.restart("athanor-gateway")
    assert operator.call(**poison) == {"answered": 1}
    alerts.look_anew()


def test_saturday_a_disk_that_fills(container, operator, alerts) -> None:
    """A disk of 600 MB for the audit log, filled at a steady rate: AthanorDiskFilling fires first, AthanorDiskLow while
    entries are still written, and AthanorAuditFailing when nothing fits; requests are served all the time, as
    configured. Status names the disk in the promised time."""
    container.run("systemctl", "stop", "athanor-supervisor")
    mount = f"mkdir /root/kept; cp -a {AUDIT}/. /root/kept; mount -t tmpfs -o size=600m,mode=700 none {AUDIT}"
    container.shell(f"{mount}; cp -a /root/kept/. {AUDIT}; chown athanor-supervisor:athanor {AUDIT}")
    operator.restart("athanor-supervisor")
    with alerts.cause("AthanorDiskFilling", patience_s=180):
        for number in range(200):
            size = "bs=10M count=2" if number < 23 else "bs=512K count=1"
            container.run("sh", "-c", f"dd if=/dev/zero of={AUDIT}/filler{number} {size} 2>/dev/null")
            time.sleep(1)
            if "AthanorDiskFilling" in operator.firing():
                break
    assert operator.call() == {"answered": 1}
    assert "AthanorAuditFailing" not in operator.firing() | operator.pending()
    with alerts.cause("AthanorDiskLow"):
        free = f"$(df --output=avail -m {AUDIT} | tail -1)"
        container.run("sh", "-c", f"dd if=/dev/zero of={AUDIT}/more bs=1M count=$(({free} - 20)) 2>/dev/null")
        with operator.within("a disk that runs full, until `athanor status` says so"):
            container.until(lambda: "disk" in json.dumps(operator.status()["alerts"]), 60)
    # The last page of the log takes some entries yet.
    entries = functools.partial(operator.call, callers=4, times=10, max_tokens=1)
    with alerts.cause("AthanorAuditFailing", patience_s=30, again=entries):
        container.run("sh", "-c", f"cat /dev/zero > {AUDIT}/rest")
    assert operator.call() == {"answered": 1}
    container.run("sh", "-c", f"rm {AUDIT}/filler* {AUDIT}/more {AUDIT}/rest")
    alerts.silent("AthanorDiskFilling", "AthanorDiskLow", "AthanorAuditFailing")
    # Entries have waited in memory: none is lost.
    assert json.loads(container.run("athanor", "audit", "verify", "-o", "json"))["ok"]
    container.run("systemctl", "stop", "athanor-supervisor")
    container.shell(
        f"rm -r /root/kept; mkdir /root/kept; cp -a {AUDIT}/. /root/kept; umount {AUDIT}; cp -a /root/kept/. {AUDIT}"
    )
    operator.restart("athanor-supervisor")


def test_saturday_an_engine_with_a_defect(container, operator, alerts) -> None:
    """AthanorIntegrity, of an engine that gives one block a wrong owner; AthanorUnfair, of one that serves the tenant
    first that has got the most. Both are edits of the installed engine, for the time of the test."""
    wrong = "            self.stamps[blocks] = stamps\n"
    once = (
        wrong + "            type(self).given = getattr(type(self), 'given', 0) + 1\n"
        "            if self.given == 300:\n                self.stamps[blocks[0]] += 1\n"
    )
    with operator.defect("engine/backends/common/batch.py", (wrong, once)):
        alerts.restart_unseen()
        with operator.calling(callers=4, max_tokens=2, prompt="NONCE is a word") as counts:
            with alerts.cause("AthanorIntegrity", patience_s=180):
                pass
            time.sleep(LOOK_S)
    print(f"with a wrong owner: {counts}")
    turns = ("return (account.service, account.num_live,", "return (-account.service, account.num_live,")
    tickets = ("(account.service, account.num_live, head", "(-account.service, account.num_live, head")
    long = {"max_tokens": 24, "ignore_eos": True, "prompt": "NONCE " + "very " * 300}
    with operator.defect("engine/core/fairness/fairness.py", turns, tickets):
        alerts.restart_unseen()
        with (
            operator.calling("alpha", callers=20, **long),
            operator.calling("beta", callers=20, **long),
            alerts.cause("AthanorUnfair", patience_s=120),
        ):
            pass
    alerts.restart_unseen()


def test_saturday_nothing_answers(container, operator, alerts) -> None:
    """AthanorDown, of a gateway that is stopped."""
    with alerts.cause("AthanorDown"):
        container.run("systemctl", "stop", "athanor-gateway")
    container.run("systemctl", "start", "athanor-gateway")
    operator.answered()
    alerts.silent("AthanorDown")


def test_saturday_each_alert_has_fired_once(operator, alerts) -> None:
    """Every shipped alert but those of GPUs, which the container has none of, and of what is unusual after a week, has
    fired under its cause, and none of them a second time; now all are silent."""
    elsewhere = ("AthanorGpu", "AthanorTenantUnusual", "AthanorAuditUnwitnessed")
    shipped = [name for name in rules() if not name.startswith(elsewhere)]
    print("\n".join(f"{name}: {seconds:.0f} s" for name, seconds in sorted(alerts.caused.items())))
    assert set(alerts.caused) == set(shipped)
    assert alerts.episodes() == dict.fromkeys(shipped, 1)
    alerts.silent(*rules())


# Sunday: removed.


def test_sunday_it_is_removed(container, operator) -> None:
    """The document's last block, in time, leaves nothing. Control: before it there is much to be found."""
    container.run("systemctl", "stop", "prometheus", "collector")
    made = "/etc/systemd/system/athanor-gateway.service.d /run/systemd/system/athanor-supervisor.service.d"
    container.run("sh", "-c", f"rm -rf {made}; systemctl daemon-reload")
    assert CONFIG in container.left()
    with operator.within("`apt-get purge`"):
        container.shell(blocks("install.md", "sh")[-1])
    assert container.left() == ""
    for step, took, most in operator.measured:
        print(f"{step}: {took:.1f} s of {most:g} s")
