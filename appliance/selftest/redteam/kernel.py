"""Attacks through the kernel: other processes, namespaces, rights, keys, and privileged calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket

from appliance.selftest.redteam.base import Target, attack, syscall

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x0002_0000, 0x1000_0000, 0x4000_0000
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
USER_KEYRING = -4

SHUT = (1, 13, 19, 38)
"""Errors that mean the call is blocked: EPERM, EACCES, ENODEV (gVisor's error for missing features), ENOSYS. Any other
error comes from code that already examines arguments."""

GATES = {
    "bpf": (321, 0xFFFF, 0, 0),
    "perf_event_open": (298, 0, 0, 0, 0, 0),
    "init_module": (175, 0, 0, 0),
    "finit_module": (313, -1, 0, 0),
    "delete_module": (176, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0xFFFF),
    "iopl": (172, 99),
    "ioperm": (173, 1 << 20, 1, 1),
    "reboot": (169, 0, 0, 0, 0),
    "swapon": (167, 0, 0),
    "acct": (163, -1),
    "userfaultfd": (323, 0xFFF_FFFF),
    "io_uring_setup": (425, 0, 0),
    "fanotify_init": (300, 0xFFFF, 0),
    "umount2": (166, 0, 0),
    "pivot_root": (155, 0, 0),
    "sethostname": (170, 0, 65_536),
}
"""Calls by name, with number and harmless arguments."""


@attack("kernel")
def identity(target: Target) -> str | None:
    """Compare the kernel's release with the host's."""
    return target["release"] if platform.release() == target["release"] else None


@attack("kernel")
def processes(target: Target) -> str | None:
    """Read the command lines of other processes."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in (os.getpid(), os.getppid()):
            with contextlib.suppress(OSError), open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
                if target["canary"].encode() in words:
                    return f"process {entry}"
    return None


@attack("kernel")
def environment(target: Target) -> str | None:
    """Read another process's environment, where secrets often lie."""
    with open(f"/proc/{target['victim']}/environ") as file:
        return "the canary" if target["canary"] in file.read() else None


@attack("kernel")
def signals(target: Target) -> str | None:
    """Send another process the null signal."""
    os.kill(target["victim"], 0)
    return f"process {target['victim']}"


@attack("kernel")
def pidfd(target: Target) -> str | None:
    """Open a pidfd of another process, and through it one of its descriptors."""
    fd = os.pidfd_open(target["victim"])
    try:
        os.close(syscall(438, fd, 1, 0))
    finally:
        os.close(fd)
    return "its output"


@attack("kernel")
def ptrace(target: Target) -> str | None:
    """Trace another process."""
    syscall(101, PTRACE_ATTACH, target["victim"], 0, 0)
    os.waitpid(target["victim"], 0x40000000)
    syscall(101, PTRACE_DETACH, target["victim"], 0, 0)
    return f"process {target['victim']}"


@attack("kernel")
def vm_read(target: Target) -> str | None:
    """Read another process's memory, at the start of its program."""
    with open(f"/proc/{target['victim']}/maps") as file:
        address = int(file.readline().split("-")[0], 16)
    there = (ctypes.c_ulong * 2)(address, 16)
    data = ctypes.create_string_buffer(16)
    here = (ctypes.c_ulong * 2)(ctypes.addressof(data), 16)
    return f"{syscall(310, target['victim'], here, 1, there, 1, 0)} bytes"


@attack("kernel", alone=True)
def namespaces(target: Target) -> str | None:
    """Enter the network namespace of another process."""
    fd = os.open(f"/proc/{target['victim']}/ns/net", os.O_RDONLY)
    syscall(308, fd, CLONE_NEWNET)
    return "the network of another process"


@attack("kernel", alone=True)
def user_namespace(target: Target) -> str | None:
    """Become root in a new user namespace, and from there reach the host's file, device and network."""
    syscall(272, CLONE_NEWUSER)
    with open(target["file"]) as file:
        return "the canary" if target["canary"] in file.read() else None


@attack("kernel", alone=True)
def mounts(target: Target) -> str | None:
    """Mount file systems: memory, devices, the kernel's own."""
    syscall(272, CLONE_NEWNS)
    syscall(165, b"none", b"/", 0, 0x44000, 0)  # private, so that nothing of it is visible outside
    syscall(165, b"tmpfs", target["scratch"].encode(), b"tmpfs", 0, 0)
    return target["scratch"]


@attack("kernel", alone=True)
def root_change(target: Target) -> str | None:
    """Change the root directory, the first step of leaving one."""
    os.chroot(target["scratch"])
    return target["scratch"]


@attack("kernel", alone=True)
def rights(_target: Target) -> str | None:
    """Take root's rights: its uid, its groups, a capability."""
    os.setgroups([0])
    os.setresuid(0, 0, 0)
    return "uid 0"


@attack("kernel")
def capabilities(_target: Target) -> str | None:
    """Report capabilities that the process already has."""
    with open("/proc/self/status") as file:
        found = [line.split()[1] for line in file if line.startswith(("CapEff", "CapPrm", "CapBnd"))]
    return found[0] if any(int(value, 16) for value in found) else None


@attack("kernel")
def keyring(target: Target) -> str | None:
    """Find a key in the user's keyring (keyctl(2), KEYCTL_SEARCH)."""
    return f"key {syscall(250, 10, USER_KEYRING, b'user', target['key'].encode(), 0)}"


@attack("kernel")
def system_v(target: Target) -> str | None:
    """Attach System V shared memory by its key."""
    return f"segment {syscall(29, target['segment'], 0, 0)}"


@attack("kernel")
def queues(target: Target) -> str | None:
    """Open a POSIX message queue by its name."""
    os.close(syscall(240, target["queue"].encode(), os.O_RDONLY, 0, 0))
    return target["queue"]


@attack("kernel")
def crypto(_target: Target) -> str | None:
    """Use the kernel's ciphers (AF_ALG)."""
    with socket.socket(38, socket.SOCK_SEQPACKET) as probe:
        probe.bind(("hash", "sha256"))
    return "sha256"


def _gate(number: int, *arguments: int) -> str | None:
    try:
        return f"gave {syscall(number, *arguments)}"
    except OSError as error:
        if error.errno in SHUT:
            raise
        return f"looked at its arguments: {error.strerror}"


def _register() -> None:
    for name, (number, *arguments) in GATES.items():

        def run(_target: Target, number: int = number, arguments: list[int] = arguments) -> str | None:
            return _gate(number, *arguments)

        run.__name__ = name
        attack("gate", alone=True)(run)


_register()
