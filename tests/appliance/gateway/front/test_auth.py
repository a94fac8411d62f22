"""The one resolver: keys, certificates, both."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from appliance.common.errors import UnauthenticatedError
from appliance.common.keys import KeyRecord, KeyTable, issue
from appliance.gateway.front.auth import Resolver
from appliance.gateway.generate_request import Principal
from tests.appliance.gateway.front.support import PEPPER, SPIFFE_ID, ScriptedService

KEY, DIGEST = issue("acme-1", PEPPER)
OTHER, OTHER_DIGEST = issue("globex-1", PEPPER)
STRAY, STRAY_DIGEST = issue("stray", PEPPER)
CREATED = datetime(2026, 1, 1, tzinfo=UTC)
TABLE = KeyTable(
    PEPPER,
    {
        "acme-1": KeyRecord(DIGEST, CREATED),
        "globex-1": KeyRecord(OTHER_DIGEST, CREATED),
        "stray": KeyRecord(STRAY_DIGEST, CREATED),
    },
)


HOME = "192.0.2.7"
"""Address of the caller."""


@pytest.fixture
def resolver() -> Resolver:
    """Over the scripted service's tenants."""
    return Resolver(ScriptedService(), lambda: TABLE)


@pytest.mark.parametrize(
    ("headers", "uris", "credential"),
    [
        ([f"Bearer {KEY}"], None, "key:acme-1"),
        ([f"bearer {KEY}"], None, "key:acme-1"),
        ([], [SPIFFE_ID], SPIFFE_ID),
        ([f"Bearer {KEY}"], [SPIFFE_ID], "key:acme-1"),
    ],
)
def test_a_proof_that_holds_gives_its_principal(resolver, headers, uris, credential):
    """A known key, a known certificate, or both of one tenant."""
    assert resolver.resolve(headers, uris, address=HOME) == Principal("acme", credential)


@pytest.mark.parametrize(
    ("headers", "uris"),
    [
        ([], None),
        ([], []),
        ([KEY], None),
        ([f"Basic {KEY}"], None),
        (["Bearer "], None),
        (["Bearer wrong"], None),
        ([f"Bearer {STRAY}"], None),
        ([f"Bearer {KEY}", f"Bearer {KEY}"], None),
        ([f"Bearer {KEY}" + " " * 300 + "x"], None),
        ([f"Bearer {OTHER}"], [SPIFFE_ID]),
        ([f"Bearer {KEY}"], ["spiffe://athanor.test/tenant/unknown"]),
        ([], [SPIFFE_ID, SPIFFE_ID]),
        ([f"Bearer {KEY}"], [SPIFFE_ID, "spiffe://athanor.test/tenant/b"]),
        ([], ["https://athanor.test/tenant/acme"]),
        ([], ["spiffe://athanor.test"]),
        ([], ["spiffe://athanor.test/tenant/../acme"]),
        ([], ["spiffe://athanor.test//acme"]),
        ([], ["spiffe://Athanor.test/tenant/acme"]),
        ([], [SPIFFE_ID + "\x00"]),
        ([], ["spiffe://a/" + "b" * 3000]),
    ],
)
def test_anything_else_is_refused_alike(resolver, headers, uris):
    """No proof, a bad one, one that the policy does not name, or two that disagree: one error, one text."""
    with pytest.raises(UnauthenticatedError) as caught:
        resolver.resolve(headers, uris, address=HOME)
    with pytest.raises(UnauthenticatedError) as nothing:
        resolver.resolve([], address=HOME)
    assert str(caught.value) == str(nothing.value)


def test_a_new_table_is_in_force_at_once():
    """Revoking a key needs no restart: the resolver asks for the table at every call."""
    tables = [TABLE]
    resolver = Resolver(ScriptedService(), lambda: tables[0])
    assert resolver.resolve([f"Bearer {KEY}"], address=HOME).tenant == "acme"
    tables[0] = KeyTable(PEPPER, {"acme-1": KeyRecord(DIGEST, CREATED, revoked=True)})
    with pytest.raises(UnauthenticatedError):
        resolver.resolve([f"Bearer {KEY}"], address=HOME)
