"""Calls as a Python list: Llama 4, LFM2 and others.

``[f(a=1, b="text"), g()]`` is the whole answer, or stands between two tokens (``<|python_start|>`` and
``<|python_end|>`` in Llama 4, ``<|tool_call_start|>`` and ``<|tool_call_end|>`` in LFM2). Values are literals. Source:
Meta's prompt format of Llama 4, and the chat template of LFM2.5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.text.output.format import CallFormat
from engine.text.output.formats.call_object import read_listed_calls, read_separate_calls
from engine.text.output.formats.schema_rules import Notation, SchemaRules
from engine.text.output.growing import Growing, MalformedCallError, Reading
from engine.text.output.json_parts import ArgumentsWriter
from engine.text.output.json_text import MAX_DEPTH, MAX_NUMBER_CHARACTERS
from engine.text.output.names import MAX_NAME, is_name_character
from engine.text.output.parts import Parts
from engine.text.output.rules import Rules, alternatives
from engine.text.output.spelling import quoted
from engine.text.output.tools import ToolSet

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_HEX = frozenset("0123456789abcdefABCDEF")
_LAST_CHARACTER = 0x10FFFF


@dataclass(frozen=True, slots=True)
class _Marks:
    begin: str
    end: str
    bare: bool
    """Whether calls also stand without the tokens, if they are the whole answer."""


_LLAMA_4 = _Marks("<|python_start|>", "<|python_end|>", bare=True)
_LFM2 = _Marks("<|tool_call_start|>", "<|tool_call_end|>", bare=False)


def _read(marks: _Marks, text: Growing, parts: Parts) -> Reading[None]:
    if marks.bare:
        text.begin()
        yield from text.skip()
        begin = text.taken()
        if (yield from text.peek()) in ("[", "{"):
            yield from _read_calls(marks, text, parts, begin)
        else:
            parts.content(begin)
    while not parts.over:
        marker = yield from text.until(parts.content, (marks.begin, marks.end))
        if marker is None:
            return
        if marker == marks.begin:
            text.begin()
            yield from text.skip()
            yield from _read_calls(marks, text, parts, marker + text.taken())


def _read_calls(marks: _Marks, text: Growing, parts: Parts, begin: str) -> Reading[None]:
    """Take calls in Python or in JSON, which these models write where a template asks for it; ``begin`` is what was
    taken before them."""
    if (yield from text.peek()) == "{":
        yield from read_separate_calls(text, parts, begin)
        return
    with parts.trying(text, begin):
        yield from text.expect("[")
        yield from text.skip()
        if (yield from text.peek()) == "{":
            yield from read_listed_calls(text, parts)
        elif marks.bare or (yield from text.begins(("]",))) is None:
            yield from _read_list(text, parts)


def _read_list(text: Growing, parts: Parts) -> Reading[None]:
    separator = ","
    while separator == "," and not parts.over:
        yield from text.skip()
        name = yield from text.word(_is_tool_name, MAX_NAME)
        yield from text.expect("(")
        yield from _read_arguments(text, ArgumentsWriter(parts, parts.call(name)))
        parts.called()
        text.begin()
        yield from text.skip()
        if not parts.over:
            separator = yield from text.expect(",", "]")


def _is_tool_name(character: str) -> bool:
    return is_name_character(character) and character != ":"


def _read_arguments(text: Growing, arguments: ArgumentsWriter) -> Reading[None]:
    yield from text.skip()
    separator = "," if (yield from text.begins((")",))) is None else ")"
    while separator == ",":
        yield from text.skip()
        name = yield from text.word(_is_tool_name, MAX_NAME)
        yield from text.skip()
        yield from text.expect("=")
        arguments.begin(name)
        arguments.value((yield from _value(text, 1)))
        yield from text.skip()
        separator = yield from text.expect(",", ")")
    arguments.end()


def _value(text: Growing, depth: int) -> Reading[Any]:
    if depth > MAX_DEPTH:
        raise MalformedCallError(f"has arguments nested deeper than {MAX_DEPTH}")
    yield from text.skip()
    char = yield from text.peek()
    if char in ("'", '"'):
        return (yield from _string(text))
    if char == "[":
        return (yield from _list(text, depth))
    if char == "{":
        return (yield from _dictionary(text, depth))
    word = yield from text.word(_is_bare, MAX_NUMBER_CHARACTERS)
    text.check_more()
    return _word(word.strip())


def _list(text: Growing, depth: int) -> Reading[list[Any]]:
    yield from text.expect("[")
    found: list[Any] = []
    yield from text.skip()
    separator = "," if (yield from text.begins(("]",))) is None else "]"
    while separator == ",":
        found.append((yield from _value(text, depth + 1)))
        yield from text.skip()
        separator = yield from text.expect(",", "]")
    return found


def _dictionary(text: Growing, depth: int) -> Reading[dict[str, Any]]:
    yield from text.expect("{")
    found: dict[str, Any] = {}
    yield from text.skip()
    separator = "," if (yield from text.begins(("}",))) is None else "}"
    while separator == ",":
        yield from text.skip()
        name = yield from _string(text)
        yield from text.skip()
        yield from text.expect(":")
        found[name] = yield from _value(text, depth + 1)
        yield from text.skip()
        separator = yield from text.expect(",", "}")
    return found


def _string(text: Growing) -> Reading[str]:
    """Take a string in either kind of quotes, with Python's escapes and JSON's."""
    quote = yield from text.expect("'", '"')
    found: list[str] = []
    while True:
        found.append(text.take_while(partial(_plain_length, quote)))
        char = yield from text.next()
        if char == quote:
            return "".join(found)
        found.append((yield from _escape(text)) if char == "\\" else char)


def _plain_length(quote: str, text: str) -> int:
    return min((at for mark in (quote, "\\") if (at := text.find(mark)) >= 0), default=len(text))


def _escape(text: Growing) -> Reading[str]:
    char = yield from text.next()
    if char not in _CODES:
        return _ESCAPES.get(char, char)
    code = yield from _code(text, _CODES[char])
    if 0xD800 <= code < 0xDC00:
        # The first half of a pair, as JSON escapes what is beyond 16 bits.
        low = (yield from _code(text, 4)) if (yield from text.begins(("\\u",))) is not None else 0
        if not 0xDC00 <= low < 0xE000:
            raise MalformedCallError("has half a surrogate pair in a string")
        code = 0x10000 + (code - 0xD800 << 10) + (low - 0xDC00)
    if code > _LAST_CHARACTER or 0xDC00 <= code < 0xE000:
        raise MalformedCallError("has an escape of no character in a string")
    return chr(code)


def _code(text: Growing, length: int) -> Reading[int]:
    digits = ""
    while len(digits) < length:
        digit = yield from text.next()
        if digit not in _HEX:
            raise MalformedCallError("has an escape in a string that Python does not know")
        digits += digit
    return int(digits, 16)


def _is_bare(character: str) -> bool:
    return character not in ",)]}[({="


def _word(word: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        raise MalformedCallError("has a value that is no literal") from None


def _rules(marks: _Marks, rules: Rules, tools: ToolSet) -> None:
    notation = Notation(
        literals=lambda texts: " | ".join(quoted(json.dumps(text, ensure_ascii=False)) for text in texts),
        text=partial(_text_rule, rules),
        member=lambda name: quoted(f"{json.dumps(name, ensure_ascii=False)}: "),
        true='"True"',
        false='"False"',
        null='"None"',
    )
    names = []
    for number, tool in enumerate(tools.tools.values()):
        writer = SchemaRules(notation, rules, number, strict=tool.strict)
        arguments = writer.arguments(tool, _keyword)
        rules.add(f"call_{number}", f'{quoted(f"{tool.name}(")} {arguments} ")"')
        names.append(f"call_{number}")
    rules.add("call", alternatives(names))
    listed = rules.repeated("call", rules.text(", "), parallel=tools.parallel)
    begin, end = ("", "") if marks.bare else (rules.opening(marks.begin), rules.text(marks.end))
    rules.add("calls", f'{begin} "[" {listed} "]" {end}'.strip())


def _keyword(name: str) -> str | None:
    return quoted(f"{name}=") if 0 < len(name) <= MAX_NAME and all(map(_is_tool_name, name)) else None


def _text_rule(rules: Rules, name: str, schema: Mapping[str, Any]) -> str:
    bounds: dict[str, Any] = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
    rules.schema(name, {"type": "string", **bounds}, strict=True)
    return name


def _format(name: str, marks: _Marks) -> CallFormat:
    reads, rules = partial(_read, marks), partial(_rules, marks)
    markers, bare, heads = (marks.begin, marks.end), "[{" if marks.bare else "", ("[NAME(",) if marks.bare else ()
    return CallFormat(name, markers, reads, rules, (marks.begin,), bare, heads)


LLAMA_4 = _format("llama-4", _LLAMA_4)
LFM2 = _format("lfm2", _LFM2)
