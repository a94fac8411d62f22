"""Rows of usage as one datagram holds them: whatever their names and numbers are, they fit the bytes that are given.

What has no room is summed in a row of its own, so an answer that leaves names out says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from appliance.common.usage.report import Sum, total

OTHERS = ""
"""Name of the row of all that is not listed, which no tenant, model or end user has."""

ROW_BYTES = 8
"""Bytes of a row besides its name and its list: the colon, the comma and their blanks, and some to spare."""

NUMBER_BYTES = 27
"""Most bytes of one sum with its comma and blank: the book's rows have sums below 2^63, and a million rows are summed
at most (25 digits)."""

SUMS = 6
"""Sums of a row: requests, input, cached, output, cost, reasoning."""


def numbers(one: Sum) -> list[int]:
    """Return the six sums of a row, in the order of the control messages."""
    return [one.requests, one.input, one.cached, one.output, one.cost, one.reasoning]


def told(rows: Iterable[Sum]) -> dict[str, list[int]]:
    """Return rows as the control messages have them, by the first name that each was summed by."""
    return {one.keys[0]: numbers(one) for one in rows}


def row_bytes(name: str, amounts: Sequence[int]) -> int:
    """Return the most bytes that a row takes in a datagram."""
    return len(json.dumps(name)) + len(json.dumps(amounts)) + ROW_BYTES


def first_rows(rows: Sequence[Sum], most: int, left: int) -> list[Sum]:
    """Return the first rows, ``most`` at most, as many as ``left`` bytes hold."""
    found: list[Sum] = []
    for one in rows[:most]:
        left -= row_bytes(one.keys[0], numbers(one))
        if left < 0:
            break
        found.append(one)
    return found


def bounded(rows: Sequence[Sum], most: int, left: int) -> list[Sum]:
    """Return the first rows, ``most`` besides ``OTHERS`` at most and as many as ``left`` bytes hold; all further ones
    are summed in the row ``OTHERS``, which is the last."""
    named = [one for one in rows if one.keys[0] != OTHERS]
    unnamed = [one for one in rows if one.keys[0] == OTHERS]
    found = first_rows(named, most, left - row_bytes(OTHERS, [10**NUMBER_BYTES] * SUMS))
    rest = [*named[len(found) :], *unnamed]
    return [*found, *([total(rest, OTHERS)] if rest else [])]


def first_lists(rows: Mapping[str, list[int]], left: int) -> dict[str, list[int]]:
    """Return the first lists of numbers by name, as many as ``left`` bytes hold."""
    found: dict[str, list[int]] = {}
    for name, amounts in rows.items():
        left -= row_bytes(name, amounts)
        if left < 0:
            break
        found[name] = amounts
    return found
