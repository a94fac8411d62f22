"""API keys: ``ath_<key id>_<secret>``, kept as HMAC-SHA256 of the secret under a pepper.

A secret has 256 random bits, so it needs no stretching (a slow hash on the request path would be a lever for denial of
service). The pepper lies apart from the table: ``credentials.json`` alone is not enough to test a guess.
Everything here is pure over text and bytes; who reads the files is not its business.

File format, strict in both directions::

    {"keys": {"acme-7f3a": {"hmac_sha256": "<64 hex>", "created": "2026-11-21T10:00:00+00:00",
                            "expires": "...", "revoked": false}}}

``expires`` and ``revoked`` may be absent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from appliance.common.errors import ConfigError
from appliance.common.figures import counted
from appliance.common.strict_json import JsonError, parse_json

KEY_PREFIX = "ath"
"""First part of every key: secret scanners find a leaked one by it."""

KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""A key id, as the policy spells one after ``key:``. It may hold an underscore: the secret is the last 64 digits."""

SECRET_BYTES = 32
"""Random bytes of a secret; written as 64 hex digits."""

PEPPER_BYTES = 32
"""Least bytes of a pepper: as strong as the secrets it protects."""

MAX_KEYS = 100_000
"""Keys in one table; more than that need a database."""

MAX_TABLE_BYTES = 32 << 20
"""Most bytes of the file: ``MAX_KEYS`` entries with room to spare."""

_KEY = re.compile(rf"{KEY_PREFIX}_({KEY_ID.pattern})_([0-9a-f]{{{2 * SECRET_BYTES}}})")
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"hmac_sha256", "created", "expires", "revoked"})
_NO_SECRET = "0" * (2 * SECRET_BYTES)
_NO_DIGEST = secrets.token_bytes(hashlib.sha256().digest_size)


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is kept of one key. Times carry a time zone."""

    digest: bytes
    created: datetime
    expires: datetime | None = None
    revoked: bool = False

    def holds(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired."""
        return not self.revoked and (self.expires is None or now < self.expires)


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All keys of the appliance, by id. Frozen: a reload makes a new one."""

    pepper: bytes
    records: Mapping[str, KeyRecord]

    def __repr__(self) -> str:
        return f"KeyTable({counted(len(self.records), 'key')})"

    def verify(self, plain: str, now: datetime) -> str | None:
        """The id behind ``plain``, or None when it is malformed, unknown, wrong, expired or revoked.

        Each of those costs one HMAC and one constant-time comparison, so the time taken tells only what the caller
        knows already.
        """
        match = _KEY.fullmatch(plain)
        key_id, secret = match.groups() if match else ("", _NO_SECRET)
        record = self.records.get(key_id)
        expected = record.digest if record is not None else _NO_DIGEST
        right = hmac.compare_digest(digest_of(secret, self.pepper), expected)
        if record is None or not right:
            return None
        return key_id if self.holds(key_id, now) else None

    def holds(self, key_id: str, now: datetime) -> bool:
        """Whether a key is known, not revoked and not expired."""
        record = self.records.get(key_id)
        return record is not None and record.holds(now)

    def in_force(self, now: datetime) -> frozenset[str]:
        """Return the ids of all keys that hold now."""
        return frozenset(key_id for key_id, record in self.records.items() if record.holds(now))


def digest_of(secret: str, pepper: bytes) -> bytes:
    """HMAC-SHA256 of a secret (RFC 2104), as kept in a record."""
    return hmac.digest(pepper, secret.encode("ascii"), "sha256")


def issue(key_id: str, pepper: bytes) -> tuple[str, bytes]:
    """A fresh key and its digest. The plain key is shown once and never kept.

    Raises:
        ConfigError: the id or the pepper cannot be used.
    """
    if not KEY_ID.fullmatch(key_id):
        raise ConfigError("the key id is not usable; take 1 to 63 letters, digits, dots, dashes and underscores")
    if len(pepper) < PEPPER_BYTES:
        raise ConfigError(f"the pepper has {counted(len(pepper), 'byte')}; it needs {PEPPER_BYTES} random ones")
    secret = secrets.token_hex(SECRET_BYTES)
    return f"{KEY_PREFIX}_{key_id}_{secret}", digest_of(secret, pepper)


def parse_records(text: str) -> dict[str, KeyRecord]:
    """The records in the text of ``credentials.json``.

    Raises:
        ConfigError: the text is not exactly of the format above; the message names the entry, never its digest.
    """
    if len(text) > MAX_TABLE_BYTES:
        raise ConfigError(f"credentials: more than {MAX_TABLE_BYTES} bytes")
    try:
        document = parse_json(text.encode("utf-8"), max_containers=2 * MAX_KEYS)
    except (JsonError, UnicodeEncodeError) as error:
        raise ConfigError(f"credentials: not valid JSON: {error}") from None
    keys = document.get("keys") if isinstance(document, dict) and document.keys() == {"keys"} else None
    if not isinstance(keys, dict):
        raise ConfigError('credentials: expected one object with the one key "keys"')
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"credentials: {len(keys)} keys are more than {MAX_KEYS}")
    return {key_id: _parse_record(key_id, entry) for key_id, entry in keys.items()}


def serialise_records(records: Mapping[str, KeyRecord]) -> str:
    """The text of ``credentials.json``: sorted, indented, one final newline."""
    keys: dict[str, dict[str, str | bool]] = {}
    for key_id in sorted(records):
        record = records[key_id]
        entry: dict[str, str | bool] = {"hmac_sha256": record.digest.hex(), "created": record.created.isoformat()}
        if record.expires is not None:
            entry["expires"] = record.expires.isoformat()
        entry["revoked"] = record.revoked
        keys[key_id] = entry
    return json.dumps({"keys": keys}, indent=2) + "\n"


def _parse_record(key_id: str, entry: object) -> KeyRecord:
    if not KEY_ID.fullmatch(key_id):
        raise ConfigError(f"credentials: {key_id[:64]!r} is not a key id")
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS:
        raise ConfigError(f"credentials: {key_id}: expected an object with {', '.join(sorted(_FIELDS))}")
    digest = entry.get("hmac_sha256")
    if not isinstance(digest, str) or not _HEX_DIGEST.fullmatch(digest):
        raise ConfigError(f"credentials: {key_id}: hmac_sha256 must be 64 lower-case hex digits")
    revoked = entry.get("revoked", False)
    if not isinstance(revoked, bool):
        raise ConfigError(f"credentials: {key_id}: revoked must be true or false")
    expires = _parse_time(key_id, "expires", entry["expires"]) if "expires" in entry else None
    created = _parse_time(key_id, "created", entry.get("created"))
    return KeyRecord(bytes.fromhex(digest), created, expires, revoked)


def _parse_time(key_id: str, field: str, value: object) -> datetime:
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise ConfigError(f"credentials: {key_id}: {field} must be an ISO 8601 time with its zone")
    return time
