"""What systemd and the process environment say to us, and what we say to systemd (sd_notify(3)).

The only module that reads ``os.environ``. Without systemd every call does nothing.
"""

from __future__ import annotations

import os
import socket
import time


def notify(*lines: str) -> bool:
    """Send state lines such as ``READY=1`` or ``STATUS=...`` to the service manager; False when there is none.

    A full or vanished socket is no reason to fail a service, so errors are swallowed here by purpose.
    """
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            sock.sendall("\n".join(lines).encode())
    except OSError:
        return False
    return True


def ready(status: str) -> None:
    """The service is up."""
    notify("READY=1", f"STATUS={status}")


def reloading() -> None:
    """A reload begins; ``ready`` ends it. MONOTONIC_USEC is demanded by Type=notify-reload."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def stopping() -> None:
    """The service drains."""
    notify("STOPPING=1", "STATUS=draining")


def extend_start(seconds: int) -> None:
    """Ask for more time to start."""
    notify(f"EXTEND_TIMEOUT_USEC={seconds * 1_000_000}")


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


def credentials_directory() -> str | None:
    """Where systemd put the credentials of LoadCredential=, if it did."""
    return os.environ.get("CREDENTIALS_DIRECTORY")


def telemetry_environment() -> dict[str, str]:
    """OpenTelemetry's standard variables, for a child that exports."""
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
