"""Responses of tenants in the book: kept whole, each sealed under its id, until their time is over. Blocks."""

from __future__ import annotations

import sqlite3

from appliance.common.audit.entry import entry
from appliance.common.batches.messages import Accepted, ResponseDelete, ResponseFound, ResponseKeep, ResponseRead
from appliance.common.batches.values import (
    DAY_S,
    MAX_RESPONSE_BYTES,
    MAX_RESPONSE_ID_CHARS,
    MAX_RESPONSES,
    RESPONSE_KEEP_S,
)
from appliance.common.errors import ControlError
from appliance.supervisor.batches.book import StoreBook, StoreRefusedError

_KIND = "response"
"""Kind of the name under which one is sealed."""


class StoredResponses:
    """Responses in one book; ``most`` are the bytes that all tenants together may keep."""

    def __init__(self, book: StoreBook, most: int) -> None:
        self._book = book
        self._most = most

    def keep(self, call: ResponseKeep, data: bytes) -> Accepted:
        """Keep a response.

        Raises:
            StoreRefusedError: its tenant has too many or too much, or there is one of this id.
            ControlError: no gateway sends that.
        """
        if not 0 < len(call.response) <= MAX_RESPONSE_ID_CHARS or len(data) > MAX_RESPONSE_BYTES:
            raise ControlError("a response that no gateway keeps")
        book, tenant = self._book, call.tenant
        with book.change() as connection:
            if connection.execute("SELECT 1 FROM responses WHERE id = ?", (call.response,)).fetchone() is not None:
                raise StoreRefusedError("in_use")
            (count,) = connection.execute("SELECT COUNT(*) FROM responses WHERE tenant = ?", (tenant,)).fetchone()
            if count >= MAX_RESPONSES:
                raise StoreRefusedError("too_many_responses", MAX_RESPONSES)
            if book.used(connection, tenant) + len(data) > call.most:
                raise StoreRefusedError("tenant_full", call.most)
            if book.used_in_all(connection) + len(data) > self._most:
                raise StoreRefusedError("appliance_full")
            now, sealed = book.now, book.seal(tenant, _KIND, call.response, 0, data)
            connection.execute(
                "INSERT INTO responses (id, tenant, kek, size, created, expires, data) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (call.response, tenant, book.kek(tenant), len(data), now, now + RESPONSE_KEEP_S, sealed),
            )
            book.note_used(connection, tenant, len(data))
            self._audit(connection, "kept", tenant, call.principal, call.response, len(data))
        return Accepted()

    def read(self, call: ResponseRead) -> tuple[ResponseFound, bytes]:
        """Return a response. That it was read is told to the audit log once a day, so that no tenant can fill the log
        by reading.

        Raises:
            StoreRefusedError: there is none of this tenant, or it does not open.
        """
        book = self._book
        with book.change() as connection:
            size = _size(connection, call.tenant, call.response, book.now)
            created, expires, read_day, sealed = connection.execute(
                "SELECT created, expires, read_day, data FROM responses WHERE id = ?", (call.response,)
            ).fetchone()
            data = book.unseal(call.tenant, _KIND, call.response, 0, sealed)
            today = book.now // DAY_S
            if read_day != today:
                connection.execute("UPDATE responses SET read_day = ? WHERE id = ?", (today, call.response))
                self._audit(connection, "read", call.tenant, call.principal, call.response, size)
        return ResponseFound(created, expires), data

    def delete(self, call: ResponseDelete) -> Accepted:
        """Delete a response.

        Raises:
            StoreRefusedError: there is none of this tenant.
        """
        with self._book.change() as connection:
            size = _size(connection, call.tenant, call.response, self._book.now)
            self.remove(connection, call.response)
            self._audit(connection, "deleted", call.tenant, call.principal, call.response, size)
        return Accepted()

    def expire(self, most: int) -> int:
        """Remove at most so many responses whose time is over; returns how many there were."""
        with self._book.change() as connection:
            rows = connection.execute(
                "SELECT id, tenant, size FROM responses WHERE expires <= ? LIMIT ?", (self._book.now, most)
            ).fetchall()
            for response, tenant, size in rows:
                self.remove(connection, response)
                self._audit(connection, "expired", tenant, "", response, size)
        return len(rows)

    def remove(self, connection: sqlite3.Connection, response: str) -> None:
        """Remove a response from the book."""
        row = connection.execute("SELECT tenant, size FROM responses WHERE id = ?", (response,)).fetchone()
        if row is not None:
            connection.execute("DELETE FROM responses WHERE id = ?", (response,))
            self._book.note_used(connection, row[0], -row[1])

    def _audit(
        self, connection: sqlite3.Connection, event: str, tenant: str, principal: str, response: str, size: int
    ) -> None:
        one = entry("response", event=event, tenant=tenant, principal=principal, response=response, bytes=size)
        day = self._book.now // DAY_S if event == "read" else 0
        self._book.note_entry(connection, f"{response} {event} {day}", one)


def _size(connection: sqlite3.Connection, tenant: str, response: str, now: int) -> int:
    """Return the bytes of a response of a tenant.

    Raises:
        StoreRefusedError: there is none, or its time is over.
    """
    row = connection.execute("SELECT tenant, size, expires FROM responses WHERE id = ?", (response,)).fetchone()
    if row is None or row[0] != tenant or row[2] <= now:
        raise StoreRefusedError("unknown")
    return int(row[1])
