"""Statements: signed, read, compared; no change of any byte passes."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from appliance.common.audit.checkpoint import Checkpoint, CheckpointError, Verifier, read_checkpoint, sign_checkpoint
from appliance.common.audit.entry import KINDS, entry
from appliance.common.audit.signed_text import SignedTextError, sign_lines
from appliance.common.audit.statement import (
    REQUEST_FIELDS,
    Head,
    Statement,
    Totals,
    differences,
    read_statement,
    sign_statement,
    stated,
    total,
)
from isolation.keys.signing import SigningKey, key_of

KEY = key_of(bytes(range(32)))
OTHER_KEY = key_of(bytes(range(1, 33)))
NAME = "athanor.audit/0011223344556677"
HEAD = Head(NAME, "r" * 44, "alpha", 1_000, 2_000)
VERIFIER = Verifier(NAME, KEY.public)


def one_request(number: int, **given: str | int) -> dict[str, str | int]:
    """A request as a statement has it."""
    fields = {name: f"{name}-{number}" if of is str else number for name, of in KINDS["request"].items()}
    return dict(stated(entry("request", **(fields | given)), 1_000 + number))


REQUESTS = [one_request(number) for number in range(5)]


def signed(head: Head = HEAD, key: SigningKey = KEY, requests: list[dict[str, str | int]] = REQUESTS) -> bytes:
    """The bytes of a statement."""
    return sign_statement(head, requests, key).encode()


def signed_lines(*lines: str, key: SigningKey = KEY) -> bytes:
    """Lines with a signature that holds, whatever they say: what only the key's holder can make."""
    return sign_lines(lines[0], lines[1:], NAME, key).encode()


def test_a_statement_is_read_as_it_was_made() -> None:
    """Head, requests in their order, and sums."""
    read = read_statement(signed(), VERIFIER)
    assert read == Statement(HEAD, tuple(REQUESTS), Totals(5, 10, 10, 10, 10, 10))
    assert read_statement(signed(requests=[]), VERIFIER).totals == Totals()


def test_a_statement_has_all_fields_of_a_request_but_tenant_and_end_user() -> None:
    """A field that requests get is stated too; whose they are stands in the head, and pseudonyms of end users are not
    for a paper that is passed on. Listener, runner and what cut a request came after the form of statements."""
    later = {"listener", "runner", "cut_rule", "cut_policy"}
    assert {*REQUEST_FIELDS, "tenant", "end_user"} | later == set(KINDS["request"])


