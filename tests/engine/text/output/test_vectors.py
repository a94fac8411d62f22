"""What holds for the calls of every family: one example in each, and what is made of it."""

from __future__ import annotations

import pytest

from engine.text.output.tools import ToolSet
from isolation.ipc.output import Thinking
from tests.engine.text.output.reading import BY_NAME, TIME, WEATHER, Read, read_output

EXAMPLES = {
    "harmony": '<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"city": "Åbo \\"1\\""}<|call|>',
    "gemma-4": '<|tool_call>call:NAME{city:<|"|>Åbo "1"<|"|>}<tool_call|>',
    "function-gemma": '<start_function_call>call:NAME{city:<escape>Åbo "1"<escape>}<end_function_call>',
    "kimi": '<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"city": "Åbo \\"1\\""}<|tool_call_end|>',
    "dsml": '<｜DSML｜invoke name="NAME">\n<｜DSML｜parameter name="city" string="true">Åbo "1"</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>",
    "dsml-v4": '<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="city" string="true">Åbo "1"</｜DSML｜parameter>'
    "</｜DSML｜invoke>",
    "deepseek": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n"
    '{"city": "Åbo \\"1\\""}\n```<｜tool▁call▁end｜>',
    "deepseek-bare": '<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"city": "Åbo \\"1\\""}<｜tool▁call▁end｜>',
    "mistral-named": '[TOOL_CALLS]NAME[ARGS]{"city": "Åbo \\"1\\""}',
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": {"city": "Åbo \\"1\\""}}]',
    "lfm2": "<|tool_call_start|>[NAME(city='Åbo \"1\"')]<|tool_call_end|>",
    "llama-4": "<|python_start|>[NAME(city='Åbo \"1\"')]<|python_end|>",
    "tagged": '<tool_call>\n<function=NAME>\n<parameter=city>\nÅbo "1"\n</parameter>\n</function>\n</tool_call>',
    "glm": '<tool_call>NAME\n<arg_key>city</arg_key>\n<arg_value>Åbo "1"</arg_value>\n</tool_call>',
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": {"city": "Åbo \\"1\\""}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "NAME", "parameters": {"city": "Åbo \\"1\\""}}',
}
"""Format -> one call of the tool ``NAME``."""

CITY = {"city": 'Åbo "1"'}
CALL = ("get_weather", CITY)
WRITTEN = '{"city":"Åbo\\"1\\""}'
"""The arguments, without blanks."""

MARKERS = {
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "mistral-named": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "dsml": ("｜DSML｜",),
    "dsml-v4": ("｜DSML｜",),
}
"""Special tokens of the published tokenizers, where they are not all markers of the format."""

SPECIAL = ("harmony", "gemma-4", "function-gemma", "kimi", "deepseek", "deepseek-bare", "lfm2", "llama-4", *MARKERS)
"""Formats whose markers are special tokens in the published tokenizers."""


def _example(form: str, name: str = "get_weather") -> str:
    return EXAMPLES[form].replace("NAME", name)


def _special(form: str) -> tuple[str, ...]:
    return MARKERS.get(form, BY_NAME[form].markers) if form in SPECIAL else ()


def test_each_format_has_an_example() -> None:
    """The table has one call of each format."""
    assert EXAMPLES.keys() == BY_NAME.keys()


@pytest.mark.parametrize("form", EXAMPLES)
def test_one_call(form: str) -> None:
    """One call has a name and arguments, and nothing of it is content, whether or not its markers are special
    tokens."""
    assert read_output(form, _example(form)) == Read(calls=[CALL])
    assert read_output(form, _example(form), special=_special(form)) == Read(calls=[CALL])


@pytest.mark.parametrize("form", EXAMPLES)
def test_white_space_around_a_call(form: str) -> None:
    """White space before and behind a call is no content."""
    assert read_output(form, f" \n{_example(form)}\n ") == Read(calls=[CALL])


@pytest.mark.parametrize("form", EXAMPLES)
def test_two_calls(form: str) -> None:
    """Two calls one after the other are read in their order."""
    found = read_output(form, f"{_example(form)}\n{_example(form, 'get_time')}", special=_special(form))
    assert found == Read(calls=[CALL, ("get_time", CITY)])


