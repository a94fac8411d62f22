"""Entries of the audit log for tests that care about a few of their fields."""

from __future__ import annotations

from appliance.common.audit.entry import KINDS, Entry, entry


def filled(kind: str, text: str = "x", /, **fields: str | int) -> Entry:
    """An entry with these fields; of the others each text is ``text`` and each number 0."""
    return entry(kind, **{**{name: text if of is str else 0 for name, of in KINDS[kind].items()}, **fields})
