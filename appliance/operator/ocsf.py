"""Entries of the audit log as events of the Open Cybersecurity Schema Framework, which security tools take. Pure.

The form is OCSF 1.6.0 (https://schema.ocsf.io/1.6.0). What the log has and the schema has no place for is under
``unmapped``, by the log's own names. A class says what happened: API Activity (6003) a request that was allowed or
denied, Authentication (3002) calls without a valid credential, Entity Management (3004) policies, keys, models,
files, batches and orders of the operator, Application Lifecycle (6002) sandboxes and GPUs, Detection Finding (2004)
requests ended for a block that was another tenant's, Base Event (0) the log itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from appliance.common.version import VERSION
from appliance.operator.audit_entries import LoggedEntry

OCSF_VERSION = "1.6.0"

SUCCESS, FAILURE = 1, 2
"""Values of ``status_id``."""

INFORMATIONAL, LOW, MEDIUM, CRITICAL = 1, 2, 3, 5
"""Values of ``severity_id``."""

CREATE, READ, UPDATE, DELETE, OTHER = 1, 2, 3, 4, 99
"""Values of ``activity_id`` in the classes about calls and entities; ``OTHER`` in every class."""

LOGON, START, STOP = 1, 3, 4
"""Values of ``activity_id`` of an authentication, and of the life of an application."""

SERVICE = "Athanor"
SERVED = "OK"
"""Outcome of a request that was answered."""

Values = Mapping[str, str | int]


@dataclass(frozen=True, slots=True)
class _Event:
    """What a kind of entry gives an event beside what all events have."""

    class_uid: int
    activity_id: int
    message: str
    status_id: int = SUCCESS
    severity_id: int = INFORMATIONAL
    attributes: Mapping[str, Any] = field(default_factory=dict)


def ocsf_event(one: LoggedEntry, log: str) -> dict[str, Any]:
    """Return an entry of the log with this name as an event. ``metadata.uid`` is the same whenever it is exported, and
    ``metadata.sequence`` is the entry's number."""
    fields = one.entry.fields
    event = _MAPPINGS[one.entry.kind](fields)
    metadata = {
        "version": OCSF_VERSION,
        "product": {"name": SERVICE, "vendor_name": SERVICE, "version": VERSION},
        "uid": f"{log}#{one.number}",
        "sequence": one.number,
        "log_name": log,
        "event_code": one.entry.kind,
    }
    if fields.get("tenant"):
        metadata["tenant_uid"] = fields["tenant"]
    common = {
        "time": one.time_ms,
        "class_uid": event.class_uid,
        "category_uid": event.class_uid // 1_000,
        "activity_id": event.activity_id,
        "type_uid": event.class_uid * 100 + event.activity_id,
        "severity_id": event.severity_id,
        "status_id": event.status_id,
        "message": event.message,
        "metadata": metadata,
        "unmapped": dict(fields),
    }
    if event.activity_id == OTHER:
        common["activity_name"] = event.message
    if "count" in fields:
        common["count"] = max(1, int(fields["count"]))
    return {**common, **event.attributes}


def _call(values: Values) -> dict[str, Any]:
    """Attributes of a call of a known principal."""
    operation = values.get("operation") or "request"
    return {
        "actor": {"user": {"uid": values["principal"], "org": {"uid": values["tenant"]}}},
        "api": {"operation": operation, "service": {"name": SERVICE}, "response": {"message": values["outcome"]}},
        # The log has no addresses of clients; the schema demands a source.
        "src_endpoint": {"name": "not recorded"},
        "resources": [{"name": values["model"], "type": "model"}],
        "status_code": values["outcome"],
        "status_detail": values["rule"],
        "unmapped": {name: value for name, value in values.items() if name not in ("tenant", "principal", "outcome")},
    }


