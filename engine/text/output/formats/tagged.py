"""Calls in tags, one for each argument: Qwen 3 Coder, Qwen 3.5, Nemotron 3 and others.

``<tool_call>``, ``<function=NAME>``, for each argument ``<parameter=NAME>``, its value on lines of its own and
``</parameter>``, then ``</function>`` and ``</tool_call>``, each on a line. Source: the chat templates of these models.
"""

from __future__ import annotations

from functools import partial

from engine.text.output.format import CallFormat
from engine.text.output.formats.argument_rules import argument_rules
from engine.text.output.growing import Growing, Reading
from engine.text.output.json_parts import ArgumentsWriter, framed_text, raw_json, raw_text
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules, alternatives
from engine.text.output.spelling import quoted
from engine.text.output.tools import ToolSet

BEGIN = "<tool_call>"
END = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
NAME_END = ">"
LINE = "\n"

_MARKERS = (BEGIN, END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)


def _read(text: Growing, parts: Parts) -> Reading[None]:
    while not parts.over:
        # Some models leave the outer tags out, or the first of them.
        begin = yield from text.until(parts.content, (BEGIN, FUNCTION))
        if begin is None:
            return
        with parts.trying(text, begin):
            if begin == BEGIN:
                yield from text.skip()
                yield from text.expect(FUNCTION)
            yield from _read_function(text, parts)
            yield from text.skip()
            if begin == FUNCTION:
                yield from text.begins((END,))
            elif (yield from text.peek()):
                yield from text.expect(END)
            parts.called()


def _read_function(text: Growing, parts: Parts) -> Reading[None]:
    arguments = ArgumentsWriter(parts, parts.call((yield from raw_text(text, NAME_END))))
    while True:
        yield from text.skip()
        if (yield from text.expect(PARAMETER, FUNCTION_END)) == FUNCTION_END:
            arguments.end()
            return
        name = yield from raw_text(text, NAME_END)
        arguments.begin(name)
        if arguments.is_text(name):
            yield from framed_text(text, parts, PARAMETER_END, trimmed=True)
        else:
            arguments.json_or_text((yield from raw_json(text, PARAMETER_END)))


def _rules(rules: Rules, tools: ToolSet) -> None:
    names, line, tail = [], rules.text(LINE), rules.text(f"{FUNCTION_END}\n{END}")
    for number, tool in enumerate(tools.tools.values()):
        arguments = argument_rules(
            rules, number, tool, before=partial(_before, rules), tail=LINE, end=PARAMETER_END, after=line
        )
        head = f"{line} {rules.text(FUNCTION)} {quoted(tool.name)} {rules.text(NAME_END)} {line}"
        rules.add(f"call_{number}", f"{head} {arguments} {tail}")
        names.append(f"call_{number}")
    rules.add("call", alternatives(names))
    rules.add("calls", rules.framed(BEGIN, "call", "\n", parallel=tools.parallel))


def _before(rules: Rules, name: str) -> str | None:
    if NAME_END in name or name.strip() != name:
        return None
    return f"{rules.text(PARAMETER)} {quoted(name)} {rules.text(NAME_END)} {rules.text(LINE)}"


TAGGED = CallFormat("tagged", _MARKERS, _read, _rules, begins=(BEGIN, FUNCTION))
