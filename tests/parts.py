"""A part of the suite, for full counts that take longer than a machine is free: `make verify PART=2/4`.

Files are dealt out in the order of their names, so each is in one part, whatever else is asked for, and parts take
about equally long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest


def check_names(items: list[pytest.Item]) -> None:
    """Refuse a test whose name holds a set of several: another process would write it in another order, and workers
    that have different tests do not begin.

    Raises:
        UsageError: there is one.
    """
    for item in items:
        spec = getattr(item, "callspec", None)
        for value in spec.params.values() if spec is not None else ():
            if any(repr(one) in item.nodeid for one in _sets(value)):
                raise pytest.UsageError(f"the name of {item.nodeid} depends on the order of a set")


def _sets(value: object) -> Iterator[object]:
    if isinstance(value, set | frozenset) and len(value) > 1:
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _sets(one)


def part_of(text: str) -> tuple[int, int]:
    """Number and count of ``K/N``.

    Raises:
        UsageError: it is something else.
    """
    found = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", text)
    number, count = (int(found.group(1)), int(found.group(2))) if found is not None else (2, 1)
    if number > count:
        raise pytest.UsageError(f"--part is K/N with K from 1 to N, not {text!r}")
    return number, count


def keep_part(items: list[pytest.Item], text: str) -> list[pytest.Item]:
    """Remove the tests of other parts, in place; returns them.

    Raises:
        UsageError: the text is no part.
    """
    number, count = part_of(text)
    files = sorted({item.path for item in items})
    kept = set(files[number - 1 :: count])
    others = [item for item in items if item.path not in kept]
    items[:] = [item for item in items if item.path in kept]
    return others
