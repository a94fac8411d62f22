"""A pod of ``deploy/kubernetes`` as far as a machine without Kubernetes can imitate one: mounts, processes,
network, and the users, capabilities and volumes that the manifest names; root read-only, ``/proc`` masked.

Not imitated: seccomp, AppArmor, cgroups, the kubelet. The root is this machine's, below an overlay.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MASKED_FILES = ("/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/sched_debug")
MASKED_FOLDERS = ("/proc/acpi", "/proc/scsi", "/sys/firmware")
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""What containerd hides of a container by default, and what it makes read-only (pkg/oci)."""

ENTER = """
set -e
mount --make-rprivate /
mkdir -p {scratch}
mount -t tmpfs -o mode=755 tmpfs {scratch}
mkdir {scratch}/upper {scratch}/work {scratch}/root
mount -t overlay -o lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work overlay {scratch}/root
cd {scratch}/root
chmod 755 root
rm -rf ./etc/athanor ./var/lib/athanor-supervisor ./var/lib/athanor ./run/athanor ./run/athanor-supervisor
printf '#!/bin/sh\\nexec {python} -m appliance.operator.cli "$@"\\n' > usr/bin/athanor
chmod 755 usr/bin/athanor
mount -t proc proc proc
mount --rbind /dev dev
mount -t sysfs -o ro sysfs sys
{volumes}
{masks}
mkdir -p mnt/old
pivot_root . mnt/old
umount -l /mnt/old
mount -o remount,bind,ro /
cd /
exec {become} {environment} {command}
"""

BECOME = """setpriv --reuid {user} --regid {group} --groups {group} --bounding-set=-all --inh-caps=-all {escalation} \
env -i PATH=/usr/bin:/bin PYTHONPATH={source} PYTHONDONTWRITEBYTECODE=1"""
"""How a process becomes one of a container's: its user and group, no capability, no way to gain one."""


@dataclass(frozen=True)
class Volume:
    """A volume of the pod: a folder of this machine in place of the kubelet's."""

    name: str
    path: Path


def put(volume: Path, files: Mapping[str, str], group: int, mode: int) -> None:
    """Replace what a projected volume has, as the kubelet does: a new folder, then a rename of the link, and the
    old folder is removed. What was a file there becomes a link."""
    folder = volume / f"..2026_{secrets.token_hex(4)}"
    folder.mkdir(mode=0o755)
    for name, text in files.items():
        (folder / name).write_text(text)
        os.chown(folder / name, -1, group)
        (folder / name).chmod(mode)
    (volume / "..data_tmp").symlink_to(folder.name)
    before = (volume / "..data").resolve() if (volume / "..data").is_symlink() else None
    os.replace(volume / "..data_tmp", volume / "..data")
    if before is not None:
        shutil.rmtree(before)
    for name in files:
        if not (volume / name).is_symlink():
            (volume / "..link").symlink_to(f"..data/{name}")
            os.replace(volume / "..link", volume / name)


def script(pod: Mapping[str, Any], container: Mapping[str, Any], volumes: Mapping[str, Path], scratch: Path) -> str:
    """What a shell runs, as root in new mounts and processes, to become a container of the manifest."""
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] and not context.get("privileged")
    binds = []
    for one in container["volumeMounts"]:
        at = "." + one["mountPath"]
        binds += [f"mkdir -p {at}", f"mount --bind {volumes[one['name']]} {at}"]
        if one.get("readOnly"):
            binds.append(f"mount -o remount,bind,ro {at}")
    masks = [f"[ ! -e .{one} ] || mount --bind /dev/null .{one}" for one in MASKED_FILES]
    masks += [f"[ ! -d .{one} ] || mount -t tmpfs -o ro tmpfs .{one}" for one in MASKED_FOLDERS]
    masks += [
        f"[ ! -e .{one} ] || {{ mount --bind .{one} .{one}; mount -o remount,bind,ro .{one}; }}" for one in READ_ONLY
    ]
    assert context["capabilities"] == {"drop": ["ALL"]}
    return ENTER.format(
        scratch=scratch,
        python=sys.executable,
        volumes="\n".join(binds),
        masks="\n".join(masks),
        become=become(pod, container),
        environment=" ".join(f"{one['name']}={one['value']}" for one in container.get("env", ()) if "value" in one),
        command=" ".join(container["command"]),
    )


def become(pod: Mapping[str, Any], container: Mapping[str, Any]) -> str:
    """The beginning of a command line that runs as a container's processes do."""
    context = container["securityContext"]
    return BECOME.format(
        user=context["runAsUser"],
        group=pod["securityContext"]["runAsGroup"],
        escalation="" if context["allowPrivilegeEscalation"] else "--no-new-privs",
        source=Path(__file__).resolve().parents[2],
    )


def first_of(process: subprocess.Popen[bytes]) -> int:
    """The first process of a container that ``start`` gave."""
    (found,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(found)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a container, and wait until nothing of it is left: its end takes its first process and all others along."""
    left = [Path(f"/proc/{first_of(process)}")] if process.poll() is None else []
    process.kill()
    process.wait(30)
    until = time.monotonic() + 60
    while any(one.exists() for one in left):
        assert time.monotonic() < until, "a killed container did not end"
        time.sleep(0.05)


def execute(
    pod: Mapping[str, Any], container: Mapping[str, Any], process: subprocess.Popen[bytes], command: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in a container that runs, as ``kubectl exec`` does; ``process`` is what ``start`` gave."""
    spaces = ["nsenter", "--target", str(first_of(process)), "--mount", "--pid", "--ipc", "--net", "--wd=/"]
    line = [*spaces, "sh", "-c", f"exec {become(pod, container)} {command}"]
    return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)


def start(text: str, log: Path, network: int) -> subprocess.Popen[bytes]:
    """Run a container in the network of the process ``network``."""
    line = [
        "nsenter",
        "--target",
        str(network),
        "--net",
        "unshare",
        "--mount",
        "--pid",
        "--ipc",
        "--fork",
        "--kill-child",
    ]
    with log.open("ab") as out:
        return subprocess.Popen([*line, "sh", "-c", text], stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def ask(network: int, port: int, path: str, key: str = "", body: Any = None) -> tuple[int, str]:
    """Ask a port of the pod over TLS, from inside of its network; status 0 where nothing answers."""
    code = (
        "import json, ssl, sys, urllib.request, urllib.error\n"
        "url, key, body = json.loads(sys.stdin.read())\n"
        "context = ssl.create_default_context(); context.check_hostname = False; context.verify_mode = ssl.CERT_NONE\n"
        "data = None if body is None else json.dumps(body).encode()\n"
        "request = urllib.request.Request(url, data, {'authorization': 'Bearer ' + key,"
        " 'content-type': 'application/json'})\n"
        "try:\n    answer = urllib.request.urlopen(request, timeout=60, context=context)\n"
        "except urllib.error.HTTPError as error:\n    answer = error\n"
        "except OSError as error:\n    print(json.dumps([0, str(error)])); sys.exit()\n"
        "print(json.dumps([answer.status, answer.read().decode()]))\n"
    )
    line = ["nsenter", "--target", str(network), "--net", sys.executable, "-c", code]
    given = json.dumps([f"https://127.0.0.1:{port}{path}", key, body])
    done = subprocess.run(line, input=given, capture_output=True, text=True, timeout=90, check=True)
    status, text = json.loads(done.stdout)
    return status, text
