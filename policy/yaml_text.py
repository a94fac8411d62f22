"""What policies demand of a YAML text beyond libyaml: the characters, the tabs, and the wording of syntax errors.

libyaml reads YAML 1.1, where three more characters end a line, and accepts tabs between tokens. Here a text has one
reading: these characters are ordinary ones, and a tab stands only in quotes, block scalars, comments, and between
brackets. Errors say what stands at their place; libyaml says only what it expected there.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from string import hexdigits

from yaml import MarkedYAMLError, YAMLError
from yaml.cyaml import CParser
from yaml.events import (
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from yaml.tokens import BlockEndToken, StreamEndToken, StreamStartToken

_REFUSED = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters outside of c-printable (YAML 1.2.2, section 5.1)."""

SEARCHED_AT_ONCE = 1 << 16
"""Characters searched in one call: some 0.4 ms."""

BYTE_ORDER_MARK = "\ufeff"
"""Character before a text that is no part of it."""

_LINE_ENDS_OF_1_1 = "\x85\u2028\u2029"
_PRIVATE = range(0xF0000, 0xFFFFE)
"""Private-use characters, from which stand-ins are taken."""

_MAX_DEPTH = 64
"""Depth to which tabs are looked for: a reader refuses the text before, and libyaml takes a time for each bracket that
grows with its depth."""

_PLAIN, _TABS = 1, 2
"""Marks of characters: in a scalar without tabs, and where tabs are allowed."""

TAB_MESSAGE = r"not YAML: while scanning for the next token: found character '\t' that cannot start any token"
"""Message for a tab where none may stand."""

_CONTEXTS: Mapping[str, str] = {"while parsing a quoted scalar": "while scanning a double-quoted scalar"}

_PROBLEMS: Mapping[str, str] = {
    "block sequence entries are not allowed in this context": "sequence entries are not allowed here",
    "mapping keys are not allowed in this context": "mapping keys are not allowed here",
    "mapping values are not allowed in this context": "mapping values are not allowed here",
    "found character that cannot start any token": "found character {character!r} that cannot start any token",
    "did not find expected alphabetic or numeric character": (
        "expected alphabetic or numeric character, but found {character!r}"
    ),
    "did not find expected whitespace or line break": "expected ' ', but found {character!r}",
    "did not find expected node content": "expected the node content, but found {token!r}",
    "did not find expected '-' indicator": "expected <block end>, but found {token!r}",
    "did not find expected key": "expected <block end>, but found {token!r}",
    "did not find expected ',' or ']'": "expected ',' or ']', but got {token!r}",
    "did not find expected ',' or '}'": "expected ',' or '}}', but got {token!r}",
    "did not find expected <document start>": "expected '<document start>', but found ({token!r},)",
    "found unexpected document indicator": "found unexpected document separator",
    "found unknown escape character": "found unknown escape character {character!r}",
    "found an indentation indicator equal to 0": "expected indentation indicator in the range 1-9, but found 0",
}
"""Our wording by libyaml's; libyaml's own is used for all others."""


def refused_character(text: str) -> int | None:
    """Return the index of the first character that a YAML text cannot have; None where there is none."""
    # In pieces: one search over megabytes would keep all other threads of a gateway waiting.
    for start in range(0, len(text), SEARCHED_AT_ONCE):
        if (found := _REFUSED.search(text, start, start + SEARCHED_AT_ONCE)) is not None:
            return found.start()
    return None


def place_at(text: str, index: int) -> tuple[int, int]:
    """Return line and column of a character, both counted from 1."""
    before = text[:index].replace("\r\n", " \n").replace("\r", "\n")
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def shielded(text: str) -> tuple[str, dict[int, str]]:
    """Replace each character that ends a line in YAML 1.1 only by a stand-in that is nowhere in the text.

    Returns the text, whose positions are unchanged, and the table for ``str.translate`` that restores the characters;
    the table is empty where the text has none of them.
    """
    found = [character for character in _LINE_ENDS_OF_1_1 if character in text]
    if not found:
        return text, {}
    # An escape such as \U000F0000 would become the stand-in itself, so its digits may not occur either.
    digits = text.lower()
    free = (chr(code) for code in _PRIVATE if chr(code) not in text and f"{code:08x}" not in digits)
    stand_ins = dict(zip(found, free, strict=False))
    shield = str.maketrans(stand_ins)
    return text.translate(shield), {ord(after): before for before, after in stand_ins.items()}


def events(text: str) -> Iterator[Event]:
    """Yield libyaml's events of a text, up to the end of the stream.

    Raises:
        yaml.YAMLError: the text is no YAML.
    """
    parser = CParser(text)
    while not isinstance(event := parser.get_event(), StreamEndEvent):
        yield event


