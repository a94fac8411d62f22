"""Calls in tags, with pairs of names and values: GLM 4.5 to 4.7.

``<tool_call>NAME``, for each argument ``<arg_key>NAME</arg_key>`` and ``<arg_value>VALUE</arg_value>``, then
``</tool_call>``; text is bare, everything else is JSON. Source: the chat templates of these models.
"""

from __future__ import annotations

from functools import partial

from engine.text.output.format import CallFormat
from engine.text.output.formats.argument_rules import argument_rules
from engine.text.output.formats.sections import read_calls
from engine.text.output.growing import Growing, Reading
from engine.text.output.json_parts import ArgumentsWriter, framed_text, raw_json, raw_text
from engine.text.output.names import MAX_NAME, is_name_character
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules, alternatives
from engine.text.output.spelling import quoted
from engine.text.output.tools import ToolSet

BEGIN = "<tool_call>"
END = "</tool_call>"
KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
LINE = '"\\n"?'
"""Stands between the tags in 4.5 and 4.6 and not in 4.7, as part of a rule."""


def _read(text: Growing, parts: Parts) -> Reading[None]:
    yield from read_calls(text, parts, BEGIN, _read_call)


def _read_call(text: Growing, parts: Parts) -> Reading[None]:
    yield from text.skip()
    name = yield from text.word(is_name_character, MAX_NAME)
    yield from text.skip()
    # Only behind the whole name is it known to be one.
    marker = yield from text.expect(KEY, END)
    arguments = ArgumentsWriter(parts, parts.call(name))
    while marker == KEY:
        key = yield from raw_text(text, KEY_END)
        yield from text.skip()
        yield from text.expect(VALUE)
        arguments.begin(key)
        if arguments.is_text(key):
            yield from framed_text(text, parts, VALUE_END, trimmed=False)
        else:
            arguments.json_or_text((yield from raw_json(text, VALUE_END)))
        yield from text.skip()
        marker = yield from text.expect(KEY, END)
    arguments.end()


def _rules(rules: Rules, tools: ToolSet) -> None:
    names = []
    for number, tool in enumerate(tools.tools.values()):
        arguments = argument_rules(
            rules, number, tool, before=partial(_before, rules), tail="", end=VALUE_END, after=LINE
        )
        rules.add(f"call_{number}", f"{quoted(tool.name)} {LINE} {arguments} {rules.text(END)}")
        names.append(f"call_{number}")
    rules.add("call", alternatives(names))
    more = f"({LINE} {rules.text(BEGIN)} call)*" if tools.parallel else ""
    rules.add("calls", f"{rules.opening(BEGIN)} call {more}")


def _before(rules: Rules, name: str) -> str | None:
    if KEY_END in name or name.strip() != name:
        return None
    return f"{rules.text(KEY)} {quoted(name)} {rules.text(KEY_END)} {LINE} {rules.text(VALUE)}"


GLM = CallFormat("glm", (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END), _read, _rules, begins=(BEGIN,))