def _request(values: Values) -> _Event:
    served = values["outcome"] == SERVED
    message = "a request was answered" if served else "an allowed request failed"
    attributes = _call(values)
    attributes["api"]["request"] = {"uid": values["request"]}
    return _Event(6003, CREATE, message, SUCCESS if served else FAILURE, attributes=attributes)


def _denied(values: Values) -> _Event:
    return _Event(6003, CREATE, "requests were denied by the policy", FAILURE, LOW, _call(values))


def _refused(values: Values) -> _Event:
    attributes = {
        "user": {"name": "unknown"},
        "service": {"name": SERVICE},
        "status_code": values["outcome"],
        "status_detail": values["reason"],
    }
    return _Event(3002, LOGON, "calls without a valid credential were refused", FAILURE, MEDIUM, attributes)


def _policy(values: Values) -> _Event:
    good = str(values["outcome"]).upper() == SERVED
    attributes: dict[str, Any] = {"entity": {"name": "policy", "type": "policy", "uid": values["policy"] or "not read"}}
    if values["by"]:
        attributes["actor"] = {"user": {"name": values["by"]}}
    message = "a policy was put in force" if good else "a policy was refused"
    return _Event(3004, UPDATE, message, SUCCESS if good else FAILURE, INFORMATIONAL if good else LOW, attributes)


def _keys(values: Values) -> _Event:
    attributes = {"entity": {"name": "keys", "type": "keys"}}
    return _Event(3004, CREATE, f"keys: {values['what']}", attributes=attributes)


def _order(values: Values) -> _Event:
    good = str(values["outcome"]).upper() == SERVED
    about = "reserved spend of a tenant" if values["what"] == "release" else "keys of a tenant"
    attributes = {
        "entity": {"name": str(values["tenant"]) or "all tenants", "type": about},
        "actor": {"user": {"uid": str(values["user"])}},
        "status_code": values["outcome"],
    }
    activity = DELETE if values["what"] == "shred" else UPDATE
    message = f"{about}: {values['what']}"
    return _Event(3004, activity, message, SUCCESS if good else FAILURE, LOW, attributes)


def _operator(values: Values) -> _Event:
    good = values["outcome"] in (SERVED, "BEGUN")
    attributes = {
        "entity": {
            "name": str(values["subject"] or values["tenant"]) or "the appliance",
            "type": "call of the operator",
        },
        "actor": {"user": {"uid": str(values["caller"] or values["user"])}},
        "status_code": values["outcome"],
    }
    message = f"operator: {values['method']}"
    name = str(values["method"]).rpartition("/")[2]
    activity = READ if name.startswith(_READS) else UPDATE
    return _Event(3004, activity, message, SUCCESS if good else FAILURE, INFORMATIONAL if good else LOW, attributes)


def _admin(values: Values) -> _Event:
    good = values["outcome"] in (SERVED, "BEGUN")
    attributes = {
        "entity": {"name": str(values["subject"]) or "the appliance", "type": "order of an operator elsewhere"},
        "actor": {"user": {"uid": str(values["caller"]) or "unknown"}},
        "status_code": values["outcome"],
    }
    message = f"operator: {values['route']}"
    return _Event(3004, UPDATE, message, SUCCESS if good else FAILURE, INFORMATIONAL if good else LOW, attributes)


def _model(values: Values) -> _Event:
    good = str(values["outcome"]).upper() == SERVED
    attributes = {
        "entity": {"name": str(values["model"]) or "a model", "type": "model", "uid": values["model_digest"] or "none"},
        "actor": {"user": {"uid": str(values["user"])}},
        "status_code": values["outcome"],
    }
    activity = DELETE if values["what"] == "remove" else CREATE
    message = f"cache of models: {values['what']}"
    return _Event(3004, activity, message, SUCCESS if good else FAILURE, LOW, attributes)


def _file(values: Values) -> _Event:
    return _kept(values, "file", str(values["file"]))


def _batch(values: Values) -> _Event:
    failed = values["event"] in ("failed", "expired")
    return _kept(values, "batch", str(values["batch"]), FAILURE if failed else SUCCESS)


