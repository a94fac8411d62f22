"""The one resolver: keys, certificates, both."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from appliance.common.errors import ScopeError, UnauthenticatedError
from appliance.common.keys import KeyRecord, KeyTable, issue, secret_name
from appliance.common.refused_credentials import CredentialRefusal
from appliance.common.scopes import Scope
from appliance.gateway.front.auth import Resolver, holds, require
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


@pytest.mark.parametrize(
    ("headers", "uris", "reason"),
    [
        ([], None, CredentialRefusal.ABSENT),
        (["Bearer wrong"], None, CredentialRefusal.MALFORMED),
        ([f"Basic {KEY}"], None, CredentialRefusal.MALFORMED),
        ([f"Bearer {KEY}"] * 2, None, CredentialRefusal.MALFORMED),
        (["Bearer ath_nobody_" + "0" * 64], None, CredentialRefusal.KEY_UNKNOWN),
        (["Bearer ath_acme-1_" + "0" * 64], None, CredentialRefusal.KEY_WRONG),
        ([f"Bearer {STRAY}"], None, CredentialRefusal.NO_TENANT),
        ([], ["spiffe://athanor.test"], CredentialRefusal.CERTIFICATE),
        ([f"Bearer {OTHER}"], [SPIFFE_ID], CredentialRefusal.DISAGREE),
    ],
)
def test_the_operator_learns_the_reason(resolver, headers, uris, reason):
    """The error has it for metrics and the audit log, not in its text (shown above)."""
    with pytest.raises(UnauthenticatedError) as caught:
        resolver.resolve(headers, uris, address=HOME)
    assert caught.value.refusal == reason


def test_each_use_of_a_key_is_told_and_no_refusal():
    """The name of the secret and the time; a refused key and a certificate tell nothing."""
    told = []
    now = datetime(2026, 6, 1, tzinfo=UTC)
    resolver = Resolver(ScriptedService(), lambda: TABLE, lambda: now, lambda *use: told.append(use))
    principal = resolver.resolve([f"Bearer {KEY}"], address=HOME)
    resolver.resolve([], [SPIFFE_ID], address=HOME)
    for wrong in (STRAY, KEY[:-1]):
        with pytest.raises(UnauthenticatedError):
            resolver.resolve([f"Bearer {wrong}"], address=HOME)
    assert told == [(principal.secret, now.timestamp())] == [(secret_name("acme-1", CREATED), now.timestamp())]


def test_a_credential_without_the_scope_is_refused():
    """The error names what it is limited to and what is needed; with the scope, or without scopes at all (controls), it
    goes on."""
    limited = Principal("acme", "key:acme-1", scopes=frozenset({Scope.MODELS, Scope.EMBEDDINGS}))
    with pytest.raises(ScopeError, match="limited to embeddings, models; this needs generate") as caught:
        require(limited, Scope.GENERATE)
    assert caught.value.refusal == CredentialRefusal.SCOPE and caught.value.details == {"scope": "generate"}
    with pytest.raises(ScopeError, match="limited to nothing"):
        require(Principal("acme", "key:acme-1", scopes=frozenset()), Scope.MODELS)
    require(limited, Scope.EMBEDDINGS)
    require(Principal("acme", "key:acme-1"), Scope.GENERATE)


def test_a_running_request_is_judged_by_the_secret_that_proved_it():
    """After a rotation, one that began with the old secret holds until that one ends; a certificate holds."""
    now = datetime(2026, 6, 1, tzinfo=UTC)
    record = TABLE.records["acme-1"].rotated(b"\x01" * 32, now, now + timedelta(hours=1), None)
    table = KeyTable(PEPPER, {"acme-1": record})
    caller = Resolver(ScriptedService(), lambda: table, lambda: now).resolve([f"Bearer {KEY}"], address=HOME)
    assert holds(caller, table, now)
    assert not holds(caller, table, now + timedelta(hours=1))
    assert holds(Principal("acme", SPIFFE_ID), table, now)
    assert not holds(caller, KeyTable(PEPPER, {}), now)


def test_a_new_table_is_in_force_at_once():
    """Revoking a key needs no restart: the resolver asks for the table at every call."""
    tables = [TABLE]
    resolver = Resolver(ScriptedService(), lambda: tables[0])
    assert resolver.resolve([f"Bearer {KEY}"], address=HOME).tenant == "acme"
    tables[0] = KeyTable(PEPPER, {"acme-1": KeyRecord(DIGEST, CREATED, revoked=True)})
    with pytest.raises(UnauthenticatedError):
        resolver.resolve([f"Bearer {KEY}"], address=HOME)
