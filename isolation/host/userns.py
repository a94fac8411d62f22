"""User namespace of the supervisor: lets a supervisor without root drive runsc.

``enter`` unshares the user and mount namespaces of the *calling process*, mapping its own uid and gid to root inside.
Afterwards runsc runs unchanged (not ``--rootless``, which has no ``create``). Outside the namespace, the process keeps
the rights of its unprivileged user.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from isolation.errors import UserNamespaceError
from isolation.gvisor.bundle import Profile

_CLONE_NEWNS = 0x0002_0000
_CLONE_NEWUSER = 0x1000_0000
_libc = ctypes.CDLL(None, use_errno=True)

_FULL_MAP = 65_536
"""Size of an id map that includes 65534, the uid of the sandbox process."""


def current_profile() -> Profile | None:
    """Return the profile available to this process as it is; None when ``enter`` must be called first.

    Root of the machine, or of a container with a full range of ids, is ``ROOT``; root of a namespace with few ids, such
    as ``enter`` makes, is ``USERNS``.
    """
    if os.geteuid() != 0:
        return None
    text = Path("/proc/self/uid_map").read_text()
    return Profile.ROOT if mapped_ids(text) >= _FULL_MAP else Profile.USERNS


def mapped_ids(uid_map: str) -> int:
    """Return how many ids a ``uid_map`` maps; user_namespaces(7). Pure."""
    return sum(int(line.split()[2]) for line in uid_map.splitlines() if line.strip())


def enter() -> None:
    """Move this process into a new user and mount namespace.

    Call it first: the kernel refuses (EINVAL) when the process has a second thread, so before any event loop, thread
    pool or import that starts threads. It is irreversible. Children inherit it.

    Raises:
        UserNamespaceError: the process has threads, or the machine forbids it; the message says which setting.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise UserNamespaceError(
            f"cannot enter a user namespace: the process has {threads} threads, the kernel allows one"
        )
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
        raise _refusal(ctypes.get_errno())
    try:
        # A process without CAP_SETGID outside may map its gid only after it has given up setgroups.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    except OSError as error:
        raise _refusal(error.errno or 0) from error


def _refusal(code: int) -> UserNamespaceError:
    return UserNamespaceError(
        f"this machine refuses an unprivileged user namespace: {os.strerror(code)}", hint=find_mend(code)
    )


def find_mend(code: int, proc_sys: Path = Path("/proc/sys")) -> str:
    """Return the change that makes the next try work, judged by the errno and the machine's settings.

    Args:
        code: errno of the refusal.
        proc_sys: where the kernel's settings are read.
    """
    if _setting(proc_sys / "kernel/unprivileged_userns_clone") == "0":
        return "allow them with `sysctl -w kernel.unprivileged_userns_clone=1`"
    if _setting(proc_sys / "kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor restricts them: install a profile with `userns,` for this interpreter, or"
            " `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0`"
        )
    if code == errno.ENOSPC or _setting(proc_sys / "user/max_user_namespaces") == "0":
        return "raise the count with `sysctl -w user.max_user_namespaces=4096`"
    return (
        "a container's seccomp or AppArmor profile may forbid `unshare`: allow it there, run as root,"
        " or choose --unsafe-no-sandbox knowingly"
    )


def _setting(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