def _response(values: Values) -> _Event:
    return _kept(values, "response", str(values["response"]))


def _kept(values: Values, kind: str, uid: str, status: int = SUCCESS) -> _Event:
    """An event about something that is kept for a tenant; without a principal the appliance did it."""
    event = str(values["event"])
    attributes = {
        "entity": {"name": uid, "type": kind, "uid": uid},
        "actor": {"user": {"uid": str(values["principal"]) or SERVICE, "org": {"uid": values["tenant"]}}},
    }
    activity = _KEPT.get(event, UPDATE)
    return _Event(3004, activity, f"{kind}: {event}", status, attributes=attributes)


def _sandbox(values: Values) -> _Event:
    state = str(values["state"])
    attributes = {"app": {"name": f"{values['role']} sandbox of {values['model']}", "vendor_name": SERVICE}}
    status, severity = (FAILURE, LOW) if state == "refused" else (SUCCESS, INFORMATIONAL)
    return _Event(6002, _STATES.get(state, OTHER), f"sandbox: {state}", status, severity, attributes)


def _card(values: Values) -> _Event:
    event = str(values["event"])
    name = f"engine of {values['model']}" if values["model"] else f"GPU {values['card']}"
    status, severity = (FAILURE, MEDIUM) if event in ("lost", "refused") else (SUCCESS, INFORMATIONAL)
    return _Event(6002, OTHER, f"GPU: {event}", status, severity, {"app": {"name": name, "vendor_name": SERVICE}})


def _integrity(values: Values) -> _Event:
    title = "requests named a KV block that was not theirs"
    info = {"title": title, "uid": f"{values['model']}#{values['generation']}"}
    return _Event(2004, CREATE, title, FAILURE, CRITICAL, {"finding_info": info})


def _lease(values: Values) -> _Event:
    title = f"part of a budget was {values['what']} within the fleet"
    return _Event(0, OTHER, title, SUCCESS, INFORMATIONAL)


def _kv_export(values: Values) -> _Event:
    attributes = {"entity": {"name": values["tenant"], "type": "sealed KV outside of the machine"}}
    return _Event(3004, UPDATE, f"sealed KV may leave the machine: {values['what']}", attributes=attributes)


def _prefill(values: Values) -> _Event:
    title = f"a prompt was {values['what']} between hosts of the fleet: {values['outcome']}"
    return _Event(0, OTHER, title, SUCCESS, INFORMATIONAL)


def _gap(values: Values) -> _Event:
    lost = {"count": max(1, int(values["dropped"]))}
    return _Event(0, OTHER, "entries of the audit log were lost", FAILURE, MEDIUM, lost)


def _log(values: Values) -> _Event:
    damaged = values["event"] == "damaged"
    status, severity = (FAILURE, CRITICAL) if damaged else (SUCCESS, INFORMATIONAL)
    return _Event(0, OTHER, f"audit log: {values['event']}", status, severity)


_MAPPINGS: Final[Mapping[str, Callable[[Values], _Event]]] = {
    "request": _request,
    "denied": _denied,
    "refused": _refused,
    "policy": _policy,
    "integrity": _integrity,
    "sandbox": _sandbox,
    "card": _card,
    "keys": _keys,
    "order": _order,
    "call": _operator,
    "admin": _admin,
    "model": _model,
    "file": _file,
    "batch": _batch,
    "response": _response,
    "lease": _lease,
    "kv_export": _kv_export,
    "prefill": _prefill,
    "gap": _gap,
    "log": _log,
}
"""Kind of entry to its event; a test compares the kinds."""

_READS = ("Get", "List", "Check", "Diff", "Explain", "Test", "History", "Schema")
"""Beginnings of the names of the operator's methods that change nothing."""

_KEPT = {"created": CREATE, "kept": CREATE, "read": READ, "deleted": DELETE}
"""What happened to something that is kept to its activity."""

_STATES = {"up": START, "down": STOP}
