"""Statements: what one tenant is charged for in a span of time, under the signature of the audit log. Pure.

::

    athanor.statement/2
    {"log":"athanor.audit/3f2a...","root":"qINS1G...","tenant":"alpha","since":1793491200000,"until":1796083200000}
    {"request":"9f...","t":1793491260001,"principal":"key:alpha-1","model":"athanor-mini",...,"cost":123}
    {"requests":1,"input_tokens":13,"cached_tokens":0,"output_tokens":48,"reasoning_tokens":9,"cost":123}
    - athanor.audit/3f2a9c01 Az3grlgtzPICa5OS8npVmf1Myq...

(where the dash is U+2014). Between the head and the sums is one line for each request that the log has of the tenant,
in the log's order. The last line signs every byte before it with the log's key, as a checkpoint's does; the second
line is a number in every checkpoint, so neither can pass for the other.

A tenant verifies it with the log's public key, compares the requests with its own records, and needs nothing else. It
learns nothing of other tenants: the statement has neither the numbers of its entries nor the size of the log, which
would count theirs. ``root`` is the hash of the whole log when the statement was made: who may read the log finds by it
the checkpoint that covers what is stated, and compares the entries (``differences``).

Statements of the form 1 do not tell reasoning tokens apart; they are read and compared as they were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from appliance.common.audit.checkpoint import Verifier
from appliance.common.audit.entry import MAX_COUNT, Entry, Value
from appliance.common.audit.signed_text import SignedTextError, json_line, json_object, read_lines, sign_lines
from appliance.common.figures import counted
from isolation.keys.signing import SigningKey

FIRST_LINE = "athanor.statement/2"
EARLIER_LINE = "athanor.statement/1"
"""First line of a statement without ``REASONING``."""

REASONING = "reasoning_tokens"

MAX_STATEMENT_BYTES = 1 << 30
"""Most bytes of a statement that is read: some three million requests."""

REQUEST_FIELDS: Final = (
    "request",
    "principal",
    "model",
    "alias",
    "operation",
    "rule",
    "policy",
    "outcome",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    REASONING,
    "cost",
    "queued_ms",
    "downgraded",
    "batch",
    "adapter",
    "adapter_digest",
)
"""Fields of a request in a statement, as the log has them; before them comes ``t``, the time in milliseconds."""

NUMBERS: Final = ("input_tokens", "cached_tokens", "output_tokens", REASONING, "cost")
"""Fields of a request that are summed up."""

HEAD_FIELDS: Final = ("log", "root", "tenant", "since", "until")


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of a statement."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    """Output tokens that are reasoning, a part of ``output_tokens``."""
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
    earlier: bool = False
    """Whether it is of the form 1, which tells no reasoning tokens."""


def stated(entry: Entry, time_ms: int) -> dict[str, Value]:
    """Return a request as a statement has it."""
    return {"t": time_ms} | {name: entry.fields[name] for name in REQUEST_FIELDS}


def total(requests: Iterable[Mapping[str, Value]]) -> Totals:
    """Sum requests up."""
    sums = [0] * (1 + len(NUMBERS))
    for one in requests:
        sums[0] += 1
        for place, name in enumerate(NUMBERS, 1):
            sums[place] += int(one.get(name, 0))
    return Totals(*sums)


def sign_statement(head: Head, requests: Sequence[Mapping[str, Value]], key: SigningKey) -> str:
    """Make the text of a statement over requests in their order."""
    lines = [json_line(asdict(head)), *map(json_line, requests), json_line(asdict(total(requests)))]
    return sign_lines(FIRST_LINE, lines, head.log, key)


def read_statement(data: bytes, verifier: Verifier) -> Statement:
    """Read a signed statement.

    Raises:
        SignedTextError: it is none, of another log, changed since it was signed, or contradicts itself.
    """
    earlier = data.startswith(f"{EARLIER_LINE}\n".encode())
    lines = read_lines(data, EARLIER_LINE if earlier else FIRST_LINE, verifier)
    if len(lines) < 2:
        raise SignedTextError("a statement has a head and sums, and this one has not")
    # From here on the text is what the key's holder signed; what does not fit is a defect, or a lie of that holder.
    head = _head(lines[0])
    requests = tuple(_request(line, number, head, earlier=earlier) for number, line in enumerate(lines[1:-1], 3))
    totals = total(requests)
    if json_object(lines[-1]) != _written(asdict(totals), earlier=earlier):
        raise SignedTextError(f"the sums are not those of its {counted(len(requests), 'request')}")
    return Statement(head, requests, totals, earlier)


def differences(statement: Statement, logged: Iterable[Mapping[str, Value]]) -> list[str]:
    """Return what differs between a statement and the requests that the log has of its tenant and time, as sentences;
    none where both are the same."""
    stated_lines = list(map(json_line, statement.requests))
    logged_lines = [json_line(_written(one, earlier=statement.earlier)) for one in logged]
    if stated_lines == logged_lines:
        return []
    missing = set(logged_lines) - set(stated_lines)
    added = set(stated_lines) - set(logged_lines)
    found = [f"the log has a request that is not stated: {line}" for line in sorted(missing)]
    found += [f"a request is stated that the log has not: {line}" for line in sorted(added)]
    return found or ["the requests are in another order, or some are there more than once"]


def _written(values: Mapping[str, Value], *, earlier: bool) -> Mapping[str, Value]:
    """Return a request or sums as a statement of either form has them."""
    return {name: value for name, value in values.items() if name != REASONING} if earlier else values


def _head(line: str) -> Head:
    values = json_object(line)
    if tuple(values) != HEAD_FIELDS:
        raise SignedTextError("line 2: not the head of a statement")
    texts, times = list(values.values())[:3], list(values.values())[3:]
    if not all(isinstance(one, str) for one in texts) or not all(type(one) is int for one in times):
        raise SignedTextError("line 2: not the head of a statement")
    return Head(**values)


def _request(line: str, number: int, head: Head, *, earlier: bool) -> Mapping[str, Value]:
    values = json_object(line)
    fields = ("t", *(name for name in REQUEST_FIELDS if not (earlier and name == REASONING)))
    if tuple(values) != fields:
        raise SignedTextError(f"line {number}: not a request")
    numbers = [values[name] for name in ("t", *NUMBERS) if name in values]
    if not all(type(one) is int and 0 <= one < MAX_COUNT for one in numbers):
        raise SignedTextError(f"line {number}: a number is none")
    if not head.since <= values["t"] < head.until:
        raise SignedTextError(f"line {number}: the request is of another time than the statement")
    return values
