"""Messages to the service manager (sd_notify(3)), and what it passes on in the environment.

Without systemd every call does nothing. Besides this module only the configuration's loader reads ``os.environ``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence

ADDRESSES_KEY = "X_ATHANOR_ADDRESSES"
"""Line of the gateway's ready notification with the addresses on which it listens, as JSON; for the launcher."""

FIRST_HELD = 3
"""First descriptor that a service manager passes on (sd_listen_fds(3))."""

MAX_HELD = 128
"""Most descriptors that are taken over from the service manager; the unit allows fewer."""


def notify(*lines: str) -> bool:
    """Send state lines such as ``READY=1`` or ``STATUS=...`` to the service manager; False when there is none.

    A full or vanished socket is no reason to fail a service, so errors are swallowed here by purpose.
    """
    return _send("\n".join(lines))


def _send(text: str, descriptors: Sequence[int] = ()) -> bool:
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            socket.send_fds(sock, [text.encode()], list(descriptors))
    except OSError:
        return False
    return True


def hold(sock: socket.socket, name: str) -> bool:
    """Give the service manager a descriptor to keep until the service's next start (``FDSTORE``, sd_notify(3)); False
    when there is none, or it was not sent. Without ``FileDescriptorStoreMax=`` in the unit it is dropped."""
    return _send(f"FDSTORE=1\nFDNAME={name}", [sock.fileno()])


def held() -> dict[str, int]:
    """Name to descriptor of what the service manager kept (``LISTEN_FDS``, sd_listen_fds(3)); the caller closes them.
    Works once, and children do not inherit them."""
    count, names = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_FDNAMES", "").split(":")
    pid = os.environ.pop("LISTEN_PID", "")
    if pid != str(os.getpid()) or not count.isdigit() or int(count) != len(names) or int(count) > MAX_HELD:
        return {}
    found: dict[str, int] = {}
    for number, name in enumerate(names, FIRST_HELD):
        os.set_inheritable(number, False)
        if name in found:
            os.close(found[name])
        found[name] = number
    return found


def let_go(name: str) -> None:
    """Have the service manager close what it keeps under a name."""
    notify("FDSTOREREMOVE=1", f"FDNAME={name}")


def ready(status: str) -> None:
    """The service is up."""
    notify("READY=1", f"STATUS={status}")


def reloading() -> None:
    """A reload begins; ``ready`` ends it. MONOTONIC_USEC is demanded by Type=notify-reload."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def stopping() -> None:
    """The service drains."""
    notify("STOPPING=1", "STATUS=draining")


def watchdog_interval_s() -> float | None:
    """Half of the watchdog's period: how often to call ``watchdog``; None without a watchdog for this process."""
    period = os.environ.get("WATCHDOG_USEC")
    pid = os.environ.get("WATCHDOG_PID")
    if not period or not period.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(period) / 2_000_000


def watchdog() -> None:
    """Tell the service manager that work goes on."""
    notify("WATCHDOG=1")


def logs_to_journal() -> bool:
    """Whether our standard error is systemd's journal, which JOURNAL_STREAM names by device and inode
    (systemd.exec(5)); a shell started from a service may have redirected it."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        found = os.fstat(2)
    except OSError:
        return False
    return named == f"{found.st_dev}:{found.st_ino}"


def telemetry_environment() -> dict[str, str]:
    """OpenTelemetry's standard variables, for a child that exports."""
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
