"""NVIDIA driver versions supported by a runsc: its own list, or a table by its release. Pure.

gVisor's nvproxy supports exact driver versions only: the ABI between programs and driver changes between versions, and
nvproxy cannot recognise an unknown one. The supported window moves: new drivers are added, old ones removed. What the
installed runsc lists (``isolation.gpu.listed_drivers``) counts; the table is for one that has no such command. A
version in neither is refused, never tried.
Sources: ``runsc nvproxy list-supported-drivers`` of Debian's 20240729 (a test compares it with this row), and
``pkg/sentry/devices/nvproxy/version.go`` of google/gvisor as of 2026-08-21, commit 3c5eee17.
"""

from __future__ import annotations

import re

from isolation.errors import GpuError

_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?")
_SHOWN_CHARS = 80
"""Characters of an odd line that an error shows."""

_DRIVERS = (
    (20_240_729, "535.104.12 535.129.03 535.154.05 535.161.07 550.54.14 550.54.15 550.90.07"),
    (
        20_260_821,
        "535.129.03 535.183.06 535.247.01 535.261.03 535.274.02 535.288.01 535.309.01 550.90.12 570.124.06 "
        "570.133.20 570.172.08 570.195.03 580.65.06 580.105.08 580.126.09 580.126.20 580.159.03 580.159.04 "
        "580.173.02 590.48.01 610.57.04",
    ),
)
SUPPORTED = tuple((date, tuple(drivers.split())) for date, drivers in _DRIVERS)
"""Release date of a runsc and the drivers that it supports on x86-64; oldest first."""

CURRENT = "20260928.0"
"""A release with the drivers of the last row and later ones; equal to the one that images/runsc.py pins with its
checksum."""

INSTALL_CURRENT = (
    f"python images/runsc.py --into DIR --release    # gVisor {CURRENT}, checked against its SHA-512; or unpack "
    "its gvisor.tar.bz2 by hand (docs/runsc.md); then sandbox: runsc: DIR/runsc"
)
"""The way to a current runsc, as errors and ``athanor doctor`` name it."""

CAPABILITIES_SINCE = 20_240_923
"""The first release with ``--nvproxy-allowed-driver-capabilities``."""


def supported_drivers(runsc: int) -> tuple[str, ...]:
    """Return the drivers that a runsc of this release date certainly supports.

    Between two rows, only drivers of both rows count as supported. Past the last row, its drivers are assumed to be
    still supported; runsc itself refuses one that has left its window.

    Args:
        runsc: release date as a number, 20240729.
    """
    older = [drivers for date, drivers in SUPPORTED if date <= runsc]
    newer = [drivers for date, drivers in SUPPORTED if date > runsc]
    if not older:
        return ()
    if not newer or SUPPORTED[len(older) - 1][0] == runsc:
        return older[-1]
    return tuple(version for version in older[-1] if version in newer[0])


def parse_drivers(text: str) -> tuple[str, ...]:
    """Parse the answer of ``runsc nvproxy list-supported-drivers``: one version a line.

    Raises:
        ValueError: a line is no version of a driver, or there is none.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    odd = next((line for line in lines if not _VERSION.fullmatch(line)), None)
    if odd is not None:
        raise ValueError(f"{odd[:_SHOWN_CHARS]!r} is no version of a driver")
    if not lines:
        raise ValueError("it lists nothing")
    return tuple(lines)


def known_drivers(listed: tuple[str, ...], runsc: int) -> tuple[str, ...]:
    """Return the drivers that a runsc supports: those that it lists, else those of the table.

    Args:
        listed: by the runsc itself; empty where it has no such command.
        runsc: release date as a number.
    """
    return listed or supported_drivers(runsc)


def check_driver(driver: str, runsc: int, listed: tuple[str, ...] = ()) -> None:
    """Refuse a driver that this runsc does not know.

    Args:
        driver: version of the kernel module.
        runsc: release date as a number.
        listed: as in ``known_drivers``.

    Raises:
        GpuError: names both versions and the remedy.
    """
    known = known_drivers(listed, runsc)
    if driver in known:
        return
    fitting = [date for date, drivers in SUPPORTED if driver in drivers and date != runsc]
    mends = [f"install driver {newest(known)}"] if known else []
    if fitting and fitting[-1] == SUPPORTED[-1][0]:
        mends.append(f"use runsc of {fitting[-1]} or later: {INSTALL_CURRENT}")
    elif fitting:
        mends.append(f"use runsc of {fitting[-1]}")
    elif runsc < int(CURRENT.partition(".")[0]):
        mends.append(f"use a current runsc, if its list has the driver: {INSTALL_CURRENT}")
    else:
        mends.append("use a later runsc whose own list has the driver: `runsc nvproxy list-supported-drivers`")
    source = "does not list" if listed else "is not known to support"
    raise GpuError(
        f"runsc of {runsc} {source} the driver {driver}: a sandbox could not use the GPU, or would misunderstand the "
        "driver",
        hint=", or ".join(mends),
    )


def newest(versions: tuple[str, ...]) -> str:
    """The highest of some driver versions.

    Raises:
        ValueError: there is none.
    """
    return max(versions, key=lambda version: tuple(int(part) for part in version.split(".")))
