"""Calls between tokens: DeepSeek V3, R1 and V3.1.

``<calls begin>``, and for each call ``<call begin>function<sep>NAME`` line break and the arguments in a Markdown block
of JSON (V3, R1), or ``<call begin>NAME<sep>`` and the arguments bare (V3.1), then ``<call end>``; at last ``<calls
end>``. Source: the chat templates of these models.
"""

from __future__ import annotations

from engine.text.output.format import CallFormat
from engine.text.output.formats.sections import read_calls
from engine.text.output.growing import Growing, MalformedCallError, Reading
from engine.text.output.json_text import object_value
from engine.text.output.names import MAX_NAME, is_name_character
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules, alternatives
from engine.text.output.spelling import quoted
from engine.text.output.tools import ToolSet

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
BEGIN = "<｜tool▁call▁begin｜>"
END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
KIND = "function"
FENCE = "```"
JSON_FENCE = "```json"

_MARKERS = (CALLS_BEGIN, CALLS_END, BEGIN, END, SEPARATOR)


def _read(text: Growing, parts: Parts) -> Reading[None]:
    yield from read_calls(text, parts, BEGIN, _read_call, (CALLS_BEGIN, CALLS_END))


def _read_call(text: Growing, parts: Parts) -> Reading[None]:
    name = yield from text.word(is_name_character, MAX_NAME)
    yield from text.expect(SEPARATOR)
    fenced = False
    if (yield from text.peek()) not in ("{", " ", "\n", ""):
        if name != KIND:
            raise MalformedCallError(f"is of another kind than {KIND!r}")
        name = yield from text.word(is_name_character, MAX_NAME)
        yield from text.skip()
        fenced = (yield from text.begins((JSON_FENCE,))) is not None
    text.check_more(JSON_FENCE)
    parts.call(name)
    yield from object_value(text, parts.arguments)
    yield from text.skip()
    if fenced:
        yield from text.expect(FENCE)
        yield from text.skip()
    yield from text.expect(END)


def _rules(rules: Rules, tools: ToolSet) -> None:
    _add_rules(rules, tools, f"{BEGIN}{KIND}{SEPARATOR}", f"\n{JSON_FENCE}\n", f"\n{FENCE}{END}", "\n")


def _bare_rules(rules: Rules, tools: ToolSet) -> None:
    _add_rules(rules, tools, BEGIN, SEPARATOR, END, "")


def _add_rules(rules: Rules, tools: ToolSet, before: str, between: str, after: str, separator: str) -> None:
    names = []
    for number, tool in enumerate(tools.tools.values()):
        head = f"{rules.text(before)} {quoted(tool.name)} {rules.text(between)}"
        rules.add(f"call_{number}", f"{head} {rules.arguments(number, tool)} {rules.text(after)}")
        names.append(f"call_{number}")
    rules.add("call", alternatives(names))
    listed = rules.repeated("call", rules.text(separator) if separator else "", parallel=tools.parallel)
    rules.add("calls", f"{rules.opening(CALLS_BEGIN)} {listed} {rules.text(CALLS_END)}")


DEEPSEEK = CallFormat("deepseek", _MARKERS, _read, _rules, begins=(CALLS_BEGIN, BEGIN))
DEEPSEEK_BARE = CallFormat("deepseek-bare", _MARKERS, _read, _bare_rules, begins=(CALLS_BEGIN, BEGIN))
