"""NVIDIA driver versions supported by each runsc release: a table and its lookup. Pure.

gVisor's nvproxy supports exact driver versions only: the ABI between programs and driver changes between versions, and
nvproxy cannot recognise an unknown one. The supported window moves: new drivers are added, old ones removed. A version
without a row is refused, never tried.
Sources: ``runsc nvproxy list-supported-drivers`` of Debian's 20240729 (a test compares it with this row), and
``pkg/sentry/devices/nvproxy/version.go`` of google/gvisor as of 2026-08-21, commit 3c5eee17.
"""

from __future__ import annotations

from isolation.errors import GpuError

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


def check_driver(driver: str, runsc: int) -> None:
    """Refuse a driver that this runsc does not know.

    Raises:
        GpuError: names both versions and the remedy.
    """
    known = supported_drivers(runsc)
    if driver in known:
        return
    fitting = [date for date, drivers in SUPPORTED if driver in drivers]
    mends = [f"install driver {newest(known)}"] if known else []
    if fitting:
        mends.append(f"use runsc of {fitting[-1]}")
    elif known:
        mends.append("a runsc whose own list has the driver, with a row for it in isolation/gpu/gpu_drivers.py")
    else:
        mends.append(f"use runsc of {SUPPORTED[-1][0]} and one of its drivers")
    raise GpuError(
        f"runsc of {runsc} is not known to support the driver {driver}: a sandbox could not use the GPU, or would "
        "misunderstand the driver",
        hint=", or ".join(mends),
    )


def newest(versions: tuple[str, ...]) -> str:
    """The highest of some driver versions.

    Raises:
        ValueError: there is none.
    """
    return max(versions, key=lambda version: tuple(int(part) for part in version.split(".")))
