"""Grammar of arguments that are no JSON object: a rule for each, text bare and everything else as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.text.output.formats.schema_rules import check_kept, length_bounds, number_rule, refusal, written_members
from engine.text.output.rules import Rules
from engine.text.output.tools import STRING, Tool

_DEFINITIONS = ("$defs", "definitions")
"""Where the schema of all arguments has schemas that the one of a single argument may refer to."""

_NUMBER_TYPES = ("integer", "number")


def argument_rules(
    rules: Rules, number: int, tool: Tool, *, before: Callable[[str], str | None], tail: str, end: str, after: str
) -> str:
    """Add rules for a tool's arguments, in the order of its schema; returns the name of the rule for all.

    Args:
        rules: the grammar.
        number: of the tool, in names of rules.
        tool: with the schema.
        before: what stands before the value of the argument of a name, as part of a rule; None where the format cannot
            write the name.
        tail: stands between a value and ``end``.
        end: marker that ends a value, and that no text may hold.
        after: what stands behind that, as part of a rule.

    Raises:
        RequestRejectedError: ``INVALID``, the schema bounds text in a way that has no rule in this format.
    """
    if tool.strict:
        check_kept(tool.parameters)
    pieces = []
    for place, (head, schema, needed) in enumerate(written_members(tool.parameters, before, strict=tool.strict)):
        rule = f"argument_{number}_{place}"
        value = _value(rules, f"value_{number}_{place}", schema, tool, tail, end)
        rules.add(rule, f"{head} {value} {after}")
        pieces.append(rule if needed else f"{rule}?")
    name = f"arguments_{number}"
    rules.add(name, " ".join(pieces) or '""')
    return name


def _value(rules: Rules, name: str, schema: Any, tool: Tool, tail: str, end: str) -> str:
    """Add the rules for one value with its end; returns a part of a rule."""
    if isinstance(schema, dict) and schema.get("type") in _NUMBER_TYPES and not schema.keys() & {"enum", "const"}:
        return f"{number_rule(rules, name, schema, strict=tool.strict)} {rules.text(tail + end)}"
    if not isinstance(schema, dict) or schema.get("type") != STRING:
        definitions = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
        rules.schema(name, {**definitions, **schema} if isinstance(schema, dict) else {}, strict=tool.strict)
        return f"{name} {rules.text(tail + end)}"
    if tool.strict:
        check_kept(schema)
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(listed, list):
        return rules.any_text(name, length_bounds(schema), tail, end)
    special = rules.spelling.is_special(end)
    texts = [text for text in listed if isinstance(text, str) and (special or end not in text)]
    if not texts:
        raise refusal("lists no text that can be written")
    return rules.one_text(texts, tail, end)
