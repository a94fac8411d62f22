"""Usage of tenants' end users in the usage book, by day, and the keys of their pseudonyms. Blocks.

The table is bounded: of one tenant and day ``MAX_USERS`` have rows of their own, all further ones share the row
``OTHERS``. What an order destroys is destroyed when the order's entry is counted, so a book that is made again from the
log destroys it at the same place.
"""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Sequence

from appliance.common.audit.entry import Entry
from appliance.common.usage.periods import MOST
from appliance.common.usage.pseudonyms import KEY_BYTES, OTHERS, name_digest, pseudonym

MAX_USERS = 1_000
"""End users of one tenant that have rows of their own in a day: some 100 kB, whatever names a tenant invents."""

DESTROYING = frozenset({"shred", "rotate"})
"""Orders after which nothing tells what a tenant's end users used."""

_ADD = f"""
UPDATE used_by_user SET requests = requests + 1, input = MIN(input + ?, {MOST}), cached = MIN(cached + ?, {MOST}),
    output = MIN(output + ?, {MOST}), reasoning = MIN(reasoning + ?, {MOST}), cost = MIN(cost + ?, {MOST})
    WHERE day = ? AND tenant = ? AND user = ?
"""  # noqa: S608 - a constant
_BEGIN = """
INSERT INTO used_by_user (input, cached, output, reasoning, cost, day, tenant, user, requests)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, 1)
"""
_NUMBER = "SELECT COUNT(*) FROM used_by_user WHERE day = ? AND tenant = ?"


def count(connection: sqlite3.Connection, day: int, one: Entry, price: int) -> None:
    """Add the entry of a request that names an end user to that user's day."""
    fields = one.fields
    names = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    numbers = tuple(int(fields.get(name, 0)) for name in names)
    tenant, user = str(fields["tenant"]), str(fields["end_user"])
    if connection.execute(_ADD, (*numbers, price, day, tenant, user)).rowcount:
        return
    (known,) = connection.execute(_NUMBER, (day, tenant)).fetchone()
    if known >= MAX_USERS:
        user = OTHERS
        if connection.execute(_ADD, (*numbers, price, day, tenant, user)).rowcount:
            return
    connection.execute(_BEGIN, (*numbers, price, day, tenant, user))


def carry_out(connection: sqlite3.Connection, order: Entry) -> bool:
    """Destroy what the entry of an order says was destroyed: a tenant's key, and what its end users used. Returns
    whether it says so."""
    fields = order.fields
    destroys = fields["what"] in DESTROYING and fields["outcome"] == "OK" and bool(fields["tenant"])
    if destroys:
        forget(connection, str(fields["tenant"]))
    return destroys


def forget(connection: sqlite3.Connection, tenant: str) -> None:
    """Remove what a tenant's end users used, and the key of their pseudonyms."""
    for table in ("used_by_user", "user_keys"):
        connection.execute(f"DELETE FROM {table} WHERE tenant = ?", (tenant,))  # noqa: S608 - constants


def key_of(connection: sqlite3.Connection, tenant: str) -> bytes:
    """Return the key of a tenant's pseudonyms, drawn at first need."""
    row = connection.execute("SELECT key FROM user_keys WHERE tenant = ?", (tenant,)).fetchone()
    if row is not None:
        return bytes(row[0])
    key = secrets.token_bytes(KEY_BYTES)
    connection.execute("INSERT INTO user_keys VALUES (?, ?)", (tenant, key))
    return key


def known_pseudonym(connection: sqlite3.Connection, tenant: str, digest: str) -> str:
    """Return the pseudonym of a tenant's end user by the digest of its name; empty where the tenant has no key, and so
    no end user in the book."""
    row = connection.execute("SELECT key FROM user_keys WHERE tenant = ?", (tenant,)).fetchone()
    return pseudonym(bytes(row[0]), digest) if row is not None else ""


def pseudonyms(connection: sqlite3.Connection, names: Sequence[str], tenants: Sequence[str]) -> list[str]:
    """Return the pseudonyms of end users by their names, of these tenants or of all."""
    keys = connection.execute("SELECT tenant, key FROM user_keys").fetchall()
    chosen = [bytes(key) for tenant, key in keys if not tenants or tenant in tenants]
    return [pseudonym(key, name_digest(name)) for key in chosen for name in names]
