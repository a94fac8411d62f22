"""Calls behind a token: Mistral's models.

Older ones write ``[TOOL_CALLS]`` and a JSON list of ``{"name": "f", "arguments": {"a": 1}}``; newer ones, for each
call, ``[TOOL_CALLS]f[ARGS]{"a": 1}``, with or without ``[CALL_ID]`` and an id before ``[ARGS]``. Source: the package
mistral-common, versions 3 to 13 of its instruction tokenizers.
"""

from __future__ import annotations

from engine.text.output.format import CallFormat
from engine.text.output.formats.call_object import call_object_rules, read_call_list
from engine.text.output.growing import Growing, MalformedCallError, Reading
from engine.text.output.json_text import object_value
from engine.text.output.names import MAX_NAME, is_name_character
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules, alternatives
from engine.text.output.spelling import quoted
from engine.text.output.tools import ToolSet

BEGIN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
ID_LENGTH = 9
"""Characters of an id, as the chat templates demand."""


def _read(text: Growing, parts: Parts) -> Reading[None]:
    while not parts.over and (yield from text.until(parts.content, (BEGIN,))) is not None:
        with parts.trying(text, BEGIN):
            yield from text.skip()
            if (yield from text.peek()) in ("[", "{"):
                yield from read_call_list(text, parts)
            else:
                yield from _read_named(text, parts)
                parts.called()


def _read_named(text: Growing, parts: Parts) -> Reading[None]:
    name = yield from text.word(is_name_character, MAX_NAME)
    if not name:
        text.check_more()
        raise MalformedCallError("has no name")
    # Only behind the whole name is it known to be one.
    yield from text.peek()
    text.check_more()
    parts.call(name)
    if (yield from text.begins((CALL_ID,))) is not None:
        yield from text.word(str.isalnum, MAX_NAME)
    if (yield from text.begins((ARGUMENTS,))) is None:
        text.check_more(CALL_ID, ARGUMENTS)
    yield from object_value(text, parts.arguments)


def _rules(rules: Rules, tools: ToolSet) -> None:
    call = call_object_rules(rules, tools)
    listed = rules.repeated(call, rules.text(", "), parallel=tools.parallel)
    rules.add("calls", f'{rules.opening(BEGIN)} "[" {listed} "]"')


def _named_rules(rules: Rules, tools: ToolSet) -> None:
    names = []
    for number, tool in enumerate(tools.tools.values()):
        head = f"{quoted(tool.name)} {rules.text(ARGUMENTS)}"
        rules.add(f"call_{number}", f"{head} {rules.arguments(number, tool)}")
        names.append(f"call_{number}")
    rules.add("call", alternatives(names))
    rules.add("calls", rules.framed(BEGIN, "call", parallel=tools.parallel))


MISTRAL = CallFormat("mistral", (BEGIN, ARGUMENTS, CALL_ID), _read, _rules, begins=(BEGIN,), id_length=ID_LENGTH)
MISTRAL_NAMED = CallFormat(
    "mistral-named", (BEGIN, ARGUMENTS, CALL_ID), _read, _named_rules, begins=(BEGIN,), id_length=ID_LENGTH
)
