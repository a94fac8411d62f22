"""A small Debian, made by mmdebstrap and booted by systemd-nspawn: a real systemd for tests, whatever runs the machine.

Needs root and the packages mmdebstrap and systemd-container; 3 GB below the temporary directory.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

BUILD_S = 2_400
"""Longest that packing may take: it builds the image of the sandboxes as well, some minutes on two cores."""

NEEDED = ("mmdebstrap", "systemd-nspawn", "nsenter", "dpkg-deb")

PACKAGES = "systemd,systemd-sysv,dbus,python3,curl"
"""What the container has; the package under test brings the rest."""

BOOT_S, MAKE_S, COMMAND_S, SHELL_S = 60, 600, 180, 600
"""Longest that the boot, making the root, one command, and a block of a document may take."""

CONTROLLERS = ("memory", "cpu", "pids")
"""Bounds of sandboxes, as hierarchies of cgroups of version 1 are named."""

GROUPS_S = 30.0
"""Longest that the last processes of a container take to leave its groups."""

GIVE_GROUPS = """\
mkdir -p /run/systemd/system/athanor-supervisor.service.d
cat > /run/systemd/system/athanor-supervisor.service.d/groups.conf <<'END'
[Service]
ExecStartPre=+/bin/sh -c 'for name in {names}; do \
chown -R athanor-supervisor /sys/fs/cgroup/$$name$$(sed -n "s/^[0-9]*:$$name://p" /proc/self/cgroup); done'
END
"""
"""What systemd does on version 2 for a unit with Delegate= and User=."""

NEXT_VERSION = "9.9.0"
STEP = """

def _mark(folder: Path) -> None:
    path = folder / "policy.yaml"
    path.write_text("# of the next form\\n" + path.read_text())


MIGRATIONS = (Migration("policies say their form", _mark),)
"""
"""What the next version's module of migrations says in place of having none."""

COMMAND = """\
#!/usr/bin/python3
import sys
sys.path[:0] = ["/srv/athanor", "/srv/packages"]
from appliance.operator.cli.app import main
sys.argv[0] = "athanor"
sys.exit(main())
"""

ASK = """\
import http.client, json, os, sys, time
key, kept, end = sys.argv[1], sys.argv[2] == "kept", sys.argv[3]
body = json.dumps({"model": "athanor-mini", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8})
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
counts = {}
connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=120)
while True:
    try:
        connection.request("POST", "/v1/chat/completions", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        outcome = "answered" if answer.status == 200 else f"{answer.status} {text[:200]}"
    except (OSError, http.client.HTTPException) as error:
        outcome = repr(error)
        connection.close()
    counts[outcome] = counts.get(outcome, 0) + 1
    if not end or os.path.exists(end):
        break
    if not kept:
        connection.close()
    time.sleep(0.2)
print(json.dumps(counts) if end else json.loads(text)["usage"]["completion_tokens"])
"""
"""Asks with a key, once, or until a file is there; each time anew, or over a connection that is kept while it may be. A
pause keeps two of them within the document's rates."""

ENOUGH = "/root/enough"
"""The file that ends who asks on."""


