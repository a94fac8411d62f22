"""API keys: ``ath_<key id>_<secret>``, kept as HMAC-SHA256 of the secret under a pepper.

A secret has 256 random bits, so it needs no stretching (a slow hash on the request path would be a lever for denial of
service). The pepper lies apart from the table: ``credentials.json`` alone is not enough to test a guess.
Everything here is pure over text and bytes; who reads the files is not its business.

File format, strict in both directions::

    {"keys": {"acme-7f3a": {"hmac_sha256": "<64 hex>", "created": "2026-11-21T10:00:00+00:00",
                            "expires": "...", "revoked": false, "tenant": "acme", "scopes": ["generate"],
                            "previous": {"hmac_sha256": "<64 hex>", "created": "...", "expires": "..."}}}}

Only ``hmac_sha256`` and ``created`` must be there. A key has two secrets while it is rotated: ``previous`` is the one
that is about to expire. Its id stays, so the policy and the audit log name it as before.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from appliance.common.errors import ConfigError
from appliance.common.figures import counted
from appliance.common.refused_credentials import CredentialRefusal
from appliance.common.scopes import Scope, read_scopes
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

MAX_TABLE_BYTES = 64 << 20
"""Most bytes of the file: ``MAX_KEYS`` entries with two secrets each."""

CONTAINERS = 4
"""Arrays and objects of one entry: itself, its scopes, its previous secret, and room."""

_KEY = re.compile(rf"{KEY_PREFIX}_({KEY_ID.pattern})_([0-9a-f]{{{2 * SECRET_BYTES}}})")
_HEAD = re.compile(r'\s*\{\s*"keys"\s*:\s*\{\s*')
"""What stands before the first entry of a table."""
_GAP = re.compile(r"[\s:,]*")
"""What stands between an id, its entry, and the next id."""
_ENTRY, _FIELD = "\n    ", "\n      "
"""Begin of a line of an entry, and of one of its fields."""
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"hmac_sha256", "created", "expires", "revoked", "tenant", "scopes", "previous"})
_PREVIOUS_FIELDS = frozenset({"hmac_sha256", "created", "expires"})
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_NO_SECRET = "0" * (2 * SECRET_BYTES)
_NO_DIGEST = secrets.token_bytes(hashlib.sha256().digest_size)


@dataclass(frozen=True, slots=True)
class Previous:
    """The secret that a key had before its rotation."""

    digest: bytes
    created: datetime
    expires: datetime


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is kept of one key. Times carry a time zone."""

    digest: bytes
    created: datetime
    """When its secret was made."""
    expires: datetime | None = None
    revoked: bool = False
    scopes: frozenset[Scope] | None = None
    """What it is limited to; None: to what its tenant may do."""
    tenant: str = ""
    """Tenant that it was made for, for lists and for revoking all of a tenant; the policy says whose it is."""
    previous: Previous | None = None

    def holds(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired."""
        return not self.revoked and (self.expires is None or now < self.expires)

    def revoke(self) -> KeyRecord:
        """Return it revoked, with both of its secrets."""
        return replace(self, revoked=True, previous=None)

    def rotated(self, digest: bytes, now: datetime, until: datetime, expires: datetime | None) -> KeyRecord:
        """Return it with a new secret, which expires then; the old one holds until a time, and never longer than it
        did."""
        last = until if self.expires is None else min(until, self.expires)
        previous = Previous(self.digest, self.created, last) if last > now else None
        return replace(self, digest=digest, created=now, expires=expires, previous=previous)


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of checking a key."""

    key_id: str
    """Empty where it is refused."""
    secret: str
    """Name of the secret (``secret_name``); empty where it is refused."""
    scopes: frozenset[Scope] | None
    refusal: CredentialRefusal | None


def secret_name(key_id: str, created: datetime) -> str:
    """Name of one secret of a key: its id and the second at which it was made."""
    return f"{key_id}@{int(created.timestamp())}"


@dataclass(frozen=True, slots=True)
class KeyTable:
    """All keys of the appliance, by id. Frozen: a reload makes a new one."""

    pepper: bytes
    records: Mapping[str, KeyRecord]
    digest: str = field(default="", compare=False)
    """SHA-256 of the file that it was read from, in hex; empty where it is of no file."""

    def __repr__(self) -> str:
        return f"KeyTable({counted(len(self.records), 'key')})"

    def verify(self, plain: str, now: datetime) -> str | None:
        """The id behind ``plain``, or None when it is malformed, unknown, wrong, expired or revoked."""
        return self.check(plain, now).key_id or None

    def check(self, plain: str, now: datetime) -> Checked:
        """Look a key up.

        Whatever comes of it costs one HMAC and two constant-time comparisons, so the time taken tells only what the
        caller knows already.
        """
        match = _KEY.fullmatch(plain)
        key_id, secret = match.groups() if match else ("", _NO_SECRET)
        record = self.records.get(key_id)
        previous = record.previous if record is not None else None
        found = digest_of(secret, self.pepper)
        is_current = hmac.compare_digest(found, record.digest if record is not None else _NO_DIGEST)
        is_previous = hmac.compare_digest(found, previous.digest if previous is not None else _NO_DIGEST)
        if match is None:
            return _refused(CredentialRefusal.MALFORMED)
        if record is None:
            return _refused(CredentialRefusal.KEY_UNKNOWN)
        if not (is_current or is_previous):
            return _refused(CredentialRefusal.KEY_WRONG)
        if record.revoked:
            return _refused(CredentialRefusal.KEY_REVOKED)
        if is_current and record.holds(now):
            return Checked(key_id, secret_name(key_id, record.created), record.scopes, None)
        if is_previous and previous is not None and now < previous.expires:
            return Checked(key_id, secret_name(key_id, previous.created), record.scopes, None)
        return _refused(CredentialRefusal.KEY_EXPIRED)

    def holds(self, key_id: str, now: datetime, named: str = "") -> bool:
        """Whether a key is known, not revoked and not expired; of two secrets, the one with this name, else the newer
        one."""
        record = self.records.get(key_id)
        if record is None or record.revoked:
            return False
        if not named or named == secret_name(key_id, record.created):
            return record.holds(now)
        previous = record.previous
        return previous is not None and named == secret_name(key_id, previous.created) and now < previous.expires

    def in_force(self, now: datetime) -> frozenset[str]:
        """Return the ids of all keys that hold now."""
        return frozenset(key_id for key_id, record in self.records.items() if record.holds(now))


def _refused(refusal: CredentialRefusal) -> Checked:
    return Checked("", "", None, refusal)


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


def digest_of_key(key_id: str, plain: str, pepper: bytes) -> bytes:
    """Digest of a whole key that was made elsewhere, as kept in a record.

    Raises:
        ConfigError: it is not a key with this id.
    """
    match = _KEY.fullmatch(plain)
    if match is None or match[1] != key_id:
        raise ConfigError(f"the key is not of the form {KEY_PREFIX}_{key_id}_ and {2 * SECRET_BYTES} hex digits")
    return digest_of(match[2], pepper)


def parse_records(text: str) -> dict[str, KeyRecord]:
    """The records in the text of ``credentials.json``.

    Raises:
        ConfigError: the text is not exactly of the format above; the message names line and entry, never its digest.
    """
    if len(text) > MAX_TABLE_BYTES:
        raise ConfigError(f"credentials: more than {MAX_TABLE_BYTES} bytes")
    try:
        document = parse_json(text.encode("utf-8"), max_containers=CONTAINERS * MAX_KEYS)
    except (JsonError, UnicodeEncodeError) as error:
        twice = _twice(text)
        where = f"line {twice[1]}: the key {twice[0]} is there twice: " if twice is not None else ""
        raise ConfigError(f"credentials: {where}not valid JSON: {error}") from None
    keys = document.get("keys") if isinstance(document, dict) and document.keys() == {"keys"} else None
    if not isinstance(keys, dict):
        raise ConfigError('credentials: line 1: expected one object with the one key "keys"')
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"credentials: {len(keys)} keys are more than {MAX_KEYS}")
    found = {}
    for key_id, entry in keys.items():
        try:
            found[key_id] = _parse_record(key_id, entry)
        except ConfigError as error:
            line = next((line for name, line in _lines(text) if name == key_id), 1)
            raise ConfigError(f"credentials: line {line}: {error.message}") from None
    return found


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """Ids of a table's entries with the lines that they are on, as far as the text can be read."""
    decoder, start = json.JSONDecoder(), _HEAD.match(text)
    position, counted_to, line = (start.end() if start is not None else len(text)), 0, 1
    try:
        while position < len(text) and text[position] == '"':
            line += text.count("\n", counted_to, position)
            counted_to = position
            name, position = decoder.raw_decode(text, position)
            yield name, line
            _, position = decoder.raw_decode(text, _GAP.match(text, position).end())  # type: ignore[union-attr]  # matches anything
            position = _GAP.match(text, position).end()  # type: ignore[union-attr]
    except (ValueError, RecursionError):
        return


