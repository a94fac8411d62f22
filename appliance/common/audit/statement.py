"""Statements: what one tenant is charged for in a span of time, under the signature of the audit log. Pure.

::

    athanor.statement/1
    {"log":"athanor.audit/3f2a...","root":"qINS1G...","tenant":"alpha","since":1793491200000,"until":1796083200000}
    {"request":"9f...","t":1793491260001,"principal":"key:alpha-1","model":"athanor-mini",...,"cost":123}
    {"requests":1,"input_tokens":13,"cached_tokens":0,"output_tokens":48,"cost":123}
    - athanor.audit/3f2a9c01 Az3grlgtzPICa5OS8npVmf1Myq...

(where the dash is U+2014). Between the head and the sums is one line for each request that the log has of the tenant,
in the log's order. The last line signs every byte before it with the log's key, as a checkpoint's does; the second
line is a number in every checkpoint, so neither can pass for the other.

A tenant verifies it with the log's public key, compares the requests with its own records, and needs nothing else. It
learns nothing of other tenants: the statement has neither the numbers of its entries nor the size of the log, which
would count theirs. ``root`` is the hash of the whole log when the statement was made: who may read the log finds by it
the checkpoint that covers what is stated, and compares the entries (``differences``).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from appliance.common.audit.checkpoint import KEY_HASH_BYTES, Verifier
from appliance.common.audit.entry import MAX_COUNT, Entry, Value
from appliance.common.figures import counted
from isolation.keys.signing import SIGNATURE_BYTES, SigningKey, verifies

FIRST_LINE = "athanor.statement/1"

MAX_STATEMENT_BYTES = 1 << 30
"""Most bytes of a statement that is read: some three million requests."""

_SIGNATURE = re.compile("\u2014 ([!-~]{1,64}) ([A-Za-z0-9+/=]{92})")

REQUEST_FIELDS: Final = (
    "request",
    "principal",
    "model",
    "operation",
    "rule",
    "policy",
    "outcome",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "cost",
)
"""Fields of a request in a statement, as the log has them; before them comes ``t``, the time in milliseconds."""

HEAD_FIELDS: Final = ("log", "root", "tenant", "since", "until")


class StatementError(ValueError):
    """The text is no statement, not one of this log, or was changed; the message says which."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of a statement."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: int = 0
    """Billionths of the currency's unit."""


@dataclass(frozen=True, slots=True)
class Head:
    """What a statement is about."""

    log: str
    """Name of the log."""
    root: str
    """Root of the log's last checkpoint when the statement was made, in base64."""
    tenant: str
    since: int
    """Begin, in milliseconds of the Unix epoch."""
    until: int
    """End, which is left out."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement whose signature holds."""

    head: Head
    requests: tuple[Mapping[str, Value], ...]
    totals: Totals


def stated(entry: Entry, time_ms: int) -> dict[str, Value]:
    """Return a request as a statement has it."""
    return {"t": time_ms} | {name: entry.fields[name] for name in REQUEST_FIELDS}


def total(requests: Iterable[Mapping[str, Value]]) -> Totals:
    """Sum requests up."""
    sums = [0, 0, 0, 0, 0]
    for one in requests:
        sums[0] += 1
        for place, name in enumerate(("input_tokens", "cached_tokens", "output_tokens", "cost"), 1):
            sums[place] += int(one[name])
    return Totals(*sums)


def sign_statement(head: Head, requests: Sequence[Mapping[str, Value]], key: SigningKey) -> str:
    """Make the text of a statement over requests in their order."""
    lines = [FIRST_LINE, _json(asdict(head)), *map(_json, requests), _json(asdict(total(requests)))]
    body = "".join(f"{line}\n" for line in lines)
    mark = Verifier(head.log, key.public).mark
    return f"{body}\u2014 {head.log} {base64.b64encode(mark + key.sign(body.encode())).decode()}\n"


def read_statement(data: bytes, verifier: Verifier) -> Statement:
    """Read a signed statement.

    Raises:
        StatementError: it is none, of another log, changed since it was signed, or contradicts itself.
    """
    body, _, last = data.removesuffix(b"\n").rpartition(b"\n")
    body += b"\n"
    lines = body.decode("utf-8", "replace").split("\n")[:-1]
    if not data.endswith(b"\n") or lines[0] != FIRST_LINE or len(lines) < 3:
        raise StatementError("that is no statement of this version: its first line is another, or it is cut off")
    _check_signature(body, last.decode("utf-8", "replace"), verifier)
    # From here on the text is what the key's holder signed; what does not fit is a defect, or a lie of that holder.
    head = _head(lines[1])
    requests = tuple(_request(line, number, head) for number, line in enumerate(lines[2:-1], 3))
    totals = total(requests)
    if _values(lines[-1]) != asdict(totals):
        raise StatementError(f"the sums are not those of its {counted(len(requests), 'request')}")
    return Statement(head, requests, totals)


def differences(statement: Statement, logged: Iterable[Mapping[str, Value]]) -> list[str]:
    """Return what differs between a statement and the requests that the log has of its tenant and time, as sentences;
    none where both are the same."""
    stated_lines, logged_lines = list(map(_json, statement.requests)), list(map(_json, logged))
    if stated_lines == logged_lines:
        return []
    missing = set(logged_lines) - set(stated_lines)
    added = set(stated_lines) - set(logged_lines)
    found = [f"the log has a request that is not stated: {line}" for line in sorted(missing)]
    found += [f"a request is stated that the log has not: {line}" for line in sorted(added)]
    return found or ["the requests are in another order, or some are there more than once"]


def _check_signature(body: bytes, last: str, verifier: Verifier) -> None:
    found = _SIGNATURE.fullmatch(last)
    if found is None:
        raise StatementError("the statement has no signature: it was cut off or changed")
    if found[1] != verifier.name:
        raise StatementError(f"the statement is of the log {found[1]}, not of {verifier.name}")
    signed = _decode(found[2])
    if len(signed) != KEY_HASH_BYTES + SIGNATURE_BYTES or signed[:KEY_HASH_BYTES] != verifier.mark:
        raise StatementError("the statement was signed with another key")
    if not verifies(verifier.public, signed[KEY_HASH_BYTES:], body):
        raise StatementError("the signature does not hold: the statement was changed after it was made")


def _head(line: str) -> Head:
    values = _values(line)
    if tuple(values) != HEAD_FIELDS:
        raise StatementError("line 2: not the head of a statement")
    texts, times = list(values.values())[:3], list(values.values())[3:]
    if not all(isinstance(one, str) for one in texts) or not all(type(one) is int for one in times):
        raise StatementError("line 2: not the head of a statement")
    return Head(**values)


def _request(line: str, number: int, head: Head) -> Mapping[str, Value]:
    values = _values(line)
    if tuple(values) != ("t", *REQUEST_FIELDS):
        raise StatementError(f"line {number}: not a request")
    numbers = [values[name] for name in ("t", "input_tokens", "cached_tokens", "output_tokens", "cost")]
    if not all(type(one) is int and 0 <= one < MAX_COUNT for one in numbers):
        raise StatementError(f"line {number}: a number is none")
    if not head.since <= values["t"] < head.until:
        raise StatementError(f"line {number}: the request is of another time than the statement")
    return values


def _values(line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise StatementError("a line is no JSON object")
    return values


def _decode(text: str) -> bytes:
    """Bytes of strict base64, empty for other text: one signature has one spelling."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""
    return data if base64.b64encode(data).decode() == text else b""


_json = json.JSONEncoder(separators=(",", ":")).encode
