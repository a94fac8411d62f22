"""Entries of the audit log: a closed list of kinds, each with its fields; never content.

An entry is one line of JSON: its number, the time in milliseconds of the Unix epoch, its kind, and the kind's fields in
their order. Texts are printable ASCII and bounded; counts are integers. There is no field that could hold a prompt, an
output or a token id, nor a hash of one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

Value = str | int

MAX_TEXT = 256
"""Most characters of one text; more are cut off."""

MAX_ENTRY_BYTES = 4_096
"""Most bytes of one line."""

MAX_COUNT = 1 << 53
"""Bound of numbers, so that every JSON reader has them exactly."""

_T, _N = str, int

KINDS: Final[dict[str, dict[str, type]]] = {
    "request": {
        "request": _T,
        "tenant": _T,
        "principal": _T,
        "model": _T,
        "alias": _T,
        "operation": _T,
        "rule": _T,
        "policy": _T,
        "cut_rule": _T,
        "cut_policy": _T,
        "outcome": _T,
        "input_tokens": _N,
        "cached_tokens": _N,
        "output_tokens": _N,
        "reasoning_tokens": _N,
        "cost": _N,
        "queued_ms": _N,
        "downgraded": _T,
        "batch": _T,
        "adapter": _T,
        "adapter_digest": _T,
        "end_user": _T,
        "listener": _T,
        "runner": _T,
    },
    "denied": {
        "tenant": _T,
        "principal": _T,
        "model": _T,
        "alias": _T,
        "rule": _T,
        "policy": _T,
        "outcome": _T,
        "count": _N,
    },
    "refused": {"outcome": _T, "reason": _T, "count": _N},
    "file": {"event": _T, "tenant": _T, "principal": _T, "file": _T, "bytes": _N},
    "batch": {
        "event": _T,
        "tenant": _T,
        "principal": _T,
        "batch": _T,
        "endpoint": _T,
        "lines": _N,
        "completed": _N,
        "failed": _N,
    },
    "response": {"event": _T, "tenant": _T, "principal": _T, "response": _T, "bytes": _N},
    "policy": {"outcome": _T, "policy": _T, "tenants": _N, "by": _T},
    "integrity": {"model": _T, "generation": _N, "count": _N},
    "sandbox": {
        "state": _T,
        "model": _T,
        "role": _T,
        "tenant": _T,
        "generation": _N,
        "cause": _T,
        "image": _T,
        "model_digest": _T,
        "model_signer": _T,
        "weights": _T,
    },
    "keys": {"what": _T, "count": _N},
    "order": {"what": _T, "tenant": _T, "user": _N, "outcome": _T, "count": _N},
    "call": {
        "method": _T,
        "user": _N,
        "roles": _T,
        "subject": _T,
        "request": _T,
        "outcome": _T,
        "tenant": _T,
        "caller": _T,
        "reason": _T,
    },
    "admin": {"route": _T, "subject": _T, "caller": _T, "roles": _T, "request": _T, "outcome": _T},
    "model": {
        "what": _T,
        "model": _T,
        "model_digest": _T,
        "source": _T,
        "user": _N,
        "outcome": _T,
        "count": _N,
        "reason": _T,
        "tenant": _T,
        "model_signer": _T,
    },
    "card": {"event": _T, "card": _N, "model": _T, "tenant": _T, "to": _T, "cause": _T},
    "lease": {"what": _T, "tenant": _T, "host": _T, "lease": _T, "day": _N, "cost": _N},
    "kv_export": {"what": _T, "tenant": _T, "count": _N},
    "prefill": {
        "what": _T,
        "request": _T,
        "tenant": _T,
        "host": _T,
        "model": _T,
        "outcome": _T,
        "tokens": _N,
        "count": _N,
    },
    "gap": {"where": _T, "dropped": _N},
    "log": {"event": _T, "detail": _T},
}
"""Kind to its fields and their types:

* ``request``: a request that the policy allowed, at its end, with the rule and the policy that allowed it, and those of
  a later policy that ended it while it ran (``cut_rule``, ``cut_policy``, empty where none did), with the tokens that
  it is charged for (reasoning is a part of the output, as what was found in the cache is of the input), their cost in
  billionths of the currency's unit, the milliseconds for which it waited for limits of its tenant, and the limit for
  which it was served with low priority, empty for none; ``alias`` is the route or the adapter by which its model was
  asked for, ``batch`` the batch of which it is a line, and ``adapter`` the whole name of the adapter with which the
  model served it, with the digest of its files, or empty; ``end_user`` is a pseudonym (``common.usage.pseudonyms``), or
  empty where the request named none or nothing of the tenant is kept; ``listener`` is that by which it came
  (``gateway.front.own_listeners.Entrance``), which names no tenant, or empty for a line of a batch; ``runner`` is what
  the model's engine does, or ``external`` where a cluster outside of the appliance computed the request;
