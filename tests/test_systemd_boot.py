"""docs/install.md and docs/upgrade.md under a real systemd: a small Debian is booted in a container, gets the package,
serves the embedded model to two tenants, is upgraded and goes back, until the package is purged.

Needs root, dpkg-deb, mmdebstrap and systemd-nspawn (packages mmdebstrap and systemd-container); some minutes, and 3 GB
below the temporary directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest

from appliance.version import VERSION

pytestmark = [pytest.mark.full, pytest.mark.runsc, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT, UPGRADE = ROOT / "docs/install.md", ROOT / "docs/upgrade.md"
ADMIN = "unix:/run/athanor/admin.sock"
POLICY = "/etc/athanor/policy.yaml"
COMMAND = """\
#!/usr/bin/python3
import sys
sys.path[:0] = ["/srv/athanor", "/srv/packages"]
from appliance.cli.app import main
sys.argv[0] = "athanor"
sys.exit(main())
"""
ASK = """\
import json, sys, urllib.request
body = {"model": "athanor-mini", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
headers = {"Authorization": "Bearer " + sys.argv[1], "Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8080/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request, timeout=30))["usage"]["completion_tokens"])
"""


ASK_ON = """\
import collections, json, os, sys, time, urllib.request
body = {"model": "athanor-mini", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
headers = {"Authorization": "Bearer " + sys.argv[1], "Content-Type": "application/json"}
counts = collections.Counter()
while not os.path.exists("/root/enough"):
    request = urllib.request.Request("http://127.0.0.1:8080/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        json.load(urllib.request.urlopen(request, timeout=120))
        counts["answered"] += 1
    except OSError as error:
        counts[repr(getattr(error, "reason", error))] += 1
    time.sleep(0.05)
print(json.dumps(counts))
"""
NEXT_VERSION = "9.9.0"
STEP = """

def _mark(folder: Path) -> None:
    path = folder / "policy.yaml"
    path.write_text("# of the next form\\n" + path.read_text())


MIGRATIONS = (Migration("policies say their form", _mark),)
"""


class Container:
    """A booted Debian; commands run inside it."""

    def __init__(self, root: Path) -> None:
        self.keys: dict[str, str] = {}
        self.root = root
        packages = sysconfig.get_path("purelib")
        binds = [f"--bind-ro={ROOT}:/srv/athanor", f"--bind-ro={packages}:/srv/packages"]
        options = ["-q", "--boot", "--register=no", "--keep-unit", "--console=pipe", "--link-journal=no"]
        self._log = open(root.parent / "log", "w+")  # noqa: SIM115 - lives as long as the container
        self._nspawn = subprocess.Popen(
            ["systemd-nspawn", *options, "--private-network", f"--directory={root}", *binds],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
        )
        self.init = 0
        self.until(lambda: self._find_init() and self.run("systemctl", "is-system-running") == "running", 60)

    def _find_init(self) -> bool:
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        self.init = int(children[0]) if children else 0
        return bool(children)

    def run(self, *argv: str) -> str:
        """What a command inside prints; its status does not matter."""
        done = subprocess.run([*self._enter(), *argv], capture_output=True, text=True, timeout=180, check=False)
        return (done.stdout + done.stderr).strip()

    def states(self) -> list[str]:
        """Of supervisor and gateway."""
        return self.run("systemctl", "is-active", "athanor-supervisor", "athanor-gateway").split()

    def main_pid(self, unit: str = "athanor-supervisor") -> str:
        """Of a service; 0 while it has none."""
        return self.run("systemctl", "show", "--property=MainPID", "--value", unit)

    def ask(self, tenant: str = "alpha") -> str:
        """Tokens of one answer, or what went wrong."""
        return self.run("python3", "-c", ASK, self.keys[tenant])

    @contextlib.contextmanager
    def asking(self):
        """A client that asks one request after the other, each over a connection of its own, while the block runs; what
        became of them is in the dictionary afterwards."""
        counts: dict[str, int] = {}
        self.run("rm", "-f", "/root/enough")
        client = subprocess.Popen(
            [*self._enter(), "python3", "-c", ASK_ON, self.keys["alpha"]], stdout=subprocess.PIPE, text=True
        )
        try:
            yield counts
        finally:
            self.run("touch", "/root/enough")
            counts.update(json.loads(client.communicate(timeout=180)[0]))

    def shell(self, script: str) -> str:
        """Run a block of the document as root in its home, ended by the first command that fails."""
        done = subprocess.run(
            [*self._enter(), f"KEY={self.keys.get('alpha', '')}", "sh", "-ec", f"cd /root\n{script}"],
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        for key in re.findall(r"ath_[a-z]+-1_[0-9a-f]{64}", done.stdout):
            self.keys[key.split("_")[1].removesuffix("-1")] = key
        return done.stdout

    def _enter(self) -> list[str]:
        enter = ["nsenter", f"--target={self.init}", "--mount", "--uts", "--ipc", "--pid", "--net", "--"]
        return [*enter, "env", "-i", "HOME=/root", "PATH=/usr/sbin:/usr/bin"]

    def left(self) -> str:
        """Files, users and groups of the appliance, beside what these tests brought."""
        brought = " -o ".join(f"-path {path}" for path in ("/proc", "/sys", "/srv", "/usr/local", "/root"))
        files = self.run("sh", "-c", f"find / \\( {brought} \\) -prune -o -iname '*athanor*' -print")
        return files + self.run("grep", "-h", "athanor", "/etc/passwd", "/etc/group")

    def until(self, condition, seconds: float) -> None:
        """Look again until it holds, or fail with what the container has said."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self._nspawn.poll() is not None:
                self._log.seek(0)
                pytest.fail(self._log.read()[-3000:] + self.run("journalctl", "--no-pager", "-n", "50"))
            time.sleep(0.25)

    def close(self) -> None:
        """End everything in it."""
        if self.init:
            os.kill(self.init, signal.SIGKILL)
        else:
            self._nspawn.kill()
        self._nspawn.wait(30)
        self._log.close()


def fill(root: Path, runsc: Path, package: Path) -> None:
    """What a machine has before the appliance comes: the package to install; and, put away for an installation
    without it, the sources' own command and runsc."""
    shutil.copy(package, root / "root")
    for place in ("srv/athanor", "srv/packages", "srv/own"):
        (root / place).mkdir(parents=True)
    shutil.copy(runsc, root / "srv/own/runsc")
    (root / "srv/own/athanor").write_text(COMMAND)
    for path in (root / "srv/own").iterdir():
        path.chmod(0o755)


def blocks(kind: str, document: Path = DOCUMENT) -> list[str]:
    """A document's commands of one kind, block by block."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


def next_version(package: Path, folder: Path) -> Path:
    """A package of a later version, whose state has another form."""
    tree = folder / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(tree)], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"^Version: .*$", f"Version: {NEXT_VERSION}", control.read_text(), flags=re.MULTILINE))
    (site,) = (tree / "usr/lib/athanor/lib").glob("python3.*/site-packages")
    version, schema = site / "appliance/version.py", site / "appliance/install/schema.py"
    version.write_text(re.sub('VERSION = ".*"', f'VERSION = "{NEXT_VERSION}"', version.read_text()))
    text = schema.read_text()
    empty = "MIGRATIONS: tuple[Migration, ...] = ()"
    assert empty in text
    schema.write_text(text.replace(empty, STEP))
    for path in (version, schema):
        py_compile.compile(str(path), dfile=f"/{path.relative_to(tree)}", doraise=True,
                           invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)  # fmt: skip
    made = folder / f"athanor_{NEXT_VERSION}_amd64.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zzstd", "-z1", "--build", str(tree), str(made)], check=True)
    shutil.rmtree(tree)
    return made


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package, built by the document's own command."""
    make, command = blocks("sh build")[0].splitlines()
    assert make == "make setup", "done already: these tests run in what it made"
    words = command.split()
    assert words[0] == ".venv/bin/athanor"
    folder = tmp_path_factory.mktemp("package")
    done = subprocess.run(
        [ROOT / words[0], *words[1:]], cwd=folder, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return next((folder / words[-1]).iterdir())


@pytest.fixture(scope="module")
def container(runsc_path, package):
    """A booted container with both services installed and none started."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for name in ("mmdebstrap", "systemd-nspawn", "nsenter", "dpkg-deb"):
        if shutil.which(name) is None:
            pytest.skip(f"no {name} on this machine")
    text = Path("/etc/os-release").read_text()
    if "VERSION_CODENAME=" not in text or "ID=debian" not in text or sys.version_info[:2] != (3, 11):
        pytest.skip("the container's Python is Debian 12's 3.11; the packages here are not for it")
    groups = [path for top in ("systemd", "unified") for path in own_groups(top)]
    with tempfile.TemporaryDirectory(prefix="ath-boot-") as place:
        root = Path(place) / "root"
        packages = "systemd,systemd-sysv,dbus,python3,curl"
        done = subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm", str(root)],
            capture_output=True, text=True, check=False, timeout=600,
        )
        if done.returncode != 0:
            pytest.skip(f"no Debian can be installed from here: {done.stderr[-300:]}")
        fill(root, runsc_path, package)
        container = Container(root)
        yield container
        container.close()
    for path in groups:
        remove_groups(path)


def own_groups(top: str) -> list[Path]:
    """The groups that systemd-nspawn leaves behind, unless they were there before."""
    names = (Path("/sys/fs/cgroup", top, name) for name in ("payload", "supervisor"))
    return [path for path in names if not path.exists()]


def remove_groups(path: Path) -> None:
    """Remove a tree of empty groups."""
    for top, _, _ in os.walk(path, topdown=False):
        os.rmdir(top)


def test_the_document_leads_to_two_tenants(container):
    """Each command of docs/install.md up to the first answer ends well; both tenants are served from gVisor."""
    for block in blocks("sh")[:-2]:
        output = container.shell(block)
        if "doctor" in block:
            assert "0 problems" in output, output
    assert container.states() == ["active", "active"], container.run("journalctl", "--no-pager", "-n", "60")
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


def test_reload_waits_for_its_outcome(container):
    """A good policy is put in force; a bad one fails the reload and changes nothing."""
    container.shell(blocks("sh")[-2])
    assert "reloaded policy" in container.run("journalctl", "--no-pager", "-u", "athanor-gateway", "-n", "5")
    container.run("sed", "-i", "s/concurrency/concurency/", POLICY)
    assert "failed" in container.run("systemctl", "reload", "athanor-gateway").lower()
    assert f"{POLICY}:" in container.run("athanor", "doctor")
    assert int(container.ask()) > 0
    container.run("sed", "-i", "s/concurency/concurrency/", POLICY)
    container.run("systemctl", "reload", "athanor-gateway")


def test_killed_supervisor_comes_back(container):
    """systemd starts it again; the gateway stays up and answers from the new sandboxes. The journal knows what was how
    bad, and `athanor logs` shows it."""
    before = container.main_pid()
    container.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "athanor-supervisor")
    container.until(lambda: container.main_pid() not in (before, "0"), 30)
    container.until(lambda: container.states() == ["active", "active"] and container.ask().isdigit(), 60)
    unit = ("-u", "athanor-gateway", "--no-pager", "-o", "cat")
    assert "supervisor is gone" in container.run("journalctl", "-p", "warning", *unit)
    assert '"event": "ready"' not in container.run("journalctl", "-p", "warning", *unit)
    assert '"event": "ready"' in container.run("journalctl", *unit)
    assert "warning  supervisor is gone" in container.run("athanor", "logs", "--level", "warning")


@pytest.mark.parametrize("unit", ["athanor-supervisor", "athanor-gateway"])
def test_a_hung_service_is_started_again(container, unit):
    """One that stops answering to the watchdog is ended and started by systemd, and requests are answered again."""
    folder = f"/run/systemd/system/{unit}.service.d"
    quick = f"mkdir -p {folder}; printf '[Service]\\nWatchdogSec=4\\nTimeoutAbortSec=2\\n' > {folder}/quick.conf"
    container.run("sh", "-c", f"{quick}; systemctl daemon-reload; systemctl restart {unit}")
    container.until(lambda: container.ask().isdigit(), 60)
    before = container.main_pid(unit)
    container.run("systemctl", "kill", "--signal=STOP", "--kill-whom=main", unit)
    container.until(lambda: container.main_pid(unit) not in (before, "0"), 60)
    container.until(lambda: container.states() == ["active", "active"] and container.ask().isdigit(), 60)
    assert "watchdog" in container.run("journalctl", "--no-pager", "-n", "200").lower()
    container.run("sh", "-c", f"rm -r {folder}; systemctl daemon-reload")


def test_a_restart_refuses_nobody(container):
    """While the gateway is started again no connection is refused or lost; control: when systemd may keep no socket,
    some are. A request that had been accepted as the drain began may get the retryable 503."""
    unit = "athanor-gateway"
    with container.asking() as counts:
        container.until(lambda: container.ask().isdigit(), 60)
        before = container.main_pid(unit)
        container.run("systemctl", "restart", unit)
        assert container.main_pid(unit) not in (before, "0")
        container.until(lambda: container.ask().isdigit(), 60)
    assert counts.pop("'Service Unavailable'", 0) <= 1 and counts.keys() == {"answered"}, counts
    folder = f"/run/systemd/system/{unit}.service.d"
    drop = f"mkdir -p {folder}; printf '[Service]\\nFileDescriptorStoreMax=0\\n' > {folder}/none.conf"
    container.run("sh", "-c", f"{drop}; systemctl daemon-reload; systemctl stop {unit}; systemctl start {unit}")
    with container.asking() as counts:
        container.until(lambda: container.ask().isdigit(), 60)
        container.run("systemctl", "restart", unit)
        container.until(lambda: container.ask().isdigit(), 60)
    assert any("refused" in reason for reason in counts), counts
    container.run("sh", "-c", f"rm -r {folder}; systemctl daemon-reload; systemctl stop {unit}; systemctl start {unit}")
    container.until(lambda: container.states() == ["active", "active"] and container.ask().isdigit(), 60)


def test_an_upgrade_and_the_way_back(container, package, tmp_path):
    """docs/upgrade.md: a later version with state of another form, and the older one again. No connection is refused
    meanwhile, keys go on working, the policy comes back as it was, and the audit log is one chain through all of it."""
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
    assert counts.pop("'Service Unavailable'", 0) <= 2 and counts.keys() == {"answered"}, counts
    assert container.run("sha256sum", *files) == kept
    state = json.loads(container.run("athanor", "state", "show", "-o", "json"))
    assert (state["form"], state["known"], state["backups"]) == (1, 1, [1, 2])
    assert container.run("stat", "-c", "%a %U", "/var/lib/athanor/backups") == "700 root"


def audit_entries(container) -> int:
    """Entries of the audit log, which is whole."""
    report = json.loads(container.run("athanor", "audit", "verify", "-o", "json"))
    assert report["ok"], report
    return report["entries"]


def test_images_are_chosen_and_rolled_back(container):
    """An image that was built and signed elsewhere is added and pinned, and serves; with a byte changed no sandbox
    starts and the log names the file; unsigned is refused."""
    built = [ROOT / ".venv/bin/athanor", "image", "build", container.root / "srv/image", "--sign",
             container.root.parent / "image.key", "-o", "json"]  # fmt: skip
    image = json.loads(subprocess.run(built, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    words = {"image_store": "/var/lib/athanor/images", "image_pin": "/etc/athanor/image.json"}
    words |= {"image_keys": image["signed_by"]}
    container.run("sh", "-c", f"echo 'sandbox: {json.dumps(words)}' >> /etc/athanor/athanor.yaml")
    container.shell(f"athanor image add /srv/image; athanor image use {image['digest'][:12]} --restart")
    container.until(lambda: container.ask().isdigit(), 60)
    assert image["digest"] in container.run("athanor", "audit", "show", "--kind", "sandbox")
    place = f"/var/lib/athanor/images/{image['digest']}"
    victim = f"{place}/text/opt/athanor/engine/text/conversation.py"
    container.run("sh", "-c", f"echo '#' >> {victim}")
    container.run("systemctl", "restart", "athanor-supervisor")
    assert f"{victim} is not what the image was built with" in container.run("journalctl", "--no-pager", "-n", "50")
    container.run("sh", "-c", f"truncate -s -2 {victim}; mv {place}/signatures /root; systemctl stop athanor.target "
                  "athanor-gateway athanor-supervisor; systemctl reset-failed; systemctl start athanor-supervisor")
    assert "is not signed" in container.run("journalctl", "--no-pager", "-n", "50")
    container.run("sh", "-c", f"mv /root/signatures {place}; systemctl stop athanor-supervisor; systemctl reset-failed")
    container.run("systemctl", "start", "athanor-supervisor", "athanor-gateway")
    container.until(lambda: container.ask().isdigit(), 60)
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
    container.until(lambda: container.states() == ["active", "active"] and container.ask().isdigit(), 90)
    print(container.run(command, "uninstall", "--purge"))
    assert container.left() == ""
    assert container.states() == ["inactive", "inactive"]
