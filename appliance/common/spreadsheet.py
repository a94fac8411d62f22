"""Comma-separated values that a spreadsheet may open: no text in them is taken for a formula. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

FORMULA_SIGNS = ("=", "+", "-", "@")
"""First characters of what a spreadsheet computes. Source: OWASP, "CSV Injection"."""


def plain(text: str) -> str:
    """Return a text as a cell has it: with an apostrophe before it where a spreadsheet would take it for a formula, and
    with a question mark in place of each sign that is not printable: a carriage return would begin another cell."""
    shown = "".join(one if one.isprintable() else "?" for one in text)
    return f"'{shown}" if shown.startswith(FORMULA_SIGNS) else shown


def csv_text(titles: Sequence[str], rows: Iterable[Sequence[object]], names: int) -> str:
    """Return rows with a line of titles. The first ``names`` cells of a row are texts that others chose, and are
    written as ``plain`` has them; all further ones are written as they are."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(titles)
    for row in rows:
        writer.writerow([*(plain(str(one)) for one in row[:names]), *row[names:]])
    return text.getvalue()
