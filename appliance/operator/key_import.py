"""Reads lists of keys to be made: one JSON object a line. Pure.

``{"tenant": "acme", "id": "acme-ci", "expires": "2027-01-31", "scopes": ["generate"], "key": "ath_acme-ci_..."}``: only
``tenant`` must be there; without ``key`` a fresh one is made.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from appliance.common.errors import ConfigError
from appliance.common.keys import MAX_KEYS
from appliance.common.scopes import read_scopes
from appliance.common.strict_json import JsonError, parse_json
from appliance.operator.key_table import WantedKey
from policy.schema import TENANT_ID

FIELDS = frozenset({"tenant", "id", "expires", "scopes", "key"})

_LASTING = re.compile(r"([1-9][0-9]{0,4})([hdw])")
_UNITS = {"h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}


def read_list(text: str, now: datetime) -> list[WantedKey]:
    """Return the keys of a list; empty lines are skipped.

    Raises:
        ConfigError: a line is wrong; the message has its number and nothing of a key.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(_read_line(line, now))
        except ValueError as error:
            raise ConfigError(f"line {number}: {error}") from None
        if len(found) > MAX_KEYS:
            raise ConfigError(f"line {number}: more than {MAX_KEYS} keys")
    return found


def _read_line(line: str, now: datetime) -> WantedKey:
    """Return the key of one line.

    Raises:
        ValueError: it is not of the form above.
    """
    try:
        entry = parse_json(line.encode("utf-8", "replace"))
    except JsonError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(entry, dict) or not entry.keys() <= FIELDS:
        raise ValueError(f"expected an object with {', '.join(sorted(FIELDS))}")
    texts: dict[str, Any] = {name: entry.get(name, "") for name in ("tenant", "id", "expires", "key")}
    if wrong := [name for name, value in texts.items() if not isinstance(value, str)]:
        raise ValueError(f"{wrong[0]} must be a text")
    if not re.fullmatch(TENANT_ID, texts["tenant"]):
        raise ValueError(f"{texts['tenant'][:64]!r} is no tenant id")
    if texts["key"] and not texts["id"]:
        raise ValueError("a key that was made elsewhere needs its id")
    scopes = entry.get("scopes")
    if scopes is not None and not isinstance(scopes, list):
        raise ValueError("scopes must be a list")
    return WantedKey(
        tenant=texts["tenant"],
        id=texts["id"],
        expires=read_end(texts["expires"], now) if texts["expires"] else None,
        scopes=None if scopes is None else read_scopes(scopes),
        key=texts["key"],
    )


def read_lasting(text: str) -> timedelta:
    """Return the time that ``90d``, ``12h`` or ``4w`` means.

    Raises:
        ValueError: it is something else.
    """
    found = _LASTING.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:32]!r} is no span of time; take 12h, 90d or 4w")
    return int(found[1]) * _UNITS[found[2]]


def read_end(text: str, now: datetime) -> datetime:
    """Return the moment that a text means: a span of time from now on, a day (its beginning, UTC), or an ISO 8601 time
    with its zone.

    Raises:
        ValueError: it is none of these, or is past.
    """
    if _LASTING.fullmatch(text):
        return now + read_lasting(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text[:32]!r} is no time; take 90d, 2027-01-31 or 2027-01-31T12:00Z") from None
    if moment.tzinfo is None:
        if "T" in text or " " in text:
            raise ValueError(f"{text[:32]!r} has no zone; write 2027-01-31T12:00Z")
        moment = moment.replace(tzinfo=UTC)
    if moment <= now:
        raise ValueError(f"{text[:32]!r} is past")
    return moment
