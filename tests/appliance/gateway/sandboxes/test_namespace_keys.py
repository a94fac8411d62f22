"""What the gateway tells the supervisor of tenants' retention: the changes, and everything to one that came anew."""

from __future__ import annotations

from appliance.common.control import CONTROL_VERSION, Control, Retention, Welcome
from appliance.gateway.sandboxes.namespace_keys import MAX_GONE, TENANTS_PER_QUERY, NamespaceKeys

TENANTS = {f"tenant-{number}": number % 2 for number in range(3 * TENANTS_PER_QUERY)}


def told(sent: list[Control]) -> list[dict[str, int]]:
    """Retention that was sent, which is forgotten then."""
    found = [message.kept for message in sent if isinstance(message, Retention)]
    sent.clear()
    return found


def test_a_reload_tells_what_has_changed() -> None:
    """All tenants at first, nothing where nothing changed, one that did, and one that is gone as 0."""
    sent = list[Control]()
    keys = NamespaceKeys(sent.append, lambda _keys: None)
    keys.set_retention(TENANTS)
    first = told(sent)
    assert [len(part) for part in first] == [TENANTS_PER_QUERY] * 3
    assert {name: kept for part in first for name, kept in part.items()} == TENANTS
    keys.set_retention(dict(TENANTS))
    assert told(sent) == []
    keys.set_retention(TENANTS | {"tenant-0": 1})
    assert told(sent) == [{"tenant-0": 1}]
    keys.set_retention({name: kept for name, kept in TENANTS.items() if name != "tenant-1"})
    assert told(sent) == [{"tenant-1": 0, "tenant-0": 0}]


def test_a_supervisor_that_comes_anew_is_told_all() -> None:
    """It may have what an earlier gateway said, so tenants without retention are named as well."""
    sent = list[Control]()
    keys = NamespaceKeys(sent.append, lambda _keys: None)
    keys.set_retention({"a": 1, "b": 0})
    sent.clear()
    keys.attached(Welcome(CONTROL_VERSION, "none", "none", []))
    assert told(sent) == [{"a": 1, "b": 0}]


def test_a_removal_that_was_not_heard_is_told_again() -> None:
    """Tenants that were removed while the connection was lost are named when it is there again, until they come back
    (control); a bounded number of them is remembered."""
    sent = list[Control]()
    keys = NamespaceKeys(sent.append, lambda _keys: None)
    keys.set_retention({"a": 1, "b": 1})
    keys.set_retention({"a": 1})
    sent.clear()
    keys.attached(Welcome(CONTROL_VERSION, "none", "none", []))
    assert told(sent) == [{"b": 0, "a": 1}]
    keys.set_retention({"a": 1, "b": 1})
    sent.clear()
    keys.attached(Welcome(CONTROL_VERSION, "none", "none", []))
    assert told(sent) == [{"a": 1, "b": 1}]
    keys.set_retention({f"t{number}": 1 for number in range(MAX_GONE + 5)})
    keys.set_retention({})
    assert len(keys._gone) == MAX_GONE
