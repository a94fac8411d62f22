"""What policy, key table, usage book and a running appliance say about tenants. Reads files and asks; blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from appliance.common.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.common.config import ApplianceConfig
    from appliance.common.keys import KeyRecord
    from appliance.common.usage.report import Sum

KEY = "key:"
"""Beginning of the credential that an API key is, in the policy."""


_KEPT = """
SELECT (SELECT COUNT(*) FROM batches WHERE tenant = :tenant AND over_at = 0),
       (SELECT COUNT(*) FROM files WHERE tenant = :tenant),
       (SELECT COUNT(*) FROM responses WHERE tenant = :tenant),
       COALESCE((SELECT bytes FROM used WHERE tenant = :tenant), 0)
"""
"""What the store of files, batches and responses has of one tenant."""


@dataclass(slots=True)
class Known:
    """What is known of tenants beside the policy. None: it is not known, and a note says why."""

    keys: Mapping[str, KeyRecord] | None = None
    """API keys by id."""
    uses: Mapping[str, int] = field(default_factory=dict)
    """Last uses of keys by secret (``appliance.common.key_uses``)."""
    today: Mapping[str, Sum] | None = None
    """Use of the day (UTC) by tenant; a tenant that used nothing is not in it."""
    month: Mapping[str, Sum] | None = None
    running: Mapping[str, int] | None = None
    """Running requests by tenant, of the policy that is in force."""
    notes: list[str] = field(default_factory=list)


def keys_in_force(credentials: Iterable[str], records: Mapping[str, KeyRecord], now: datetime) -> int:
    """Return how many of a tenant's credentials are API keys that hold."""
    ids = (one.removeprefix(KEY) for one in credentials if one.startswith(KEY))
    return sum(1 for one in ids if one in records and records[one].holds(now))


def read_keys(known: Known, config: ApplianceConfig) -> None:
    """Read the key table and, where there is an audit log, the last uses."""
    from appliance.common.credentials import read_key_records
    from appliance.common.key_uses import read_uses

    try:
        known.keys = read_key_records(config.credentials)
        if config.audit is not None:
            known.uses = read_uses(config.audit.directory)
    except ConfigError as error:
        known.notes.append(f"keys: {error.message}")


def read_usage(known: Known, config: ApplianceConfig, now: datetime, tenants: tuple[str, ...] = ()) -> None:
    """Read the sums of the day and of the month from the usage book; of all tenants, where none is named."""
    if config.audit is None:
        known.notes.append("use: the configuration has no audit log, so there is no usage book")
        return
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    try:
        known.today = _sums(config.audit.directory, day, now, tenants)
        known.month = _sums(config.audit.directory, day.replace(day=1), now, tenants)
    except ConfigError as error:
        known.notes.append(f"use: {error.message}")


def _sums(folder: Path, begin: datetime, now: datetime, tenants: tuple[str, ...]) -> dict[str, Sum]:
    from appliance.common.usage.report import By, Filter, sums

    end = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)  # the hour that runs
    return {one.keys[0]: one for one in sums(folder, [By.TENANT], Filter(begin, end, tenants))}


@dataclass(frozen=True, slots=True)
class KeptOfTenant:
    """What is kept of a tenant on the disk."""

    batches: int = 0
    """Batches that are not over."""
    files: int = 0
    """Files, results among them."""
    responses: int = 0
    bytes: int = 0
    """Bytes of its files and responses."""
    has_key: bool = False
    """Whether the keyring has a key under which something of it may be sealed."""


def read_kept(config: ApplianceConfig, tenant: str) -> KeptOfTenant:
    """Return what is kept of a tenant.

    Raises:
        ConfigError: the store or the keyring cannot be read.
    """
    import sqlite3

    from appliance.common.errors import os_errors_as
    from appliance.supervisor.batches.book import BUSY_S, NAME
    from isolation.keys.keyring import KEK_ENDING

    has_key, counts = False, (0, 0, 0, 0)
    if config.keys is not None:
        with os_errors_as(f"cannot read {config.keys.keyring}"):
            has_key = (config.keys.keyring / f"{tenant}{KEK_ENDING}").exists()
    path = config.batches.directory / NAME if config.batches is not None else None
    if path is not None and path.exists():
        try:
            uri = f"{path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_S)) as store:
                counts = store.execute(_KEPT, {"tenant": tenant}).fetchone()
        except sqlite3.Error as error:
            raise ConfigError(f"cannot read files and batches in {path}: {error}") from error
    return KeptOfTenant(*counts, has_key=has_key)
