"""API keys: issue, verify, and the file they are kept in."""

from __future__ import annotations

import hmac
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from appliance.common import keys
from appliance.common.credentials import read_key_records
from appliance.common.errors import ConfigError
from appliance.common.keys import KeyRecord, KeyTable, issue, parse_records, serialise_records

PEPPER = b"p" * 32
NOW = datetime(2026, 6, 1, tzinfo=UTC)


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
    """One HMAC and one constant-time comparison, whatever the outcome."""
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
    assert counts == {"digest": 1, "compare": 1}


def test_records_survive_the_file():
    """What is written is read back, in a stable order."""
    records = {"b": KeyRecord(b"\x01" * 32, NOW, NOW + timedelta(days=1), True), "a": KeyRecord(b"\x02" * 32, NOW)}
    text = serialise_records(records)
    assert parse_records(text) == records
    assert list(json.loads(text)["keys"]) == ["a", "b"]


_GOOD = {"hmac_sha256": "00" * 32, "created": "2026-01-01T00:00:00+00:00"}


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
    with pytest.raises(ConfigError, match=f"^{table}: expected one object"):
        read_key_records(table)
