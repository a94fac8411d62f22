"""What a call's arguments mean, as one line that is the same for calls of one kind: for the collector's report.

Descriptors are told by the file behind them, paths by their text, the rest by the numbers that lists judge. Addresses
and lengths are left out, so that a thousand maps are one line.
"""

from __future__ import annotations

import bisect
import os
import re
import struct
from collections.abc import Sequence

MOST_PATH_BYTES = 256
"""Bytes of a path that are read from the process and shown."""

STACK_BYTES = 2_048
"""Bytes of a stack that are looked at: some ten frames."""

MOST_NEAR = 3

_EVERYWHERE = ("libc.so", "libc-", "libpthread", "ld-linux")

_PAGE_BYTES = 4_096
_NO_DESCRIPTOR = 0xFFFF_FFFF
_NUMBERED = re.compile(r"^(\w+:)\[\d+\]$")

ARGUMENTS: dict[str, tuple[tuple[str, int, str], ...]] = {
    "accept": (("", 0, "fd"),),
    "access": (("", 0, "path"),),
    "bind": (("", 0, "fd"),),
    "clone": (("flags", 0, "hex"),),
    "close": (("", 0, "fd"),),
    "connect": (("", 0, "fd"),),
    "dup": (("", 0, "fd"),),
    "dup3": (("", 0, "fd"),),
    "epoll_ctl": (("", 0, "fd"), ("operation", 1, "number"), ("on", 2, "fd")),
    "epoll_pwait": (("", 0, "fd"),),
    "epoll_wait": (("", 0, "fd"),),
    "eventfd2": (("flags", 1, "hex"),),
    "execve": (("", 0, "path"),),
    "faccessat": (("", 1, "path"),),
    "faccessat2": (("", 1, "path"),),
    "fcntl": (("", 0, "fd"), ("command", 1, "number")),
    "fstat": (("", 0, "fd"),),
    "futex": (("operation", 1, "hex"),),
    "getdents64": (("", 0, "fd"),),
    "getrandom": (("flags", 2, "hex"),),
    "ioctl": (("", 0, "fd"), ("", 1, "request")),
    "kill": (("signal", 1, "number"),),
    "lseek": (("", 0, "fd"),),
    "lstat": (("", 0, "path"),),
    "madvise": (("advice", 2, "number"),),
    "mbind": (("mode", 2, "number"),),
    "mincore": (),
    "mkdir": (("", 0, "path"),),
    "mmap": (("rights", 2, "hex"), ("flags", 3, "hex"), ("of", 4, "fd")),
    "mprotect": (("rights", 2, "hex"),),
    "mremap": (("flags", 3, "hex"),),
    "newfstatat": (("", 1, "path"),),
    "open": (("", 0, "path"), ("flags", 1, "hex")),
    "openat": (("", 1, "path"), ("flags", 2, "hex")),
    "prctl": (("option", 0, "number"),),
    "pread64": (("", 0, "fd"),),
    "prlimit64": (("resource", 1, "number"),),
    "pwrite64": (("", 0, "fd"),),
    "read": (("", 0, "fd"),),
    "readlink": (("", 0, "path"),),
    "readlinkat": (("", 1, "path"),),
    "readv": (("", 0, "fd"),),
    "recvmsg": (("", 0, "fd"),),
    "rt_sigaction": (("signal", 0, "number"),),
    "rt_sigprocmask": (("how", 0, "number"),),
    "sendmsg": (("", 0, "fd"),),
    "setitimer": (("timer", 0, "number"),),
    "socket": (("family", 0, "number"), ("kind", 1, "hex")),
    "stat": (("", 0, "path"),),
    "statx": (("", 1, "path"),),
    "tgkill": (("signal", 2, "number"),),
    "timerfd_settime": (("", 0, "fd"),),
    "unlink": (("", 0, "path"),),
    "unlinkat": (("", 1, "path"),),
    "write": (("", 0, "fd"),),
    "writev": (("", 0, "fd"),),
}
"""Word, place and kind of the arguments that tell calls of one name apart. A call that is not here is told by its name
alone."""

NODE_REQUESTS = {
    0x27: "allocate memory",
    0x28: "allocate object",
    0x29: "free",
    0x2A: "control",
    0x2B: "allocate",
    0x34: "duplicate object",
    0x35: "share",
    0x41: "idle channels",
    0x4A: "heap",
    0x4E: "map memory",
    0x4F: "unmap memory",
    0x57: "map memory for access",
    0x58: "unmap memory for access",
    0x5E: "update mapping",
    200: "card information",
    201: "register descriptor",
    206: "allocate event",
    207: "free event",
    209: "status",
    210: "check version",
    212: "attach cards",
    214: "system parameters",
    218: "wait until open",
}
"""Commands of NVIDIA's control and card nodes by their number (open-gpu-kernel-modules, nv-ioctl-numbers.h and
nv_escape.h), for the reader's eye alone."""

