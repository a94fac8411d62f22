"""The user namespace of a supervisor without root, entered in processes of their own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isolation.gvisor.bundle import Profile
from isolation.host.userns import current_profile, find_mend, mapped_ids

ROOT = Path(__file__).resolve().parents[3]
ENTER = (
    "import os, sys; sys.path.insert(0, {root!r})\n"
    "from isolation.host import userns\n"
    "print(userns.current_profile())\n"
    "userns.enter()\n"
    "print(userns.current_profile(), os.geteuid(), open('/proc/self/uid_map').read().split())"
)
THREADED = "import threading\nthreading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()\n"


def run_as_nobody(code: str) -> subprocess.CompletedProcess:
    """Run code with an interpreter that user 65534 can reach, as that user when we are root."""
    options = {"user": 65_534, "group": 65_534, "extra_groups": []} if os.geteuid() == 0 else {}
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{version}"):
        try:
            return subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, **options)
        except (PermissionError, FileNotFoundError):
            continue
    pytest.skip("no interpreter that an unprivileged user can run")


def test_enter_makes_us_root_of_one_id():
    """Before, runsc cannot be driven; after, it can, with a single mapped uid."""
    done = run_as_nobody(ENTER.format(root=os.fspath(ROOT)))
    if "refuses an unprivileged user namespace" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    uid = 65_534 if os.geteuid() == 0 else os.geteuid()
    assert done.stdout.splitlines() == ["None", f"Profile.USERNS 0 ['0', '{uid}', '1']"], done.stderr


def test_threads_are_refused_with_the_reason():
    """The kernel would say only "invalid argument"; we say how many threads there are."""
    done = run_as_nobody(THREADED + ENTER.format(root=os.fspath(ROOT)))
    assert done.returncode == 1
    assert "the process has 2 threads, the kernel allows one" in done.stderr


def test_profile_of_this_process():
    """Root of a whole machine or container has the profile for root; others must enter a namespace first."""
    expected = Profile.ROOT if os.geteuid() == 0 else None
    assert current_profile() == expected


@pytest.mark.parametrize(
    ("text", "count"),
    [("0 0 4294967295\n", 4294967295), ("0 1000 1\n", 1), ("0 1000 1\n1 100000 65536\n", 65537), ("", 0)],
)
def test_mapped_ids(text, count):
    """All lines of a map count."""
    assert mapped_ids(text) == count


@pytest.mark.parametrize(
    ("settings", "code", "mend"),
    [
        ({"kernel/unprivileged_userns_clone": "0"}, errno.EPERM, "kernel.unprivileged_userns_clone=1"),
        ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, errno.EACCES, "AppArmor"),
        ({"user/max_user_namespaces": "0"}, errno.ENOSPC, "user.max_user_namespaces"),
        ({"kernel/unprivileged_userns_clone": "1"}, errno.EPERM, "container"),
    ],
)
def test_mend_names_the_setting(tmp_path, settings, code, mend):
    """The hint names what on this machine stands in the way."""
    for name, value in settings.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value + "\n")
    assert mend in find_mend(code, tmp_path)