class Container:
    """A booted Debian; commands run inside it."""

    def __init__(self, root: Path) -> None:
        self.keys: dict[str, str] = {}
        """Of each tenant, the key that a command has shown."""
        self.root = root
        self.groups = _own_groups(root.parent.name)
        packages = sysconfig.get_path("purelib")
        place = ["--private-network", f"--directory={root}"]
        binds = [f"--bind-ro={ROOT}:/srv/athanor", f"--bind-ro={packages}:/srv/packages"]
        options = ["-q", "--boot", "--register=no", "--keep-unit", "--console=pipe", "--link-journal=no"]
        self._log = open(root.parent / "log", "w+")  # noqa: SIM115 - lives as long as the container
        join = "".join(f"echo $$ > {path}/cgroup.procs; " for path in self.groups.values())
        self._nspawn = subprocess.Popen(
            ["sh", "-ec", f'{join} exec "$@"', "sh", "systemd-nspawn", *options, *place, *binds],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self._init = 0

    def wait_booted(self) -> None:
        """Until systemd says that everything runs."""
        self.until(lambda: self._find_init() and self.run("systemctl", "is-system-running") == "running", BOOT_S)

    def give_controllers(self) -> None:
        """Let the container's systemd bound memory, processor time and processes where they are cgroups of version 1:
        systemd-nspawn hands those in for reading. The supervisor's unit gets its own groups, which systemd gives to a
        unit's user on version 2 alone. Nothing changes where the container has version 2, or no such controllers."""
        given = [name for name in CONTROLLERS if name in self.groups]
        for name in given:
            (self.groups[name] / "payload").mkdir(exist_ok=True)
            self.run("mount", "-o", "remount,rw,bind", f"/sys/fs/cgroup/{name}")
        if given:
            self.run("systemctl", "daemon-reexec")
            self.run("sh", "-c", GIVE_GROUPS.format(names=" ".join(given)))
            self.run("systemctl", "daemon-reload")

    def _find_init(self) -> bool:
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        self._init = int(children[0]) if children else 0
        return bool(children)

    def enter(self) -> list[str]:
        """Words of a command that runs another one inside."""
        enter = ["nsenter", f"--target={self._init}", "--mount", "--uts", "--ipc", "--pid", "--net", "--"]
        return [*enter, "env", "-i", "HOME=/root", "PATH=/usr/sbin:/usr/bin"]

    def run(self, *argv: str) -> str:
        """What a command inside prints; its status does not matter."""
        done = subprocess.run([*self.enter(), *argv], capture_output=True, text=True, timeout=COMMAND_S, check=False)
        return (done.stdout + done.stderr).strip()

    def shell(self, script: str) -> str:
        """Run a block of a document as root in its home, ended by the first command that fails."""
        done = subprocess.run(
            [*self.enter(), f"KEY={self.keys.get('alpha', '')}", "sh", "-ec", f"cd /root\n{script}"],
            capture_output=True,
            text=True,
            timeout=SHELL_S,
            check=False,
        )
        assert done.returncode == 0, (script, done.stdout, done.stderr)
        for key in re.findall(r"ath_[a-z]+-1_[0-9a-f]{64}", done.stdout):
            self.keys[key.split("_")[1].removesuffix("-1")] = key
        return done.stdout

    def journal(self, *words: str) -> str:
        """What journalctl prints."""
        return self.run("journalctl", "--no-pager", *words)

    def states(self) -> list[str]:
        """Of supervisor and gateway."""
        return self.run("systemctl", "is-active", "athanor-supervisor", "athanor-gateway").split()

    def main_pid(self, unit: str = "athanor-supervisor") -> str:
        """Of a service; 0 while it has none."""
        return self.run("systemctl", "show", "--property=MainPID", "--value", unit)

    def drop_in(self, unit: str, *lines: str) -> str:
        """Change a service's settings until the folder that is given back is removed; counts after a daemon-reload."""
        folder = f"/run/systemd/system/{unit}.service.d"
        words = "\\n".join(("[Service]", *lines))
        self.run("sh", "-c", f"mkdir -p {folder}; printf '{words}\\n' > {folder}/test.conf; systemctl daemon-reload")
        return folder

    def ask(self, tenant: str = "alpha") -> str:
        """Tokens of one answer, or what went wrong."""
        return self.run("python3", "-c", ASK, self.keys[tenant], "kept", "")

    def wait_answered(self, seconds: float = 60) -> None:
        """Until both services are there and a request is answered."""
        self.until(lambda: self.states() == ["active", "active"] and self.ask().isdigit(), seconds)

    @contextlib.contextmanager
    def asking(self) -> Iterator[dict[str, int]]:
        """Two clients that ask one request after the other while the block runs, one over a new connection each time,
        one over a connection that it keeps; what became of the requests is in the dictionary afterwards."""
        counts: dict[str, int] = {}
        self.run("rm", "-f", ENOUGH)
        clients = [
            subprocess.Popen(
                [*self.enter(), "python3", "-c", ASK, self.keys["alpha"], kind, ENOUGH],
                stdout=subprocess.PIPE,
                text=True,
            )
            for kind in ("new", "kept")
        ]
        try:
            yield counts
        finally:
            self.run("touch", ENOUGH)
            for client in clients:
                for outcome, count in json.loads(client.communicate(timeout=COMMAND_S)[0]).items():
                    counts[outcome] = counts.get(outcome, 0) + count

    def left(self) -> str:
        """Files, users and groups of the appliance, beside what these tests brought."""
        brought = " -o ".join(f"-path {path}" for path in ("/proc", "/sys", "/srv", "/usr/local", "/root"))
        files = self.run("sh", "-c", f"find / \\( {brought} \\) -prune -o -iname '*athanor*' -print")
        return files + self.run("grep", "-h", "athanor", "/etc/passwd", "/etc/group")

    def until(self, condition: Callable[[], object], seconds: float) -> None:
        """Look again until it holds, or fail with what the container has said."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self._nspawn.poll() is not None:
                self._log.seek(0)
                pytest.fail(self._log.read()[-3000:] + self.journal("-n", "50"))
            time.sleep(0.25)

    def close(self) -> None:
        """End everything in it."""
        if self._init:
            os.kill(self._init, signal.SIGKILL)
        else:
            self._nspawn.kill()
        self._nspawn.wait(30)
        self._log.close()
        for path in self.groups.values():
            _remove_groups(path)


@contextlib.contextmanager
def booted(runsc: Path, package: Path) -> Iterator[Container]:
    """A container that has booted and has the package to install in root's home, while the block runs. The test is
    skipped where there can be none."""
    _skip_unless_possible()
    with tempfile.TemporaryDirectory(prefix="ath-boot-") as place:
        root = Path(place) / "root"
        done = subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)],
            capture_output=True,
            text=True,
            check=False,
            timeout=MAKE_S,
        )
        if done.returncode != 0:
            pytest.skip(f"no Debian can be installed from here: {done.stderr[-300:]}")
        _fill(root, runsc, package)
        container = Container(root)
        try:
            container.wait_booted()
            yield container
        finally:
            container.close()


def _skip_unless_possible() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for name in NEEDED:
        if shutil.which(name) is None:
            pytest.skip(f"no {name} on this machine")
    text = Path("/etc/os-release").read_text()
    if "VERSION_CODENAME=" not in text or "ID=debian" not in text or sys.version_info[:2] != (3, 11):
        pytest.skip("the container's Python is Debian 12's 3.11; the packages here are not for it")


def _fill(root: Path, runsc: Path, package: Path) -> None:
    """What a machine has before the appliance comes: the package to install; and, put away for an installation
    without it, the sources' own command and runsc."""
    shutil.copy(package, root / "root")
    for place in ("srv/athanor", "srv/packages", "srv/own"):
        (root / place).mkdir(parents=True)
    shutil.copy(runsc, root / "srv/own/runsc")
    (root / "srv/own/athanor").write_text(COMMAND)
    for path in (root / "srv/own").iterdir():
        path.chmod(0o755)


def next_version(package: Path, folder: Path) -> Path:
    """A package of a later version, whose state has another form."""
    tree = folder / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", str(package), str(tree)], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"^Version: .*$", f"Version: {NEXT_VERSION}", control.read_text(), flags=re.MULTILINE))
    (site,) = (tree / "usr/lib/athanor/lib").glob("python3.*/site-packages")
    version, schema = site / "appliance/common/version.py", site / "appliance/common/schema.py"
    version.write_text(re.sub('VERSION = ".*"', f'VERSION = "{NEXT_VERSION}"', version.read_text()))
    text = schema.read_text()
    empty = "MIGRATIONS: tuple[Migration, ...] = ()"
    assert empty in text
    schema.write_text(text.replace(empty, STEP))
    for path in (version, schema):
        py_compile.compile(
            str(path),
            dfile=f"/{path.relative_to(tree)}",
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    made = folder / f"athanor_{NEXT_VERSION}_amd64.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zzstd", "-z1", "--build", str(tree), str(made)], check=True)
    shutil.rmtree(tree)
    return made