* ``denied``: what the policy denied one principal, counted over a moment, as ``count`` of ``outcome``;
* ``refused``: calls without a valid credential, counted likewise, by the reason for which it was refused;
* ``file``: a tenant's file was created or deleted, or has expired;
* ``batch``: a batch was created or cancelled by its tenant, or is over: completed, failed (its file was refused),
  expired or, without a principal, cancelled; with the numbers of its lines and of those that have a result;
* ``response``: a tenant's response was kept or deleted, has expired, or was read, which is told once a day;
* ``policy``: a policy was put in force, or refused; ``by`` says who asked: ``start``, ``signal``, or users;
* ``integrity``: requests that an engine ended because a KV block in their tables was not theirs;
* ``sandbox``: one came up, went down, was frozen or thawed, with its tenant, if any, the digests of its image and
  model, and the id of the key that has signed the model, empty where no signature is asked for;
* ``keys``: keys were made, or given to the gateway; or a supervisor's start has accepted the list of a fleet's members;
* ``order``: what the operator had done to keys (shred, rotate, rewrap) or to spend that requests had reserved which
  ended with the machine (release), as which user id, and how many objects, keys or requests that touched;
* ``call``: a call of the operator's API, when it has ended, with the user id that called and its roles, what it was
  about, its id and the status of its end; one that changes something has another entry before, ``BEGUN``. A caller on
  another machine has the user 65534 and is named by ``caller``; ``reason`` says why a credential was refused;
* ``admin``: an operator on another machine changed something by a route of the admin listener, when it has ended and,
  as ``BEGUN``, before; or was refused there for want of a role. Told by the gateway;
* ``model``: what the operator had done to the cache of models (pull, remove) or to what is served (add, stop), as which
  user id, with the model's name, digest and source, and the bytes that came; told by the command, after it was done or
  failed. And each model that came (serve) or went (end) by a reload, fell asleep (sleep, by the operator, idle, or for
  the memory of another) or woke (wake, by the operator or for the request of a tenant), told by the supervisor with the
  user 0 and the id of the key that has signed it;
* ``card``: a GPU was lost, answers again (back), or gets engines again (trusted); an engine got another one (moved,
  ``to`` is its number) or found none with room (refused); told by the supervisor;
* ``lease``: a part of a tenant's budget was lent to another host of the fleet, or borrowed from it, with the day, by
  number, that it is of, and the amount; ``lease`` is the name of its reservation in the usage book;
* ``kv_export``: sealed KV of a tenant, or of a sharing group (``group/ID``), may leave this machine from now on
  (allowed), or may no longer (withdrawn, with the number of blocks in the store that were forgotten); told by the
  supervisor when the policy in force changes it, and at each start of it for who may. Other hosts of the fleet may use
  it (shared), or may no longer (unshared); the fleet's key for it ends because an engine died that had written under
  it (suspected), is held by no host any more (shredded, with the seconds that it took), or nobody said so in time (not
  shredded);
* ``prefill``: another host was asked to compute the prompt of a request (asked, with its name), or one was computed
  for another host (served, with the SPIFFE id of its certificate), with the outcome and the prompt's tokens;
  ``request`` is the id of the request on the asking host, where its entry has what it is charged for. Calls of one
  host beyond a rate are in one entry for each outcome, with their ``count`` and without what differs;
