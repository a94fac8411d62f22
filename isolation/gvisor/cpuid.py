"""Native CPUID for programs in a sandbox: disables gVisor's emulation of the instruction.

On processors that can fault on CPUID (Intel's can), gVisor answers the instruction itself from a table of the features
known to its release. The table of 2024 lacks avx512_bf16, so libraries that test for it emulate bfloat16 products:
three times slower (measured). gVisor arms the fault in each stub by ``arch_prctl(ARCH_SET_CPUID)`` and continues
without it where the processor cannot. So a seccomp filter, inherited by all processes started from this one, answers
that one call with ENODEV. Nothing else is filtered, and a sandbox learns only what any unprivileged program may ask the
processor.

A checkpoint must then be restored on a machine with the same kind of processor, which torch's choice of kernels
requires anyway.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from pathlib import Path

_SECCOMP = 317
_SET_MODE_FILTER = 1
_FLAG_TSYNC = 1
_AUDIT_ARCH_X86_64 = 0xC000_003E
_ARCH_PRCTL = 158
_ARCH_SET_CPUID = 0x1012
_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_PROGRAM = (
    (_LOAD, 0, 0, 4),
    (_EQUAL, 0, 5, _AUDIT_ARCH_X86_64),
    (_LOAD, 0, 0, 0),
    (_EQUAL, 0, 3, _ARCH_PRCTL),
    (_LOAD, 0, 0, 16),
    (_EQUAL, 0, 1, _ARCH_SET_CPUID),
    (_RETURN, 0, 0, _ERRNO | errno.ENODEV),
    (_RETURN, 0, 0, _ALLOW),
)
"""Classic BPF program over ``struct seccomp_data``: number at offset 0, architecture at 4, first argument at 16."""

_lock = threading.Lock()
_done = False


class _Filter(ctypes.Structure):
    """``struct sock_fprog``: a BPF program and its length."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def show_native_cpuid() -> bool:
    """Answer ``arch_prctl(ARCH_SET_CPUID)`` with ENODEV here and in every process started from here, permanently.

    Returns False on another architecture, or when the kernel refuses the filter; sandboxes then run as before, with the
    features that gVisor knows. Idempotent. Needs CAP_SYS_ADMIN in this user namespace, or "no new privileges".
    """
    global _done
    if os.uname().machine != "x86_64":
        return False
    with _lock:
        if not _done:
            code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _PROGRAM)
            libc = ctypes.CDLL(None, use_errno=True)
            program = _Filter(len(_PROGRAM), code)
            _done = libc.syscall(_SECCOMP, _SET_MODE_FILTER, _FLAG_TSYNC, ctypes.byref(program)) == 0
        return _done


def processor() -> str:
    """Describe the processor (family, model, features) from the first entry of /proc/cpuinfo; a checkpoint taken
    elsewhere may contain code paths that this processor cannot run."""
    told = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.partition(":")[0].strip() in told)
