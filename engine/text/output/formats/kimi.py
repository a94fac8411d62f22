"""Calls between tokens, with ids that say the name: Kimi K2.

``<|tool_calls_section_begin|>``, and for each call ``<|tool_call_begin|>functions.NAME:NUMBER
<|tool_call_argument_begin|>{...}<|tool_call_end|>`` without blanks, then ``<|tool_calls_section_end|>``. Source: the
guide to tool calls in the model's repository.
"""

from __future__ import annotations

from engine.text.output.format import CallFormat
from engine.text.output.formats.sections import read_calls
from engine.text.output.growing import Growing, Reading
from engine.text.output.json_text import object_value
from engine.text.output.names import MAX_NAME, is_name_character
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules, alternatives
from engine.text.output.spelling import quoted
from engine.text.output.tools import ToolSet

SECTION_BEGIN = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
BEGIN = "<|tool_call_begin|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
END = "<|tool_call_end|>"
PREFIX = "functions."


def _read(text: Growing, parts: Parts) -> Reading[None]:
    yield from read_calls(text, parts, BEGIN, _read_call, (SECTION_BEGIN, SECTION_END))


def _read_call(text: Growing, parts: Parts) -> Reading[None]:
    yield from text.skip()
    spelt = yield from text.word(is_name_character, MAX_NAME)
    yield from text.skip()
    yield from text.expect(ARGUMENTS)
    named = spelt.removeprefix(PREFIX)
    name, _colon, number = named.rpartition(":")
    # Some models leave the number out.
    parts.call(name if number.isdigit() else named)
    yield from object_value(text, parts.arguments)
    yield from text.skip()
    yield from text.expect(END)


def _rules(rules: Rules, tools: ToolSet) -> None:
    names = []
    for number, tool in enumerate(tools.tools.values()):
        name = quoted(f"{PREFIX}{tool.name}:")
        head = f"{rules.text(BEGIN)} {name} NUMBER {rules.text(ARGUMENTS)}"
        rules.add(f"call_{number}", f"{head} {rules.arguments(number, tool)} {rules.text(END)}")
        names.append(f"call_{number}")
    rules.add("NUMBER", "/[0-9]{1,3}/")
    rules.add("call", alternatives(names))
    listed = rules.repeated("call", "", parallel=tools.parallel)
    rules.add("calls", f"{rules.opening(SECTION_BEGIN)} {listed} {rules.text(SECTION_END)}")


KIMI = CallFormat(
    "kimi", (SECTION_BEGIN, SECTION_END, BEGIN, ARGUMENTS, END), _read, _rules, begins=(SECTION_BEGIN, BEGIN)
)