def stray_tab(text: str) -> int | None:
    """Return the index of the first tab outside of quotes, block scalars, comments and brackets; None where there is
    none before the first syntax error."""
    if "\t" not in text:
        return None
    marks, end = _marked(text)
    start = 0
    for line in text.replace("\r", "\n").split("\n"):
        if "\t" in line:
            comment = next((at for at in _hashes(line) if not marks[start + at]), len(line))
            for tab in re.finditer("\t", line[:comment]):
                if marks[start + tab.start()] != _TABS:
                    return start + tab.start() if start + tab.start() < end else None
        start += len(line) + 1
    return None


def _hashes(line: str) -> Iterator[int]:
    """Yield the index of each ``#`` that begins a comment where it is in no scalar."""
    return (found.end() - 1 for found in re.finditer(r"(?:^|(?<=[ \t]))#", line))


def _marked(text: str) -> tuple[bytearray, int]:
    """Mark each character: ``_TABS`` where a tab is allowed, ``_PLAIN`` in other scalars; also return the index of the
    first syntax error, or the text's length."""
    allowed, plain, end = _spans(text)
    marks = bytearray(len(text))
    for spans, mark in ((allowed, _TABS), (plain, _PLAIN)):
        for first, last in spans:
            marks[first:last] = bytes([mark]) * (last - first)
    return marks, end


def _spans(text: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """Return where tabs are allowed, where unquoted scalars are, and the index of the first syntax error."""
    allowed: list[tuple[int, int]] = []
    plain: list[tuple[int, int]] = []
    depth, end = 0, len(text)
    brackets: tuple[int, int] | None = None  # Depth and beginning of the outermost collection in brackets.
    try:
        for event in events(text):
            first, last = event.start_mark.index, event.end_mark.index
            if isinstance(event, ScalarEvent):
                if event.style in ("|", ">"):
                    # No tab stands in a block scalar's first line, which has its sign alone.
                    first = text.find("\n", first, last) % (last + 1)
                (allowed if event.style else plain).append((first, last))
            elif isinstance(event, MappingStartEvent | SequenceStartEvent):
                depth += 1
                if depth > _MAX_DEPTH:
                    end = first
                    break
                if event.flow_style and brackets is None:
                    brackets = depth, first
            elif isinstance(event, MappingEndEvent | SequenceEndEvent):
                if brackets is not None and brackets[0] == depth:
                    allowed.append((brackets[1], last))
                    brackets = None
                depth -= 1
    except MarkedYAMLError as error:
        # A quoted scalar that does not end is wrong from its beginning on.
        end = (error.context_mark if "quoted" in (error.context or "") else error.problem_mark).index
    except YAMLError:
        end = 0
    if brackets is not None:
        allowed.append((brackets[1], end))
    return allowed, plain, end


def worded(error: MarkedYAMLError, text: str, original: str) -> tuple[tuple[int, int], str]:
    """Return line and column of a syntax error, and its message in our words.

    Args:
        error: libyaml's error.
        text: what libyaml has read.
        original: the text before stand-ins were put into it.
    """
    mark, problem, context = error.problem_mark or error.context_mark, error.problem or "", error.context or ""
    index, line, column = mark.index, mark.line + 1, mark.column + 1
    if index >= len(text):
        # libyaml counts the end of a text without a final newline as a line of its own.
        line, column = place_at(text, len(text))
    if "directive" in context:
        return (line, column), "directives are not accepted"
    if problem == "found unknown escape character":
        index, column = index + 1, column + 1  # libyaml points at the backslash.
    if "tab character" in problem:
        context, problem = "while scanning for the next token", "found character that cannot start any token"
    problem = _found(problem, text, original, index)
    context = _CONTEXTS.get(context, context)
    return (line, column), "not YAML: " + ": ".join(part for part in (context, problem) if part)


def _found(problem: str, text: str, original: str, index: int) -> str:
    """Return what was expected and what was found at ``index``."""
    character = original[index : index + 1] or "\0"
    if problem == "did not find expected hexdecimal number":
        # A backslash and a letter stand before the digits.
        length = {"x": 2, "u": 4, "U": 8}[text[index - 1]]
        after = original[index:].lstrip(hexdigits)[:1] or "\0"
        return f"expected escape sequence of {length} hexdecimal numbers, but found {after!r}"
    if problem == "did not find expected comment or line break":
        expected = "a comment or a line break" if text[index - 1] == " " else "chomping or indentation indicators"
        return f"expected {expected}, but found {character!r}"
    template = _PROBLEMS.get(problem)
    if template is None:
        return problem
    return template.format(character=character, token=_token_at(text, index) if "{token" in template else "")


def _token_at(text: str, index: int) -> str:
    """Return the name of the token at ``index``, such as ``<scalar>``; the ends of blocks before it are passed by."""
    parser = CParser(text)
    try:
        while True:
            token = parser.get_token()
            there = token.start_mark.index >= index and not isinstance(token, BlockEndToken | StreamStartToken)
            if there or isinstance(token, StreamEndToken):
                return str(token.id)
    except YAMLError:
        return "<error>"