_NODE_LETTER = 0x46


def describe(thread: int, name: str, arguments: Sequence[int]) -> str:
    """One line of the arguments that matter, while the thread waits; empty where the name says all."""
    words = []
    for word, place, kind in ARGUMENTS.get(name, ()):
        text = _text(thread, kind, arguments[place])
        words.append(f"{word} {text}" if word else text)
    return ", ".join(words)


def libraries_near(thread: int) -> list[str]:
    """Files that a waiting thread has probably come through, the nearest first: those that words on its stack point
    into as code. A hint: an older call's words may lie there too. The C library, by which all calls go, is left out."""
    try:
        with open(f"/proc/{thread}/syscall", encoding="ascii") as file:
            stack = int(file.read().split()[-2], 16)
        code = _code_of(thread)
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            data = os.pread(memory.fileno(), STACK_BYTES, stack)
    except (OSError, ValueError, IndexError, OverflowError):
        return []
    found: list[str] = []
    for (word,) in struct.iter_unpack("=Q", data[: len(data) // 8 * 8]):
        place = bisect.bisect_right(code, (word, chr(0x10FFFF), 0)) - 1
        if place >= 0 and word < code[place][2] and code[place][1] not in found:
            found.append(code[place][1])
    return [name for name in found if not name.startswith(_EVERYWHERE)][:MOST_NEAR]


def _code_of(thread: int) -> list[tuple[int, str, int]]:
    """Begin, file and end of the mapped code, sorted."""
    code = []
    with open(f"/proc/{thread}/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            addresses, rights, _offset, _device, _inode, *path = line.split(None, 5)
            if "x" in rights and path and path[0].startswith("/"):
                begin, _, end = addresses.partition("-")
                code.append((int(begin, 16), os.path.basename(path[0].strip()), int(end, 16)))
    return sorted(code)


def thread_name(thread: int) -> str:
    """Name of a thread, as libraries give it to theirs; empty when it has ended."""
    try:
        with open(f"/proc/{thread}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def threads_of(pid: int) -> list[str]:
    """Names of a process's threads; nothing of one that has ended."""
    try:
        return [thread_name(int(name)) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def files_of(pid: int) -> list[str]:
    """What a process's descriptors are; nothing of one that has ended."""
    try:
        return [_descriptor(pid, int(name)) for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def process_of(thread: int) -> int:
    """The process that a thread is of; 0 when it has ended."""
    try:
        with open(f"/proc/{thread}/status", encoding="utf-8", errors="replace") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Tgid:")), 0)
    except OSError:
        return 0


def _text(thread: int, kind: str, value: int) -> str:
    if kind == "fd":
        return _descriptor(thread, value & 0xFFFF_FFFF)
    if kind == "path":
        return _path(thread, value)
    if kind == "request":
        return request(value & 0xFFFF_FFFF)
    return f"{value & 0xFFFF_FFFF:#x}" if kind == "hex" else str(value & 0xFFFF_FFFF)


def request(value: int) -> str:
    """An ioctl's command; NVIDIA's by name where it is known. Pure."""
    known = NODE_REQUESTS.get(value & 0xFF) if value >> 8 & 0xFF == _NODE_LETTER else None
    return f"{value:#x} ({known})" if known else f"{value:#x}"


def _descriptor(thread: int, fd: int) -> str:
    if fd == _NO_DESCRIPTOR:
        return "no file"
    try:
        link = os.readlink(f"/proc/{thread}/fd/{fd}")
    except OSError:
        return f"descriptor {fd}, which is not open"
    # Pipes and sockets have a number of their own each.
    return _NUMBERED.sub(lambda found: found[1].rstrip(":"), link)


def _path(thread: int, address: int) -> str:
    """The text at an address, as it is now: another thread may change it before the call reads it."""
    text = b""
    try:
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            while len(text) < MOST_PATH_BYTES and b"\0" not in text:
                place = address + len(text)
                # A page at most: the next one may not be there.
                text += os.pread(memory.fileno(), min(MOST_PATH_BYTES, _PAGE_BYTES - place % _PAGE_BYTES), place)
    except (OSError, OverflowError):
        return "unreadable path" if not text else _shown(text)
    return _shown(text)


def _shown(text: bytes) -> str:
    return text.partition(b"\0")[0][:MOST_PATH_BYTES].decode("utf-8", "backslashreplace")
