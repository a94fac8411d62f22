"""JSON from strangers: what is taken, what is refused, and that refusing is cheap."""

from __future__ import annotations

import contextlib
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.common.strict_json import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, JsonError, parse_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_ordinary_documents_are_read_as_the_standard_parser_reads_them(value):
    """Nothing legitimate is lost to the checks."""
    text = json.dumps(value)
    assert parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"nul",
        b"[1,]",
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b"-1e999",
        b'{"a": 1, "a": 1}',
        b'[{"b": {"c": 1, "c": 2}}]',
        b'"\xff"',
        b'\xff\xfe"\x00a\x00"\x00',
        b"\xef\xbb\xbf{}",
        b"1" * 5_000,
        b"[" * 100_000,
        b'{"a":' * 5_000,
        b"[]" * 2,
    ],
)
def test_what_is_not_plain_json_is_refused(text):
    """Malformed, ambiguous, not UTF-8, not finite, or bottomless: one error type."""
    with pytest.raises(JsonError):
        parse_json(text)


def test_depth_is_bounded_exactly():
    """The limit itself is taken, one more is not."""
    parse_json(b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH)
    with pytest.raises(JsonError):
        parse_json(b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1))


def test_containers_are_bounded_but_brackets_in_text_are_not():
    """A long program text full of brackets is a prompt; a million empty arrays are an attack."""
    prose = json.dumps({"prompt": '[{"\\' * MAX_JSON_CONTAINERS}).encode()
    assert parse_json(prose)["prompt"].count("[") == MAX_JSON_CONTAINERS
    with pytest.raises(JsonError):
        parse_json(b"[" + b"[]," * MAX_JSON_CONTAINERS + b"[]]")


@pytest.mark.parametrize(
    "text",
    [
        b'"' + b'\\"' * 1_000_000 + b"[" * 100_000,
        b'"' * 2_000_000 + b"[" * 100_000,
        b'"' + b'\\"' * 1_000_000 + b"[" * 100_000 + b"\\",
        b"[{" * 1_000_000,
        b'{"' * 1_000_000,
    ],
)
def test_refusing_four_megabytes_is_linear(text):
    """No body within the limit can keep the parser busy for longer than a second."""
    begun = time.process_time()
    with pytest.raises(JsonError):
        parse_json(text)
    assert time.process_time() - begun < 1.0


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_value_or_the_one_error(data):
    """Nothing but JsonError comes out."""
    with contextlib.suppress(JsonError):
        parse_json(data)
