"""Jinja environment for chat templates, and the marking of a parsed template.

It is configured so that published templates give the results that they give in ``transformers``: trimmed blocks, loop
controls, ``raise_exception``, ``strftime_now``, JSON without HTML escapes, ``generation`` blocks. In addition to
Jinja's own sandbox (no underscored attributes, no mutation of arguments), it omits what no template needs: loaders,
``lipsum``, and the filters that format pages.

Marking (see ``engine.text.marks``) operates on the syntax tree, so it affects only what the template writes. Where a
template only *inspects* a text, marks must not interfere: literals in comparisons, tests and subscripts stay bare, both
sides of a comparison are stripped of marks, and so are the arguments of methods such as ``startswith`` and ``split``.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, time
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.text.marks import ControlTokens, unmark

FILTERS = frozenset(
    (
        "abs attr batch capitalize count d default dictsort e escape first float format groupby indent int items "
        "join last length list lower map max min reject rejectattr replace reverse round safe select selectattr "
        "slice sort string title tojson trim truncate unique upper wordcount"
    ).split()
)
"""Jinja filters that chat templates use or may reasonably use."""

GLOBALS = ("range", "dict", "namespace", "joiner", "cycler")

INSPECTING_METHODS = frozenset(
    (
        "startswith endswith split rsplit partition rpartition find rfind index rindex count strip lstrip rstrip "
        "removeprefix removesuffix replace get"
    ).split()
)
"""Methods that compare their first argument with a text or key and do not write it."""

MAX_DATE_FORMAT_CHARACTERS = 64
_DATE_FORMAT = re.compile(r"(?:[^%]|%[-]?[aAbBdejmuUVwWyYGgFDxhHIMSpcXTRrCZz%])*")

_ESCAPED_MARK = re.compile(r"\\ufdd[01]")

_UNMARK = "unmark for comparison"
"""Name of an internal filter; the space prevents templates from calling it."""


class TemplateRefusal(TemplateError):
    """The template called ``raise_exception``: it rejects this conversation."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with the functions that chat templates expect."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Without this, constant expressions would be evaluated during compilation.
            optimized=False,
            cache_size=0,
            extensions=[LoopControlExtension, _Generation],
        )
        self.filters = {name: value for name, value in self.filters.items() if name in FILTERS}
        self.filters["tojson"] = _tojson
        self.filters[_UNMARK] = _without_marks
        self.globals = {name: self.globals[name] for name in GLOBALS}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``__obj`` if the sandbox permits; inspecting methods get arguments without marks."""
        # The unusual parameter names leave every keyword available to the callee, as in the overridden method.
        if (
            args
            and isinstance(__obj, BuiltinMethodType)
            and isinstance(__obj.__self__, str | dict)
            and __obj.__name__ in INSPECTING_METHODS
        ):
            args = (_without_marks(args[0]), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)


class _Generation(Extension):
    """``{% generation %}`` marks assistant output for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 prescribes

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body in its own scope."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def literals(tree: nodes.Template) -> str:
    """Return all text in a template's data and string literals, for searching."""
    found = [node.data for node in tree.find_all(nodes.TemplateData)]
    found += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\n".join(found)


def mark_tree(tree: nodes.Template, control: ControlTokens) -> None:
    """Mark, in place, the control tokens that the template writes."""
    _mark(tree, control, inert=False)


def _mark(node: nodes.Node, control: ControlTokens, *, inert: bool) -> None:
    if isinstance(node, nodes.TemplateData):
        node.data = control.mark(node.data)
    elif isinstance(node, nodes.Const) and isinstance(node.value, str) and not inert:
        node.value = control.mark(node.value)
    looks = isinstance(node, nodes.Compare | nodes.Test)
    inspected = _inspected_children(node)
    for child in node.iter_child_nodes():
        # Nodes compare by content, so identity is used.
        bare = inert or looks or any(child is part for part in inspected)
        _mark(child, control, inert=bare)
    if isinstance(node, nodes.Compare):
        node.expr = _unmarking(node.expr)
        for operand in node.ops:
            operand.expr = _unmarking(operand.expr)


def _inspected_children(node: nodes.Node) -> tuple[nodes.Node, ...]:
    if isinstance(node, nodes.Getitem):
        return (node.arg,)
    if isinstance(node, nodes.Pair):
        return (node.key,)
    if isinstance(node, nodes.Filter) and node.name == "replace":
        return tuple(node.args[:1])
    return ()


def _unmarking(expression: nodes.Expr) -> nodes.Expr:
    if isinstance(expression, nodes.Const):
        return expression
    return nodes.Filter(
        expression, _UNMARK, [], [], None, None, lineno=expression.lineno, environment=expression.environment
    )


def _without_marks(value: Any) -> Any:
    return unmark(value) if isinstance(value, str) else value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise to JSON as ``transformers`` does."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # In chunks: the C encoder that produces the whole at once cannot be interrupted by the alarm.
    text = "".join(encoder.iterencode(value))
    # An escaped mark would be six characters of text; tenants' texts hold no marks.
    return _ESCAPED_MARK.sub("", text) if ensure_ascii else text


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:  # noqa: A002 - the name templates may call it by
    """Return the current date in UTC, at midnight: prompts get no clock finer than a day."""
    if len(format) > MAX_DATE_FORMAT_CHARACTERS or not _DATE_FORMAT.fullmatch(format):
        raise TemplateError("strftime_now: a format this service does not know")
    return datetime.combine(datetime.now(UTC).date(), time(), UTC).strftime(format)
