"""Calls as bare JSON: Llama 3.1, 3.2 and 3.3.

The whole answer is ``{"name": "f", "parameters": {"a": 1}}``, behind ``<|python_tag|>`` or not; several are parted by
semicolons. Source: Meta's prompt formats of these models, and their chat templates.
"""

from __future__ import annotations

from engine.text.output.format import CallFormat
from engine.text.output.formats.call_object import call_object_rules, read_separate_calls
from engine.text.output.growing import Growing, Reading
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules
from engine.text.output.tools import ToolSet

TAG = "<|python_tag|>"


def _read(text: Growing, parts: Parts) -> Reading[None]:
    text.begin()
    yield from text.skip()
    begin = text.taken()
    if (yield from text.peek()) == "{":
        yield from read_separate_calls(text, parts, begin)
    else:
        parts.content(begin)
    while not parts.over and (yield from text.until(parts.content, (TAG,))) is not None:
        yield from read_separate_calls(text, parts, TAG)


def _rules(rules: Rules, tools: ToolSet) -> None:
    call = call_object_rules(rules, tools, "parameters")
    rules.add("calls", rules.repeated(call, rules.text("; "), parallel=tools.parallel))


LLAMA3 = CallFormat("llama3", (TAG,), _read, _rules, begins=(TAG,), bare="{", heads=('{"name": ',), one_call=True)
