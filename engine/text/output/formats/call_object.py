"""A call as a JSON object with the tool's name and its arguments, which several formats share."""

from __future__ import annotations

import json

from engine.text.output.growing import Growing, MalformedCallError, Reading, UnfinishedCallError
from engine.text.output.json_parts import written
from engine.text.output.json_text import object_value, string, value, whole
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules, alternatives
from engine.text.output.spelling import quoted
from engine.text.output.tools import ToolSet

ARGUMENTS = ("arguments", "parameters")
"""Names of the member that holds the arguments."""


def read_call_object(text: Growing, parts: Parts) -> Reading[None]:
    """Take ``{"name": ..., "arguments": {...}}``; arguments behind the name are passed on as they come. Members of
    other names have no effect.

    Raises:
        MalformedCallError: it is none.
    """
    named, early, passed = False, "", False
    yield from text.skip()
    yield from text.expect("{")
    while True:
        member = yield from string(text)
        yield from text.skip()
        yield from text.expect(":")
        if member == "name" and not named:
            parts.call((yield from string(text)))
            named = True
            parts.arguments(early)
        elif member in ARGUMENTS and not passed:
            passed = True
            if named:
                yield from _arguments(text, parts)
            else:
                early = yield from _early(text)
        else:
            yield from value(text, _ignore)
        yield from text.skip()
        if (yield from text.expect(",", "}")) == "}":
            break
    if not named:
        raise MalformedCallError("has no name")
    if not passed:
        parts.arguments("{}")


def read_call_list(text: Growing, parts: Parts) -> Reading[None]:
    """Take a JSON list of such objects, or one of them.

    Raises:
        MalformedCallError: it is none.
    """
    yield from text.skip()
    if (yield from text.begins(("[",))) is None:
        yield from read_call_object(text, parts)
        parts.called()
        return
    yield from read_listed_calls(text, parts)


def read_listed_calls(text: Growing, parts: Parts) -> Reading[None]:
    """Take the rest of such a list, behind its bracket.

    Raises:
        MalformedCallError: it is none.
    """
    while not parts.over:
        yield from read_call_object(text, parts)
        parts.called()
        text.begin()
        yield from text.skip()
        if (yield from text.expect(",", "]")) == "]":
            return


def read_separate_calls(text: Growing, parts: Parts, begin: str) -> Reading[None]:
    """Take such objects with semicolons, commas or nothing between them; ``begin`` is what was taken before them."""
    while not parts.over:
        with parts.trying(text, begin):
            yield from read_call_object(text, parts)
            parts.called()
            yield from text.skip()
            begin = (yield from text.begins((";", ","))) or ""
            if begin or (yield from text.peek()) == "{":
                continue
        return


def call_object_rules(rules: Rules, tools: ToolSet, member: str = "arguments") -> str:
    """Add rules for such an object; returns the name of the rule for one call."""
    names = []
    for number, tool in enumerate(tools.tools.values()):
        # Beside an answer, what is the same in both has to be the same lexemes.
        begin = ["{", '"name"', ":", " "] if tools.answer is not None else ['{"name": ']
        head = " ".join(quoted(piece) for piece in (*begin, f'{json.dumps(tool.name)}, "{member}": '))
        rules.add(f"call_{number}", f'{head} {rules.arguments(number, tool)} "}}"')
        names.append(f"call_{number}")
    rules.add("call", alternatives(names))
    return "call"


def _arguments(text: Growing, parts: Parts) -> Reading[None]:
    """Pass on the arguments; models that write the object into a string mean the object."""
    yield from text.skip()
    if (yield from text.peek()) != '"':
        yield from object_value(text, parts.arguments)
        return
    spelt = yield from string(text)
    inner = Growing()
    inner.push(spelt)
    inner.ended = True
    try:
        yield from object_value(inner, parts.arguments)
        yield from inner.skip()
    except UnfinishedCallError:
        # The string has ended, the output has not.
        raise MalformedCallError("has arguments that are no JSON object") from None
    if inner.held():
        raise MalformedCallError("has arguments that are no JSON object")


def _early(text: Growing) -> Reading[str]:
    found = yield from whole(text)
    if isinstance(found, str):
        found = _parsed(found)
    if not isinstance(found, dict):
        raise MalformedCallError("has arguments that are no JSON object")
    return written(found)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _ignore(_text: str) -> None:
    """Pass on nothing."""