def _twice(text: str) -> tuple[str, int] | None:
    """The first id that stands twice in a table, and the line of its second entry."""
    seen = set()
    for name, line in _lines(text):
        if name in seen and KEY_ID.fullmatch(name):
            return name, line
        seen.add(name)
    return None


def serialise_records(records: Mapping[str, KeyRecord]) -> str:
    """The text of ``credentials.json``: sorted, indented, one final newline."""
    entries = [f"{_ENTRY}{json.dumps(key_id)}: {_entry(records[key_id])}" for key_id in sorted(records)]
    return '{\n  "keys": {' + ",".join(entries) + ("\n  }" if entries else "}") + "\n}\n"


def _entry(record: KeyRecord) -> str:
    """One key's object, indented as ``json.dumps`` with two blanks would indent the whole: that one has no quick
    encoder, and takes three times as long for a table of 10,000."""
    fields = [f'"hmac_sha256": "{record.digest.hex()}"', f'"created": "{record.created.isoformat()}"']
    if record.expires is not None:
        fields.append(f'"expires": "{record.expires.isoformat()}"')
    fields.append(f'"revoked": {"true" if record.revoked else "false"}')
    if record.tenant:
        fields.append(f'"tenant": {json.dumps(record.tenant)}')
    if record.scopes is not None:
        scopes = json.dumps(sorted(record.scopes), indent=2)
        fields.append(f'"scopes": {scopes.replace(chr(10), _FIELD)}')
    if (previous := record.previous) is not None:
        inner = [f'"hmac_sha256": "{previous.digest.hex()}"', f'"created": "{previous.created.isoformat()}"']
        inner.append(f'"expires": "{previous.expires.isoformat()}"')
        fields.append(f'"previous": {{{_FIELD}  {f",{_FIELD}  ".join(inner)}{_FIELD}}}')
    return f"{{{_FIELD}{f',{_FIELD}'.join(fields)}{_ENTRY}}}"