def _own_groups(name: str) -> dict[str, Path]:
    """Groups of a container's own by controller ("systemd" and "unified" have none), so that two containers of this
    machine share none; only where a group can be made, which is not so on a machine with version 2 alone."""
    made: dict[str, Path] = {}
    for top in ("systemd", "unified", *CONTROLLERS):
        path = Path("/sys/fs/cgroup", top, name)
        with contextlib.suppress(OSError):
            path.mkdir()
            made[top] = path
    return made


def _remove_groups(path: Path) -> None:
    """Remove a tree of groups, as soon as what was killed in them is gone."""
    deadline = time.monotonic() + GROUPS_S
    while path.exists():
        with contextlib.suppress(OSError):
            for top, _, _ in os.walk(path, topdown=False):
                os.rmdir(top)
        if time.monotonic() > deadline:
            raise AssertionError(f"{path} is not empty")
        time.sleep(0.1)


def build_package(folder: Path) -> Path:
    """Build the package as docs/install.md says; gives its file."""
    (block,) = re.findall(r"^```sh build\n(.*?)^```$", (ROOT / "docs/install.md").read_text(), re.DOTALL | re.MULTILINE)
    make, command = block.splitlines()
    assert make == "make setup", "done already: these tests run in what it made"
    words = command.split()
    assert words[0] == ".venv/bin/athanor"
    done = subprocess.run(
        [ROOT / words[0], *words[1:]], cwd=folder, capture_output=True, text=True, check=False, timeout=BUILD_S
    )
    assert done.returncode == 0, done.stderr
    return next((folder / words[-1]).iterdir())
