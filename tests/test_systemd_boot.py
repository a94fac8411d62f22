"""The units under a real systemd: a small Debian is booted in a container and serves the embedded model from it.

Needs root, mmdebstrap and systemd-nspawn (packages mmdebstrap and systemd-container); a minute, 250 MB below /tmp.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from appliance.api.keys import KeyRecord, issue, serialise_records
from appliance.credentials import new_pepper

pytestmark = [pytest.mark.full, pytest.mark.runsc, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "images/mini/athanor-mini"
COMMAND = """\
#!/usr/bin/python3
import sys
sys.path[:0] = ["/srv/athanor", "/srv/packages"]
from appliance.cli.app import main
sys.argv[0] = "athanor"
sys.exit(main())
"""
POLICY = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["*"]
    limits:
      requests_per_minute: 6000
      tokens_per_minute: 10000000
      concurrency: 16
      max_context_tokens: 4096
      max_output_tokens: 64
"""
ASK = """\
import json, sys, urllib.request
body = {"model": "my-model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
headers = {"Authorization": "Bearer " + sys.argv[1], "Content-Type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8080/v1/chat/completions", json.dumps(body).encode(), headers)
print(json.load(urllib.request.urlopen(request, timeout=30))["usage"]["completion_tokens"])
"""


class Container:
    """A booted Debian; commands run inside it."""

    def __init__(self, root: Path, api_key: str) -> None:
        self.api_key = api_key
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
        enter = ["nsenter", f"--target={self.init}", "--mount", "--uts", "--ipc", "--pid", "--net", "--"]
        done = subprocess.run([*enter, *argv], capture_output=True, text=True, timeout=180, check=False)
        return (done.stdout + done.stderr).strip()

    def states(self) -> list[str]:
        """Of supervisor and gateway."""
        return self.run("systemctl", "is-active", "athanor-supervisor", "athanor-gateway").split()

    def main_pid(self) -> str:
        """Of the supervisor."""
        return self.run("systemctl", "show", "--property=MainPID", "--value", "athanor-supervisor")

    def ask(self) -> str:
        """Tokens of one answer, or what went wrong."""
        return self.run("python3", "-c", ASK, self.api_key)

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


def fill(root: Path, runsc: Path) -> str:
    """Install the appliance's files into a fresh root; gives the plain key of a tenant."""
    shutil.copy(runsc, root / "usr/bin/runsc")
    (root / "usr/bin/athanor").write_text(COMMAND)
    (root / "usr/bin/athanor").chmod(0o755)
    for path in (ROOT / "systemd").iterdir():
        if path.suffix in {".service", ".slice", ".target"}:
            shutil.copy(path, root / "etc/systemd/system")
    shutil.copy(ROOT / "systemd/athanor.sysusers.conf", root / "usr/lib/sysusers.d/athanor.conf")
    shutil.copy(ROOT / "systemd/athanor.tmpfiles.conf", root / "usr/lib/tmpfiles.d/athanor.conf")
    etc = root / "etc/athanor"
    etc.mkdir()
    shutil.copy(ROOT / "systemd/athanor.yaml", etc)
    shutil.copytree(MODEL, root / "var/lib/athanor/models/my-model")
    pepper = new_pepper()
    plain, digest = issue("alpha-1", pepper)
    (etc / "pepper").write_bytes(pepper)
    (etc / "credentials.json").write_text(serialise_records({"alpha-1": KeyRecord(digest, datetime.now(UTC))}))
    (etc / "policy.yaml").write_text(POLICY)
    for place in ("srv/athanor", "srv/packages"):
        (root / place).mkdir(parents=True)
    return plain


@pytest.fixture(scope="module")
def container(runsc_path):
    """A booted container with both services installed and none started."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for name in ("mmdebstrap", "systemd-nspawn", "nsenter"):
        if shutil.which(name) is None:
            pytest.skip(f"no {name} on this machine")
    text = Path("/etc/os-release").read_text()
    if "VERSION_CODENAME=" not in text or "ID=debian" not in text or sys.version_info[:2] != (3, 11):
        pytest.skip("the container's Python is Debian 12's 3.11; the packages here are not for it")
    groups = [path for top in ("systemd", "unified") for path in own_groups(top)]
    with tempfile.TemporaryDirectory(prefix="ath-boot-") as place:
        root = Path(place) / "root"
        packages = "systemd,systemd-sysv,dbus,python3"
        done = subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm", str(root)],
            capture_output=True, text=True, check=False, timeout=300,
        )
        if done.returncode != 0:
            pytest.skip(f"no Debian can be installed from here: {done.stderr[-300:]}")
        container = Container(root, fill(root, runsc_path))
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


def test_services_start_and_answer(container):
    """Both become active, the sandboxes are real, and a request is answered through all of it."""
    container.run("systemctl", "start", "athanor-supervisor", "athanor-gateway")
    assert container.states() == ["active", "active"], container.run("journalctl", "--no-pager", "-n", "60")
    assert int(container.ask()) > 0
    status = json.loads(container.run("athanor", "status", "--admin", "unix:/run/athanor/admin.sock", "-o", "json"))
    assert "gvisor/systrap" in json.dumps(status)


def test_reload_waits_for_its_outcome(container):
    """A good policy is put in force; a bad one fails the reload and changes nothing."""
    policy = "/etc/athanor/policy.yaml"
    container.run("systemctl", "reload", "athanor-gateway")
    assert "reloaded policy" in container.run("journalctl", "--no-pager", "-u", "athanor-gateway", "-n", "5")
    container.run("sed", "-i", "s/concurrency/concurency/", policy)
    assert "failed" in container.run("systemctl", "reload", "athanor-gateway").lower()
    assert int(container.ask()) > 0
    container.run("sed", "-i", "s/concurency/concurrency/", policy)


def test_killed_supervisor_comes_back(container):
    """systemd starts it again; the gateway stays up and answers from the new sandboxes."""
    before = container.main_pid()
    container.run("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "athanor-supervisor")
    container.until(lambda: container.main_pid() not in (before, "0"), 30)
    container.until(lambda: container.states() == ["active", "active"] and container.ask().isdigit(), 60)


def test_stop_leaves_nothing(container):
    """After the stop no sandbox process runs and the run directories are gone."""
    container.run("systemctl", "stop", "athanor-gateway", "athanor-supervisor")
    assert container.states() == ["inactive", "inactive"]
    look = "import glob; print([p for p in glob.glob('/proc/*/cmdline') if b'ro' + b'ot=/run' in open(p, 'rb').read()])"
    assert container.run("python3", "-c", look) == "[]"
    assert "athanor" not in container.run("ls", "/run")
