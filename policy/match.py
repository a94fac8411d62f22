"""Pattern matching for policy names: literal text in which ``*`` matches any characters, including none."""

from __future__ import annotations

from collections.abc import Iterable


def glob_matches(pattern: str, name: str) -> bool:
    """Return whether the whole of ``name`` matches ``pattern``, in at most ``len(pattern) * len(name)`` steps."""
    # Almost every pattern is a name or a beginning: comparing whole texts takes a fiftieth of the loop's time.
    start = pattern.partition("*")[0]
    if len(start) == len(pattern):
        return pattern == name
    if len(start) + 1 == len(pattern):
        return name.startswith(start)
    at, position = 0, 0
    star, resume = -1, 0
    while position < len(name):
        if at < len(pattern) and pattern[at] == "*":
            star, resume = at, position
            at += 1
        elif at < len(pattern) and pattern[at] == name[position]:
            at += 1
            position += 1
        elif star >= 0:
            # The last star takes one more character; earlier stars never need to be reconsidered.
            resume += 1
            at, position = star + 1, resume
        else:
            return False
    return all(character == "*" for character in pattern[at:])


def first_match(patterns: Iterable[str], name: str) -> int | None:
    """Return the index of the first pattern that matches ``name``, or None; an empty list matches nothing."""
    for index, pattern in enumerate(patterns):
        if glob_matches(pattern, name):
            return index
    return None
