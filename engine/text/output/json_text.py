"""JSON in a growing text (RFC 8259): one value taken as it comes, or read once it is complete.

A value is checked character by character, so that its text can be passed on before its end has come; what was passed on
is a beginning of valid JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

from engine.text.output.growing import SPACE, Emit, Growing, MalformedCallError, Reading, UnfinishedCallError

MAX_DEPTH = 64
"""Largest nesting depth of arguments; the schemas of tools rarely exceed ten."""

MAX_NUMBER_CHARACTERS = 4_096
"""Characters of one number: a grammar does not bound an integer's digits, and a small model may go on with them."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_BEGINS = frozenset("-0123456789")
_NUMBER_CHARACTERS = _NUMBER_BEGINS | frozenset("+.eE")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"t": "true", "f": "false", "n": "null"}


def value(text: Growing, emit: Emit) -> Reading[None]:
    """Take one JSON value and what stands before it of white space; passes on its text as it comes.

    Raises:
        MalformedCallError: it is not JSON.
    """
    yield from text.skip()
    closing: list[str] = []
    while True:
        char = yield from text.next()
        emit(char)
        if char in "{[":
            if len(closing) == MAX_DEPTH:
                raise MalformedCallError(f"has arguments nested deeper than {MAX_DEPTH}")
            closing.append("}" if char == "{" else "]")
            yield from _space(text, emit)
            if (yield from text.peek()) != closing[-1]:
                if char == "{":
                    yield from _name(text, emit)
                continue
        elif char == '"':
            yield from _string(text, emit)
        elif char in _WORDS:
            for expected in _WORDS[char][1:]:
                emit((yield from _exactly(text, expected)))
        elif char in _NUMBER_BEGINS:
            yield from _number(text, char, emit)
        else:
            raise _wrong(char)
        if not (yield from _closed(text, closing, emit)):
            return


def object_value(text: Growing, emit: Emit) -> Reading[None]:
    """Take one JSON object, as ``value`` does.

    Raises:
        MalformedCallError: it is none.
    """
    yield from text.skip()
    if (yield from text.peek()) not in ("{", ""):
        raise MalformedCallError("has arguments that are no JSON object")
    yield from value(text, emit)


def string(text: Growing) -> Reading[str]:
    """Take a JSON string, and return what it spells.

    Raises:
        MalformedCallError: it is none.
    """
    yield from text.skip()
    raw = [(yield from _exactly(text, '"'))]
    yield from _string(text, raw.append)
    found: str = parsed("".join(raw))
    if any("\ud800" <= char <= "\udfff" for char in found):
        raise MalformedCallError("has half a surrogate pair in a string")
    return found


def whole(text: Growing) -> Reading[Any]:
    """Take one JSON value, and return it.

    Raises:
        MalformedCallError: it is not JSON.
    """
    raw: list[str] = []
    yield from value(text, raw.append)
    return parsed("".join(raw))


def parsed(raw: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        MalformedCallError: it is none.
    """
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError("has a value that is not JSON") from error


def _closed(text: Growing, closing: list[str], emit: Emit) -> Reading[bool]:
    """Take what follows a value: the ends of objects and lists, and a comma; returns whether another value follows."""
    while closing:
        yield from _space(text, emit)
        char = yield from text.next()
        if char == closing[-1]:
            emit(char)
            closing.pop()
        elif char == ",":
            emit(char)
            if closing[-1] == "}":
                yield from _space(text, emit)
                yield from _name(text, emit)
            else:
                yield from _space(text, emit)
            return True
        else:
            raise _wrong(char)
    return False


def _name(text: Growing, emit: Emit) -> Reading[None]:
    """Take the name of an object's member, and the colon."""
    emit((yield from _exactly(text, '"')))
    yield from _string(text, emit)
    yield from _space(text, emit)
    emit((yield from _exactly(text, ":")))
    yield from _space(text, emit)


def _string(text: Growing, emit: Emit) -> Reading[None]:
    """Take a string behind its opening quote; an escape is passed on whole."""
    while True:
        if plain := text.take_while(_plain_length):
            emit(plain)
        char = yield from text.next()
        if char == '"':
            emit(char)
            return
        if char == "\\":
            emit(char + (yield from _escape(text)))
        elif char < " ":
            raise MalformedCallError("has a control character in a string")
        else:
            # Came while ``next`` waited.
            emit(char)


def _plain_length(text: str) -> int:
    match = _PLAIN.match(text)
    return match.end() if match is not None else 0


def _escape(text: Growing) -> Reading[str]:
    char = yield from text.next()
    if char in _ESCAPES:
        return char
    if char != "u":
        raise MalformedCallError("has an escape in a string that JSON does not know")
    digits = ""
    while len(digits) < 4:
        digit = yield from text.next()
        if digit not in _HEX:
            raise MalformedCallError("has an escape in a string that JSON does not know")
        digits += digit
    return char + digits


def _number(text: Growing, first: str, emit: Emit) -> Reading[None]:
    # Checked when it is complete; passed on then, since a beginning may be no number.
    rest = yield from text.word(_NUMBER_CHARACTERS.__contains__, MAX_NUMBER_CHARACTERS - 1)
    if not _NUMBER.fullmatch(first + rest):
        if not (yield from text.peek()):
            raise UnfinishedCallError
        raise MalformedCallError("has a number that is not JSON")
    emit(rest)


def _space(text: Growing, emit: Emit) -> Reading[None]:
    while (yield from text.peek()) and (space := text.take_while(_space_length)):
        emit(space)


def _space_length(text: str) -> int:
    return len(text) - len(text.lstrip(SPACE))


def _exactly(text: Growing, expected: str) -> Reading[str]:
    char = yield from text.next()
    if char != expected:
        raise _wrong(char)
    return char


def _wrong(char: str) -> MalformedCallError:
    shown = char if char.isprintable() else f"U+{ord(char):04X}"
    return MalformedCallError(f"is not JSON: {shown!r} cannot stand where it does")
