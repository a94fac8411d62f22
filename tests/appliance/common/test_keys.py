"""API keys: issue, verify, and the file they are kept in."""

from __future__ import annotations

import hmac
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from appliance.common import keys
from appliance.common.credentials import read_key_records
from appliance.common.errors import ConfigError
from appliance.common.keys import (
    KeyRecord,
    KeyTable,
    Previous,
    digest_of_key,
    issue,
    parse_records,
    secret_name,
    serialise_records,
)
from appliance.common.refused_credentials import CredentialRefusal
from appliance.common.scopes import Scope

PEPPER = b"p" * 32
NOW = datetime(2026, 6, 1, tzinfo=UTC)
_GOOD = {"hmac_sha256": "00" * 32, "created": "2026-01-01T00:00:00+00:00"}


def _table(**changes: object) -> tuple[str, KeyTable]:
    plain, digest = issue("acme-1", PEPPER)
    return plain, KeyTable(PEPPER, {"acme-1": KeyRecord(digest, NOW - timedelta(days=1), **changes)})


def test_an_issued_key_verifies_under_its_pepper_only():
    """The right key gives its id; under another pepper it gives nothing."""
    plain, table = _table()
    assert table.verify(plain, NOW) == "acme-1"
    assert KeyTable(b"q" * 32, table.records).verify(plain, NOW) is None


@pytest.mark.parametrize("key_id", ["A.b_c-9", "a_" + "0" * 61, "0"])
def test_any_id_that_a_policy_can_spell_works(key_id):
    """Underscores and digits in an id do not blur where the secret begins."""
    plain, digest = issue(key_id, PEPPER)
    assert KeyTable(PEPPER, {key_id: KeyRecord(digest, NOW)}).verify(plain, NOW) == key_id


def test_keys_have_256_random_bits():
    """Two keys of one id differ, and a secret has 64 hex digits."""
    first, second = issue("a", PEPPER)[0], issue("a", PEPPER)[0]
    assert first != second
    assert len(first.rsplit("_", 1)[1]) == 64


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plain: "",
        lambda plain: plain[:-1],
        lambda plain: plain + "0",
        lambda plain: plain.upper(),
        lambda plain: plain.replace("acme-1", "acme-1_"),
        lambda plain: plain.replace("acme-1", "acme-2"),
        lambda plain: plain[:-1] + ("0" if plain[-1] != "0" else "1"),
        lambda plain: plain.replace("ath_", "sk-"),
        lambda plain: plain + "\n",
        lambda plain: "\u0660" * 140,
    ],
)
def test_a_spoiled_key_is_refused(spoil):
    """Any change to a key makes it worthless."""
    plain, table = _table()
    assert table.verify(spoil(plain), NOW) is None
    assert table.verify(plain, NOW) == "acme-1"


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({"revoked": True}, False),
        ({"expires": NOW}, False),
        ({"expires": NOW + timedelta(seconds=1)}, True),
        ({"expires": NOW - timedelta(days=400)}, False),
    ],
)
def test_expiry_and_revocation(changes, holds):
    """A key holds until the second it expires, and never once revoked."""
    plain, table = _table(**changes)
    assert (table.verify(plain, NOW) is not None) is holds


@pytest.mark.parametrize("case", ["right", "wrong", "unknown", "malformed", "revoked"])
def test_every_outcome_costs_the_same_work(case, monkeypatch):
    """One HMAC and two constant-time comparisons, whatever the outcome."""
    plain, table = _table(revoked=case == "revoked")
    tried = {"wrong": "ath_acme-1_" + "0" * 64, "unknown": "ath_nobody_" + "0" * 64, "malformed": "x"}.get(case, plain)
    counts = {"digest": 0, "compare": 0}
    real_digest, real_compare = hmac.digest, hmac.compare_digest

    def digest(*arguments):
        counts["digest"] += 1
        return real_digest(*arguments)

    def compare(*arguments):
        counts["compare"] += 1
        return real_compare(*arguments)

    monkeypatch.setattr(keys.hmac, "digest", digest)
    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    table.verify(tried, NOW)
    assert counts == {"digest": 1, "compare": 2}


def _rotated() -> tuple[str, str, KeyTable]:
    """An old key, a new one of the same id, and the table; the old one holds for a day from NOW on."""
    old, table = _table()
    new, digest = issue("acme-1", PEPPER)
    record = table.records["acme-1"].rotated(digest, NOW, NOW + timedelta(days=1), None)
    return old, new, KeyTable(PEPPER, {"acme-1": record})


