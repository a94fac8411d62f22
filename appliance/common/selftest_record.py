"""The outcome of the last recorded self-test, in the folder of the audit log. Blocks; a command writes, the supervisor
reads.

``{"at": 1764151200, "version": "0.1.0", "form": "short", "pass": 61, "fail": 0, "absent": 2, "not run": 9}``: when it
ended, in seconds of Unix time, by which version, in which form, and how many rows had each verdict.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from appliance.common.errors import ConfigError, os_errors_as
from appliance.common.strict_json import JsonError, parse_json
from isolation.host.atomic_file import write_whole

NAME: Final = "selftest.json"
FILE_MODE: Final = 0o644
"""Everybody may read it: root records it, and the supervisor has a user of its own."""

MAX_BYTES: Final = 4_096
"""Most bytes of the file; one has some 120."""

MAX_ROWS: Final = 100_000
"""Most rows of one verdict; a whole self-test has some hundred."""

FORMS: Final = ("short", "full")
VERDICTS: Final = ("pass", "fail", "absent", "not run")

_VERSION: Final = re.compile(r"[0-9A-Za-z.+-]{1,64}")
_FIELDS: Final = {"at", "version", "form", *VERDICTS}


@dataclass(frozen=True, slots=True)
class SelftestRecord:
    """What a self-test came to."""

    at: int
    """When it ended, in seconds of Unix time."""
    version: str
    """Version of the appliance that ran it."""
    form: str
    """One of ``FORMS``."""
    rows: tuple[int, int, int, int]
    """How many rows had each of ``VERDICTS``."""

    def line(self) -> str:
        """Return it as one line, as attestations have it."""
        at = datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        counts = ", ".join(f"{count} {verdict}" for count, verdict in zip(self.rows, VERDICTS, strict=True))
        return f"{at}, version {self.version}, {self.form} form: {counts}"


def read_record(folder: Path) -> SelftestRecord | None:
    """Return the record in a folder; None where there is none.

    Raises:
        ConfigError: the file cannot be read, or is no such file.
    """
    path = folder / NAME
    try:
        with os_errors_as(f"cannot read {path}"):
            if not path.exists():
                return None
            with path.open("rb") as file:
                found = parse_json(file.read(MAX_BYTES + 1))
    except JsonError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict) or found.keys() != _FIELDS:
        raise ConfigError(f"{path}: expected the record of a self-test")
    at, version, form = found["at"], found["version"], found["form"]
    counts = [found[verdict] for verdict in VERDICTS]
    known = type(at) is int and 0 <= at < 1 << 35 and isinstance(version, str) and _VERSION.fullmatch(version)
    if not known or form not in FORMS or not all(type(count) is int and 0 <= count <= MAX_ROWS for count in counts):
        raise ConfigError(f"{path}: a value of the record of a self-test is of another kind")
    passed, failed, absent, not_run = counts
    return SelftestRecord(at, version, form, (passed, failed, absent, not_run))


def write_record(folder: Path, record: SelftestRecord) -> None:
    """Write the record; it replaces the one before.

    Raises:
        ConfigError: it cannot be written.
    """
    counts = dict(zip(VERDICTS, record.rows, strict=True))
    document = {"at": record.at, "version": record.version, "form": record.form, **counts}
    with os_errors_as(f"cannot write {folder / NAME}"):
        write_whole(folder / NAME, json.dumps(document).encode(), FILE_MODE)