@pytest.mark.parametrize("form", EXAMPLES)
def test_the_only_call_ends_the_output(form: str) -> None:
    """An output that may have one call ends behind it: a second call and text are not read."""
    tools = ToolSet({tool.name: tool for tool in (WEATHER, TIME)}, parallel=False)
    found = read_output(form, f"{_example(form)}\n{_example(form, 'get_time')} Text.", tools=tools)
    assert found == Read(calls=[CALL])


@pytest.mark.parametrize("form", sorted(EXAMPLES.keys() - {"harmony"}))
def test_content_before_a_call(form: str) -> None:
    """Text before a call is content, without the white space between them."""
    found = read_output(form, f"\tI look: {{1}} <b> [2].\n\n{_example(form)}", special=_special(form))
    assert found == Read(content="\tI look: {1} <b> [2].", calls=[CALL])


@pytest.mark.parametrize("form", sorted(EXAMPLES.keys() - {"harmony"}))
def test_reasoning_before_a_call(form: str) -> None:
    """Reasoning before a call is no content, and a call inside it is none."""
    text = f"<think>\n{_example(form)} or not?\n</think>\n\n{_example(form)}"
    found = read_output(form, text, thinking=("<think>", "</think>"), state=Thinking.POSSIBLE, special=_special(form))
    assert found == Read(reasoning=f"{_example(form)} or not?", calls=[CALL])


@pytest.mark.parametrize("form", EXAMPLES)
def test_a_tool_that_is_not_offered(form: str) -> None:
    """A call of another tool becomes content, whole, and the reason says why."""
    found = read_output(form, f"{_example(form, 'drop_tables')}", special=_special(form))
    assert found.refused == ["the call names a tool that the request does not have"]
    # The end of a message or section is no text of the call.
    assert _example(form, "drop_tables").startswith(found.content)
    assert "drop_tables" in found.content
    assert "Åbo" in found.content
    assert not found.calls


@pytest.mark.parametrize(
    ("form", "special"), [(form, False) for form in EXAMPLES if form != "harmony"] + [(form, True) for form in SPECIAL]
)
def test_every_truncation(form: str, special: bool) -> None:
    """A call that is cut off by the limit of tokens is never refused: it has begun, or is content, or is complete but
    for its last marker. What has come of its arguments is the beginning of the whole ones."""
    text, tokens = _example(form), _special(form) if special else ()
    for length in range(len(text)):
        if any(
            text[at : at + len(token)] == token and at < length < at + len(token)
            for token in tokens
            for at in range(len(text))
        ):
            continue
        found = read_output(form, text[:length], special=tokens, cut=True)
        assert not found.refused, text[:length]
        assert found.calls in ([], [CALL])
        if found.begun is not None:
            assert found.content == ""
            name, arguments = found.begun
            assert name == "get_weather"
            # Text at the end may be the beginning of a marker, or not.
            begun = (arguments, arguments.rpartition("<")[0].removesuffix("\\n"))
            assert any(WRITTEN.startswith(part.replace(" ", "")) for part in begun)
        elif form == "harmony":
            assert not found.content
        elif not found.calls:
            assert found.content == text[:length].rstrip() or found.content == text[:length]


@pytest.mark.parametrize("form", sorted(EXAMPLES.keys() - {"llama3", "mistral", "mistral-named", "hermes"}))
def test_an_output_that_ends_inside_a_call(form: str) -> None:
    """A call that the model itself leaves incomplete is refused, and becomes content."""
    text = _example(form)
    text = text[: text.index("1")]
    found = read_output(form, text, special=_special(form))
    assert found == Read(content=text, refused=["the call is not complete"])


@pytest.mark.parametrize("form", EXAMPLES)
def test_a_plain_answer(form: str) -> None:
    """An answer without a call is content, word for word."""
    text = '  Hello, "world"!\n\n```json\n[1, {"a": "<b>"}]\n```\n '
    assert read_output(form, text, special=_special(form)) == Read(content=text)


@pytest.mark.parametrize("form", SPECIAL)
def test_a_marker_that_is_spelt(form: str) -> None:
    """The text of a special token, spelt by other tokens, is text and no marker."""
    text = f"It writes {_example(form)}"
    found = read_output(form, text, special=_special(form), spelt=True)
    assert found == Read(content=text)
