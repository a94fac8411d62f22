"""Properties of the reading of any text, and of JSON as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.text.output.detect import FORMATS
from engine.text.output.format import CallFormat
from engine.text.output.growing import Growing, MalformedCallError, Reading, UnfinishedCallError
from engine.text.output.json_text import MAX_DEPTH, MAX_NUMBER_CHARACTERS, object_value, whole
from isolation.ipc.output import Thinking
from tests.engine.text.output.reading import read_output
from tests.engine.text.output.test_vectors import EXAMPLES

PIECES = (
    *"{}[]()\":,=\\'<>|;\n \t\r\0\x1f",
    *('{"', '"}', '": ', "\\n", "\\ud800", "\\ud83d\\ude00", "\\u00e9", "\\x", '\\"', "\\\\", "```json\n", "\n```"),
    *("get_weather", "get_time", "other", "city", "days", "name", "arguments", "parameters", "functions.", ":0"),
    *("0", "-1.5e3", "1e999", "01", "true", "None", "null", "NaN", "é", "🌍", "\u2028", "\ufffd", "word "),
    *('{"name": "get_weather", "arguments": ', '{"city": "a", "days": 1}', '"{\\"city\\": \\"\\\\ud800\\"}"', "{}}"),
    *(" to=functions.get_time", "assistant", "analysis", "commentary", "final", "call:get_time{", "get_time()"),
    *("<think>", "</think>", "<function=get_time>", "<parameter=city>", ' string="true">', 'get_time">'),
)

each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def _texts(form: CallFormat) -> st.SearchStrategy[str]:
    """Texts of pieces of the format and of others."""
    call = EXAMPLES[form.name].replace("NAME", "get_weather")
    halves = [marker[: len(marker) // 2] for marker in form.markers]
    own = [*form.markers, *form.markers, *halves, call, call[: len(call) // 2], call[:-1], call[1:]]
    return st.lists(st.sampled_from(own) | st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join)


@each_format
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_text_is_read(form: CallFormat, data: st.DataObject) -> None:
    """Any text is read to its end, gives the same in pieces of any size, and every complete call has an object of
    arguments."""
    text = data.draw(_texts(form))
    special = data.draw(st.sampled_from([(), form.markers]))
    state = data.draw(st.sampled_from(Thinking))
    thinking = None if form.reads_thinking else data.draw(st.sampled_from([None, ("<think>", "</think>")]))
    cut = data.draw(st.booleans())
    # Noncharacters that mark special tokens come from no model.
    assume("\ufdd0" not in text and "\ufdd1" not in text)
    found = read_output(form, text, thinking=thinking, state=state, cut=cut, special=special)
    assert all(isinstance(arguments, dict) for _name, arguments in found.calls)
    assert found.begun is None or cut


@each_format
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_text_without_markers_is_content(form: CallFormat, data: st.DataObject) -> None:
    """Text that holds no marker, and does not begin as a bare call, is content to the last character."""
    text = data.draw(_texts(form))
    assume(not any(marker in text for marker in form.markers))
    assume(not text.strip(" \t\r\n").startswith(("{", "[")))
    assume("\ufdd0" not in text and "\ufdd1" not in text)
    found = read_output(form, text)
    assert found.content == text
    assert not found.calls
    assert not found.refused


Reader = Callable[[Growing, Callable[[str], None]], Reading[None]]


def _passed_on(text: str, size: int, reader: Reader = object_value) -> tuple[str, MalformedCallError | None, str]:
    """Read a text in pieces of a size; returns what was passed on, the error and what was not taken."""
    growing, passed = Growing(), list[str]()
    reading = reader(growing, passed.append)
    try:
        for at in range(0, len(text), size):
            growing.push(text[at : at + size])
            next(reading)
        growing.ended = True
        next(reading)
    except StopIteration:
        return "".join(passed), None, growing.held() + text[at + size :] if text else ""
    except MalformedCallError as error:
        return "".join(passed), error, ""
    raise AssertionError("the reading waits at the end")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)
json_objects = st.dictionaries(st.text(max_size=4), json_values, max_size=4)


@given(json_objects, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([1, 3, 1 << 20]), st.text(max_size=3))
@settings(max_examples=300, deadline=None)
def test_an_object_is_passed_on_as_it_is(
    value: dict[str, Any], ascii_only: bool, indent: int | None, size: int, behind: str
) -> None:
    """A JSON object is passed on character by character, and what stands behind it is left."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert _passed_on(text + behind, size) == (text, None, behind)


@given(json_objects, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([1, 3, 1 << 20]))
@settings(max_examples=60, deadline=None)
def test_an_object_that_is_cut_off(value: dict[str, Any], ascii_only: bool, indent: int | None, size: int) -> None:
    """A beginning of an object is not complete, wherever it ends; what is passed on is a beginning of the text."""
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    for length in range(len(text)):
        passed, error, _rest = _passed_on(text[:length], size)
        assert isinstance(error, UnfinishedCallError)
        assert text.startswith(passed)


