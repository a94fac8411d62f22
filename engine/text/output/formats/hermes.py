"""Calls as JSON in tags: Hermes 2 Pro, Qwen 2.5 and 3, Granite 4 and others.

``<tool_call>`` line break, ``{"name": "f", "arguments": {"a": 1}}``, line break ``</tool_call>``; several follow each
other. Source: the chat templates of these models.
"""

from __future__ import annotations

from engine.text.output.format import CallFormat
from engine.text.output.formats.call_object import call_object_rules, read_call_object
from engine.text.output.formats.sections import read_calls
from engine.text.output.growing import Growing, Reading
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules
from engine.text.output.tools import ToolSet

BEGIN = "<tool_call>"
END = "</tool_call>"


def _read(text: Growing, parts: Parts) -> Reading[None]:
    yield from read_calls(text, parts, BEGIN, _read_call)


def _read_call(text: Growing, parts: Parts) -> Reading[None]:
    yield from read_call_object(text, parts)
    yield from text.skip()
    # Some models end the output in place of the tag.
    if (yield from text.peek()):
        yield from text.expect(END)


def _rules(rules: Rules, tools: ToolSet) -> None:
    call = call_object_rules(rules, tools)
    line = rules.text("\n")
    rules.add("framed", f"{line} {call} {line} {rules.text(END)}")
    rules.add("calls", rules.framed(BEGIN, "framed", "\n", parallel=tools.parallel))


HERMES = CallFormat("hermes", (BEGIN, END), _read, _rules, begins=(BEGIN,))