def test_nothing_of_other_tenants_is_in_a_statement() -> None:
    """Neither numbers of entries nor the size of the log, which would count the requests of others."""
    text = signed().decode()
    lines = [json.loads(line) for line in text.splitlines()[1:-1]]
    assert set(lines[0]) == {"log", "root", "tenant", "since", "until"}
    assert all("n" not in line and "size" not in line for line in lines)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The bytes with one random change: a bit, a byte put in or taken out, lines swapped, doubled or left out."""
    kind, at = chance.randrange(6), chance.randrange(len(data))
    lines = data.split(b"\n")
    first, second = chance.randrange(len(lines)), chance.randrange(len(lines))
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + bytes([chance.randrange(256)]) + data[at:]
    if kind == 2:
        return data[:at] + data[at + 1 :]
    if kind == 3:
        lines[first], lines[second] = lines[second], lines[first]
    elif kind == 4:
        lines.insert(first, lines[second])
    else:
        del lines[first]
    return b"\n".join(lines)


def detected(count: int, seed: int) -> int:
    """How many of so many random changes were detected; texts that a change left as they were are drawn anew."""
    chance, data, found = random.Random(seed), signed(), 0
    read_statement(data, VERIFIER)
    for _ in range(count):
        while (changed := mutated(data, chance)) == data:
            continue
        try:
            read_statement(changed, VERIFIER)
        except SignedTextError:
            found += 1
    return found


def test_every_change_is_detected() -> None:
    """3,000 random changes of bits, bytes and lines; the statement itself passes (control)."""
    assert detected(3_000, 1) == 3_000


@pytest.mark.full
def test_every_change_of_a_hundred_thousand_is_detected() -> None:
    """The same with 100,000 changes."""
    assert detected(100_000, 2) == 100_000


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "first line"),
        (b"\n\n\n", "first line"),
        (signed()[:-1], "cut off"),
        (signed().replace(b"\n\xe2\x80\x94", b"\n\xe2\x80\x93"), "no signature"),
        (signed(replace(HEAD, log="athanor.audit/ffff")), "of the log athanor.audit/ffff"),
        (signed(key=OTHER_KEY), "another key"),
        (signed().replace(b'"cost":3', b'"cost":4', 1), "signature does not hold"),
    ],
)
def test_what_is_no_statement_of_this_log_is_told(data: bytes, told: str) -> None:
    """Other texts, other logs, other keys, changed ones: each by its own words."""
    with pytest.raises(SignedTextError, match=told):
        read_statement(data, VERIFIER)


HEAD_LINE = signed().decode().splitlines()[1]
REQUEST_LINE = json.dumps(REQUESTS[0])
SUMS_LINE = json.dumps(
    {"requests": 1, "input_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "reasoning_tokens": 0, "cost": 0}
)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((HEAD_LINE, REQUEST_LINE, SUMS_LINE.replace('"cost": 0', '"cost": 9')), "sums are not those"),
        ((HEAD_LINE, SUMS_LINE), "sums are not those"),
        (("{}", REQUEST_LINE, SUMS_LINE), "line 2: not the head"),
        ((HEAD_LINE.replace("1000", '"1"'), REQUEST_LINE, SUMS_LINE), "line 2: not the head"),
        ((HEAD_LINE, "[]", SUMS_LINE), "no JSON object"),
        ((HEAD_LINE, '{"t": 1000}', SUMS_LINE), "line 3: not a request"),
        ((HEAD_LINE, REQUEST_LINE.replace('"cost": 0', '"cost": -1'), SUMS_LINE), "line 3: a number is none"),
        ((HEAD_LINE, REQUEST_LINE.replace('"t": 1000', '"t": 2000'), SUMS_LINE), "line 3: the request is of another"),
    ],
)
def test_a_lie_of_the_holder_of_the_key_is_told(lines: tuple[str, ...], told: str) -> None:
    """A signed text that contradicts itself is refused; one that does not is read (control)."""
    assert read_statement(signed_lines("athanor.statement/2", HEAD_LINE, REQUEST_LINE, SUMS_LINE), VERIFIER)
    with pytest.raises(SignedTextError, match=told):
        read_statement(signed_lines("athanor.statement/2", *lines), VERIFIER)


def test_a_statement_of_the_form_before_holds() -> None:
    """One that was signed before reasoning tokens were told is read, compared with the log and found equal, or not;
    under the new first line its requests are none (control)."""

    def without(line: str) -> str:
        values = json.loads(line)
        del values["reasoning_tokens"]
        return json.dumps(values)

    lines = HEAD_LINE, without(REQUEST_LINE), without(SUMS_LINE)
    old = read_statement(signed_lines("athanor.statement/1", *lines), VERIFIER)
    assert (old.earlier, old.totals) == (True, Totals(1))
    assert differences(old, [json.loads(REQUEST_LINE)]) == []
    assert differences(old, [json.loads(REQUEST_LINE) | {"cost": 1}])
    for first, told in (("athanor.statement/2", lines), ("athanor.statement/1", (HEAD_LINE, REQUEST_LINE, SUMS_LINE))):
        with pytest.raises(SignedTextError, match="line 3: not a request"):
            read_statement(signed_lines(first, *told), VERIFIER)


def test_neither_passes_for_the_other() -> None:
    """A statement is no checkpoint and a checkpoint no statement, though one key signs both."""
    checkpoint = sign_checkpoint(Checkpoint(5, bytes(32)), NAME, KEY)
    assert read_checkpoint(checkpoint, VERIFIER).size == 5
    with pytest.raises(SignedTextError):
        read_statement(checkpoint.encode(), VERIFIER)
    with pytest.raises(CheckpointError):
        read_checkpoint(signed(requests=[]).decode(), VERIFIER)


def test_differences_from_the_log_are_told() -> None:
    """Requests left out, made up, doubled and reordered; none where both are the same (control)."""
    statement = read_statement(signed(), VERIFIER)
    assert differences(statement, REQUESTS) == []
    (more,) = differences(statement, [*REQUESTS, one_request(9)])
    assert more.startswith("the log has a request that is not stated")
    (less,) = differences(statement, REQUESTS[1:])
    assert less.startswith("a request is stated that the log has not")
    for other in (REQUESTS[::-1], [*REQUESTS, REQUESTS[0]]):
        assert differences(statement, other) == ["the requests are in another order, or some are there more than once"]


def test_sums_are_exact() -> None:
    """Amounts far beyond what a float has exactly are summed to the unit."""
    largest = (1 << 53) - 1
    assert total([one_request(1, cost=largest)] * 3).cost == 3 * largest
