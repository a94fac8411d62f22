"""Each way to drive runsc, in a supervisor process of its own: as root, with four capabilities, without root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.runsc

NOBODY = 65_534
PROGRAM = Path(__file__).with_name("supervisor_probe.py")
PROBE = Path(__file__).with_name("guest_probe.py")
ROOT = Path(__file__).resolve().parents[3]
PATHS = f"{ROOT}:{sysconfig.get_path('purelib')}"
MEET = """\
import os, time
if not os.path.exists("/ipc/go"):
    print("waits", flush=True)
    while not os.path.exists("/ipc/go"):
        time.sleep(0.01)
if os.path.exists("/model"):
    assert [open(f"/model/{name}").read() for name in os.listdir("/model")] == ["of a copy"]
"""
STAY = "import time; time.sleep(1)"
"""For the supervisor to look at the sandbox from outside before it has ended, on a busy machine too."""

FOUR = "-all,+sys_admin,+setuid,+setgid,+sys_chroot"


def unprivileged_python() -> str:
    """An interpreter of our version that user 65534 can run: ours, or the distribution's."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        try:
            check = ["-S", "-c", "import sys; sys.exit(0)", os.fspath(PROGRAM)]
            subprocess.run([candidate, *check], check=True, **as_nobody())
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip("no interpreter that an unprivileged user can run")


def as_nobody() -> dict:
    """Arguments for ``subprocess`` that drop root; none when we have none."""
    if os.geteuid() != 0:
        return {}
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


def start(run_dir: Path, runsc: Path, mode: str, code: str, *arguments: str, profile: str = "root"):
    """A supervisor process under the named profile."""
    prefix, options, python = [], {}, sys.executable
    if profile == "userns":
        options, python = as_nobody(), unprivileged_python()
        os.chown(run_dir, *(NOBODY, NOBODY) if os.geteuid() == 0 else (-1, -1))
    elif os.geteuid() != 0:
        pytest.skip("needs root")
    elif profile == "four":
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv")
        prefix = ["setpriv", f"--bounding-set={FOUR}", "--inh-caps=-all", "--ambient-caps=-all"]
    argv = [python, os.fspath(PROGRAM), PATHS, os.fspath(runsc), os.fspath(run_dir / "run"), mode, code, *arguments]
    return subprocess.Popen([*prefix, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process) -> list[dict]:
    """What a supervisor process said."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("mode", ["once", "copy"])
@pytest.mark.parametrize("profile", ["root", "four", "userns"])
def test_sandbox_under_each_profile(run_dir, runsc_path, profile, mode):
    """Inside: no capability, no network, own namespaces, started or restored, also with a file that its checkpoint
    lacks. After: an empty run directory."""
    code = (MEET if mode == "copy" else "") + PROBE.read_text() + STAY
    probe = start(run_dir, runsc_path, mode, code, "inside", "1", "192.0.2.1", "9", profile=profile)
    booted, ended, cleaned = finish(probe)
    inside = json.loads(next(line for line in ended["tail"] if line.startswith("{")))
    assert ended["status"] == 0
    assert inside["ids"][:4] == [65532] * 4
    assert set(inside["caps"].values()) == {0}
    assert inside["loopback"] != "ok"
    assert inside["outside"] != "ok"
    assert {path for path, result in inside["writes"].items() if result == "ok"} == {"/tmp/x", "/dev/shm/x"}
    assert booted["seccomp"] == 2
    assert booted["mine"].keys() == booted["its"].keys()
    different = {name for name in booted["mine"] if booted["mine"][name] != booted["its"][name]}
    assert {"mnt", "net", "ipc", "uts", "user"} == different
    if profile == "userns":
        assert booted["profile"] == "userns"
    else:
        assert (booted["profile"], booted["uid"], booted["caps"]) == ("root", NOBODY, 0)
    assert cleaned == {"stale": [], "left": {"bundles": [], "runsc": []}}


@pytest.mark.parametrize("profile", ["root", "userns"])
def test_a_killed_supervisor_is_cleared_up_after(run_dir, runsc_path, profile):
    """After SIGKILL to the supervisor its sandbox still runs; the next one ends it, processes and files."""
    first = start(run_dir, runsc_path, "stay", "import time; time.sleep(600)", profile=profile)
    booted = json.loads(first.stdout.readline())
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert all(alive(pid) for pid in booted["family"]), "the control: the sandbox survives its supervisor"
    (cleaned,) = finish(start(run_dir, runsc_path, "clean", "", profile=profile))
    assert cleaned == {"stale": ["life"], "left": {"bundles": [], "runsc": []}}
    assert not any(alive(pid) for pid in booted["family"])


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
