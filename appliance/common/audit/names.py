"""Pseudonyms of the audit log: what stands in entries in place of tenants and their credentials, and the way back.

Each tenant has a random key of its own, in a file ``names/TENANT`` beside the log, with the credentials that entries
name::

    athanor.names/1 4be1...
    key:alpha-1
    spiffe://example.org/alpha

The pseudonym of a name is ``anon.`` and 32 hexadecimal digits of HMAC-SHA256 (RFC 2104) under that key, so entries of
one tenant go on having one pseudonym, and two tenants with a credential of one name have two. While the file is there,
names are found again (``shown_by``). Once it is destroyed nothing leads from a pseudonym to its name, and no entry was
changed: the log verifies as before. What is written of that tenant afterwards has another key, and another pseudonym.

Entries that were written with names have no pseudonym in them; both stand in one log, and are told apart by their form,
which no tenant's id and no credential has.
"""

from __future__ import annotations

import errno
import hmac
import os
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from appliance.common.audit.entry import Entry, Value
from isolation.host.atomic_file import write_whole
from isolation.keys.files import destroy

FOLDER = "names"
"""Name of the folder of keys, in the audit log's."""

RULES = ("rule", "cut_rule")
"""Fields that have paths of rules; such a path may name the tenant."""

FIRST_LINE = "athanor.names/1"
KEY_BYTES = 32
DIGITS = 32
"""Hexadecimal digits of a pseudonym: 128 bits, so that no two names share one."""

FOLDER_MODE, FILE_MODE = 0o750, 0o640
"""As the log's: who may read entries finds the names too, while the keys live."""

MAX_TENANTS = 20_000
"""Tenants that have a key: twice what one policy may have. A gateway that was taken over can report no more; entries
about further ones have their names."""

MAX_CREDENTIALS = 10_000
"""Credentials of one tenant that are found again; further ones have a pseudonym, and stay that."""

MAX_FILE_BYTES = 4 << 20
"""Most bytes of a tenant's file: that many credentials, each as long as a text of an entry."""

SECURITY = "security"
"""Role of the operator's API that may change keys."""

PSEUDONYM = re.compile(rf"anon\.[0-9a-f]{{{DIGITS}}}")
"""A pseudonym. A tenant's id has no point in it, and a credential begins with its kind."""

_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_RULE = re.compile(rf"tenants\.({PSEUDONYM.pattern})(\..*)?")
_HEAD = re.compile(rf"{FIRST_LINE} ([0-9a-f]{{{2 * KEY_BYTES}}})")


@dataclass(frozen=True, slots=True)
class _Tenant:
    """Key of a tenant, and its credentials by pseudonym."""

    key: bytes
    credentials: dict[str, str]


