"""Calls in the tags of DeepSeek V3.2 and V4, whose names begin with a special token.

``<｜DSML｜function_calls>`` (V4: ``tool_calls``), for each call ``<｜DSML｜invoke name="f">``, for each argument
``<｜DSML｜parameter name="a" string="true">VALUE</｜DSML｜parameter>``, bare text where ``string`` is true and JSON
where it is false, and the closing tags. Source: the chat templates of these models.
"""

from __future__ import annotations

from functools import partial

from engine.text.output.format import CallFormat
from engine.text.output.formats.argument_rules import argument_rules
from engine.text.output.formats.sections import read_calls
from engine.text.output.growing import Growing, MalformedCallError, Reading
from engine.text.output.json_parts import ArgumentsWriter, framed_text, raw_json, raw_text
from engine.text.output.json_text import object_value
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules, alternatives
from engine.text.output.spelling import quoted
from engine.text.output.tools import STRING, Tool, ToolSet

SIGN = "｜DSML｜"
SECTIONS = ("function_calls", "tool_calls")
SECTION_BEGINS = tuple(f"<{SIGN}{name}>" for name in SECTIONS)
SECTION_ENDS = tuple(f"</{SIGN}{name}>" for name in SECTIONS)
INVOKE = f'<{SIGN}invoke name="'
INVOKE_END = f"</{SIGN}invoke>"
PARAMETER = f'<{SIGN}parameter name="'
PARAMETER_END = f"</{SIGN}parameter>"
NAME_END = '">'
IS_TEXT = '" string="true">'
IS_JSON = '" string="false">'


def _read(text: Growing, parts: Parts) -> Reading[None]:
    yield from read_calls(text, parts, INVOKE, _read_call, (*SECTION_BEGINS, *SECTION_ENDS))


def _read_call(text: Growing, parts: Parts) -> Reading[None]:
    tool = parts.call((yield from raw_text(text, NAME_END)))
    yield from text.skip()
    if (yield from text.peek()) == "{":
        # Some outputs write the arguments as one JSON object.
        yield from object_value(text, parts.arguments)
        yield from text.skip()
        yield from text.expect(INVOKE_END)
        return
    arguments = ArgumentsWriter(parts, tool)
    while True:
        yield from text.skip()
        if (yield from text.expect(PARAMETER, INVOKE_END)) == INVOKE_END:
            arguments.end()
            return
        name: list[str] = []
        marker = yield from text.until(name.append, (IS_TEXT, IS_JSON))
        if marker is None:
            text.check_more()
            raise MalformedCallError("has an argument that does not say whether it is text")
        arguments.begin("".join(name))
        if marker == IS_TEXT:
            yield from framed_text(text, parts, PARAMETER_END, trimmed=False)
        else:
            arguments.json((yield from raw_json(text, PARAMETER_END)))


def _rules(section: int, rules: Rules, tools: ToolSet) -> None:
    """``section``: number of the name that the section has."""
    names, line = [], rules.text("\n")
    for number, tool in enumerate(tools.tools.values()):
        arguments = argument_rules(
            rules, number, tool, before=partial(_before, rules, tool), tail="", end=PARAMETER_END, after=line
        )
        head = f"{rules.text(INVOKE)} {quoted(tool.name)} {rules.text(NAME_END)} {line}"
        tail = rules.text(f"{INVOKE_END}\n")
        rules.add(f"call_{number}", f"{head} {arguments} {tail}")
        names.append(f"call_{number}")
    rules.add("call", alternatives(names))
    listed = rules.repeated("call", "", parallel=tools.parallel)
    begin, end = rules.opening(SECTION_BEGINS[section]), rules.text(SECTION_ENDS[section])
    rules.add("calls", f'{begin} "\\n" {listed} {end}')


def _before(rules: Rules, tool: Tool, name: str) -> str | None:
    if IS_TEXT in name or IS_JSON in name:
        return None
    kind = IS_TEXT if tool.type_of(name) == STRING else IS_JSON
    return f"{rules.text(PARAMETER)} {quoted(name)} {rules.text(kind)}"


_MARKERS = (*SECTION_BEGINS, *SECTION_ENDS, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END, NAME_END, IS_TEXT, IS_JSON)
_BEGINS = (*SECTION_BEGINS, INVOKE)

DSML = CallFormat("dsml", _MARKERS, _read, partial(_rules, 0), begins=_BEGINS)
DSML_V4 = CallFormat("dsml-v4", _MARKERS, _read, partial(_rules, 1), begins=_BEGINS)
