"""docs/install.md and docs/upgrade.md under a real systemd: a small Debian is booted in a container, gets the package,
serves the embedded model to two tenants, is upgraded and goes back, until the package is purged.

Needs root, dpkg-deb, mmdebstrap and systemd-nspawn (packages mmdebstrap and systemd-container); ten minutes, and 3 GB
below the temporary directory.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from appliance.common.audit.cosignature import Witness, cosign
from appliance.common.version import VERSION
from isolation.keys.signing import key_of
from tests.booted_debian import NEXT_VERSION, ROOT, booted, build_package, next_version

pytestmark = [pytest.mark.full, pytest.mark.runsc, pytest.mark.timeout(1500)]

DOCUMENT, UPGRADE = ROOT / "docs/install.md", ROOT / "docs/upgrade.md"
ADMIN = "unix:/run/athanor/admin.sock"
POLICY = "/etc/athanor/policy.yaml"
EXPOSURE = {
    "athanor-gateway": 1.2,
    "athanor-supervisor": 2.5,
    "athanor-fetch": 1.2,
    "athanor-statements": 1.0,
    "athanor-witness": 1.2,
}
"""The most that systemd's own analysis may say of each unit, of 10."""

RESTARTS = 4
"""Of the gateway under load."""

TOLD_TO_COME_AGAIN = 6
"""Requests in flight, of two clients, when one version's sandboxes end, and the other's again."""

SAY = """
import json, sys, urllib.request
body = {"model": "athanor-mini", "messages": [{"role": "user", "content": sys.argv[2]}], "max_tokens": 4}
headers = {"Authorization": "Bearer " + sys.argv[1], "Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8080/v1/chat/completions", json.dumps(body).encode(), headers)
print(urllib.request.urlopen(request, timeout=30).read().decode())
"""


def blocks(kind: str, document: Path = DOCUMENT) -> list[str]:
    """A document's commands of one kind, block by block."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package, built by the document's own command."""
    return build_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def container(runsc_path, package):
    """A booted container that has the package's file and nothing of it installed."""
    with booted(runsc_path, package) as container:
        yield container


def test_the_document_leads_to_two_tenants(container):
    """Each command of docs/install.md up to the first answer ends well; both tenants are served from gVisor."""
    for block in blocks("sh")[:-2]:
        output = container.shell(block)
        if "doctor" in block:
            assert "0 problems" in output, output
    assert container.states() == ["active", "active"], container.journal("-n", "60")
    assert set(container.keys) == {"alpha", "beta"}
    assert int(container.ask("alpha")) > 0
    assert int(container.ask("beta")) > 0
    status = json.loads(container.run("athanor", "status", "--admin", ADMIN, "-o", "json"))
    assert "gvisor/systrap" in json.dumps(status)
    assert "memory" in status["cgroup"], "the unit delegates"
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    unprivileged = container.run(*nobody, "athanor", "doctor")
    assert "sudo athanor doctor" in unprivileged, unprivileged
    assert "systrap: a trial sandbox ran" in unprivileged, unprivileged


def test_installing_again_does_nothing(container):
    """The package has its units; what else an installation makes is there."""
    assert "nothing to do" in container.run("athanor", "install", "--systemd")


def test_systemd_finds_the_units_sound(container):
    """Nothing to say against any of them as they are loaded, and little exposure of each service."""
    units = [
        f"athanor{name}"
        for name in (
            "-gateway.service",
            "-supervisor.service",
            "-fetch.service",
            "-statements.service",
            "-statements.timer",
            "-witness.service",
            "-witness.timer",
            ".target",
            "-sandboxes.slice",
        )
    ]
    assert container.run("systemd-analyze", "verify", *units) == ""
    for unit, most in EXPOSURE.items():
        said = container.run("systemd-analyze", "security", "--no-pager", unit)
        (exposure,) = re.findall(r"exposure level for \S+: ([0-9.]+)", said)
        print(f"{unit}: exposure {exposure}, bar {most}")
        assert float(exposure) <= most