class NameBook:
    """Keys of one log's pseudonyms, for its writer. Methods may be called from any thread, and block."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the audit log's; nothing is read or written yet."""
        self._folder = folder / FOLDER
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] | None = None

    def hidden(self, one: Entry) -> Entry:
        """Return an entry with pseudonyms in place of its tenant and credential; keys that are missing are made, and
        are on disk then. A call of the operator's API makes a key where the caller may change keys; otherwise a tenant
        without one is not named: who may read only cannot fill the folder with names.

        Raises:
            OSError: the disk does not take a key.
        """
        tenant = str(one.fields.get("tenant", ""))
        if not _TENANT.fullmatch(tenant):
            return one
        with self._lock:
            known = self._read()
            found = known.get(tenant)
            if found is None:
                if one.kind == "call" and SECURITY not in str(one.fields["roles"]).split(","):
                    return Entry(one.kind, {**one.fields, "tenant": ""})
                if len(known) >= MAX_TENANTS:
                    return one
                found = known[tenant] = self._make(tenant)
            fields = dict(one.fields)
            name = fields["tenant"] = _pseudonym(found.key, "tenant", tenant)
            if fields.get("principal"):
                fields["principal"] = self._credential(tenant, found, str(fields["principal"]))
        for field in RULES:
            rule = str(fields.get(field, ""))
            if rule == f"tenants.{tenant}" or rule.startswith(f"tenants.{tenant}."):
                fields[field] = f"tenants.{name}{rule.removeprefix(f'tenants.{tenant}')}"
        return Entry(one.kind, fields)

    def pseudonym(self, tenant: str) -> str:
        """Return a tenant's pseudonym; empty where it has none.

        Raises:
            OSError: the keys cannot be read.
        """
        with self._lock:
            found = self._read().get(tenant)
        return _pseudonym(found.key, "tenant", tenant) if found is not None else ""

    def forget(self, tenant: str) -> None:
        """Destroy a tenant's key, and the list of its credentials.

        Raises:
            OSError: the disk does not take it; the key is used on, so that no other is made over its file, which would
                leave its bytes on the disk.
        """
        if not _TENANT.fullmatch(tenant):
            return
        with self._lock:
            destroy(self._folder / tenant)
            if self._tenants is not None:
                self._tenants.pop(tenant, None)

    def _read(self) -> dict[str, _Tenant]:
        if self._tenants is None:
            self._tenants = _read_folder(self._folder)
        return self._tenants

    def _make(self, tenant: str) -> _Tenant:
        key = secrets.token_bytes(KEY_BYTES)
        self._folder.mkdir(exist_ok=True, mode=FOLDER_MODE)
        write_whole(self._folder / tenant, f"{FIRST_LINE} {key.hex()}\n".encode(), FILE_MODE)
        return _Tenant(key, {})

    def _credential(self, tenant: str, found: _Tenant, credential: str) -> str:
        if PSEUDONYM.fullmatch(credential):
            return credential
        name = _pseudonym(found.key, "credential", credential)
        if name not in found.credentials and len(found.credentials) < MAX_CREDENTIALS:
            _append(self._folder / tenant, credential)
            found.credentials[name] = credential
        return name


def shown_by(folder: Path) -> Callable[[Entry], Entry]:
    """Return what puts names in place of pseudonyms, as far as an audit folder has the keys. The keys are read when the
    first pseudonym comes; where they cannot be read, pseudonyms stay."""
    names: dict[str, str] | None = None

    def found(text: Value) -> Value:
        nonlocal names
        if not isinstance(text, str) or PSEUDONYM.fullmatch(text) is None:
            return text
        if names is None:
            names = _names(folder / FOLDER)
        return names.get(text, text)

    def shown(one: Entry) -> Entry:
        if "tenant" not in one.fields:
            return one
        fields = {
            name: found(value) if name in ("tenant", "principal") else value for name, value in one.fields.items()
        }
        for field in RULES:
            rule = _RULE.fullmatch(str(fields.get(field, "")))
            if rule is not None:
                fields[field] = f"tenants.{found(rule[1])}{rule[2] or ''}"
        return Entry(one.kind, fields)

    return shown


def _names(folder: Path) -> dict[str, str]:
    names: dict[str, str] = {}
    try:
        tenants = _read_folder(folder)
    except OSError:
        return names
    for tenant, one in tenants.items():
        names[_pseudonym(one.key, "tenant", tenant)] = tenant
        names.update(one.credentials)
    return names


def _read_folder(folder: Path) -> dict[str, _Tenant]:
    """Read all keys; a file that is none is passed over."""
    found: dict[str, _Tenant] = {}
    try:
        names = sorted(path.name for path in folder.iterdir() if _TENANT.fullmatch(path.name))
    except FileNotFoundError:
        return found
    for tenant in names[:MAX_TENANTS]:
        with (folder / tenant).open("rb") as file:
            lines = file.read(MAX_FILE_BYTES).decode("utf-8", "replace").split("\n")
        head = _HEAD.fullmatch(lines[0])
        if head is not None:
            key = bytes.fromhex(head[1])
            credentials = {_pseudonym(key, "credential", line): line for line in lines[1:] if line}
            found[tenant] = _Tenant(key, credentials)
    return found


def _append(path: Path, credential: str) -> None:
    """Add a credential to a tenant's file. Half a line, of an attempt that a full disk cut off, names nothing."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        line = f"\n{credential}\n".encode()
        if os.write(fd, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(fd)
    finally:
        os.close(fd)


def _pseudonym(key: bytes, kind: str, name: str) -> str:
    digest = hmac.new(key, f"{kind}\0{name}".encode(), sha256).hexdigest()
    return f"anon.{digest[:DIGITS]}"
