"""Does a pattern of the policy match a name: literal text in which ``*`` stands for any
characters, none included."""

from __future__ import annotations

from collections.abc import Iterable


def glob_matches(pattern: str, name: str) -> bool:
    """Whether the whole of ``name`` fits ``pattern``. At most ``len(pattern) * len(name)`` steps,
    whatever they hold."""
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
            # The last star takes one character more; earlier stars never need to be reopened.
            resume += 1
            at, position = star + 1, resume
        else:
            return False
    return all(character == "*" for character in pattern[at:])


def first_match(patterns: Iterable[str], name: str) -> int | None:
    """Index of the first pattern that fits ``name``, or None. No pattern at all fits nothing."""
    for index, pattern in enumerate(patterns):
        if glob_matches(pattern, name):
            return index
    return None