def test_the_journal_is_asked_by_field(container):
    """A request's line is found by its tenant and by its id, with its priority; a prompt is found nowhere. Control: the
    other tenant has lines of its own, and the prompt was answered."""
    word = "quicksilver-and-antimony"
    answer = json.loads(container.run("python3", "-c", SAY, container.keys["beta"], word))
    assert answer["usage"]["completion_tokens"] > 0
    request = re.findall(r'"request_id": "(\w+)"', container.journal("-o", "cat", "ATHANOR_TENANT=beta"))[-1]
    (line,) = container.journal("-o", "json", f"ATHANOR_REQUEST={request}").splitlines()
    entry = json.loads(line)
    assert (entry["_SYSTEMD_UNIT"], entry["_TRANSPORT"]) == ("athanor-gateway.service", "journal")
    assert (entry["ATHANOR_TENANT"], entry["PRIORITY"], entry["ATHANOR_OUTCOME"]) == ("beta", "6", "ok")
    assert json.loads(entry["MESSAGE"])["request_id"] == request
    assert set(container.journal("-F", "ATHANOR_TENANT").split()) == {"alpha", "beta"}
    assert '"tenant": "alpha"' not in container.journal("-o", "cat", "ATHANOR_TENANT=beta")
    assert "gateway attached" in container.journal("-o", "cat", "-u", "athanor-supervisor", "_TRANSPORT=journal")
    assert word not in container.journal("-o", "json", "--all")


def test_statements_are_made_by_a_timer(container):
    """The service runs to its end within its walls and makes nothing of a month without requests; the same command over
    this month makes one for each tenant (control), as the same user; the timer waits for the first of a month."""
    container.run("systemctl", "enable", "--now", "athanor-statements.timer")
    container.run("systemctl", "start", "athanor-statements.service")
    assert container.run("systemctl", "show", "--property=Result", "--value", "athanor-statements") == "success"
    made = "/var/lib/athanor-supervisor/statements"
    assert container.run("ls", made) == ""
    edited = ("--since=month", "--until=now", "--into", made, "--from", "/var/lib/athanor-supervisor/audit")
    user = ("setpriv", "--reuid=athanor-supervisor", "--regid=athanor", "--clear-groups")
    container.run(*user, "athanor", "statement", "create", "--all", *edited)
    names = container.run("ls", made).split()
    assert [name.partition("-")[0] for name in names] == ["alpha", "beta"]
    next_run = container.run(
        "systemctl", "show", "--property=NextElapseUSecRealtime", "--value", "athanor-statements.timer"
    )
    assert re.search(r"-01 00:1\d", next_run), next_run
    container.run("systemctl", "disable", "--now", "athanor-statements.timer")


def test_the_witnesses_are_asked_by_a_timer(container):
    """Without a witness the service fails and says so (control). With one that is a folder it exports tiles and writes
    its request, within its walls: the log's public key can be read there and what signs it cannot; the witness's
    answer is taken at the next run. The timer waits for the next hour."""
    unit, folder = "athanor-witness", "/var/lib/athanor-supervisor/witness"
    result = ("systemctl", "show", "--property=Result", "--value", unit)
    container.run("systemctl", "start", unit)
    assert container.run(*result) == "exit-code"
    assert "no witness is configured" in container.journal("-u", unit)
    key = key_of(bytes(range(32)))
    witness = Witness("notary.example.org", key.public)
    audit = "/var/lib/athanor-supervisor/audit"
    lines = f"  tiles: {folder}/tiles\\n  witnesses: [{{key: {witness.line()}, folder: {folder}/notary}}]"
    config = "/etc/athanor/athanor.yaml"
    container.run("cp", "-p", config, "/root/athanor.yaml")
    container.run("sed", "-i", f"s|^  directory: {audit}$|&\\n{lines}|", config)
    walls = f'ExecStartPre=/bin/sh -c "test -r {audit}/public.key && ! cat {audit}/signing.key"'
    dropped = container.drop_in(unit, walls)
    container.run("systemctl", "enable", "--now", f"{unit}.timer")
    container.run("systemctl", "start", unit)
    assert container.run(*result) == "success", container.journal("-u", unit)
    notary = container.root / folder.lstrip("/") / "notary"
    note = (notary / "request").read_text().partition("\n\n")[2]
    (notary / "response").write_text(cosign(note, witness, key, int(time.time())))
    container.run("systemctl", "start", unit)
    assert container.run(*result) == "success", container.journal("-u", unit)
    assert re.search(r"notary\.example\.org has cosigned [1-9]\d* entr", container.journal("-u", unit))
    next_run = container.run("systemctl", "show", "--property=NextElapseUSecRealtime", "--value", f"{unit}.timer")
    assert re.search(r" \d\d:(0\d|10):\d\d", next_run), next_run
    container.run("systemctl", "disable", "--now", f"{unit}.timer")
    container.run("sh", "-c", f"rm -r {dropped}; mv /root/athanor.yaml {config}; systemctl daemon-reload")