* ``gap``: entries were lost for want of room;
* ``log``: the log itself was opened, recovered, or found damaged.
"""

_CUT = frozenset({"cut_rule", "cut_policy"})
_REASONING = _CUT | {"reasoning_tokens"}
_RUNNER = _REASONING | {"runner"}
_LAST = _RUNNER | {"listener"}
_LATEST = _LAST | {"end_user"}
_NEWEST = _LATEST | {"adapter", "adapter_digest"}
_NEW = _NEWEST | {"batch"}
_NEWER = _NEW | {"alias", "queued_ms", "downgraded"}

LATER: Final[dict[str, tuple[frozenset[str], ...]]] = {
    "request": (_CUT, _REASONING, _RUNNER, _LAST, _LATEST, _NEWEST, _NEW, _NEWER, _NEWER | {"cached_tokens", "cost"}),
    "denied": (frozenset({"alias"}),),
    "refused": (frozenset({"reason"}),),
    "call": (frozenset({"caller", "reason"}),),
    "model": (frozenset({"model_signer"}), frozenset({"model_signer", "reason", "tenant"})),
    "policy": (frozenset({"by"}),),
    "prefill": (frozenset({"count"}),),
    "sandbox": (frozenset({"weights"}), frozenset({"weights", "model_signer"})),
}
"""Fields that each earlier version of a kind did not have. A log is read for years: where they are missing they are 0
or empty."""

SELDOM = _CUT
"""Fields of a request's entry that its line leaves out where all of them are empty, as lines of an earlier version do:
a log has one line for each request, and few requests are cut."""

FROM_GATEWAY = frozenset({"request", "denied", "refused", "policy", "integrity", "admin", "lease", "prefill"})
"""Kinds that the gateway may report: a taken-over gateway can lie about these and no others."""


_compact = json.JSONEncoder(separators=(",", ":")).encode
"""Encodes without blanks; ``json.dumps`` makes an encoder for each call that asks for it."""


class EntryError(ValueError):
    """The entry is of no kind of the list above, or does not have that kind's fields."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log, before it has a number and a time."""

    kind: str
    fields: dict[str, Value]


def entry(kind: str, **fields: Value) -> Entry:
    """An entry of this kind with exactly its fields; texts are made printable and short."""
    wanted = KINDS[kind]
    assert fields.keys() == wanted.keys(), f"an entry {kind} has the fields {', '.join(wanted)}"
    clean: dict[str, Value] = {}
    for name, of in wanted.items():
        value = fields[name]
        clean[name] = _cut(value) if of is str else max(0, min(int(value), MAX_COUNT - 1))
    return Entry(kind, clean)


def to_wire(one: Entry) -> str:
    """The entry as a text of the control socket."""
    return _compact({"kind": one.kind, **one.fields})


def from_wire(text: str) -> Entry:
    """Read an entry that the gateway sent; the text is hostile.

    Raises:
        EntryError: not an entry that it may send, to the letter.
    """
    try:
        values = json.loads(text) if len(text) <= MAX_ENTRY_BYTES else None
    except (ValueError, RecursionError):
        values = None
    kind = values.pop("kind", None) if isinstance(values, dict) else None
    if not isinstance(values, dict) or not isinstance(kind, str) or kind not in FROM_GATEWAY:
        raise EntryError("not an entry that a gateway sends")
    if values.keys() != KINDS[kind].keys() or not all(_fits(values[name], of) for name, of in KINDS[kind].items()):
        raise EntryError(f"an entry {kind} with wrong fields")
    return Entry(kind, values)


def to_line(one: Entry, number: int, time_ms: int) -> bytes:
    """Line of the log, without its end."""
    fields = one.fields
    if one.kind == "request" and not any(fields[name] for name in SELDOM):
        fields = {name: value for name, value in fields.items() if name not in SELDOM}
    return json.dumps({"n": number, "t": time_ms, "kind": one.kind, **fields}, separators=(",", ":")).encode()


def from_line(line: bytes) -> tuple[int, int, Entry]:
    """Number, time in milliseconds and entry of a line.

    Raises:
        EntryError: it is no line of a log.
    """
    try:
        values = json.loads(line)
        number, time_ms, kind = values.pop("n"), values.pop("t"), values.pop("kind")
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise EntryError("not a line of an audit log") from error
    if not isinstance(kind, str) or kind not in KINDS or type(number) is not int or type(time_ms) is not int:
        raise EntryError("not a line of an audit log")
    known = KINDS[kind]
    missing = known.keys() - values.keys()
    if values.keys() - known.keys() or (missing and missing not in LATER.get(kind, ())):
        raise EntryError("not a line of an audit log")
    return number, time_ms, Entry(kind, values | {name: known[name]() for name in missing})


def _fits(value: object, of: type) -> bool:
    """Whether ``entry`` would leave a value as it is."""
    if of is int:
        return type(value) is int and 0 <= value < MAX_COUNT
    return isinstance(value, str) and _cut(value) == value


def _cut(value: Value) -> str:
    """Printable ASCII, at most ``MAX_TEXT`` characters."""
    text = str(value)[:MAX_TEXT]
    return (
        text
        if text.isascii() and text.isprintable()
        else "".join(char if char.isascii() and char.isprintable() else "?" for char in text)
    )
