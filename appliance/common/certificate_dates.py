"""Dates of a certificate file, and when its end is near."""

from __future__ import annotations

from pathlib import Path

from appliance.common.figures import counted

MAX_BYTES = 1 << 20
"""Bytes of a file with a chain; usual ones have some thousand."""

DAY_S = 86_400

RENEW_DAYS = 14
"""Days before its end at which a certificate is reported, so that there is time to renew it."""


def read_validity(path: Path) -> tuple[float, float]:
    """Unix times between which the first certificate of a file is valid.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no certificate, or a malformed one.
    """
    from isolation.keys.certificates import validity  # takes 50 ms: only where there is a certificate

    with path.open("rb") as file:
        return validity(file.read(MAX_BYTES))


def whole_days(seconds: float) -> str:
    """Whole days, hours below one."""
    days, hours = divmod(int(seconds) // 3_600, 24)
    number, unit = (days, "day") if days else (hours, "hour")
    return counted(number, unit)