def test_both_secrets_of_a_rotated_key_hold_for_a_while():
    """Old and new secret give the one id, under names of their own; after the overlap only the new one does. A request
    that was proved with the old one holds as long. Control: a third secret never does."""
    old, new, table = _rotated()
    first, second = table.check(old, NOW), table.check(new, NOW)
    assert (first.key_id, second.key_id) == ("acme-1", "acme-1")
    assert first.secret != second.secret == secret_name("acme-1", NOW)
    assert table.holds("acme-1", NOW, first.secret) and table.holds("acme-1", NOW, second.secret)
    later = NOW + timedelta(days=1)
    assert table.check(old, later).refusal is CredentialRefusal.KEY_EXPIRED
    assert table.check(new, later).key_id == "acme-1"
    assert not table.holds("acme-1", later, first.secret) and table.holds("acme-1", later, second.secret)
    assert table.check("ath_acme-1_" + "0" * 64, NOW).refusal is CredentialRefusal.KEY_WRONG


def test_a_rotation_does_not_lengthen_a_life():
    """The old secret ends when it would have ended anyway, and a rotation without overlap ends it at once."""
    record = KeyRecord(b"\x01" * 32, NOW - timedelta(days=1), NOW + timedelta(hours=1))
    kept = record.rotated(b"\x02" * 32, NOW, NOW + timedelta(days=7), None).previous
    assert kept is not None and kept.expires == record.expires
    assert record.rotated(b"\x02" * 32, NOW, NOW, None).previous is None


def test_revoking_ends_both_secrets():
    """Nothing of a revoked key holds, and what it was proved with before does not either."""
    old, new, table = _rotated()
    names = [table.check(one, NOW).secret for one in (old, new)]
    gone = KeyTable(PEPPER, {"acme-1": table.records["acme-1"].revoke()})
    assert gone.check(new, NOW).refusal is CredentialRefusal.KEY_REVOKED
    assert gone.check(old, NOW).refusal is CredentialRefusal.KEY_WRONG
    assert not any(gone.holds("acme-1", NOW, name) for name in names)


@pytest.mark.parametrize(
    ("tried", "changes", "refusal"),
    [
        ("x", {}, CredentialRefusal.MALFORMED),
        ("ath_nobody_" + "0" * 64, {}, CredentialRefusal.KEY_UNKNOWN),
        ("ath_acme-1_" + "0" * 64, {}, CredentialRefusal.KEY_WRONG),
        ("", {"revoked": True}, CredentialRefusal.KEY_REVOKED),
        ("", {"expires": NOW}, CredentialRefusal.KEY_EXPIRED),
        ("", {}, None),
    ],
)
def test_a_refusal_has_its_reason(tried, changes, refusal):
    """For metrics and the audit log; a right key (control) has none, and gives its scopes."""
    plain, table = _table(scopes=frozenset({Scope.MODELS}), **changes)
    found = table.check(tried or plain, NOW)
    assert found.refusal is refusal
    assert (found.key_id, found.scopes) == (("acme-1", frozenset({Scope.MODELS})) if refusal is None else ("", None))


def test_a_key_made_elsewhere_has_its_digest():
    """The digest of a whole key is the one that it was issued with; of another id, or no key, there is none."""
    plain, digest = issue("acme-1", PEPPER)
    assert digest_of_key("acme-1", plain, PEPPER) == digest
    for key_id, text in (("acme-2", plain), ("acme-1", plain[:-1]), ("acme-1", "")):
        with pytest.raises(ConfigError):
            digest_of_key(key_id, text, PEPPER)


@pytest.mark.parametrize(
    ("broken", "line", "told"),
    [
        ('"hmac_sha256": "zz"', 5, "b-2: hmac_sha256 must be"),
        ('"hmac_sha256": 5', 5, "b-2: hmac_sha256 must be"),
        (f'"hmac_sha256": "{"0" * 64}", "scopes": ["all"]', 5, "b-2: scopes: 'all' is no scope; take generate"),
    ],
)
def test_a_broken_entry_is_named_with_its_line(broken, line, told):
    """The line of the entry's id, whatever stands in the entries before it, an id of a field's name among them."""
    text = (
        '{\n "keys": {\n'
        f'  "created": {json.dumps({**_GOOD, "scopes": []})},\n'
        f'  "a-1": {{"hmac_sha256": "{"0" * 64}", "created": "2026-01-01T00:00:00+00:00"}},\n'
        f'  "b-2": {{"created": "2026-01-01T00:00:00+00:00", {broken}}}\n }}\n}}\n'
    )
    with pytest.raises(ConfigError, match=f"^credentials: line {line}: {re.escape(told)}"):
        parse_records(text)