def test_reload_waits_for_its_outcome(container):
    """A good policy is put in force; a bad one fails the reload and changes nothing. The status that systemctl points
    to has the reason in its line, and the reload's own output with every problem; `athanor reload` prints it itself."""
    unit = "athanor-gateway"
    status = ("systemctl", "show", "--property=StatusText", "--value", unit)
    container.shell(blocks("sh")[-2])
    assert "reloaded policy" in container.journal("-u", unit, "-n", "5")
    assert re.fullmatch(r"policy [0-9a-f]{12} with 2 tenants is in force", container.run(*status))
    container.run("sed", "-i", "s/concurrency/concurency/", POLICY)
    said = container.run("systemctl", "reload", unit)
    print(said)
    assert "failed" in said.lower() and f"systemctl status {unit}" in said
    problem = re.compile(re.escape(POLICY) + r":\d+:\d+: tenants\.alpha\.limits\.concurency: unknown key")
    shown = container.run("systemctl", "status", "--no-pager", "--full", unit)
    print(shown)
    assert problem.search(container.run(*status)) and problem.search(shown.partition("Status: ")[2].splitlines()[0])
    assert "athanor[" in shown and "error: what was to be reloaded is not usable" in shown
    assert problem.search(container.run("athanor", "reload"))
    assert f"{POLICY}:" in container.run("athanor", "doctor")
    assert int(container.ask()) > 0
    container.run("sed", "-i", "s/concurency/concurrency/", POLICY)
    container.run("systemctl", "reload", unit)
    assert "in force" in container.run(*status)


def test_the_doctor_tries_as_the_services_users(container):
    """A policy that root reads and the services do not: told with the users, and the command that is told mends it.
    Control: before and after, all users can use everything."""
    fine = "athanor-gateway, athanor-supervisor, athanor-fetch can use the"
    assert fine in container.run("athanor", "doctor")
    container.run("chown", "root:root", POLICY)
    container.run("chmod", "0600", POLICY)
    told = json.loads(container.run("athanor", "doctor", "--json"))["findings"]
    found = [one for one in told if "cannot read" in one["what"]]
    assert [one["what"].split()[0] for one in found] == ["athanor-gateway", "athanor-supervisor"]
    container.run("sh", "-c", found[0]["mend"])
    assert fine in container.run("athanor", "doctor")


def test_killed_supervisor_comes_back(container):
    """systemd starts it again; the gateway stays up and answers from the new sandboxes. The journal knows what was how
    bad, and `athanor logs` shows it."""
    before = container.main_pid()
    container.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "athanor-supervisor")
    container.until(lambda: container.main_pid() not in (before, "0"), 30)
    container.wait_answered()
    unit = ("-u", "athanor-gateway", "-o", "cat")
    assert "supervisor is gone" in container.journal("-p", "warning", *unit)
    assert '"event": "ready"' not in container.journal("-p", "warning", *unit)
    assert '"event": "ready"' in container.journal(*unit)
    assert "warning  supervisor is gone" in container.run("athanor", "logs", "--level", "warning")


@pytest.mark.parametrize("unit", ["athanor-supervisor", "athanor-gateway"])
def test_a_hung_service_is_started_again(container, unit):
    """One that stops answering to the watchdog is ended and started by systemd, and requests are answered again."""
    folder = container.drop_in(unit, "WatchdogSec=4", "TimeoutAbortSec=2")
    container.run("systemctl", "restart", unit)
    container.wait_answered()
    before = container.main_pid(unit)
    container.run("systemctl", "kill", "--signal=STOP", "--kill-whom=main", unit)
    container.until(lambda: container.main_pid(unit) not in (before, "0"), 60)
    container.wait_answered()
    assert "watchdog" in container.journal("-n", "200").lower()
    container.run("sh", "-c", f"rm -r {folder}; systemctl daemon-reload")