def _parse_record(key_id: str, entry: object) -> KeyRecord:
    if not KEY_ID.fullmatch(key_id):
        raise ConfigError(f"{key_id[:64]!r} is not a key id")
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS:
        raise ConfigError(f"{key_id}: expected an object with {', '.join(sorted(_FIELDS))}")
    digest = _parse_digest(key_id, entry)
    revoked = entry.get("revoked", False)
    if not isinstance(revoked, bool):
        raise ConfigError(f"{key_id}: revoked must be true or false")
    tenant = entry.get("tenant", "")
    if not isinstance(tenant, str) or not (tenant == "" or _TENANT.fullmatch(tenant)):
        raise ConfigError(f"{key_id}: tenant must be the id of a tenant")
    scopes = entry.get("scopes")
    if "scopes" in entry and not isinstance(scopes, list):
        raise ConfigError(f"{key_id}: scopes must be a list of {', '.join(Scope)}")
    try:
        granted = None if scopes is None else read_scopes(scopes)
    except ValueError as error:
        raise ConfigError(f"{key_id}: scopes: {error}") from None
    return KeyRecord(
        digest,
        _parse_time(key_id, "created", entry.get("created")),
        _parse_time(key_id, "expires", entry["expires"]) if "expires" in entry else None,
        revoked,
        granted,
        tenant,
        _parse_previous(key_id, entry["previous"]) if "previous" in entry else None,
    )


def _parse_previous(key_id: str, entry: object) -> Previous:
    if not isinstance(entry, dict) or entry.keys() != _PREVIOUS_FIELDS:
        raise ConfigError(f"{key_id}: previous: expected an object with {', '.join(sorted(_PREVIOUS_FIELDS))}")
    times = (_parse_time(f"{key_id}: previous", field, entry[field]) for field in ("created", "expires"))
    return Previous(_parse_digest(f"{key_id}: previous", entry), *times)


def _parse_digest(where: str, entry: dict[str, object]) -> bytes:
    digest = entry.get("hmac_sha256")
    if not isinstance(digest, str) or not _HEX_DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: hmac_sha256 must be 64 lower-case hex digits")
    return bytes.fromhex(digest)


def _parse_time(where: str, field: str, value: object) -> datetime:
    try:
        time = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise ConfigError(f"{where}: {field} must be an ISO 8601 time with its zone")
    return time
