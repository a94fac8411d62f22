"""Entries of a running appliance's audit log, read from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from appliance.operator.audit_entries import in_order


def written(folder: Path) -> list[dict[str, Any]]:
    """All entries, in their order, with names in place of pseudonyms."""
    return [dict(one.values()) for one in in_order(folder)]
