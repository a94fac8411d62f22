"""Pure: the files of ``systemd/`` as they are installed on one machine.

Each begins with a line that holds a digest of the rest, so that a later install can tell a file that somebody has
edited from one that an older version wrote.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

SHIPPED_COMMAND = "/usr/bin/athanor"
"""What the shipped units run; replaced by where the command is."""

UNIT_KINDS = (".service", ".slice", ".target", ".timer", ".socket")
UNITS = "systemd/system"

ADMIN_PLACE, PACKAGE_PLACE = "etc", "usr/lib"
"""What an administrator installs goes to the first, what a package brings to the second; systemd.unit(5)."""

DOCUMENTS = "file:///usr/share/doc/athanor/", "file:///usr/local/share/doc/athanor/"
"""Where units say that the documents are, and where an administrator's installation puts them."""

GATEWAY_UNIT = "athanor-gateway.service"
"""The unit by which an installation is known."""

RENAMED = {"athanor.sysusers.conf": "sysusers.d/athanor.conf", "athanor.tmpfiles.conf": "tmpfiles.d/athanor.conf"}

SERVICES = ("athanor-gateway.service", "athanor-supervisor.service", "athanor-fetch.service")
TARGET = "athanor.target"
TIMERS = ("athanor-statements.timer", "athanor-witness.timer")
"""What an operator may enable beside the services; each starts the service of its name."""

API_SERVICE = "athanor-operator.service"
"""The operator's API, which is enabled by hand too."""

CARRIER = ("athanor-carrier.socket", "athanor-carrier.service")
"""The carrier of sealed KV: its socket, which is enabled by hand too, and the service that the socket starts."""

HIDDEN_FROM_UNITS = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - named, not written to
"""What ProtectHome= and PrivateTmp= take away from the services."""

_MARK = re.compile(r"\A# Written by `athanor install`; changes belong into `systemctl edit`\. sha256:([0-9a-f]{64})\n")


@dataclass(frozen=True, slots=True)
class InstalledFile:
    """One file to install."""

    path: PurePosixPath
    """Path below the root."""
    content: str


def render(files: Mapping[str, str], command: str, place: str = ADMIN_PLACE) -> tuple[InstalledFile, ...]:
    """Units, users and directories for a machine on which ``command`` is the ``athanor`` command.

    Args:
        files: name to text of what lies in ``systemd/``; others than units, users and directories are passed over.
        command: an absolute path without spaces.
        place: ``ADMIN_PLACE`` or ``PACKAGE_PLACE``.
    """
    found = []
    for name in sorted(files):
        below = f"{UNITS}/{name}" if name.endswith(UNIT_KINDS) else RENAMED.get(name)
        if below is not None:
            text = re.sub(rf"(?<=[= ]){SHIPPED_COMMAND}(?= )", lambda _: command, files[name])
            if place == ADMIN_PLACE:
                text = text.replace(*DOCUMENTS)
            found.append(InstalledFile(PurePosixPath(place, below), seal(text)))
    return tuple(found)


def seal(text: str) -> str:
    """The text under a line with its digest."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"# Written by `athanor install`; changes belong into `systemctl edit`. sha256:{digest}\n{text}"


def is_untouched(text: str) -> bool:
    """Whether a file is as some version of this program wrote it."""
    match = _MARK.match(text)
    return match is not None and hashlib.sha256(text[match.end() :].encode()).hexdigest() == match[1]


def body(text: str) -> str:
    """A file without the line that holds its digest, which says nothing to a reader."""
    return _MARK.sub("", text)


def hidden(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Paths that the services could not see."""
    return tuple(path for path in paths if any(path.is_relative_to(place) for place in HIDDEN_FROM_UNITS))