@given(json_values)
@settings(max_examples=100, deadline=None)
def test_a_whole_value(value: Any) -> None:
    """A value that is read whole is the value."""
    growing = Growing()
    growing.push(json.dumps(value))
    growing.ended = True
    with pytest.raises(StopIteration) as stopped:
        next(whole(growing))
    assert stopped.value.value == value


INVALID = (
    *("[1]", '"a"', "1", "null", "a", "}", ",", "'", "/**/{}"),
    *("{,}", "{a: 1}", "{'a': 1}", "{1: 1}", '{"a"}', '{"a",}', '{"a":}', '{"a": }', '{"a" 1}', '{"a": 1 "b": 2}'),
    *('{"a": 1,}', '{"a": [1,]}', '{"a": [,1]}', '{"a": [1 2]}', '{"a": [1}', '{"a": {]}', '{"a": 1]', '{"a": 1;}'),
    *('{"a": +1}', '{"a": 01}', '{"a": -01}', '{"a": .5}', '{"a": 1.}', '{"a": 1e}', '{"a": 1e+}', '{"a": --1}'),
    *('{"a": -}', '{"a": 0x1}', '{"a": 1_000}', '{"a": 1-1}', '{"a": 1.2.3}', '{"a": ١}'),
    *('{"a": NaN}', '{"a": Infinity}', '{"a": -Infinity}', '{"a": undefined}', '{"a": None}', '{"a": True}'),
    *('{"a": tru}', '{"a": nulL}', '{"a": truex}', "{\"a\": 'b'}", "{\"a\": b'c'}", '{"a": `b`}'),
    *(
        '{"a": "\\x41"}',
        '{"a": "\\\'"}',
        '{"a": "\\u12g4"}',
        '{"a": "\\u 123"}',
        '{"a": "\\U0001F600"}',
        '{"a": "\\0"}',
    ),
    *(f'{{"a": "{chr(code)}"}}' for code in range(0x20)),
    *('{"a\n": 1}', '{\v"a": 1}', '{\u00a0"a": 1}', '{"a": 1\u2028}', '{"a": 1 // b\n}', "\ufeff{}"),
    '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}",
    '{"a": 1' + "0" * MAX_NUMBER_CHARACTERS + "}",
)


@pytest.mark.parametrize("size", [1, 3, 1 << 20])
@pytest.mark.parametrize("text", INVALID, ids=ascii)
def test_what_is_no_object_is_refused(text: str, size: int) -> None:
    """Text that is no JSON object is malformed, and not only incomplete; what was passed on is a beginning of it."""
    passed, error, _rest = _passed_on(text, size)
    assert error is not None
    assert not isinstance(error, UnfinishedCallError)
    assert text.startswith(passed)


def test_the_limits_are_the_largest_that_pass() -> None:
    """An object of the largest depth and the longest number passes."""
    deep = '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    long = '{"a": ' + "1" * MAX_NUMBER_CHARACTERS + "}"
    assert _passed_on(deep, 1) == (deep, None, "")
    assert _passed_on(long, 1) == (long, None, "")


HALF = (
    '<tool_call>{"name": "get_time", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
    '<tool_call>{"name": "get_time\\ud800", "arguments": {}}</tool_call>',
)


@pytest.mark.parametrize("text", HALF)
def test_half_a_surrogate_pair_that_is_decoded(text: str) -> None:
    """Half a surrogate pair, which has no UTF-8, is refused where the text that it stands in is decoded."""
    found = read_output("hermes", text)
    assert found.refused == ["the call has half a surrogate pair in a string"]
    assert found.content == text


def test_half_a_surrogate_pair_that_is_not_decoded() -> None:
    """Half a surrogate pair stays an escape in arguments that are passed on as they are."""
    late = '<tool_call>{"name": "get_time", "arguments": {"a": "\\ud800"}}</tool_call>'
    early = '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "get_time"}</tool_call>'
    for text in (late, early):
        assert read_output("hermes", text).calls == [("get_time", {"a": "\ud800"})]


@pytest.mark.parametrize("arguments", ['"{\\"a\\": NaN}"', '"[]"', '"{} x"', '"{"', '""', "null", "[]", "1"])
def test_arguments_that_are_no_object(arguments: str) -> None:
    """Arguments that are no JSON object, or a string that spells none, are refused before and behind the name."""
    for text in (
        f'<tool_call>{{"arguments": {arguments}, "name": "get_time"}}</tool_call>',
        f'<tool_call>{{"name": "get_time", "arguments": {arguments}}}</tool_call>',
    ):
        found = read_output("hermes", text)
        assert not found.calls, text
        assert len(found.refused) == 1
        assert found.content == text
