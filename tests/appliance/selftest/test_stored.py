"""G1 and G9 of what tenants have kept: the rows, and that each of them can fail."""

from __future__ import annotations

import asyncio

import pytest

from appliance.selftest.g1_stored import stored_rows
from appliance.selftest.g9_stored import kept_rows
from appliance.selftest.result import Result
from appliance.supervisor.batches import responses
from appliance.supervisor.batches.store import BatchStore
from isolation.keys.kept import KeptSealer


def told(rows: list[Result]) -> dict[str, str]:
    """Verdicts by id; figures show when a test fails."""
    for row in rows:
        print(row)
    return {row.id: row.verdict for row in rows}


def test_what_is_kept_is_its_tenants_alone_and_ends_with_the_key() -> None:
    """All rows pass, each with its control."""
    assert told(asyncio.run(stored_rows(1))) == {"G1.stored": "pass", "G1.stored.control": "pass"}
    verdicts = told(asyncio.run(kept_rows(1, full=True)))
    assert verdicts == dict.fromkeys(("G9.stored", "G9.stored.control", "G9.kept", "G9.kept.control"), "pass")


def test_a_store_that_asks_no_tenant_fails_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row finds responses that are given to any tenant."""

    def anybodys(connection, tenant, response, now):
        return connection.execute("SELECT size FROM responses WHERE id = ?", (response,)).fetchone()[0]

    monkeypatch.setattr(responses, "_size", anybodys)
    monkeypatch.setattr(KeptSealer, "open", lambda _self, _name, sealed: sealed)
    monkeypatch.setattr(KeptSealer, "seal", lambda _self, _name, data: data)
    assert told(asyncio.run(stored_rows(1)))["G1.stored"] == "fail"


def test_a_store_that_does_not_seal_or_forget_fails_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text on the disk, and things that outlive their key, are found by the rows."""
    monkeypatch.setattr(KeptSealer, "open", lambda _self, _name, sealed: sealed)
    monkeypatch.setattr(KeptSealer, "seal", lambda _self, _name, data: data)
    monkeypatch.setattr(BatchStore, "shred", lambda _self, _tenant: 0)
    verdicts = told(asyncio.run(kept_rows(1, full=False)))
    assert (verdicts["G9.stored"], verdicts["G9.kept"]) == ("fail", "fail")