def test_a_restart_refuses_nobody(container):
    """While the gateway is started again, and again, every request is answered, over a new connection and over one that
    is kept; control: when systemd may keep no socket, connections are refused."""
    unit = "athanor-gateway"
    with container.asking() as counts:
        container.wait_answered()
        for _ in range(RESTARTS):
            before = container.main_pid(unit)
            container.run("sh", "-c", f"systemctl reset-failed; systemctl restart {unit}")  # starts are counted
            assert container.main_pid(unit) not in (before, "0")
            container.wait_answered()
    print(f"{RESTARTS} restarts: {counts}")
    assert counts.keys() == {"answered"}, counts
    folder = container.drop_in(unit, "FileDescriptorStoreMax=0")
    container.run("sh", "-c", f"systemctl stop {unit}; systemctl start {unit}")
    with container.asking() as counts:
        container.wait_answered()
        container.run("systemctl", "restart", unit)
        container.wait_answered()
    print(f"without the kept socket: {counts}")
    assert any("refused" in reason for reason in counts), counts
    container.run("sh", "-c", f"rm -r {folder}; systemctl daemon-reload; systemctl stop {unit}; systemctl start {unit}")
    container.wait_answered()


def test_an_upgrade_and_the_way_back(container, package, tmp_path):
    """docs/upgrade.md: a later version with state of another form, and the older one again. Every request is answered
    meanwhile, or one of the few that ran in the engine that goes is told to come again; keys go on working, the policy
    comes back as it was, and the audit log is one chain through all of it."""
    files = (POLICY, "/etc/athanor/credentials.json", "/etc/athanor/pepper")
    kept = container.run("sha256sum", *files)
    for name, one in (("old", package), ("new", next_version(package, tmp_path))):
        (container.root / "root" / name).mkdir()
        shutil.move(shutil.copy(one, tmp_path / f"{name}.deb"), container.root / "root" / name / one.name)
    assert "has the form 1" in container.shell(blocks("sh before", UPGRADE)[0])
    entries = audit_entries(container)
    with container.asking() as counts:
        for block, version, mark in (
            (blocks("sh upgrade", UPGRADE)[0], NEXT_VERSION, "# of the next form"),
            (blocks("sh back", UPGRADE)[0], VERSION, "version"),
        ):
            before = [container.main_pid(unit) for unit in ("athanor-supervisor", "athanor-gateway")]
            said = container.shell(block)
            assert "the log is whole" in said
            container.until(lambda: container.states() == ["active", "active"] and container.ask("beta").isdigit(), 90)
            after = [container.main_pid(unit) for unit in ("athanor-supervisor", "athanor-gateway")]
            assert not set(before) & set(after)
            assert container.run("athanor", "--version") == f"athanor {version}"
            assert container.run("head", "-n1", POLICY).startswith(mark)
            assert int(container.ask("alpha")) > 0
            assert audit_entries(container) > entries
            entries = audit_entries(container)
    print(f"an upgrade and the way back: {counts}")
    again = {said: times for said, times in counts.items() if said != "answered"}
    assert all(said.startswith("503 ") and "service_unavailable_error" in said for said in again), counts
    assert sum(again.values()) <= TOLD_TO_COME_AGAIN, counts
    assert container.run("sha256sum", *files) == kept
    state = json.loads(container.run("athanor", "state", "show", "-o", "json"))
    assert (state["form"], state["known"], state["written_by"]) == (1, 1, VERSION)
    assert [(one["form"], one["state_of"]) for one in state["backups"]] == [(1, VERSION), (2, NEXT_VERSION)]
    assert all(one["name"].startswith(f"form-{one['form']}-of-") for one in state["backups"])
    assert container.run("stat", "-c", "%a %U", "/var/lib/athanor/backups") == "700 root"


