"""Entries: a closed list, bounded, the same after every way through wire and disk; nothing else gets in."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.common.audit.entry import (
    FROM_GATEWAY,
    KINDS,
    LATER,
    MAX_ENTRY_BYTES,
    MAX_TEXT,
    Entry,
    EntryError,
    entry,
    from_line,
    from_wire,
    to_line,
    to_wire,
)

VALUES = {str: st.text(max_size=300), int: st.integers(-5, 1 << 60)}


def entries(kinds: frozenset[str]) -> st.SearchStrategy[Entry]:
    """Entries of these kinds from any values."""
    return st.sampled_from(sorted(kinds)).flatmap(
        lambda kind: st.fixed_dictionaries({name: VALUES[of] for name, of in KINDS[kind].items()}).map(
            lambda fields: entry(kind, **fields)
        )
    )


@settings(deadline=None, derandomize=True)
@given(entries(frozenset(KINDS)), st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_a_line_comes_back(one: Entry, number: int, time_ms: int) -> None:
    """Any entry is one bounded line of ASCII, and is read as it was."""
    line = to_line(one, number, time_ms)
    assert b"\n" not in line
    assert line.isascii()
    assert len(line) <= MAX_ENTRY_BYTES
    assert from_line(line) == (number, time_ms, one)


def test_a_line_of_an_earlier_version_is_read() -> None:
    """A line without the fields that came later is read, of each earlier version, with zeros and empty texts; with one
    of several missing, or another, it is no line (control)."""
    for kind, versions in LATER.items():
        one = entry(kind, **dict.fromkeys(KINDS[kind], 7))  # type: ignore[arg-type]
        values = json.loads(to_line(one, 3, 4))
        for later in versions:
            line = json.dumps({name: value for name, value in values.items() if name not in later})
            assert from_line(line.encode())[2].fields == one.fields | {name: KINDS[kind][name]() for name in later}
        for gone in (values.keys() & {"cost", "output_tokens", "count"}) - {
            *chain(*(one for one in versions if len(one) == 1))
        }:
            with pytest.raises(EntryError):
                from_line(json.dumps({name: value for name, value in values.items() if name != gone}).encode())


@settings(deadline=None, derandomize=True)
@given(entries(FROM_GATEWAY))
def test_a_report_of_the_gateway_comes_back(one: Entry) -> None:
    """What the gateway may say is read as it was said."""
    assert from_wire(to_wire(one)) == one


@settings(deadline=None, derandomize=True)
@given(entries(frozenset(KINDS) - FROM_GATEWAY))
def test_the_gateway_cannot_speak_for_others(one: Entry) -> None:
    """Entries about sandboxes, keys, gaps and the log itself are refused from it."""
    with pytest.raises(EntryError):
        from_wire(to_wire(one))


GOOD = {"kind": "refused", "outcome": "X", "reason": "absent", "count": 1}
BAD = {
    "no object": [1],
    "another kind": {**GOOD, "kind": "prompt"},
    "a kind that is none": {**GOOD, "kind": 7},
    "a further field": {**GOOD, "prompt": "x"},
    "a missing field": {"kind": "refused", "outcome": "X", "count": 1},
    "a text for a number": {**GOOD, "count": "1"},
    "a truth for a number": {**GOOD, "count": True},
    "a negative number": {**GOOD, "count": -1},
    "a number too large": {**GOOD, "count": 1 << 53},
    "a line break": {**GOOD, "outcome": "a\nb"},
    "another script": {**GOOD, "outcome": "\u00e9"},
    "a long text": {**GOOD, "outcome": "x" * (MAX_TEXT + 1)},
    "a number for a text": {**GOOD, "outcome": 1},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_entry_is_refused(name: str) -> None:
    """A taken-over gateway gets nothing but entries into the log; the good one passes (control)."""
    assert from_wire(json.dumps(GOOD)) == Entry("refused", {"outcome": "X", "reason": "absent", "count": 1})
    with pytest.raises(EntryError):
        from_wire(json.dumps(BAD[name]))


@pytest.mark.parametrize("text", ["", "{", "[" * 5_000, "1" * 10_000, '{"kind":"refused"}' + " " * MAX_ENTRY_BYTES])
def test_what_is_no_json_is_refused(text: str) -> None:
    """Broken, deep or long texts end as an ``EntryError``, in either direction."""
    with pytest.raises(EntryError):
        from_wire(text)
    with pytest.raises(EntryError):
        from_line(text.encode())
