"""Texts of policy files with a tenant more or less: every other character stays as it is written. Pure.

A tenant comes behind the last one of its file. One that goes takes the comments inside its entry along, and is taken
out of the sharing groups and public prefixes of the file that name it. What comes out is read again, and has exactly
the data of the old text with that change; anything else is an error, and no text. A library that writes YAML again
would lay out anew lines that did not change, and be a dependency of what serves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from policy.errors import PolicySyntaxError, Problem
from policy.loader import Source
from policy.nodes import Node, root_node
from policy.positions import load_yaml
from policy.yaml_text import BYTE_ORDER_MARK, place_at, shielded

NEW_FILE = "version: 1\ntenants: {}\n"
"""Text of a policy file without tenants."""

STEP = 2
"""Columns by which an entry stands behind its key, where the file shows no other."""

_PLAIN = re.compile(r"[a-z][a-z0-9-]*")
_NO_TEXT = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that some version of YAML takes for no text."""

_NAMING = ("sharing_groups", "public_prefixes")
"""Sections whose entries have a list of tenants."""

Value = str | tuple[str, ...] | dict[str, str]
"""Value of a tenant's key: a text, a list of texts, or a section."""

Edit = tuple[int, int, str]
"""Begin and end of a part of a text, and what comes in its place."""


def with_tenant(source: Source, name: str, tenant: Mapping[str, Value]) -> Source:
    """Return a policy file with one tenant more.

    Args:
        source: a file that was loaded before.
        name: id of the tenant, which the file does not have.
        tenant: its keys, in their order.

    Raises:
        PolicySyntaxError: the text has a form in which no place for the tenant is found.
    """
    plain, mark = _unmarked(source.text)
    root = root_node(shielded(plain)[0])
    section = root.entry("tenants")
    if section is None:
        raise _formless(source, root.start, name)
    place, value = section
    fields = [(key, _written(one)) for key, one in tenant.items()]
    if value.block or (not value.entries and root.block):
        edits = _block_entry(plain, place, value, name, fields)
    else:
        edits = [_bracketed_entry(plain, value, name, fields)]

    def change(data: dict[str, Any]) -> None:
        data["tenants"][name] = {key: [*one] if isinstance(one, tuple) else one for key, one in tenant.items()}

    return _checked(source, mark + _edited(plain, edits), change, place.start, name)


def without_tenant(source: Source, name: str) -> Source:
    """Return a policy file without a tenant: its entry, if the file has it, and the mention of it in sharing groups and
    public prefixes. A list whose only item the tenant is becomes empty, which no policy may have.

    Raises:
        PolicySyntaxError: the text has a form in which the entry cannot be taken out alone.
    """
    plain, mark = _unmarked(source.text)
    root = root_node(shielded(plain)[0])
    edits: list[Edit] = []
    start = root.start
    if (section := root.entry("tenants")) is not None and section[1].entry(name) is not None:
        start = section[0].start
        edits += _without_entry(plain, *section, name)
    for kind in _NAMING:
        groups = root.at(kind)
        for _, entry in groups.entries if groups is not None else ():
            if (members := entry.entry("tenants")) is not None:
                edits += _without_item(plain, members[0], members[1], name)

    def change(data: dict[str, Any]) -> None:
        data["tenants"].pop(name, None)
        for kind in _NAMING:
            for one in data.get(kind, {}).values():
                if isinstance(one.get("tenants"), list):
                    one["tenants"] = [member for member in one["tenants"] if member != name]

    return _checked(source, mark + _edited(plain, edits), change, start, name)


def _unmarked(text: str) -> tuple[str, str]:
    plain = text.removeprefix(BYTE_ORDER_MARK)
    return plain, text[: len(text) - len(plain)]


def _written(value: Value) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        return f"{{{', '.join(f'{key}: {_written(one)}' for key, one in value.items())}}}"
    plain = _PLAIN.fullmatch(value) and value not in _NO_TEXT
    return value if plain else json.dumps(value, ensure_ascii=False)


def _block_entry(text: str, place: Node, value: Node, name: str, fields: Sequence[tuple[str, str]]) -> list[Edit]:
    """Return the edits that write an entry in lines of its own, behind the last one of a section."""
    newline = "\r\n" if "\r\n" in text else "\n"
    edits: list[Edit] = []
    column, step, gap = place.column + STEP, STEP, ""
    at = value.end
    if value.entries:
        key, last = value.entries[-1]
        column = key.column
        step = last.column - column if last.block and last.column > column else max(column - place.column, 1)
        at = _behind(text, at, column)
        before = text[: text.rfind("\n", 0, key.start) + 1]
        # Where a blank line stands between tenants, one stands before the new one.
        gap = newline if len(value.entries) > 1 and re.search(r"\n[ \t]*\r?\n\Z", before) else ""
    else:
        edits.append((len(text[: value.start].rstrip(" ")), value.end, ""))
        at = _line_end(text, at)
    if at and text[at - 1] != "\n":
        gap += newline
    inner = " " * (column + step)
    lines = [f"{' ' * column}{_written(name)}:", *(f"{inner}{key}: {one}" for key, one in fields)]
    edits.append((at, at, gap + "".join(line + newline for line in lines)))
    return edits


