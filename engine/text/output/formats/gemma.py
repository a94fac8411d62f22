"""Calls in a notation of their own: Gemma 4 and FunctionGemma.

Gemma 4: ``<|tool_call>call:NAME{a:1,b:<|"|>text<|"|>}<tool_call|>``; FunctionGemma: ``<start_function_call>``,
``<escape>`` for the quotes and ``<end_function_call>``. Names of members are bare; lists and objects nest. Source: the
chat template of Gemma 4, and the model card of FunctionGemma.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.text.output.format import CallFormat
from engine.text.output.formats.schema_rules import Notation, SchemaRules, length_bounds, refusal
from engine.text.output.growing import Growing, MalformedCallError, Reading
from engine.text.output.json_parts import ArgumentsWriter, framed_text
from engine.text.output.json_text import MAX_DEPTH, MAX_NUMBER_CHARACTERS, string
from engine.text.output.names import MAX_NAME, is_name_character
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules, alternatives
from engine.text.output.spelling import quoted
from engine.text.output.tools import ToolSet

CALL = "call:"
"""Stands before the name of the tool."""

_PLAIN_NAME = re.compile(r"\w[\w.-]*")
"""A member's name that needs no quotes."""


@dataclass(frozen=True, slots=True)
class _Marks:
    """How one family writes it."""

    begin: str
    end: str
    quote: str

    @property
    def all(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote)


_GEMMA_4 = _Marks("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = _Marks("<start_function_call>", "<end_function_call>", "<escape>")


def _read(marks: _Marks, text: Growing, parts: Parts) -> Reading[None]:
    while not parts.over and (yield from text.until(parts.content, (marks.begin,))) is not None:
        with parts.trying(text, marks.begin):
            yield from text.expect(CALL)
            name = yield from text.word(_is_tool_name, MAX_NAME)
            yield from text.expect("{")
            yield from _read_members(marks, text, parts, ArgumentsWriter(parts, parts.call(name)))
            yield from text.expect(marks.end)
            parts.called()


def _is_tool_name(character: str) -> bool:
    return is_name_character(character) and character != ":"


def _read_members(marks: _Marks, text: Growing, parts: Parts, arguments: ArgumentsWriter) -> Reading[None]:
    """Take the members of the outermost object; text among them is passed on as it comes."""
    yield from text.skip()
    if (yield from text.begins(("}",))) is None:
        separator = ","
        while separator == ",":
            arguments.begin((yield from _member_name(marks, text)))
            if (yield from text.begins((marks.quote,))) is not None:
                yield from framed_text(text, parts, marks.quote, trimmed=False)
            else:
                arguments.value((yield from _value(marks, text, 1)))
            yield from text.skip()
            separator = yield from text.expect(",", "}")
    arguments.end()


def _member_name(marks: _Marks, text: Growing) -> Reading[str]:
    yield from text.skip()
    if (yield from text.begins((marks.quote,))) is not None:
        name = yield from _quoted(marks, text)
        yield from text.skip()
        yield from text.expect(":")
    else:
        found: list[str] = []
        if (yield from text.until(found.append, (":",))) is None:
            text.check_more()
        name = "".join(found).strip()
    yield from text.skip()
    return name


def _value(marks: _Marks, text: Growing, depth: int) -> Reading[Any]:
    if depth > MAX_DEPTH:
        raise MalformedCallError(f"has arguments nested deeper than {MAX_DEPTH}")
    yield from text.skip()
    if (yield from text.begins((marks.quote,))) is not None:
        return (yield from _quoted(marks, text))
    char = yield from text.peek()
    if char == "{":
        return (yield from _object(marks, text, depth))
    if char == "[":
        return (yield from _list(marks, text, depth))
    if char == '"':
        # Some outputs quote as JSON does.
        return (yield from string(text))
    word = yield from text.word(_is_bare, MAX_NUMBER_CHARACTERS)
    text.check_more()
    return _bare(word.strip())


def _object(marks: _Marks, text: Growing, depth: int) -> Reading[dict[str, Any]]:
    yield from text.expect("{")
    found: dict[str, Any] = {}
    yield from text.skip()
    if (yield from text.begins(("}",))) is not None:
        return found
    separator = ","
    while separator == ",":
        name = yield from _member_name(marks, text)
        found[name] = yield from _value(marks, text, depth + 1)
        yield from text.skip()
        separator = yield from text.expect(",", "}")
    return found


def _list(marks: _Marks, text: Growing, depth: int) -> Reading[list[Any]]:
    yield from text.expect("[")
    found: list[Any] = []
    yield from text.skip()
    if (yield from text.begins(("]",))) is not None:
        return found
    separator = ","
    while separator == ",":
        found.append((yield from _value(marks, text, depth + 1)))
        yield from text.skip()
        separator = yield from text.expect(",", "]")
    return found


def _quoted(marks: _Marks, text: Growing) -> Reading[str]:
    found: list[str] = []
    if (yield from text.until(found.append, (marks.quote,))) is None:
        text.check_more()
    return "".join(found)


def _is_bare(character: str) -> bool:
    return character not in ",}]{["


def _bare(word: str) -> Any:
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        raise MalformedCallError("has a value that is neither quoted nor JSON") from None


def _rules(marks: _Marks, rules: Rules, tools: ToolSet) -> None:
    notation = Notation(
        literals=partial(_literals, marks, rules),
        text=partial(_text_rule, marks, rules),
        member=partial(_member, marks, rules),
    )
    names = []
    for number, tool in enumerate(tools.tools.values()):
        members = SchemaRules(notation, rules, number, strict=tool.strict).arguments(tool)
        head, tail = quoted(f"{CALL}{tool.name}{{"), rules.text(f"}}{marks.end}")
        rules.add(f"call_{number}", f"{head} {members} {tail}")
        names.append(f"call_{number}")
    rules.add("call", alternatives(names))
    rules.add("calls", rules.framed(marks.begin, "call", parallel=tools.parallel))


def _text_rule(marks: _Marks, rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    return f"{rules.text(marks.quote)} {rules.any_text(name, length_bounds(schema), '', marks.quote)}"


def _literals(marks: _Marks, rules: Rules, texts: Iterable[str]) -> str:
    written = [text for text in texts if _can_quote(marks, rules, text)]
    if not written:
        raise refusal("lists no text that can be written")
    return f"{rules.text(marks.quote)} {rules.one_text(written, '', marks.quote)}"


def _member(marks: _Marks, rules: Rules, name: str) -> str | None:
    if _PLAIN_NAME.fullmatch(name):
        return quoted(f"{name}:")
    if not _can_quote(marks, rules, name):
        return None
    return f'{rules.text(marks.quote)} {rules.one_text([name], "", marks.quote)} ":"'


def _can_quote(marks: _Marks, rules: Rules, text: str) -> bool:
    return rules.spelling.is_special(marks.quote) or marks.quote not in text


GEMMA_4 = CallFormat(
    "gemma-4", _GEMMA_4.all, partial(_read, _GEMMA_4), partial(_rules, _GEMMA_4), begins=(_GEMMA_4.begin,)
)
FUNCTION_GEMMA = CallFormat(
    "function-gemma",
    _FUNCTION_GEMMA.all,
    partial(_read, _FUNCTION_GEMMA),
    partial(_rules, _FUNCTION_GEMMA),
    begins=(_FUNCTION_GEMMA.begin,),
)
