"""A program of its own: becomes a service's user and tries what the service will do with files, folders and devices.

Only the kernel knows whether a user may: owners, groups, access lists, mounts and security modules have a say, so
nothing is derived from modes. Nothing is changed. Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from enum import StrEnum


class Use(StrEnum):
    """What a service does with a path."""

    READ = "read"
    """Reads the file, or lists the folder."""
    EXECUTE = "execute"
    FILL = "write to"
    """Reads and writes files in the folder; makes it where it is absent."""
    REPLACE = "write"
    """Reads the file and writes it anew beside the old one; makes it where it is absent."""
    BIND = "make its socket at"
    """Makes a socket, in place of an old one."""
    ENTER = "find sockets in"
    """Opens what it knows the name of in the folder."""
    DEVICE = "open"
    """Opens it to read and to write."""


MAX_ENTRIES = 1_000
"""Most files of a folder that are looked at: one that another user has left there is mostly among the newest few."""


def become(user: int, group: int, groups: list[int]) -> None:
    """Be this user from now on, with no way back.

    Raises:
        PermissionError: this process is another user, and not root.
    """
    if (os.geteuid(), os.getegid()) == (user, group) and user != 0:
        return
    os.setgroups(groups)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def attempt(path: str, use: Use) -> tuple[str, str]:
    """Try it: the path at which it fails and the reason; empty texts when it succeeds, or there is nothing yet."""
    try:
        if use is Use.READ:
            _read(path)
        elif use in (Use.EXECUTE, Use.ENTER):
            _allowed(path, os.X_OK)
        elif use is Use.DEVICE:
            _allowed(path, os.R_OK | os.W_OK)
        else:
            _write(path, use)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return "", ""
        culprit = next(iter(_closed(path)), None) or str(error.filename or path)
        return culprit, (error.strerror or str(error)).lower()
    return "", ""


def _read(path: str) -> None:
    if os.path.isdir(path):
        os.listdir(path)
        _allowed(path, os.X_OK)
        return
    # A pipe would wait for its writer.
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def _write(path: str, use: Use) -> None:
    if use is Use.FILL:
        folder = path
    else:
        folder = os.path.dirname(path)
        if use is Use.REPLACE and _there(path):
            _allowed(path, os.R_OK | os.W_OK)
    while not _there(folder):
        folder = os.path.dirname(folder)
    _allowed(folder, os.R_OK | os.W_OK | os.X_OK if folder == path else os.W_OK | os.X_OK)
    if folder == path:
        with os.scandir(path) as entries:
            for entry, _ in zip(entries, range(MAX_ENTRIES), strict=False):
                if not entry.is_symlink():
                    inside = os.X_OK if entry.is_dir() else 0
                    _allowed(entry.path, os.R_OK | os.W_OK | inside)


def _allowed(path: str, mode: int) -> None:
    """Raise the error that the kernel would give."""
    os.stat(path)
    if not os.access(path, mode):
        read_only = mode & os.W_OK and os.access(path, mode & ~os.W_OK) and os.statvfs(path).f_flag & os.ST_RDONLY
        number = errno.EROFS if read_only else errno.EACCES
        raise OSError(number, os.strerror(number), path)


def _there(path: str) -> bool:
    """Whether it exists; a folder on the way that is closed to us is an error."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _closed(path: str) -> list[str]:
    """Folders on the way, by every link, that may not be passed; the outermost first."""
    found = []
    for place in (path, os.path.realpath(path)):
        parts = place.split("/")
        for end in range(1, len(parts)):
            folder = "/".join(parts[:end]) or "/"
            try:
                mode = os.stat(folder).st_mode
            except OSError:
                break
            if stat.S_ISDIR(mode) and not os.access(folder, os.X_OK):
                found.append(folder)
    return found


def main(text: str) -> int:
    """Try all of a JSON document: user, group, groups, and a list of path and use; prints a list of what failed."""
    asked = json.loads(text)
    become(asked["user"], asked["group"], asked["groups"])
    print(json.dumps([attempt(path, Use(use)) for path, use in asked["tries"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