def _bracketed_entry(text: str, value: Node, name: str, fields: Sequence[tuple[str, str]]) -> Edit:
    """Return the edit that writes an entry in brackets, behind the last one of a section."""
    entry = f"{_written(name)}: {{{', '.join(f'{key}: {one}' for key, one in fields)}}}"
    if not value.entries:
        return value.start + 1, value.start + 1, entry
    key, last = value.entries[-1]
    before = text[text.rfind("\n", 0, key.start) + 1 : key.start]
    between = "\n" + before if len(value.entries) > 1 and not before.strip() else " "
    return last.end, last.end, f",{between}{entry}"


def _without_entry(text: str, place: Node, value: Node, name: str) -> list[Edit]:
    """Return the edits that take an entry out of a section."""
    index = next(index for index, (key, _) in enumerate(value.entries) if key.value == name)
    if not value.block:
        parts = [(key.start, one.end) for key, one in value.entries]
        return [_without_part(value, parts, index)]
    key, one = value.entries[index]
    start = text.rfind("\n", 0, key.start) + 1
    if index:  # the blank lines that set it apart go with it
        start = len(text[:start].rstrip(" \t\r\n"))
        start = _line_end(text, start)
    edits: list[Edit] = [(start, _behind(text, one.end, key.column + 1), "")]
    if len(value.entries) == 1:
        edits.append((*_behind_colon(text, place), " {}"))
    return edits


def _without_item(text: str, place: Node, value: Node, name: str) -> list[Edit]:
    """Return the edits that take an item out of a list of texts; none where it is not in it."""
    index = next((index for index, item in enumerate(value.items) if item.value == name), None)
    if index is None:
        return []
    if not value.block:
        return [_without_part(value, [(item.start, item.end) for item in value.items], index)]
    item = value.items[index]
    edits: list[Edit] = [(text.rfind("\n", 0, item.start) + 1, _line_end(text, item.end), "")]
    if len(value.items) == 1:
        edits.append((*_behind_colon(text, place), " []"))
    return edits


def _without_part(value: Node, parts: Sequence[tuple[int, int]], index: int) -> Edit:
    """Return the edit that takes a part out of a collection in brackets, with one of its commas."""
    if index:
        return parts[index - 1][1], parts[index][1], ""
    if len(parts) > 1:
        return parts[0][0], parts[1][0], ""
    return value.start + 1, value.end - 1, ""


def _behind_colon(text: str, place: Node) -> tuple[int, int]:
    at = text.index(":", place.end) + 1
    return at, at


def _line_end(text: str, at: int) -> int:
    """Return the index behind the line in which ``at`` is."""
    found = text.find("\n", at)
    return len(text) if found < 0 else found + 1


def _behind(text: str, end: int, column: int) -> int:
    """Return the index behind the line in which an entry ends, and behind the comments that follow it at ``column`` or
    further right: those are its own."""
    found = at = _line_end(text, end)
    while at < len(text):
        after = _line_end(text, at)
        line = text[at:after]
        written = line.strip()
        if written and (not written.startswith("#") or len(line) - len(line.lstrip(" ")) < column):
            break
        at = after
        if written:
            found = at
    return found


def _edited(text: str, edits: Sequence[Edit]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _checked(source: Source, text: str, change: Callable[[dict[str, Any]], None], at: int, name: str) -> Source:
    """Return the file with another text, which has the data of the old one after a change, and no other.

    Raises:
        PolicySyntaxError: it has not.
    """
    wanted, _ = load_yaml(source.text, source.name)
    change(wanted)
    try:
        found, _ = load_yaml(text, source.name)
    except PolicySyntaxError:
        raise _formless(source, at, name) from None
    if found != wanted:
        raise _formless(source, at, name)
    return replace(source, text=text)


def _formless(source: Source, at: int, name: str) -> PolicySyntaxError:
    place = place_at(_unmarked(source.text)[0], at)
    message = "tenants have a form here that is changed by hand alone: athanor policy edit"
    return PolicySyntaxError([Problem(source.name, *place, f"tenants.{name}", message)])
