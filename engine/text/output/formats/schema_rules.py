"""Grammar of values in another notation than JSON, from their JSON Schema: types, enumerations and bounds as the
schemas of tools have them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestRejectedError
from engine.text.output.rules import Rules
from engine.text.output.spelling import quoted
from engine.text.output.tools import STRING, Tool
from isolation.ipc.messages import FailureCode

MAX_DEPTH = 16
"""Largest nesting depth of a schema."""

COMMA = '"," " "?'
"""What stands between values, as part of a rule."""

NUMBERS = {
    "integer": "-?(0|[1-9][0-9]{0,17})",
    "number": r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?",
}
"""Type of numbers -> pattern of those that a schema does not bound: none is infinite, or too long to be read."""

_NUMBER_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_UNKEPT = frozenset(
    "$ref $dynamicRef $recursiveRef allOf anyOf oneOf not if then else dependentSchemas dependentRequired dependencies "
    "prefixItems additionalItems contains minContains maxContains uniqueItems patternProperties propertyNames "
    "minProperties maxProperties unevaluatedItems unevaluatedProperties pattern format".split()
)
"""Keywords that bound values and are not kept here; objects never have members that the schema does not name."""


@dataclass(frozen=True, slots=True)
class Notation:
    """How a format writes values; each entry gives part of a rule."""

    literals: Callable[[Iterable[str]], str]
    """One of several texts."""
    text: Callable[[str, Mapping[str, Any]], str]
    """Any text within the bounds of a schema; the first argument is a name for a new rule."""
    member: Callable[[str], str | None]
    """What stands before the value of a member of an object; None where its name cannot be written."""
    true: str = '"true"'
    false: str = '"false"'
    null: str = '"null"'


class SchemaRules:
    """Adds rules for the values of one tool."""

    def __init__(self, notation: Notation, rules: Rules, number: int, *, strict: bool) -> None:
        """``number``: of the tool, in names of rules."""
        self._notation = notation
        self._rules = rules
        self._number = number
        self._strict = strict
        self._count = 0

    def value(self, schema: object, depth: int = 0) -> str:
        """Add a rule for the values of a schema; returns its name.

        Raises:
            RequestRejectedError: ``INVALID``, the tool is strict and the schema says what has no rule here.
        """
        if depth > MAX_DEPTH and self._strict:
            raise refusal("is nested too deeply")
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            schema = {}
        if self._strict:
            check_kept(schema)
        name = self._name()
        self._rules.add(name, self._body(schema, depth))
        return name

    def arguments(self, tool: Tool, member: Callable[[str], str | None] | None = None) -> str:
        """Add a rule for a tool's arguments, parted by commas, as ``members`` does; returns its name."""
        if self._strict:
            check_kept(tool.parameters)
        return self.members(tool.parameters, member=member)

    def members(
        self, schema: Mapping[str, Any], depth: int = 0, member: Callable[[str], str | None] | None = None
    ) -> str:
        """Add a rule for the members of an object in the order of the schema, parted by commas; returns its name.
        ``member``: what stands before a value, where that is not as in other objects."""
        before = member or self._notation.member
        pieces = [
            (f"{head} {self.value(part, depth + 1)}", is_needed)
            for head, part, is_needed in written_members(schema, before, strict=self._strict)
        ]
        # From the end: what follows the first member that is there, with a comma before it.
        rest = first = '""'
        for piece, is_needed in reversed(pieces):
            follows, begins = self._name(), self._name()
            self._rules.add(follows, f"{COMMA} {piece} {rest}" + ("" if is_needed else f" | {rest}"))
            self._rules.add(begins, f"{piece} {rest}" + ("" if is_needed else f" | {first}"))
            rest, first = follows, begins
        return first

    def _name(self) -> str:
        self._count += 1
        return f"value_{self._number}_{self._count}"

    def _body(self, schema: Mapping[str, Any], depth: int) -> str:
        listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(listed, list) and listed:
            texts = [value for value in listed if isinstance(value, str)]
            others = [self._constant(value) for value in listed if not isinstance(value, str)]
            return " | ".join([self._notation.literals(texts), *others] if texts else others)
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(self._of_type(one, schema, depth) for one in kind)
        if isinstance(kind, str):
            return self._of_type(kind, schema, depth)
        kinds = (STRING, "number", "boolean", "null") + (("array", "object") if depth < 2 else ())
        return " | ".join(self._of_type(one, {}, depth) for one in kinds)

    def _constant(self, value: object) -> str:
        notation = self._notation
        if isinstance(value, str):
            return notation.literals([value])
        if value is None or isinstance(value, bool):
            return notation.null if value is None else notation.true if value else notation.false
        if isinstance(value, list):
            return f'"[" {COMMA.join(self._constant(one) for one in value)} "]"'
        if isinstance(value, dict):
            members = [(notation.member(name), self._constant(one)) for name, one in value.items()]
            if not all(head for head, _ in members):
                raise refusal("lists an object whose members have names that cannot be written")
            return f'"{{" {COMMA.join(f"{head} {one}" for head, one in members)} "}}"'
        return quoted(json.dumps(value, allow_nan=False))

    def _of_type(self, kind: object, schema: Mapping[str, Any], depth: int) -> str:
        notation = self._notation
        if not isinstance(kind, str):
            raise refusal("has a type that is no text")
        if kind == STRING:
            return notation.text(self._name(), schema)
        if kind in NUMBERS:
            return number_rule(self._rules, self._name(), {**schema, "type": kind}, strict=self._strict)
        if kind == "boolean":
            return f"({notation.true} | {notation.false})"
        if kind == "null":
            return notation.null
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object":
            return f'"{{" {self.members(schema, depth)} "}}"'
        raise refusal(f"has a type {kind!r}")

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        item = self.value(schema.get("items"), depth + 1)
        least, most = _bounds(schema, "minItems", "maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        listed = item if most == 1 else f"{item} ({COMMA} {item}){more}"
        return f'"[" {listed} "]"' if least else f'"[" ({listed})? "]"'


def written_members(
    schema: Mapping[str, Any], before: Callable[[str], str | None], *, strict: bool
) -> Iterator[tuple[str, Any, bool]]:
    """Yield what stands before the value of each member of an object, its schema, and whether it is required.

    Args:
        schema: of the object.
        before: what stands before the value of a member; None where its name cannot be written.
        strict: such names are refused, else left out.

    Raises:
        RequestRejectedError: ``INVALID``, a name cannot be written.
    """
    properties, required = schema.get("properties"), schema.get("required")
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    listed = properties if isinstance(properties, dict) else {}
    for name, part in {**listed, **{name: {} for name in needed if name not in listed}}.items():
        head = before(name)
        if head is not None:
            yield head, part, name in needed
        elif strict:
            raise refusal(f"has a parameter {name[:64]!r}")


def length_bounds(schema: Mapping[str, Any]) -> str:
    """Return the bounds of a text's length as the end of a pattern.

    Raises:
        RequestRejectedError: ``INVALID``, they are none.
    """
    least, most = _bounds(schema, "minLength", "maxLength")
    return f"{{{least},{'' if most is None else most}}}"


def number_rule(rules: Rules, name: str, schema: Mapping[str, Any], *, strict: bool) -> str:
    """Add a rule for numbers of a schema; returns its name."""
    if schema.keys() & _NUMBER_BOUNDS:
        rules.schema(name, schema, strict=strict)
        return name
    rules.add(name.upper(), f"/{NUMBERS[schema['type']]}/")
    return name.upper()


def check_kept(schema: Mapping[str, Any]) -> None:
    """Raises:
    RequestRejectedError: ``INVALID``, the schema bounds values in a way that has no rule.
    """
    if unkept := sorted(schema.keys() & _UNKEPT):
        raise refusal(f"has {unkept[0]!r}")


def refusal(what: str) -> RequestRejectedError:
    """Return the error for a schema; ``what`` ends the sentence "a tool's schema ..."."""
    reason = f"a tool's schema {what}, which this model's calls cannot be held to"
    return RequestRejectedError(FailureCode.INVALID, reason)


def _bounds(schema: Mapping[str, Any], least_name: str, most_name: str) -> tuple[int, int | None]:
    least, most = schema.get(least_name, 0), schema.get(most_name)
    numbers = [bound for bound in (least, most) if bound is not None]
    if not all(isinstance(bound, int | float) and 0 <= bound < math.inf and bound == int(bound) for bound in numbers):
        raise refusal(f"has a {least_name} or {most_name} that is no count")
    if most is not None and most < least:
        raise refusal(f"has a {most_name} below its {least_name}")
    return int(least), None if most is None else int(most)