def test_an_id_that_stands_twice_is_named_with_its_line():
    """JSON with one key twice is refused by the second one's place."""
    entry = json.dumps(_GOOD)
    with pytest.raises(ConfigError, match="^credentials: line 3: the key a is there twice"):
        parse_records(f'{{"keys": {{"a": {entry},\n"b": {entry},\n"a": {entry}}}}}')


def test_records_survive_the_file():
    """What is written is read back, in a stable order, and is spelt as the standard library would spell it."""
    records = {
        "b": KeyRecord(b"\x01" * 32, NOW, NOW + timedelta(days=1), True),
        "a": KeyRecord(b"\x02" * 32, NOW),
        "c": KeyRecord(
            b"\x03" * 32,
            NOW,
            scopes=frozenset({Scope.MODELS, Scope.GENERATE}),
            tenant="acme",
            previous=Previous(b"\x04" * 32, NOW - timedelta(days=9), NOW + timedelta(days=1)),
        ),
        "d": KeyRecord(b"\x05" * 32, NOW, scopes=frozenset()),
    }
    text = serialise_records(records)
    assert parse_records(text) == records
    assert list(json.loads(text)["keys"]) == ["a", "b", "c", "d"]
    for written in (text, serialise_records({})):
        assert written == json.dumps(json.loads(written), indent=2) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"keys": []}',
        '{"keys": {}, "more": 1}',
        '{"keys": {"a": {}, "a": {}}}',
        json.dumps({"keys": {"-bad": _GOOD}}),
        json.dumps({"keys": {"a": {**_GOOD, "hmac_sha256": "zz"}}}),
        json.dumps({"keys": {"a": {**_GOOD, "hmac_sha256": 5}}}),
        json.dumps({"keys": {"a": {**_GOOD, "created": "yesterday"}}}),
        json.dumps({"keys": {"a": {**_GOOD, "created": "2026-01-01T00:00:00"}}}),
        json.dumps({"keys": {"a": {**_GOOD, "expires": None}}}),
        json.dumps({"keys": {"a": {**_GOOD, "revoked": 0}}}),
        json.dumps({"keys": {"a": {**_GOOD, "scope": "all"}}}),
        json.dumps({"keys": {"a": {**_GOOD, "scopes": "generate"}}}),
        json.dumps({"keys": {"a": {**_GOOD, "scopes": ["everything"]}}}),
        json.dumps({"keys": {"a": {**_GOOD, "scopes": [1]}}}),
        json.dumps({"keys": {"a": {**_GOOD, "scopes": None}}}),
        json.dumps({"keys": {"a": {**_GOOD, "tenant": "A B"}}}),
        json.dumps({"keys": {"a": {**_GOOD, "tenant": 1}}}),
        json.dumps({"keys": {"a": {**_GOOD, "previous": {}}}}),
        json.dumps({"keys": {"a": {**_GOOD, "previous": None}}}),
        json.dumps({"keys": {"a": {**_GOOD, "previous": {**_GOOD, "expires": "soon"}}}}),
        json.dumps({"keys": {"a": {**_GOOD, "previous": {**_GOOD, "expires": _GOOD["created"], "more": 1}}}}),
        json.dumps({"keys": {"a": []}}),
        '{"keys": {"\\ud800": {}}}',
        "\ud800",
    ],
)
def test_a_bad_file_is_refused_by_type(text):
    """Only a file of exactly the format is read; anything else is a ConfigError."""
    assert parse_records(json.dumps({"keys": {"a": _GOOD}}))
    with pytest.raises(ConfigError):
        parse_records(text)


@pytest.mark.parametrize(
    ("key_id", "pepper"), [("", PEPPER), ("-a", PEPPER), ("a b", PEPPER), ("a" * 64, PEPPER), ("a", b"short")]
)
def test_bad_ids_and_peppers_are_refused(key_id, pepper):
    """An id that could not be split off again, or a guessable pepper, issues nothing."""
    with pytest.raises(ConfigError):
        issue(key_id, pepper)


def test_a_table_shows_no_secret():
    """Neither pepper nor digests appear in its repr, so they cannot reach a log."""
    _, table = _table()
    assert repr(table) == "KeyTable(1 key)"


def test_a_broken_table_is_named_by_its_path(tmp_path: Path) -> None:
    """Which file is broken, and where in it. Control: a whole table is read."""
    table = tmp_path / "credentials.json"
    table.write_text('{"keys": {}}')
    table.chmod(0o640)
    assert read_key_records(table) == {}
    table.write_text('{"keys":\n {,}}')
    with pytest.raises(ConfigError) as raised:
        read_key_records(table)
    assert str(raised.value).startswith(f"{table}: not valid JSON: ") and "line 2" in str(raised.value)
    table.write_text("[]")
    with pytest.raises(ConfigError, match=f"^{table}: line 1: expected one object"):
        read_key_records(table)
