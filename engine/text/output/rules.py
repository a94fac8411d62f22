"""Grammars of outputs that call tools, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.text.output.spelling import Spelling, quoted
from engine.text.output.tools import AnswerSchema, Tool

WHITESPACE = "[ ]"
"""What may stand between the tokens of JSON, besides nothing: models were trained on one space, and a small one would
go on with more until its tokens are used up."""

ANY_TEXT = r"/(?s:.*)/"

_EXACT = 1 << 53
"""Below it a float is exactly the integer that it is equal to."""


class Rules:
    """Rules of one grammar, added one after the other."""

    def __init__(self, spelling: Spelling, free: Sequence[str] | None = None) -> None:
        """``free``: text may stand before the first call, and begins with none of these patterns."""
        self.spelling = spelling
        self._free = free
        self._lines: list[str] = []

    def add(self, name: str, body: str) -> None:
        """Add a rule, or a terminal where the name has capital letters."""
        self._lines.append(f"{name}: {body}")

    def text(self, text: str) -> str:
        """Return a text of the format, with the markers in it, as part of a rule; what a request holds is ``quoted``,
        so that it cannot spell a special token."""
        return self.spelling.rule(text)

    def schema(self, name: str, schema: Mapping[str, Any], *, strict: bool, whitespace: str = WHITESPACE) -> None:
        """Add a rule for JSON that satisfies a schema; without ``strict`` a keyword that is not implemented has no
        effect."""
        options = {"whitespace_pattern": whitespace, "lenient": not strict}
        self.add(name, "%json " + json.dumps({**_integral(schema), "x-guidance": options}, ensure_ascii=False))

    def arguments(self, number: int, tool: Tool) -> str:
        """Add a rule for a tool's arguments in JSON; returns its name."""
        name = f"arguments_{number}"
        # A schema without a type, or with several, would have values that are no arguments.
        self.schema(name, {**tool.parameters, "type": "object"}, strict=tool.strict)
        return name

    def answer(self, answer: AnswerSchema) -> str:
        """Add a rule for an answer in JSON, which has no blanks between its tokens; returns its name.

        Raises:
            ValueError: what it follows is no schema.
        """
        schema = json.loads(answer.schema)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("the schema of the answer is no object")
        self.schema("answer", schema, strict=answer.strict, whitespace="")
        return "answer"

    def any_text(self, name: str, bounds: str, tail: str, marker: str, never: Sequence[str] = ()) -> str:
        """Add rules for text and what ends it; returns a part of a rule.

        Args:
            name: for the rules.
            bounds: number of characters of the text, as the end of a pattern.
            tail: stands between the text and the marker.
            marker: ends the text, which does not hold it.
            never: patterns with which the text does not begin.
        """
        before, rest = self.spelling.split(marker)
        pattern = f"/(?s:.){bounds}{escaped(tail + before)}/"
        if rest:
            self.add(name.upper(), not_beginning(pattern, never))
            return f"{name.upper()} {self.text(rest)}"
        # The lexer goes on with text as long as it can; a lazy one ends with the first of its ends.
        if tail or not bounds.startswith(("*", "{0,")):
            never = [*never, f"{holding(marker)}(?s:.)"]
        self.add(name.upper(), not_beginning(pattern, never))
        self.add(f"{name}[lazy]", name.upper())
        return name

    def one_text(self, texts: Iterable[str], tail: str, marker: str) -> str:
        """Return a part of a rule for one of several texts, and what ends it as in ``any_text``."""
        before, rest = self.spelling.split(marker)
        # Each text is one lexeme with its end: one that another begins with would not be found otherwise.
        listed = " | ".join(quoted(text + tail + before) for text in texts)
        return f"({listed}) {self.text(rest)}"

    def opening(self, marker: str) -> str:
        """Add the beginning of the first call, and before it text where that is permitted; returns a part of a rule."""
        if self._free is None:
            return self.text(marker)
        never = [pattern for pattern in self._free if pattern != holding(marker)]
        return self.any_text("before", "*", "", marker, never)

    def framed(self, marker: str, call: str, separator: str = "", *, parallel: bool) -> str:
        """Return a rule's body for calls that each begin with the marker."""
        first = f"{self.opening(marker)} {call}"
        return f"{first} ({self.text(separator + marker)} {call})*" if parallel else first

    def repeated(self, call: str, separator: str, *, parallel: bool) -> str:
        """Return a rule's body for one call, or several where that is permitted."""
        if not parallel:
            return call
        return f"{call} ({separator} {call})*" if separator else f"{call}+"

    def source(self) -> str:
        """Return the grammar."""
        return "\n".join(self._lines) + "\n"


def holding(marker: str) -> str:
    """Return the inside of a pattern of text up to the marker, and it."""
    return f"(?s:.*){escaped(marker)}"


def beginning(marker: str) -> str:
    """Return the inside of a pattern of the marker behind white space."""
    return f"[ \\t\\r\\n]*{escaped(marker)}"


def not_beginning(pattern: str, never: Sequence[str]) -> str:
    """Return the pattern of what is of a pattern, and begins with none of others."""
    # One complement of all: several would multiply the states of the lexer.
    return f"{pattern} & ~/({'|'.join(never)})(?s:.*)/" if never else pattern


def escaped(text: str) -> str:
    """Return the pattern of exactly this text."""
    return re.sub("[^A-Za-z0-9]", lambda match: f"\\x{{{ord(match.group()):x}}}", text)


def _integral(value: Any) -> Any:
    """Return a schema with integers for floats that are equal to one; JSON Schema has no difference between them, and
    the compiler takes no bound of ``3.0``."""
    if isinstance(value, dict):
        return {name: _integral(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_integral(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT else value


def alternatives(names: list[str]) -> str:
    """Return a rule's body for one of several rules."""
    return " | ".join(names)
