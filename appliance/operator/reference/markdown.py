"""Pieces of Markdown: cells, tables, titles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

GENERATED = "<!-- Written by `python -m appliance.operator.reference`; change the code, then run that again. -->\n"

Field = tuple[str, str, str, str]
"""Name of a field, its type and range, its default, its meaning."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a line for each row."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def cell(text: str) -> str:
    """A text that ends no cell and no line."""
    return " ".join(text.replace("|", "\\|").split())


def code(text: str) -> str:
    """A text as code; nothing for an empty one."""
    return f"`{text}`" if text else ""


def page(title: str, about: str, *parts: str) -> str:
    """A page that says that it is generated."""
    return "\n".join([GENERATED + f"\n# {title}\n", about.strip() + "\n", *parts])


def section(title: str, *parts: str, level: int = 2) -> str:
    """A section with its title."""
    return "\n".join([f"{'#' * level} {title}\n", *(part for part in parts if part)])


def first_paragraph(docstring: str | None) -> str:
    """First paragraph of a docstring, as one line, without markup of literals."""
    return " ".join((docstring or "").strip().partition("\n\n")[0].replace("``", "`").split())
