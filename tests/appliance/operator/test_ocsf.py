"""Entries of the audit log as OCSF events: every kind is mapped, and has what the schema demands of its class."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.common.audit.entry import KINDS, entry
from appliance.operator.audit_entries import LoggedEntry
from appliance.operator.ocsf import _MAPPINGS, ocsf_event

REQUIRED = {"activity_id", "category_uid", "class_uid", "metadata", "severity_id", "time", "type_uid"}
"""Attributes that OCSF 1.6.0 demands of every event (https://schema.ocsf.io/1.6.0/classes/base_event)."""

OF_CLASS = {
    0: set(),
    2004: {"finding_info"},
    3002: {"user"},
    3004: {"entity"},
    6002: {"app"},
    6003: {"actor", "api", "src_endpoint"},
}
"""Class to the attributes that it demands beside."""

ACTIVITIES = {
    0: {0, 99},
    2004: {1, 2, 3},
    3002: {1, 2, 3},
    3004: {1, 2, 3, 4},
    6002: {1, 2, 3, 4, 99},
    6003: {1, 2, 3, 4},
}
"""Class to the activities of its list that are used here."""

AT_LEAST_ONE = {3002: {"service", "dst_endpoint"}}
"""Class to attributes of which it demands one or more."""

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "request": [{"outcome": "OK"}, {"outcome": "INTERNAL"}],
    "denied": [{"outcome": "RATE_LIMITED", "model": ""}],
    "refused": [{"outcome": "UNAUTHENTICATED"}],
    "policy": [{"outcome": "OK"}, {"outcome": "refused", "policy": ""}],
    "integrity": [{}],
    "sandbox": [{"state": state} for state in ("up", "down", "frozen", "thawed", "refused")],
    "card": [
        {"event": "lost", "model": ""},
        {"event": "moved"},
        {"event": "refused"},
        {"event": "trusted", "model": ""},
    ],
    "keys": [{}],
    "order": [
        {"what": "shred", "outcome": "OK"},
        {"what": "rotate", "outcome": "FAILED", "tenant": ""},
        {"what": "release", "outcome": "OK"},
    ],
    "call": [{"outcome": "OK"}, {"outcome": "BEGUN"}, {"outcome": "PERMISSION_DENIED", "subject": ""}],
    "admin": [{"outcome": "OK"}, {"outcome": "PERMISSION_DENIED", "subject": ""}],
    "model": [{"what": "pull", "outcome": "OK"}, {"what": "remove", "outcome": "FAILED", "model": ""}],
    "file": [{"event": "created"}, {"event": "deleted"}, {"event": "expired", "principal": ""}],
    "batch": [{"event": "created"}, {"event": "expired", "principal": ""}],
    "response": [{"event": "kept"}, {"event": "read"}, {"event": "expired", "principal": ""}],
    "lease": [{"what": "lent"}, {"what": "borrowed"}],
    "kv_export": [{"what": "allowed"}, {"what": "withdrawn"}, {"what": "shared"}, {"what": "not shredded"}],
    "prefill": [{"what": "asked"}, {"what": "served", "outcome": "refused"}],
    "gap": [{}],
    "log": [{"event": "opened"}, {"event": "damaged"}],
}
"""Kind to fields that change its event."""


def events(kind: str) -> list[dict[str, Any]]:
    """The events of a kind's examples; all other fields are filled in."""
    found = []
    for number, given in enumerate(EXAMPLES[kind]):
        filled = {name: f"some {name}" if of is str else 7 for name, of in KINDS[kind].items()}
        found.append(ocsf_event(LoggedEntry(number, 1_700_000_000_000, entry(kind, **(filled | given))), "log/1"))
    return found


def test_every_kind_is_mapped() -> None:
    """A kind that the log gets is mapped, and has examples here."""
    assert set(_MAPPINGS) == set(KINDS) == set(EXAMPLES)


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_has_what_its_class_demands(kind: str) -> None:
    """Required attributes of every event and of its class; numbers that are derived from others agree."""
    for event in events(kind):
        class_uid = event["class_uid"]
        assert REQUIRED | OF_CLASS[class_uid] <= set(event)
        assert event["category_uid"] == class_uid // 1000
        assert event["type_uid"] == class_uid * 100 + event["activity_id"]
        assert event["activity_id"] in ACTIVITIES[class_uid]
        assert event["activity_id"] != 99 or event["activity_name"]
        assert not AT_LEAST_ONE.get(class_uid) or AT_LEAST_ONE[class_uid] & set(event)
        assert event["metadata"]["version"] == "1.6.0"
        assert {"name", "vendor_name"} <= set(event["metadata"]["product"])
        assert event.get("count", 1) >= 1


def test_nothing_of_an_entry_is_missing_from_its_event() -> None:
    """Each value of an entry is somewhere in the event, whatever the kind."""

    def leaves(value: Any) -> list[str]:
        if isinstance(value, dict):
            return [leaf for one in value.values() for leaf in leaves(one)]
        if isinstance(value, list):
            return [leaf for one in value for leaf in leaves(one)]
        return [str(value)]

    for kind, fields in KINDS.items():
        for event in events(kind)[:1]:
            given = {name: f"some {name}" if of is str else 7 for name, of in fields.items()} | EXAMPLES[kind][0]
            assert {str(value) for value in given.values()} - {""} <= set(leaves(event))


def test_what_failed_is_marked() -> None:
    """Failures and successes of one kind differ by status, what is grave by severity."""
    answered, failed = events("request")
    assert (answered["status_id"], failed["status_id"], failed["status_code"]) == (1, 2, "INTERNAL")
    assert [event["severity_id"] for event in events("log")] == [1, 5]
    assert events("integrity")[0]["severity_id"] == 5
    assert [event["activity_id"] for event in events("sandbox")] == [3, 4, 99, 99, 99]
    assert [event["status_id"] for event in events("order")] == [1, 2, 1]
    assert [event["status_id"] for event in events("card")] == [2, 1, 2, 1]


def test_an_event_is_the_same_whenever_it_is_made() -> None:
    """The unique id is made of log and number: an event that comes twice is known for one."""
    first, again = events("denied"), events("denied")
    assert first == again
    assert first[0]["metadata"]["uid"] == "log/1#0"
    assert first[0]["metadata"]["tenant_uid"] == "some tenant"
    assert first[0]["count"] == 7