def audit_entries(container) -> int:
    """Entries of the audit log, which is whole."""
    report = json.loads(container.run("athanor", "audit", "verify", "-o", "json"))
    assert report["ok"], report
    return report["entries"]


def test_images_are_chosen_and_rolled_back(container):
    """Until now sandboxes ran the image of the package, which the first configuration names. One that was built and
    signed elsewhere is added and pinned, and serves; with a byte changed no sandbox starts and the log names the file;
    unsigned is refused."""
    packaged = json.loads(container.run("cat", "/etc/athanor/image.json"))["pinned"]
    assert container.root.joinpath("usr/lib/athanor/share/athanor/images", packaged, "manifest.json").is_file()
    assert packaged in container.run("athanor", "audit", "show", "--kind", "sandbox")
    built = [
        ROOT / ".venv/bin/athanor",
        "image",
        "build",
        container.root / "srv/image",
        "--sign",
        container.root.parent / "image.key",
        "-o",
        "json",
    ]
    image = json.loads(subprocess.run(built, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    words = {"image_store": "/var/lib/athanor/images", "image_pin": "/etc/athanor/image.json"}
    words |= {"image_keys": image["signed_by"]}
    for name, value in words.items():
        container.run(
            "sed", "-i", rf"s|^  \(# \)\?{name}: .*|  {name}: {json.dumps(value)}|", "/etc/athanor/athanor.yaml"
        )
    container.shell(f"athanor image add /srv/image; athanor image use {image['digest'][:12]} --restart")
    container.wait_answered()
    assert image["digest"] in container.run("athanor", "audit", "show", "--kind", "sandbox")
    place = f"/var/lib/athanor/images/{image['digest']}"
    victim = f"{place}/text/opt/athanor/engine/text/conversation.py"
    container.run("sh", "-c", f"echo '#' >> {victim}")
    container.run("systemctl", "restart", "athanor-supervisor")
    assert f"{victim} is not what the image was built with" in container.journal("-n", "50")
    container.run(
        "sh",
        "-c",
        f"truncate -s -2 {victim}; mv {place}/signatures /root; systemctl stop athanor.target "
        "athanor-gateway athanor-supervisor; systemctl reset-failed; systemctl start athanor-supervisor",
    )
    assert "is not signed" in container.journal("-n", "50")
    container.run("sh", "-c", f"mv /root/signatures {place}; systemctl stop athanor-supervisor; systemctl reset-failed")
    container.run("systemctl", "start", "athanor-supervisor", "athanor-gateway")
    container.wait_answered()
    shutil.rmtree(container.root / "srv/image")


def test_stop_leaves_no_process(container):
    """After the stop no sandbox process runs and the run directories are gone."""
    container.run("systemctl", "stop", "athanor-gateway", "athanor-supervisor")
    assert container.states() == ["inactive", "inactive"]
    look = "import glob; print([p for p in glob.glob('/proc/*/cmdline') if b'ro' + b'ot=/run' in open(p, 'rb').read()])"
    assert container.run("python3", "-c", look) == "[]"
    assert "athanor" not in container.run("ls", "/run")


def test_purge_leaves_nothing(container):
    """Before it there is much of the appliance to be found; after the document's last block there is nothing."""
    assert "/etc/athanor/athanor.yaml" in container.left()
    container.shell(blocks("sh")[-1])
    assert container.left() == ""
    assert container.states() == ["inactive", "inactive"]


def test_installed_without_a_package(container):
    """`athanor install --systemd` of the sources' own command serves as well, and an uninstall with --purge leaves
    nothing."""
    command = "/usr/local/bin/athanor"
    container.shell("cp /srv/own/* /usr/local/bin")
    container.run(command, "install", "--systemd", "--command", command)
    container.keys.clear()
    create, policy = blocks("sh")[1:3]
    container.shell(create.replace("athanor key", f"{command} key"))
    container.shell(policy.replace("athanor policy", f"{command} policy"))
    assert "nothing to do" in container.run(command, "install", "--systemd", "--command", command)
    container.run("systemctl", "start", "athanor.target")
    container.wait_answered(90)
    print(container.run(command, "uninstall", "--purge"))
    assert container.left() == ""
    assert container.states() == ["inactive", "inactive"]
